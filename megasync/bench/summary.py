"""What the benches' rounds come to: medians, ratios and the figures that are aimed at. Pure functions; no torch in here.

Leaves out their tables (tables.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

OURS = ("stream", "unverified", "lora merged", "lora adapter")
FASTER_THAN_DISK = 3.0
ADAPTER_FASTER_THAN_STREAM = 10.0
ADAPTER_OVERHEAD = 1.01
MERGED_TIMES_STREAM = 1.25
VERIFIED_TIMES_UNVERIFIED = 1.1


def summarise_sync(results: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios to ours and peaks by way, our ways' stages, and the figures that are aimed at."""
    by_way = _by_way(results["rounds"])
    ours = statistics.median(measured["seconds"] for measured in by_way["stream"])
    floor = statistics.median(measured["seconds"] for measured in by_way["floor"]) if "floor" in by_way else 0.0
    summary: dict[str, Any] = {}
    for way, rounds in by_way.items():
        seconds = [measured["seconds"] for measured in rounds]
        peaks = {name: max(m["extra_bytes"][name] for m in rounds) for name in rounds[0]["extra_bytes"]}
        summary[way] = {
            **_spread(seconds),
            "times_ours": statistics.median(seconds) / ours,
            **({"times_floor": statistics.median(seconds) / floor} if floor else {}),
            "messages": rounds[-1]["messages"],
            "bytes": rounds[-1]["bytes"],
            "extra_bytes_most": peaks,
        }
    stages = {way: _stage_medians(by_way[way]) for way in OURS if way in by_way}
    return {"summary": summary, "stage_seconds_median": stages, "targets": _sync_targets(results, summary)}


def _sync_targets(results: dict[str, Any], summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    bound = 2 * results["bucket_bytes"] + results["model"]["largest_tensor"]["bytes"]
    most = max(summary["stream"]["extra_bytes_most"].values())
    targets: dict[str, dict[str, float]] = {"stream_extra_bytes": {"is": most, "at_most": bound}}
    if "disk" in summary:
        targets["disk_times_ours"] = {"is": summary["disk"]["times_ours"], "at_least": FASTER_THAN_DISK}
    if "unverified" in summary:
        targets["stream_times_unverified"] = {"is": 1 / summary["unverified"]["times_ours"], "at_most": VERIFIED_TIMES_UNVERIFIED}
    if "lora merged" in summary:
        targets["lora_merged_times_stream"] = {"is": summary["lora merged"]["times_ours"], "at_most": MERGED_TIMES_STREAM}
    if "lora adapter" in summary:
        if not results["machine"].get("gpus"):  # between GPUs a whole sync takes hardly longer than the messages of any sync
            faster = 1 / summary["lora adapter"]["times_ours"]
            targets["stream_times_lora_adapter"] = {"is": faster, "at_least": ADAPTER_FASTER_THAN_STREAM}
        adapter = results["adapter"]
        targets["lora_adapter_bytes"] = {"is": adapter["bytes_sent"], "at_most": int(ADAPTER_OVERHEAD * adapter["bytes"])}
    return targets


def summarise_rollout(results: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds and tokens a second by way, and how the adapter's speed compares with merged weights'."""
    summary = {
        way: {
            **_spread([measured["seconds"] for measured in rounds]),
            "tokens": rounds[-1]["tokens"],
            "tokens_per_second_median": statistics.median(m["tokens"] / m["seconds"] for m in rounds),
        }
        for way, rounds in _by_way(results["rounds"]).items()
    }
    speeds = {way: figures["tokens_per_second_median"] for way, figures in summary.items()}
    return {"summary": summary, "adapter_times_merged": speeds["adapter"] / speeds["merged"]}


def _by_way(rounds: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_way: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for measured in rounds:
        by_way[measured["way"]].append(measured)
    return by_way


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
    }


def _stage_medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(m["stages"].get(name, 0.0) for m in rounds) for name in rounds[0]["stages"]}
