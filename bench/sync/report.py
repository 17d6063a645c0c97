"""The report of `bench sync`: medians, ratios, peaks of memory and their tables. No torch in here."""

from __future__ import annotations

from bench.common import results as of_results
from bench.common.results import Results, print_table

OURS = ("stream", "unverified", "lora merged", "lora adapter")
OUTSIDE = ("pause", "resume")  # stages outside of the measured time
MIB = 2**20


def summarise(results: Results) -> Results:
    """Medians, ratios to ours and peaks by method, and our methods' stages."""
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
    return {"summary": summary, "stage_seconds_median": stages}


def show(results: Results) -> None:
    """Tables for people."""
    model, config, summary = results["model"], results["config"], results["summary"]
    adapter = f"; LoRA rank {config['bench']['lora_rank']}" if "lora adapter" in summary else ""
    print(
        f"{model['parameters'] / 1e6:.1f} M parameters, {model['tensors']} tensors, {model['bytes'] / MIB:.0f} MiB; "
        f"{config['bench']['num_ranks']} trainer ranks, {config['engine']['wrap']}, tensor parallel "
        f"{config['engine']['parallel']['tensor']}{adapter}; {config['bench']['rounds']} rounds"
    )
    titles = ("method", "ms", "least", "most", "x floor", "x ours", "messages", "MiB")
    print_table("weight sync, medians", titles, (_row(name, found) for name, found in summary.items()))
    peaks = {name: found["extra_bytes_most"] for name, found in summary.items()}
    rows = [[process, *(f"{most.get(process, 0) / MIB:.0f}" for most in peaks.values())] for process in peaks["stream"]]
    bound = (2 * results["bucket_bytes"] + model["largest_tensor"]["bytes"]) / MIB
    title = f"peak memory above that before, MiB; two buckets and the largest tensor are {bound:.0f}"
    print_table(title, ("process", *summary), rows)
    stages, total = results["stage_seconds_median"], summary["stream"]["seconds_median"]
    shares = {name: f"{seconds / total:.0%}" if name not in OUTSIDE else "" for name, seconds in stages["stream"].items()}
    rows = [[name, *(f"{1000 * of.get(name, 0.0):.1f}" for of in stages.values()), share] for name, share in shares.items()]
    print_table("our time by stage, on rank 0, ms", ("stage", *stages, "of stream"), rows)


def _row(method: str, found: Results) -> tuple[str, ...]:
    seconds = [f"{1000 * found[name]:.1f}" for name in ("seconds_median", "seconds_least", "seconds_most")]
    floor = f"{found['times_floor']:.2f}" if "times_floor" in found else ""
    return method, *seconds, floor, f"{found['times_ours']:.2f}", str(found["messages"]), f"{found['bytes'] / MIB:.1f}"
