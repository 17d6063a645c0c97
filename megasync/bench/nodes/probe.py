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
from contextlib import suppress
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


def ask(host: str, over: Path) -> dict[bool, list[float]]:
    """Seconds there and back, until there is the file `over`: of messages while the link out was in use, and of the others."""
    found: dict[bool, list[float]] = {True: [], False: []}
    number, sent_before, before = 0, _sent_bytes(), time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.connect((host, PORT))
        own.settimeout(LOST_SECONDS)
        while not over.exists():
            time.sleep(EVERY_SECONDS)
            number, begin, sent = number + 1, time.monotonic(), _sent_bytes()
            is_in_use = (sent - sent_before) / (begin - before) > IN_USE
            sent_before, before = sent, begin
            with suppress(OSError):  # it was lost, or nobody answers yet
                own.send(struct.pack("q", number))
                while struct.unpack("q", own.recv(64))[0] != number:
                    pass
                found[is_in_use].append(time.monotonic() - begin)
    return found


def _sent_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True, nowrap=False)[INTERFACE].bytes_sent)


def main(arguments: Sequence[str]) -> int:
    what, host, *over = arguments
    if what == "answer":
        answer(host)
    for is_in_use, seconds in ask(host, Path(over[0])).items():
        if len(seconds) > 1:
            least, median, most = (1e3 * part for part in statistics.quantiles(seconds, n=4))
            link, spread = "in use" if is_in_use else "not in use", f"{least:.1f} to {most:.1f}"
            print(f"link out {link}: {median:.1f} ms there and back ({spread}), {len(seconds)} messages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
