"""What the benches' rounds come to: medians, ratios and the figures that are aimed at. Pure functions; no torch in here.

Leaves out their tables (tables.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

OURS = ("stream", "unverified", "lora merged", "lora adapter")
ADAPTER_OVERHEAD = 1.01
RATIO_TARGETS = (  # the seconds of one way over those of another, and what is aimed at
    ("disk_times_ours", "disk", "stream", {"at_least": 3.0}),
    ("stream_times_unverified", "stream", "unverified", {"at_most": 1.1}),
    ("lora_merged_times_stream", "lora merged", "stream", {"at_most": 1.25}),
    ("stream_times_lora_adapter", "stream", "lora adapter", {"at_least": 10.0}),
)
WITHOUT_GPUS = ("stream_times_lora_adapter",)  # between GPUs a whole sync takes hardly longer than the messages of any sync
SPREAD = ("seconds_median", "seconds_least", "seconds_most")


def summarise_sync(results: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios to ours and peaks by way, our ways' stages, and the figures that are aimed at."""
    by_way = _by_way(results["rounds"])
    spreads = {way: _spread(rounds) for way, rounds in by_way.items()}
    others = {"times_ours": "stream"} | ({"times_floor": "floor"} if "floor" in by_way else {})
    summary: dict[str, Any] = {}
    for way, rounds in by_way.items():
        summary[way] = {
            **spreads[way],
            **{name: spreads[way]["seconds_median"] / spreads[other]["seconds_median"] for name, other in others.items()},
            "messages": rounds[-1]["messages"],
            "bytes": rounds[-1]["bytes"],
            "extra_bytes_most": {name: max(m["extra_bytes"][name] for m in rounds) for name in rounds[0]["extra_bytes"]},
        }
    stages = {way: _stage_medians(by_way[way]) for way in OURS if way in by_way}
    return {"summary": summary, "stage_seconds_median": stages, "targets": _sync_targets(results, summary)}


def _sync_targets(results: dict[str, Any], summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    bound = 2 * results["bucket_bytes"] + results["model"]["largest_tensor"]["bytes"]
    most = max(summary["stream"]["extra_bytes_most"].values())
    targets: dict[str, dict[str, float]] = {"stream_extra_bytes": {"is": most, "at_most": bound}}
    for name, way, other, bound in RATIO_TARGETS:
        if {way, other} <= summary.keys() and not (name in WITHOUT_GPUS and results["machine"].get("gpus")):
            targets[name] = {"is": summary[way]["seconds_median"] / summary[other]["seconds_median"], **bound}
    if "lora adapter" in summary:
        adapter = results["adapter"]
        targets["lora_adapter_bytes"] = {"is": adapter["bytes_sent"], "at_most": int(ADAPTER_OVERHEAD * adapter["bytes"])}
    return targets


def summarise_rollout(results: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds and tokens a second by way, and how the adapter's speed compares with merged weights', or ours with
    vLLM's own in the same round.
    """
    summary = {
        way: {
            **_spread(rounds),
            "tokens": rounds[-1]["tokens"],
            "tokens_per_second_median": statistics.median(m["tokens"] / m["seconds"] for m in rounds),
        }
        for way, rounds in _by_way(results["rounds"]).items()
    }
    speeds = {way: figures["tokens_per_second_median"] for way, figures in summary.items()}
    if "vllm" in summary:
        ours, offline = (_by_way(results["rounds"])[way] for way in ("replica", "vllm"))
        ratios = [other["seconds"] / own["seconds"] for own, other in zip(ours, offline, strict=True)]
        spent = {
            way: {name: statistics.median(m["cpu_seconds"][name] for m in rounds) for name in rounds[0]["cpu_seconds"]}
            for way, rounds in _by_way(results["rounds"]).items()
        }
        target = {"replica_times_vllm": {"is": statistics.median(ratios), "at_least": 0.95}}
        return {"summary": summary, "cpu_seconds_median": spent, "targets": target}
    return {"summary": summary, "adapter_times_merged": speeds["adapter"] / speeds["merged"]}


def summarise_staleness(results: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, by max_staleness and on_update, each also as a share of the first row's seconds."""
    by_row: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for measured in results["rounds"]:
        by_row[f"{measured['max_staleness']} {measured['on_update']}"].append(measured)
    names = ("seconds", "wait_seconds", "pause_seconds", "staleness_mean", "staleness_max")
    summary = {row: {name: statistics.median(m[name] for m in rounds) for name in names} for row, rounds in by_row.items()}
    base = summary["0 drain"]["seconds"]
    for figures in summary.values():
        figures["times_synchronous"] = figures["seconds"] / base
    target = {"staleness_4_continue": {"is": summary["4 continue"]["times_synchronous"], "at_most": 0.75}}
    return {"summary": summary, "targets": target}


def _by_way(rounds: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_way: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for measured in rounds:
        by_way[measured["way"]].append(measured)
    return by_way


def _spread(rounds: list[dict[str, Any]]) -> dict[str, float]:
    seconds = [measured["seconds"] for measured in rounds]
    return dict(zip(SPREAD, (statistics.median(seconds), min(seconds), max(seconds)), strict=True))


def _stage_medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(m["stages"].get(name, 0.0) for m in rounds) for name in rounds[0]["stages"]}
