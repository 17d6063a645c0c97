"""Who has come, who gives signs of life, who has left, as the store tells it. Waits for nothing.

Keys: arrivals, arrival/K {arrival, facts}, beat/K, left/K; refused/K TEXT.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.nodes.compare import differences
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import NodeStore

FRESH_SECONDS = 10.0  # a node that gives no sign of life for so long is not here, while nodes are waited for


class Presence:
    """Nodes by number. `gone`: those that have left or were sent away, which do not come back."""

    def __init__(self, store: NodeStore) -> None:
        self.store = store
        self.arrivals: dict[int, Arrival] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.gone: set[int] = set()
        self.forget()

    def forget(self, *, was_lost: bool = False) -> None:
        """Signs of life of before do not count. `was_lost`: a node was, see `present`."""
        self._changes: dict[int, tuple[int, float, int]] = {}  # count, when it came, and how many looks found another one
        self._least = 2 if was_lost else 1

    def look(self) -> None:
        """New arrivals, and those that have left."""
        for number in range(len(self.arrivals) + 1, self.store.add("arrivals", 0) + 1):
            told = self.store.get(f"arrival/{number}")
            if told is None:
                break
            self.arrivals[number], self.facts[number] = Arrival(**told["arrival"]), told["facts"]
        there = [number for number in self.arrivals if number not in self.gone]
        self.gone |= {number for number in there if self.store.get(f"left/{number}") is not None}

    def beats(self) -> dict[int, int]:
        return {number: self.store.add(f"beat/{number}", 0) for number in self.arrivals if number not in self.gone}

    def present(self, fresh_seconds: float = FRESH_SECONDS) -> list[Arrival]:
        """Those whose signs of life have come since `forget`, and come still.

        After a loss more than once: the signs that a node had sent over a link that was cut come all together when it is
        mended, also of a node that has ended since.
        """
        counts, now = self.beats(), time.monotonic()
        for number, count in counts.items():
            before, _, changes = self._changes.get(number, (-1, 0.0, -1))
            if count != before:
                self._changes[number] = count, now, changes + 1
        looks = {number: self._changes[number] for number in counts}
        alive = [number for number, (_, at, changes) in looks.items() if changes >= self._least and now - at < fresh_seconds]
        here = [self.arrivals[number] for number in alive]
        return sorted(here, key=lambda arrival: (not arrival.is_head, arrival.number))

    def recent(self) -> set[int]:
        """Those that `present` found, or found a moment ago."""
        now = time.monotonic()
        return {number for number, (_, at, _) in self._changes.items() if now - at < FRESH_SECONDS}

    def differing(self, nodes: Sequence[Arrival]) -> dict[int, str]:
        """What is wrong with which of them, by number."""
        hosts = {arrival.number: arrival.host for arrival in nodes}
        names = {number: host if list(hosts.values()).count(host) == 1 else f"{host} #{number}" for number, host in hosts.items()}
        told = differences({name: self.facts[number] for number, name in names.items()})
        return {number: told[name] for number, name in names.items() if name in told}

    def send_away(self, told: Mapping[int, str]) -> None:
        for number, why in told.items():
            self.gone.add(number)
            self.store.set(f"refused/{number}", why)
