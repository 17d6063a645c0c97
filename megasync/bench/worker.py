"""One trainer rank of `python -m megasync.bench`, which starts it: runs a bench and writes what it measured as JSON.

Leaves out the benches (sync/rounds.py, generation/).

    python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.bench.worker sync runs/bench/config.yaml OUT.json
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.runtime import parallel
from megasync.bench.common.rank import BenchRank
from megasync.bench.config import BenchRoot
from megasync.bench.equivalence.read_back import ReadBack
from megasync.bench.generation.lora import LoraBench
from megasync.bench.generation.staleness import StalenessBench
from megasync.bench.nodes.lanes import LanesBench
from megasync.bench.sync.rounds import SyncBench
from megasync.config.load import load_config
from megasync.launch.processes import end_on_sigterm, run_and_leave

BENCHES: dict[str, type[BenchRank]] = {
    "sync": SyncBench,
    "lanes": LanesBench,
    "rollout": LoraBench,
    "staleness": StalenessBench,
    "equivalence": ReadBack,
}


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file and write the results as JSON, also those of a bench that does not come to its end."""
    verb, config_path, results_path = arguments
    end_on_sigterm()
    with ExitStack() as ends:
        ends.callback(parallel.shutdown)
        bench = BENCHES[verb](load_config(config_path, root=BenchRoot), Path(results_path), ends)
        bench.keep(bench.run(), is_complete=True)
    return 0


if __name__ == "__main__":
    run_and_leave(main)
