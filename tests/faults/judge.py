"""Whether what a fault run recorded is right: every prompt trained once, versions, tokens of whole weights, who was restarted.

    verdict = judge(case, folder, run_folder, model, settings)

Scores each token under the checkpoint of the version that it says it is of. Leaves out how it was recorded (program.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults import orders
from tests.faults.cases import NUM_FAILURES, Case
from megasync.config.files import CHECKPOINTS, METRICS_FILE

MAX_GAP = 1e-3  # between log-probs of the same weights in vLLM and in transformers; of others it is about 1e-1
Scores = Callable[[int, Sequence[int]], Sequence[float]]  # of a version: log-probs of a text's tokens from the second on


@dataclass
class Verdict:
    """`problems` are empty where all is right. `gap`: the largest between a token's log-prob and that of its version."""

    problems: list[str] = field(default_factory=list)
    gap: float = 0.0
    other_gap: float = 0.0  # the median to the version before, which a wrong one would show
    num_starts: dict[int, int] = field(default_factory=dict)  # of each replica


@dataclass(frozen=True)
class Expected:
    """Of a run that comes to its end."""

    num_steps: int
    batch_size: int
    max_staleness: int
    num_replicas: int


def judge(case: Case, folder: Path, run_folder: Path, model: Path, expected: Expected) -> Verdict:
    """Of all starts of a case together."""
    verdict = Verdict()
    lines = trained_lines(orders.read_notes(folder, orders.TRAINED), expected.batch_size)
    verdict.problems += find_untrained(lines, expected)
    verdict.problems += find_wrong_versions(lines, expected.max_staleness)
    verdict.problems += find_steps_back(orders.read_notes(folder, orders.COMMITS))
    path = run_folder / METRICS_FILE
    metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    if [line["version"] for line in metrics] != list(range(1, expected.num_steps + 1)):
        verdict.problems.append(f"metrics.jsonl has versions {[line['version'] for line in metrics]}")
    verdict.problems += find_wrong_failures(metrics, case)
    verdict.num_starts, problems = count_starts(orders.read_notes(folder, orders.STARTS), case, expected)
    verdict.problems += problems
    score = scorer(model, run_folder / CHECKPOINTS)
    verdict.gap, verdict.other_gap = largest_gap(lines, score)
    if not verdict.gap < MAX_GAP:
        verdict.problems.append(f"a log-prob differs by {verdict.gap:.3g} from that of the version it is said to be of")
    return verdict


def trained_lines(notes: Iterable[Mapping[str, Any]], batch_size: int) -> list[Mapping[str, Any]]:
    """Those of steps that count: a start takes back the steps from where it begins on."""
    kept: list[Mapping[str, Any]] = []
    for note in notes:
        if "begin" in note:
            kept = [line for line in kept if line["step"] < note["begin"] // batch_size]
        else:
            kept.append(note)
    return kept


def find_untrained(lines: Iterable[Mapping[str, Any]], expected: Expected) -> list[str]:
    """Each prompt once, each step a whole batch."""
    ordinals, sizes = defaultdict(int), defaultdict(int)  # type: defaultdict[int, int], defaultdict[int, int]
    for line in lines:
        ordinals[line["ordinal"]] += 1
        sizes[line["step"]] += 1
    wanted = range(expected.num_steps * expected.batch_size)
    problems = [f"prompt {each} was never trained" for each in wanted if each not in ordinals]
    problems += [f"prompt {each} was trained {times} times" for each, times in ordinals.items() if times > 1]
    problems += [f"prompt {each} is beyond the run" for each in ordinals if each not in wanted]
    return problems + [f"step {step} has {size} prompts" for step, size in sizes.items() if size != expected.batch_size]


def find_wrong_versions(lines: Iterable[Mapping[str, Any]], max_staleness: int) -> list[str]:
    """Within a sample versions go up, and none is too old or too new for its step."""
    problems = []
    for line in lines:
        for sample in line["samples"]:
            versions, where = sample["versions"], f"step {line['step']}, prompt {line['ordinal']}"
            if any(later < former for former, later in pairwise(versions)):
                problems.append(f"{where}: versions go back within a sample: {versions}")
            if versions and not line["step"] - max_staleness <= min(versions) <= max(versions) <= line["step"]:
                problems.append(f"{where}: versions {min(versions)} to {max(versions)}")
    return problems


def find_wrong_failures(metrics: Iterable[Mapping[str, Any]], case: Case) -> list[str]:
    """Of episodes: the one that has to fail is counted, and no other."""
    found = sum(int(line.get("episode/failures", 0)) for line in metrics)
    wanted = NUM_FAILURES[case.episode] if case.episode else 0
    return [f"{found} episodes failed, {wanted} were to"] if found != wanted else []


def find_steps_back(commits: Iterable[Mapping[str, Any]]) -> list[str]:
    """A replica's process is only ever brought to later versions, or once more to one whose sync failed elsewhere."""
    last: dict[tuple[int, int], int] = {}
    problems = []
    for note in commits:
        key = note["replica"], note["pid"]
        if note["version"] < last.get(key, -1):
            problems.append(f"replica {key[0]} went from version {last[key]} to {note['version']}")
        last[key] = note["version"]
    return problems


def count_starts(starts: Iterable[Mapping[str, Any]], case: Case, expected: Expected) -> tuple[dict[int, int], list[str]]:
    """How often each replica was started; a restart of one that was not signalled is a problem, unless a rank was."""
    counts: dict[int, int] = defaultdict(int)
    for note in starts:
        counts[note["replica"]] += 1
    problems = []
    if case.kind != "rank":
        healthy = [replica for replica in range(expected.num_replicas) if case.kind == "none" or replica != case.number]
        more = [each for each in healthy if counts[each] != 1]
        problems = [f"replica {each}, which was not signalled, was started {counts[each]} times" for each in more]
    return dict(sorted(counts.items())), problems


def largest_gap(lines: Iterable[Mapping[str, Any]], score: Scores) -> tuple[float, float]:
    """To the version that each token is of, the largest; to the version before that, the median."""
    own, other = [0.0], [0.0]
    for line in lines:
        for sample in line["samples"]:
            prompt = sample.get("prompt", line["prompt"])
            first, text = len(prompt) - 1, [*prompt, *sample["tokens"]]
            sampled = sample.get("sampled", [True] * len(sample["tokens"]))
            scores = {version: score(version, text)[first:] for version in {*sample["versions"]}}
            for place, (version, log_prob) in enumerate(zip(sample["versions"], sample["log_probs"], strict=True)):
                if not sampled[place]:
                    continue
                own.append(abs(scores[version][place] - log_prob))
                if version > 0 and place == 0:
                    other.append(abs(score(version - 1, text)[first] - log_prob))
    return max(own), sorted(other)[len(other) // 2]


def scorer(model: Path, checkpoints: Path) -> Scores:
    """By transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: dict[int, Any] = {}

    @torch.no_grad()
    def score(version: int, text: Sequence[int]) -> Sequence[float]:
        if version not in loaded:
            folder = checkpoints / f"step_{version:08d}" / "hf" if version else model
            loaded[version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([list(text)])
        found = loaded[version](ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        values: list[float] = found.tolist()
        return values

    return score
