"""When a relayed bucket is given back: events of a device that this machine has not, on a real segment.

python -m pytest tests/bridge/transport/test_ports.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from bridge.layout.lanes import Holder, plan_lanes
from bridge.transport.channel import Channel
from bridge.transport.protocol import TransportError
from bridge.transport.ports import RelayedPort
from bridge.transport.shm import ShmWriter
from tests.bridge.transport.test_group_transport import STAGE

CPU = torch.device("cpu")
PLAN = plan_lanes([Holder(0, 0, "a")], ["b", "b"], ["worker 0", "worker 1"])


class Copied:
    """An event after a copy, as torch.cuda.Event."""

    is_over = was_waited_for = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.was_waited_for = True


class Relay:
    """The first reader's buffers, and the port of the other reader of its host, whose copies are over when a test says so."""

    def __init__(self) -> None:
        self.writer = ShmWriter(STAGE, ["worker 1"], [0])
        self.channel, _ = Channel.listen(1, CPU)
        self.channel.publish("relay0", self.writer.endpoint.encode())
        self.copies: list[Copied] = []
        self.channel.mark = self._mark  # type: ignore[method-assign]
        self.port = RelayedPort(PLAN.lanes[0], PLAN, self.channel, 1, self._progress, None)
        self.port.open(time.monotonic() + 60)
        self.port.start(time.monotonic() + 60)

    def _progress(self) -> None:
        self.port.progress()

    def _mark(self) -> Copied:
        self.copies.append(Copied())
        return self.copies[-1]

    def send(self, index: int) -> None:
        self.writer.acquire(time.monotonic() + 60, self.port.progress)
        self.writer.announce(STAGE.buckets[index].num_bytes)

    def take(self, index: int) -> None:
        self.port.take(STAGE.buckets[index])
        self.port.give_back()

    @property
    def consumed(self) -> int:
        return self.writer.segment.consumed[0]


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.port.close()
    made.writer.close()


def test_a_bucket_is_given_back_once_it_is_copied_and_none_before_the_one_before(relay: Relay) -> None:
    for index in range(2):
        relay.send(index)
        relay.take(index)
    assert relay.consumed == 0
    relay.copies[1].is_over = True
    relay.port.progress()
    assert relay.consumed == 0
    relay.copies[0].is_over = True
    relay.port.progress()
    assert relay.consumed == 2


def test_who_waits_for_a_free_buffer_gives_back_meanwhile(relay: Relay) -> None:
    """Else the first readers of two lanes, which wait for each other's, would do so for ever."""
    for index in range(2):
        relay.send(index)
        relay.take(index)
    relay.copies[0].is_over = True
    relay.send(2)
    assert relay.consumed == 1


def test_a_pass_ends_with_all_given_back_or_says_what_it_waits_for(relay: Relay) -> None:
    relay.send(0)
    relay.take(0)
    relay.port.start(time.monotonic())
    with pytest.raises(TransportError, match="deadline passed: waits for the copies out of the last buckets"):
        relay.port.finish()
    relay.copies[0].is_over = True
    relay.port.start(time.monotonic() + 60)
    relay.port.finish()
    assert relay.consumed == 1


def test_memory_is_not_unmapped_under_a_copy(relay: Relay) -> None:
    relay.send(0)
    relay.take(0)
    relay.port.close()
    assert relay.copies[0].was_waited_for
