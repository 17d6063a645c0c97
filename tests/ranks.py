"""Runs a function on N ranks under torchrun's own launcher and brings each rank's result back.

    results = run_ranks(2, "tests.engine_cases:losses", {"wrap": "ddp"})

The function gets the keyword arguments and returns anything that pickles. One launch may run many cases: start-up costs more
than most of them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(num_ranks: int, target: str, arguments: dict[str, Any], timeout_seconds: float = 300.0) -> list[Any]:
    """Results in rank order. A failing rank raises AssertionError with the ranks' output."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps((target, arguments)))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
            *("-m", "tests.ranks", folder),
        ]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
        assert done.returncode == 0, f"{target} on {num_ranks} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return [pickle.loads((Path(folder) / f"rank{rank}").read_bytes()) for rank in range(num_ranks)]


def main(folder: str) -> None:
    target, arguments = pickle.loads((Path(folder) / "arguments").read_bytes())
    module, name = target.split(":")
    result = getattr(importlib.import_module(module), name)(**arguments)
    (Path(folder) / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
