"""One process of `python -m bench`, which starts it: runs a program and writes its measurements as JSON.

Leaves out the programs (sync/methods.py, generation/, training/rank.py, equivalence/read_back.py).

    python -m megasync.launch.torchrun --nproc-per-node 2 -m bench.worker sync runs/bench/config.yaml OUT.json
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.config import BenchRoot
from megasync.config.load import load_config
from megasync.launch.processes import end_on_sigterm, run_and_leave

PROGRAMS = {
    "sync": "sync.methods:SyncBench",
    "rollout": "generation.rollout:LoraBench",
    "throughput": "generation.rollout:ThroughputBench",
    "train": "training.rank:TrainBench",
    "equivalence": "equivalence.read_back:ReadBack",
}


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file and write the results as JSON, also those of a bench that does not come to its end."""
    program, config_path, results_path = arguments
    end_on_sigterm()
    with ExitStack() as ends:
        kind = pkgutil.resolve_name(f"bench.{PROGRAMS[program]}")
        bench = kind(load_config(config_path, root=BenchRoot), Path(results_path), ends)
        bench.start()
        bench.keep(bench.run(), is_complete=True)
    return 0


if __name__ == "__main__":
    run_and_leave(main)
