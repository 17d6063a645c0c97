"""A family's weights on their way to vLLM and back: trained on two ranks, published, and compared with what vLLM computes with.

One vLLM serves every wrap, one after the other. worker.py runs it on each rank.
"""

from __future__ import annotations

from typing import Any

from bench.common.processes import run_logged
from bench.common.program import Measured
from bench.common.rank import BenchRank
from bench.config import BenchRoot
from bench.equivalence.cases import WRAPS
from bench.equivalence.measure import build_engine, forget_wrappers, leave_groups
from bench.equivalence.models import step_samples
from engine.runtime import parallel
from megasync.config.load import with_changes
from megasync.run.weights import build_exporter, build_publisher

NUM_RANKS, NUM_STEPS = 2, 2
LAYOUT = "tp2_sp"  # which all families take
SECONDS = 400.0


class ReadBack(BenchRank):
    """`config.engine.wrap` is the first of the wraps."""

    def run(self) -> Measured:
        """By wrap how many tensors were compared, all of them equal bit for bit."""
        pool, chosen = self.start_pool(), self.config.bench_equivalence
        found: Measured = {}
        for version, wrap in enumerate(wrap for wrap in WRAPS if wrap in chosen.wraps or "all" in chosen.wraps):
            if version:
                leave_groups()
                forget_wrappers()
                parallel.initialize(self.config.engine.parallel, self.config.run.seed)
            config = with_changes(self.config, {"engine.wrap": wrap})
            built = build_engine(config)
            for step in range(NUM_STEPS):
                built.update(built.prepare(step_samples(config.run.seed, step, chosen.micro_batches)))
            source = build_exporter(built)
            publisher = build_publisher(source, pool, config)
            report = publisher.publish(version)
            self.compare(wrap, source, pool)
            publisher.close()
            found[wrap] = {"tensors": len(source.manifest().tensors), "bytes": report.num_bytes}
            self.keep(found, is_complete=False)
            del built, source, publisher
        return found


def read_back(config: BenchRoot, run_config: dict[str, Any], family: str) -> Measured:
    """Start the ranks for one family by a run's config; what `ReadBack` found, and `error` where it did not come to its end."""
    sections = {name: run_config[name] for name in ("model", "engine", "algorithm", "run")}
    own = with_changes(config, {**sections, "bench.num_ranks": NUM_RANKS})
    found, log = run_logged("equivalence", own, config.run.folder / "vllm" / family, NUM_RANKS, SECONDS)
    if "problem" in found:
        errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error: " in line]
        found["error"] = f"{(errors or [found['problem']])[0]}: see {log}"
        del found["problem"]
    return found
