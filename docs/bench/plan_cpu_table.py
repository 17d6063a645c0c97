"""Plans of runs on CPUs beside what they took, in one pass of plan_cases_cpu.sh or several: docs/bench/plan_cpu_table.py OUT ...

A machine that others share is not as fast in one minute as in the next. So a plan is taken to be the mean of two, the run's own right
before its first step and the one made right after its last (plan_cpu_again.py), of rollouts the second alone, which knows how long
responses are. Of several passes the ratio in the middle counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

STEP, PEAKS = "step/seconds", ("memory/host_peak_bytes", "memory/worker_host_peak_bytes")


class Pass(NamedTuple):
    """One run of a case: seconds of a step as planned before and after it, and as it took; peaks by name, planned over taken."""

    before: float
    after: float
    actual: float
    peaks: dict[str, float]

    @property
    def ratio(self) -> float:
        """Planned over taken."""
        has_rollouts = len(self.peaks) > 1  # a worker's peak, too
        return (self.after if has_rollouts else math.sqrt(self.before * self.after)) / self.actual


def read(text: str) -> Pass:
    """What plan_cases_cpu.sh writes into CASE.txt: the table of `plan --compare`, and a line of JSON."""
    lines = text.splitlines()
    table = {line.split()[0]: line.split() for line in lines if line.startswith((STEP, *PEAKS))}
    after = next(json.loads(line) for line in lines if line.startswith("{"))["predicted"][STEP]
    _, before, _, actual, _, _ = table[STEP]
    return Pass(float(before), after, float(actual), {name: float(table[name][-1]) for name in PEAKS if name in table})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    passes: dict[str, list[Pass]] = {}
    for folder in given.folders:
        for path in sorted(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime):
            passes.setdefault(path.stem, []).append(read(path.read_text(encoding="utf-8")))
    print(f"{'case':<22} {'ratio':>5}   of each pass: before, after over actual s = ratio")
    ratios, peaks = list[float](), list[float]()
    for case, found in passes.items():
        ratios.append(statistics.median(each.ratio for each in found))
        peaks += [statistics.median(each.peaks[name] for each in found) for name in found[0].peaks]
        told = "; ".join(f"{each.before:.3g}, {each.after:.3g} over {each.actual:.3g} = {each.ratio:.2f}" for each in found)
        print(f"{case:<22} {ratios[-1]:5.2f}   {told}")
    for name, values in (("seconds of a step", ratios), ("peaks", peaks)):
        off = [abs(value - 1) for value in values]
        print(f"{name}: {statistics.median(off):.1%} off in the median, {max(off):.1%} at most, of {len(off)}")


if __name__ == "__main__":
    main()
