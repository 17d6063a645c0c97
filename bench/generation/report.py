"""What `bench rollout` measures: medians, ratios, targets and their tables. No torch in here."""

from __future__ import annotations

import statistics

from bench.common.results import Results, medians, print_figures, print_targets, rounds_by, spread

ROLLOUT_COLUMNS = (
    "tokens/s: {tokens_per_second_median:.1f} | samples/s: {samples_per_second_median:.1f} | seconds: {seconds_median:.3f}"
    "| least: {seconds_least:.3f} | most: {seconds_most:.3f} | tokens: {tokens}"
)


def summarise_rollout(results: Results) -> Results:
    """Medians by method, and how the adapter's speed compares with merged weights', or ours with vLLM's own in the same round."""
    by_method = rounds_by("method", results["rounds"])
    summary = {
        method: {
            **spread(rounds),
            "tokens": rounds[-1]["tokens"],
            "tokens_per_second_median": statistics.median(m["tokens"] / m["seconds"] for m in rounds),
            "samples_per_second_median": statistics.median(m["samples"] / m["seconds"] for m in rounds),
        }
        for method, rounds in by_method.items()
    }
    if "vllm" not in summary:
        speeds = {method: figures["tokens_per_second_median"] for method, figures in summary.items()}
        return {"summary": summary, "adapter_times_merged": speeds["adapter"] / speeds["merged"]}
    pairs = zip(by_method["replica"], by_method["vllm"], strict=True)
    ratio = statistics.median(other["seconds"] / own["seconds"] for own, other in pairs)
    spent = {method: medians(("asks", "computes"), [m["cpu_seconds"] for m in rounds]) for method, rounds in by_method.items()}
    return {"summary": summary, "cpu_seconds_median": spent, "targets": {"replica_times_vllm": {"is": ratio, "at_least": 0.95}}}


def show_rollout(results: Results) -> None:
    """Tables for people."""
    bench, summary, longest = results["config"]["bench"], results["summary"], results["config"]["rollout"]["max_new_tokens"]
    how = f"greedy; LoRA rank {bench['lora_rank']}" if "adapter" in summary else f"model {results['config']['model']['path']}"
    print(f"{bench['num_prompts']} prompts of {bench['prompt_tokens']} tokens, at most {longest} new ones; {how}")
    print_figures(f"generation, medians of {bench['rounds']} rounds", "method", ROLLOUT_COLUMNS, summary)
    print(f"{results['same_tokens']:.0%} of the responses are the same from both")
    if "adapter" in summary:
        print(f"the adapter generates at {results['adapter_times_merged']:.2f} times the speed of merged weights")
        return
    for method, spent in results["cpu_seconds_median"].items():
        print(f"{method:<8}{spent['asks']:.2f} CPU seconds in the process that asks, {spent['computes']:.2f} in the engine's")
    print_targets(results["targets"])
