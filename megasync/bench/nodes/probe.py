"""What a small message waits on a link that is in use: datagrams from the first receiving node to a sender's and back.

Beside a sync, started and ended by docs/bench/nodes.sh. The simulation's `asking_seconds`. No torch in here.

    python -m megasync.bench.nodes.probe answer 10.82.0.1
    python -m megasync.bench.nodes.probe ask 10.82.0.1 OVER      # until there is a file of that name
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PORT, INTERFACE = 6999, "eth0"
EVERY_SECONDS, LOST_SECONDS = 0.02, 2.0
IN_USE = 25e6  # bytes a second, of a link of 50e6


def answer(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((host, PORT))
        while True:
            own.sendto(*own.recvfrom(64))


class Probe:
    """Round trips, of messages while the link out was in use and of the others."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect((host, PORT))
        self._socket.settimeout(LOST_SECONDS)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def run(self, over: Path) -> None:
        number, sent_before, before = 0, _sent_bytes(), time.monotonic()
        while not over.exists():
            time.sleep(EVERY_SECONDS)
            number, begin, sent = number + 1, time.monotonic(), _sent_bytes()
            is_in_use = (sent - sent_before) / (begin - before) > IN_USE
            sent_before, before = sent, begin
            if (seconds := self._ask(number)) is not None:
                self.seconds[is_in_use].append(seconds)

    def _ask(self, number: int) -> float | None:
        """Of one message; None: it was lost, or nobody answers yet."""
        begin = time.monotonic()
        try:
            self._socket.send(struct.pack("q", number))
            while struct.unpack("q", self._socket.recv(64))[0] != number:
                pass
        except OSError:
            return None
        return time.monotonic() - begin

    def told(self) -> str:
        lines = []
        for is_in_use, seconds in self.seconds.items():
            if len(seconds) > 1:
                least, median, most = (1e3 * part for part in statistics.quantiles(seconds, n=4))
                link = "in use" if is_in_use else "not in use"
                there = f"{median:.1f} ms there and back ({least:.1f} to {most:.1f})"
                lines.append(f"link out {link}: {there}, {len(seconds)} messages")
        return "\n".join(lines)


def _sent_bytes() -> int:
    counted = psutil.net_io_counters(pernic=True, nowrap=False)[INTERFACE]
    return int(counted.bytes_sent)


def main(arguments: Sequence[str]) -> int:
    what, host, *over = arguments
    if what == "answer":
        answer(host)
    probe = Probe(host)
    probe.run(Path(over[0]))
    print(probe.told(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
