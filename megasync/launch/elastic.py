"""torch's elastic rendezvous for the nodes of a run: its c10d backend over the head's store.

torch decides which nodes take part in a round, waits for lost ones, lets a spare in and restarts all ranks then. Added here: the
head has rank 0 and --node-rank is kept, since c10d sorts nodes by address; a number of nodes that `engine.parallel` does not
divide is reduced to one that it does; each round's ranks have a store of their own, since the agents of several nodes count
restarts differently, and torch puts that count into the keys of a shared one. Leaves out starting ranks (torchrun.py).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from bridge.processes import watched
from megasync.config.files import is_asked_to_stop
from megasync.launch.members import Node, in_order
from megasync.launch.ray_cluster import free_port
from megasync.launch.torchrun import BACKEND

dist: Any = distributed  # its stores are not typed

RUN_ID = "megasync"
FOREVER_SECONDS = 10 * 365 * 86400.0  # for --wait-seconds inf
BEAT_SECONDS = 1
LOOK_SECONDS = 0.5
PREPARE_SECONDS = 180.0  # for a node to prepare a round, while the others wait for it
MARGIN = timedelta(seconds=30)


class RunOverError(Exception):
    """The run ended while this node waited for a place in it."""


@dataclass(frozen=True)
class Limits:
    """Numbers of nodes with ranks; `wait_seconds`: for the nodes of a round; `silent_seconds`: after which a node is lost."""

    min_nodes: int
    max_nodes: int
    wait_seconds: float
    silent_seconds: float


class NodesRendezvous(RendezvousHandler):
    """`connect`: a TCPStore with so many seconds for an operation; `node`: this one; `fits`: whether a round may have so many
    ranks; `prepare`: called with a round's nodes before its ranks start.
    """

    def __init__(
        self,
        connect: Callable[[float], Any],
        node: Node,
        limits: Limits,
        fits: Callable[[int], bool],
        prepare: Callable[[Sequence[Node]], None],
        run_folder: Path,
    ) -> None:
        wait = timedelta(seconds=min(limits.wait_seconds, FOREVER_SECONDS))
        self._inner = DynamicRendezvousHandler.from_backend(
            RUN_ID,
            connect(PREPARE_SECONDS),
            C10dRendezvousBackend(connect(limits.silent_seconds / 2), RUN_ID),
            limits.min_nodes,
            limits.max_nodes,
            local_addr=node.address,
            # `last_call` begins when `min_nodes` are here
            timeout=RendezvousTimeout(join=wait if limits.min_nodes == limits.max_nodes else 2 * wait + MARGIN, last_call=wait),
            keep_alive_interval=BEAT_SECONDS,
            keep_alive_max_attempt=max(3, int(limits.silent_seconds / BEAT_SECONDS)),
        )
        self._node, self._fits, self._prepare, self._run_folder = node, fits, prepare, run_folder
        self._round_wait = timedelta(seconds=min(PREPARE_SECONDS, 2 * limits.silent_seconds))
        self._closes = False  # at the end, for all nodes: once this one has taken part
        self.is_stopped = False  # the run was asked to stop while no ranks ran

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises RunOverError where the run ended meanwhile, and torch's RendezvousTimeoutError and RendezvousConnectionError."""
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # also each agent's own: see above
        with watched(self._stop_if_asked, "stop-request"):
            while True:
                try:
                    joined = self._inner.next_rendezvous()
                except (RendezvousClosedError, RendezvousGracefulExitError) as error:
                    raise RunOverError from error
                except RendezvousConnectionError:
                    self._closes = False
                    raise
                try:
                    members = self._members(joined)
                except dist.DistStoreError:  # a node of this round was lost before it wrote itself down
                    continue
                if self._node in members:
                    break
                self._wait_for_change()
        self._closes = True
        self._prepare(members)
        rank, store = members.index(self._node), dist.PrefixStore("ordered", joined.store)
        info = RendezvousStoreInfo.build(rank, store, self._node.address, free_port())
        return RendezvousInfo(store, rank, len(members), info)

    def _members(self, joined: RendezvousInfo) -> list[Node]:
        """The nodes that get ranks, in their order: as many as `fits`. DistStoreError: one of the round is missing."""
        store, keys = dist.PrefixStore("nodes", joined.store), [str(rank) for rank in range(joined.world_size)]
        store.set(str(joined.rank), json.dumps(asdict(self._node)))
        store.wait(keys, self._round_wait)
        order = in_order([Node(**json.loads(store.get(key))) for key in keys])
        counts = range(len(order), 0, -1)
        count = next((count for count in counts if self._fits(sum(node.num_ranks for node in order[:count]))), len(order))
        return order[:count]

    def _wait_for_change(self) -> None:
        """Until a node comes or goes: this one has no ranks in this round."""
        while not self._inner.num_nodes_waiting():
            if self._inner.is_closed():
                raise RunOverError
            time.sleep(LOOK_SECONDS)

    def _stop_if_asked(self, over: threading.Event) -> None:
        """Until `over`: this process gets a SIGTERM where the run is asked to stop, as no ranks run that could end their step."""
        while not over.wait(LOOK_SECONDS):
            if is_asked_to_stop(self._run_folder):
                self.is_stopped = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        try:
            return int(self._inner.num_nodes_waiting())
        except RendezvousConnectionError:
            self._closes = False  # it would wait once more
            raise

    def get_run_id(self) -> str:
        return RUN_ID

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown()) if self._closes else True
