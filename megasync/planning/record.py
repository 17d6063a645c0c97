"""plan.json in a run's folder, and what came of it: predicted over actual. Where no plan can be made, that is a note.

notes = write_plan(config, num_ranks, stage, lengths)    # rank 0, when the engine is there
summary |= outcome(folder, summary)                      # at the end
print(compare(folder))                                   # megasync plan --compare RUN
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megasync.config.errors import ConfigError
from megasync.config.files import write_atomically
from megasync.config.schema import Config
from megasync.planning.replicas import TRAINING_DEVICE, WORKER_DEVICE, WORKER_PEAK
from megasync.reporting.log import TIMELINE_FILE, read_metrics, read_summary

PLAN_FILE = "plan.json"
RATIO = "predicted/actual "  # of a key in summary.json, before the name of what is compared
PEAKS = ("memory/tensors_peak_bytes", "memory/device_bytes", TRAINING_DEVICE, "memory/host_bytes", "memory/host_peak_bytes")
OF_WORKERS = (WORKER_PEAK, WORKER_DEVICE)
MEDIANS = ("step/seconds", "rollout/seconds", "sync/seconds")
TRAIN = "train"  # the timeline's span


def write_plan(config: Config, num_ranks: int, stage: int, lengths: Sequence[tuple[int, int]]) -> list[str]:
    """Of this process, whose groups are there. Returns notes: what does not fit, or that no plan could be made. Not collective.

    `lengths`: tokens of prompt and response of some examples; without rollouts those are what is trained on.
    """
    try:
        plan = _plan(config, num_ranks, stage, lengths)
        write_atomically(config.run.folder / PLAN_FILE, json.dumps(plan, indent=1) + "\n")
    except Exception as error:  # noqa: BLE001 - whatever it is, the run does not need it
        return [f"no plan of this run could be made: {type(error).__name__}: {error}".splitlines()[0]]
    return warnings_of(plan)


def warnings_of(plan: Mapping[str, Any]) -> list[str]:
    """A line for each thing that does not fit; the run goes on, as plans are a few percent off."""
    remedy = "megasync plan, with the run's config and keys, names the nearest change that fits"
    return [f"may run out of memory, by its plan: {problem}; {remedy}" for problem in plan["problems"]]


def _plan(config: Config, num_ranks: int, stage: int, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    import torch

    from megasync.planning.cpu.kept import kept
    from megasync.planning.hardware import hardware, kind_of, with_memory
    from megasync.planning.make import plan_of_rank
    from megasync.planning.shapes import Request

    has_cuda = torch.cuda.is_available()
    kind = (kind_of(torch.cuda.get_device_name()) or "h100") if has_cuda else "cpu"
    known = hardware(kind)
    if has_cuda:
        known = with_memory(known, torch.cuda.get_device_properties(0).total_memory)
    prompts, responses = zip(*lengths, strict=True) if lengths else ((128,), (0,))
    is_grpo = config.algorithm.name == "grpo"
    mean = config.rollout.max_new_tokens / 2 if is_grpo else statistics.fmean(responses)
    supervised = () if is_grpo else tuple(responses)  # those of rollouts are not known yet
    request = Request(num_ranks, known, max(1.0, mean), round(statistics.fmean(prompts)), supervised)
    with nullcontext() if has_cuda else kept():
        return plan_of_rank(config, request, stage).as_dict()


def outcome(folder: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over actual, by what is compared, for summary.json, of which the rest is given; empty without a plan."""
    return {RATIO + name: predicted / actual for name, predicted, actual in _pairs(folder, summary) if actual}


def compare(folder: Path) -> str:
    """A table.

    Raises:
        ConfigError: the run has no plan.
    """
    if not (folder / PLAN_FILE).is_file():
        remedy = "name the folder of a run, such as runs/grpo; each writes a plan when it starts"
        raise ConfigError(f"{folder}: holds no {PLAN_FILE}", remedy=remedy)
    lines = [f"{'':<28} {'predicted':>12} {'actual':>12} {'ratio':>7}"]
    for name, predicted, actual in _pairs(folder, read_summary(folder)):
        is_size = name.endswith("bytes")
        shown = (f"{value / 2**30:.2f} GiB" if is_size else f"{value:.3f} s" for value in (predicted, actual))
        lines.append(f"{name:<28} {next(shown):>12} {next(shown):>12} {predicted / actual:>7.2f}")
    return "\n".join(lines)


def _pairs(folder: Path, summary: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(what, predicted, actual) of all that the plan says and the run has written."""
    path = folder / PLAN_FILE
    if not path.is_file():
        return []
    predicted = json.loads(path.read_text(encoding="utf-8"))["predicted"]
    found = actual(folder, summary)
    return [(name, value, found[name]) for name, value in predicted.items() if value and found.get(name)]


def actual(folder: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """What a run took, by the names of what is planned. Of seconds medians, without the first step, in which kernels are compiled
    and memory is mapped.
    """
    steps = read_metrics(folder)
    found = {name: max(values) for name in PEAKS if (values := _values(steps, name))}
    found |= {name: float(size) for name in OF_WORKERS if (size := summary.get(name))}
    found |= {name: statistics.median(values) for name in MEDIANS if (values := _values(steps[1:] or steps, name))}
    timeline = folder / TIMELINE_FILE
    if timeline.is_file():
        events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
        spans = [event["dur"] / 1e6 for event in events if event["ph"] == "X" and event["name"] == TRAIN]
        if spans:
            found[TRAIN] = statistics.median(spans[1:] or spans)
    return found


def _values(steps: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps if step.get(name) is not None]
