"""torchrun for the ranks of this machine: its store listens on the loopback alone, and nothing is left behind.

python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from bridge.transport.channel import open_store
from megasync.launch.processes import run_and_leave
from megasync.launch.scope import LOOPBACK, run_scope

BACKEND = "loopback"


class LoopbackRendezvous(StaticTCPRendezvous):
    """Of one torchrun: there is nobody to wait for. The ranks use its store, too."""

    def __init__(self, run_id: str) -> None:
        store = open_store(LOOPBACK)
        super().__init__(LOOPBACK, store.port, rank=0, world_size=1, run_id=run_id, timeout=60)
        self._store = store

    def get_backend(self) -> str:
        return BACKEND


def main(arguments: Sequence[str]) -> int:
    """As torchrun, which raises where a rank failed."""
    rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(parameters.run_id))
    with run_scope():
        run.main(["--rdzv-backend", BACKEND, "--rdzv-endpoint", f"{LOOPBACK}:0", "--local-addr", LOOPBACK, *arguments])
    return 0


if __name__ == "__main__":
    run_and_leave(main)
