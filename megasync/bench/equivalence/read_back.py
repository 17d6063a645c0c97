"""A family's weights on their way to vLLM and back: trained on two ranks, published, and compared with what vLLM computes with.

One vLLM serves every wrap, one after the other. worker.py runs it on each rank.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from engine import parallel
from megasync.bench.config import BenchRoot
from megasync.bench.equivalence.groups import forget_wrappers, leave_groups
from megasync.bench.equivalence.layouts import WRAPS
from megasync.bench.equivalence.measure import build_engine
from megasync.bench.equivalence.models import step_samples
from megasync.bench.equivalence.start import POLL_SECONDS, start
from megasync.bench.rank import BenchRank, Measured
from megasync.bench.train import end_session
from megasync.config.load import save_config
from megasync.launch.processes import torchrun
from megasync.weights import build_exporter, build_publisher

NUM_RANKS, NUM_STEPS = 2, 2
LAYOUT = "tp2_sp"  # which all families take
SECONDS = 400.0


class ReadBack(BenchRank):
    """`config.engine.wrap` is the first of the wraps."""

    def run(self) -> Measured:
        """By wrap how many tensors were compared, all of them equal bit for bit."""
        pool, told, chosen = self.start_pool(), self.config, self.config.bench_equivalence
        found: Measured = {}
        wraps = [wrap for wrap in WRAPS if wrap in chosen.wraps or "all" in chosen.wraps]
        for version, wrap in enumerate(wraps):
            if version:
                leave_groups()
                forget_wrappers()
                parallel.initialize(told.engine.parallel, told.run.seed)
            config = told.model_copy(update={"engine": told.engine.model_copy(update={"wrap": wrap})})
            built = build_engine(config)
            for step in range(NUM_STEPS):
                built.update(built.prepare(step_samples(told.run.seed, step, chosen.micro_batches)))
            source = build_exporter(built)
            publisher = build_publisher(source, pool, config)
            report = publisher.publish(version)
            self.compare(wrap, source, pool)
            publisher.close()
            found[wrap] = {"tensors": len(source.manifest().tensors), "bytes": report.num_bytes}
            self.keep(found, is_complete=False)
            del built, source, publisher
        return found


def read_back(config: BenchRoot, told: dict[str, Any], family: str) -> Measured:
    """Start the ranks for one family by a run's config; what `ReadBack` found, and `error` where it did not come to its end."""
    place = config.run.folder / "vllm" / family
    path, result, log = (place / name for name in ("config.yaml", "found.json", "ranks.log"))
    place.mkdir(parents=True, exist_ok=True)
    for former in (result, log):
        former.unlink(missing_ok=True)
    sections = {name: told[name] for name in ("model", "engine", "algorithm", "run")}
    bench = config.bench.model_copy(update={"num_ranks": NUM_RANKS})
    save_config(BenchRoot.model_validate({**config.model_dump(), **sections, "bench": bench.model_dump()}), path)
    process = start(torchrun(NUM_RANKS, "megasync.bench.worker", "equivalence", str(path), str(result)), log)
    deadline = time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        end_session(process)
    found: Measured = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if not found.pop("is_complete", False):
        found["error"] = f"{_last_error(log)}: see {log}"
    return found


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error: " in line]
    return errors[0] if errors else f"not done after {SECONDS:g} s"
