"""What the rounds of `bench sync` come to: medians, ratios, peaks, targets and their tables. No torch in here."""

from __future__ import annotations

from bench.common import results as of_results
from bench.common.results import Results, print_table

OURS = ("stream", "unverified", "lora merged", "lora adapter")
MAX_ADAPTER_OVERHEAD = 1.01  # bytes sent over bytes trained
RATIO_TARGETS = (  # the seconds of one method over the seconds of another, and the aim
    ("disk_times_ours", "disk", "stream", {"at_least": 3.0}),
    ("stream_times_unverified", "stream", "unverified", {"at_most": 1.1}),
    ("lora_merged_times_stream", "lora merged", "stream", {"at_most": 1.25}),
    ("stream_times_lora_adapter", "stream", "lora adapter", {"at_least": 10.0}),
)
WITHOUT_GPUS = ("stream_times_lora_adapter",)  # between GPUs a whole sync takes hardly longer than the messages of any sync
OUTSIDE = ("pause", "resume")  # stages outside of the measured time
MIB = 2**20


def summarise(results: Results) -> Results:
    """Medians, ratios to ours and peaks by method, our methods' stages, and the figures that are aimed at."""
    by_method = of_results.rounds_by("method", results["rounds"])
    spreads = {name: of_results.spread(rounds) for name, rounds in by_method.items()}
    others = {"times_ours": "stream"} | ({"times_floor": "floor"} if "floor" in by_method else {})
    summary: Results = {}
    for method, rounds in by_method.items():
        summary[method] = {
            **spreads[method],
            **{name: spreads[method]["seconds_median"] / spreads[other]["seconds_median"] for name, other in others.items()},
            "messages": rounds[-1]["messages"],
            "bytes": rounds[-1]["bytes"],
            "extra_bytes_most": {name: max(m["extra_bytes"][name] for m in rounds) for name in rounds[0]["extra_bytes"]},
        }
    of_ours = {name: [measured["stages"] for measured in by_method[name]] for name in OURS if name in by_method}
    stages = {name: of_results.medians(of_rounds[0], of_rounds) for name, of_rounds in of_ours.items()}
    return {"summary": summary, "stage_seconds_median": stages, "targets": _targets(results, summary)}


def _targets(results: Results, summary: Results) -> dict[str, dict[str, float]]:
    bound = 2 * results["bucket_bytes"] + results["model"]["largest_tensor"]["bytes"]
    peak = max(summary["stream"]["extra_bytes_most"].values())
    targets: dict[str, dict[str, float]] = {"stream_extra_bytes": {"is": peak, "at_most": bound}}
    for name, method, other, bound in RATIO_TARGETS:
        if {method, other} <= summary.keys() and not (name in WITHOUT_GPUS and results["machine"].get("gpus")):
            targets[name] = {"is": summary[method]["seconds_median"] / summary[other]["seconds_median"], **bound}
    if "lora adapter" in summary:
        adapter = results["adapter"]
        targets["lora_adapter_bytes"] = {"is": adapter["bytes_sent"], "at_most": int(MAX_ADAPTER_OVERHEAD * adapter["bytes"])}
    return targets


def show(results: Results) -> None:
    """Tables for people."""
    model, config, summary = results["model"], results["config"], results["summary"]
    adapter = f"; LoRA rank {config['bench']['lora_rank']}" if "adapter" in results else ""
    print(
        f"{model['parameters'] / 1e6:.1f} M parameters, {model['tensors']} tensors, {model['bytes'] / MIB:.0f} MiB; "
        f"{config['bench']['num_ranks']} trainer ranks, {config['engine']['wrap']}, tensor parallel "
        f"{config['engine']['parallel']['tensor']}{adapter}; {config['bench']['rounds']} rounds"
    )
    columns = f"{of_results.MILLISECONDS} | x ours: {{times_ours:.2f}} | messages: {{messages}} | MiB: {{mib:.1f}}"
    sizes = {name: {**s, "mib": s["bytes"] / MIB} for name, s in summary.items()}
    of_results.print_figures("weight sync, medians", "method", columns, sizes)
    peaks = {name: s["extra_bytes_most"] for name, s in summary.items()}
    rows = [[process, *(f"{most.get(process, 0) / MIB:.0f}" for most in peaks.values())] for process in peaks["stream"]]
    print_table("peak memory above that before, MiB (shared memory counts in every process)", ("process", *summary), rows)
    stages, total = results["stage_seconds_median"], summary["stream"]["seconds_median"]
    shares = {name: f"{seconds / total:.0%}" if name not in OUTSIDE else "" for name, seconds in stages["stream"].items()}
    rows = [[name, *(f"{1000 * of.get(name, 0.0):.1f}" for of in stages.values()), share] for name, share in shares.items()]
    print_table("our time by stage, on rank 0, ms", ("stage", *stages, "of stream"), rows)
    of_results.print_targets(results["targets"])
