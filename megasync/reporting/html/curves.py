"""A run's metrics as charts, grouped, under human names; what does not vary is a number. Data alone, which script.py draws.

Leaves out names, units and meanings (metric_names.py).

    for group in charts(records):
        group.name, group.charts, group.numbers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.reporting.html.record import Points, Record
from megasync.reporting.metric_names import GROUPS, Metric, label, metric

MAX_POINTS, MAX_OF_RUNS = 500, 1500  # of one curve, and of all runs for one metric
LEAST_SPREAD = 1e-3  # of a metric's values, over their largest; below it the metric is a number
PREFIX, GIB = "eval/", float(2**30)
TWINS = {"loss/total": "loss/policy"}  # left out where a run has the same of both


@dataclass(frozen=True)
class Chart:
    """One pair of axes and the metrics on it, those that a run has and that vary. A * in a key stands for any name."""

    group: str
    title: str
    sentence: str
    keys: tuple[str, ...]
    unit: str = ""
    log_scale: bool = False
    scale: float = 1.0  # of the unit, in that of the metric


CHARTS = (
    Chart("learning", "Reward", "What the policy earns: sampled in training, and greedily on prompts it does not train on.",
          ("reward/mean", "eval/reward", "eval/accuracy")),
    Chart("learning", "Parts of the reward", "Each reward by itself, where the config names several.", ("reward/*",)),
    Chart("learning", "Policy entropy", "How undecided the policy is about the next token; near 0 it no longer explores.",
          ("entropy/mean",), "nats"),
    Chart("learning", "Ties and spread", "Groups with equal rewards teach nothing; the spread is what learning feeds on.",
          ("groups/tied_fraction", "reward/std")),
    Chart("learning", "Loss", "Of a policy gradient neither sign nor size says much; of supervised steps it should fall.",
          ("loss/policy", "loss/total", "loss/sft", "eval/loss")),
    Chart("learning", "Gradient norm", "Before clipping. Spikes ask for a lower learning rate or a longer warm-up.",
          ("grad_norm",)),
    Chart("learning", "Learning rate", "As the schedule sets it.", ("learning_rate",)),
    Chart("learning", "Loss scale", "Of float16. It is halved where gradients overflow.", ("train/loss_scale",)),
    Chart("learning", "KL to the start", "How far the policy has moved from the model that the run began with.", ("loss/kl",),
          "nats"),
    Chart("learning", "Clipped tokens", "Tokens whose probability has moved so far that their gradient is cut off.",
          ("ratio/clipped_fraction", "ratio/dual_clipped_fraction"), "share"),
    Chart("learning", "Load balance", "Of the experts: 1 where all get the same number of tokens.", ("loss/load_balancing",)),
    Chart("rollouts", "Response length", "Tokens that the model writes for one response.", ("response/tokens_mean",), "tokens"),
    Chart("rollouts", "Truncated responses", "Those that reached the limit of tokens before they ended.",
          ("response/truncated_fraction",), "share"),
    Chart("rollouts", "Staleness", "How many weight versions the tokens are behind those that train on them.",
          ("staleness/mean", "staleness/max"), "versions"),
    Chart("rollouts", "Lead and filtered groups", "How far replicas are ahead, and groups that were replaced.",
          ("rollout/lead_batches", "rollout/filtered_groups")),
    Chart("rollouts", "Failed rewards", "Calls that raised, were late or died, and counted as 0.", ("reward/failures",), "calls"),
    Chart("rollouts", "Length penalty", "What responses near the limit lose.", ("reward/penalty_mean",)),
    Chart("rollouts", "Turns of an episode", "Requests to the model, and training sequences that come of them.",
          ("episode/turns_mean", "episode/branches")),
    Chart("rollouts", "Tokens of an episode", "Those that the model sampled, and those that it was given.",
          ("episode/sampled_tokens", "episode/given_tokens"), "tokens"),
    Chart("rollouts", "Prefix hits", "Share of the turns' prompts that their replica had computed before.",
          ("episode/prefix_hits",), "share"),
    Chart("rollouts", "Failed episodes", "What went wrong, and what was left out of the batch for it.",
          ("episode/failures", "episode/dropped"), "episodes"),
    Chart("speed", "Time in tools", "Of an episode: its tools, its environment and its own code.", ("episode/tool_seconds",),
          "s"),
    Chart("speed", "Share of time in tools", "The same over the episodes' whole time.", ("episode/tool_share",), "share"),
    Chart("speed", "Throughput", "Response tokens a second: generated while the replicas work, and trained over whole steps.",
          ("rollout/tokens_per_second", "train/tokens_per_second"), "tokens/s"),
    Chart("speed", "Time of a step", "Wall time, and where it goes.",
          ("step/seconds", "rollout/wait_seconds", "step/*_seconds"), "s"),
    Chart("speed", "Generation time", "What a batch takes, or since the one before where batches overlap.", ("rollout/seconds",),
          "s"),
    Chart("speed", "GPU memory of rank 0", "In use by all processes, by torch's tensors, and their peak.",
          ("memory/device_bytes", "memory/training_device_bytes", "memory/tensors_bytes", "memory/tensors_peak_bytes"), "GiB",
          scale=GIB),
    Chart("speed", "Host memory of rank 0", "Steady growth over a long run would be a leak.",
          ("memory/host_bytes", "memory/host_peak_bytes"), "GiB", scale=GIB),
    Chart("speed", "Padding", "Tokens that are computed and thrown away.", ("train/padding_fraction",), "share"),
    Chart("sync", "Time of a sync", "From the trainer's weights to vLLM's, and how long generation stood still for it.",
          ("sync/seconds", "sync/pause_seconds"), "ms", scale=1e-3),
    Chart("sync", "Sync bandwidth", "Bytes that go out, over the time they take.", ("sync/gb_per_second",), "GB/s"),
    Chart("sync", "Canary", "Scoring one prompt on both sides after each sync.", ("sync/canary_seconds",), "ms", scale=1e-3),
    Chart("sync", "Lost by merging", "Share of the adapters' update that rounding the merged weights loses.",
          ("lora/merge_error",), "share"),
    Chart("sameness", "Log-prob gap", "The same token, scored by trainer and vLLM; staleness adds what was learnt since.",
          ("logprob_gap/mean", "logprob_gap/max", "logprob_gap/own_experts_mean"), "nats", log_scale=True),
    Chart("sameness", "Effective sample size",
          "Of the weights that correct for the gap and for staleness: 1 where none is needed.",
          ("importance/ess",), "share"),
    Chart("sameness", "Masked tokens", "Left out of the loss, since both sides differ too much.", ("importance/masked_fraction",),
          "share"),
    Chart("sameness", "Canary gap", "A fixed prompt after each sync. A jump would mean damaged weights.", ("sync/canary_gap",),
          "nats"),
    Chart("sameness", "Tokens that differ", "Under model.exact: of those that are compared, with log-probs of other bits.",
          ("exact/differing_tokens", "exact/compared_tokens"), "tokens"),
    Chart("sameness", "Replayed choices", "Choices of experts that differ between vLLM and the trainer.",
          ("router_replay/moved_fraction",), "share"),
)  # fmt: skip
SCORES = "Over several samples a prompt: their mean reward (avg), and the chance that one of K passes (pass)."

RETURNED = "The mean of what episodes return in `metrics` under this name."


@dataclass
class Group:
    """Charts as `script.py` takes them; `numbers` are metrics that do not vary, with their value in each run."""

    name: str
    sentence: str
    charts: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[tuple[Metric, str, list[float | None]]] = field(default_factory=list)


def charts(records: Sequence[Record]) -> list[Group]:
    """Groups with something in them; of several runs each chart has a curve a metric and run."""
    keys = list(dict.fromkeys(key for record in records for key in record.keys))
    flat = {key for key in keys if _is_flat(records, key)}
    groups, drawn = {name: Group(name, sentence) for name, sentence in GROUPS.items()}, set[str]()
    for chart in (*CHARTS, *_set_charts(keys), *_episode_charts(keys)):
        curves = []
        for key in _keys_of(chart, keys, drawn):
            drawn.add(key)
            for number, record in enumerate(records):
                points = _thin(record.points(key), len(records))
                is_twin = key in TWINS and record.points(key) == record.points(TWINS[key])
                if points and key not in flat and not is_twin:
                    curves.append(_curve(key, points, chart.scale, number, record.name if len(records) > 1 else ""))
        if curves:
            told = {"title": chart.title, "sentence": chart.sentence, "unit": chart.unit, "log": chart.log_scale}
            groups[chart.group].charts.append({**told, "curves": curves})
    for key in keys:
        found = metric(key)
        if found is not None and key in flat:
            values = [record.points(key)[-1:] for record in records]
            groups[found.group].numbers.append((found, key, [point[0][1] if point else None for point in values]))
    return [group for group in groups.values() if group.charts or group.numbers]


def _set_charts(keys: Iterable[str]) -> list[Chart]:
    """One for each evaluation set."""
    names = dict.fromkeys(key.split("/")[1] for key in keys if key.startswith(PREFIX) and key.count("/") == 2)
    return [Chart("learning", f"Evaluation set {n}", SCORES, (f"{PREFIX}{n}/avg@*", f"{PREFIX}{n}/pass@*")) for n in names]


def _episode_charts(keys: Iterable[str]) -> list[Chart]:
    """One for each metric that episodes return: their scales are their own."""
    own = [(key, label(key)) for key in keys if (row := metric(key)) is not None and row.key == "episode/NAME"]
    return [Chart("rollouts", name[:1].upper() + name[1:], RETURNED, (key,)) for key, name in own]


def _keys_of(chart: Chart, keys: Sequence[str], drawn: set[str]) -> list[str]:
    """Of the run's keys those that the chart asks for; a * takes what has no row of its own in the table of metrics."""
    found = [wanted for wanted in chart.keys if wanted in keys]
    for begin, _, end in (wanted.partition("*") for wanted in chart.keys if "*" in wanted):
        alike = [key for key in keys if key.startswith(begin) and key.endswith(end) and key not in (*drawn, *found)]
        found += [key for key in alike if (row := metric(key)) is not None and row.key != key]
    return found


def _is_flat(records: Sequence[Record], key: str) -> bool:
    values = [value for record in records for _, value in record.points(key)]
    most = max(abs(value) for value in values) if values else 0.0
    return len(values) < 2 or max(values) - min(values) <= LEAST_SPREAD * most


def _curve(key: str, points: Points, scale: float, run: int, name: str) -> dict[str, Any]:
    shown = label(key).replace("_", " ") if key.startswith("step/") else label(key)
    return {
        "key": key,
        "label": shown[:1].upper() + shown[1:],
        "run": run,
        "name": name,
        "evaluated": key.startswith(PREFIX),
        "x": [step for step, _ in points],
        "y": [_short(value / scale) for _, value in points],
    }


def _thin(points: Points, num_runs: int) -> Points:
    """Evenly spaced ones, the last included."""
    most = max(20, min(MAX_POINTS, MAX_OF_RUNS // num_runs))
    if len(points) <= most:
        return points
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _short(value: float) -> float:
    """Five digits are more than a screen shows."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0
