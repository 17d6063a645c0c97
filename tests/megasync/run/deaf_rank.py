"""A rank of test_life.py: no handler of a signal runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from megasync.launch.processes import run_and_leave


def deaf(_: Sequence[str]) -> int:
    """A rank: rank 1 waits for rank 0 in a collective, where no handler of a signal runs; rank 0 never comes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.write(sys.stdout.fileno(), b"there\n")  # in one piece: the other rank writes into the same pipe
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    dist.barrier()
    return 0


if __name__ == "__main__":
    run_and_leave(deaf)
