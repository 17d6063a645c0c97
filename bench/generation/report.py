"""The report of `bench rollout`: medians, ratios and their tables. No torch in here."""

from __future__ import annotations

import statistics

from bench.common.results import Results, print_table, rounds_by, spread

SHOWN = {  # titles by figure
    "tokens_per_second_median": "tokens/s",
    "samples_per_second_median": "samples/s",
    "seconds_median": "seconds",
    "seconds_least": "least",
    "seconds_most": "most",
    "tokens": "tokens",
}


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
    return {"summary": summary, "replica_times_vllm": ratio}


def show_rollout(results: Results) -> None:
    """Tables for people."""
    bench, summary, longest = results["config"]["bench"], results["summary"], results["config"]["rollout"]["max_new_tokens"]
    how = f"greedy; LoRA rank {bench['lora_rank']}" if "adapter" in summary else f"model {results['config']['model']['path']}"
    print(f"{bench['num_prompts']} prompts of {bench['prompt_tokens']} tokens, at most {longest} new ones; {how}")
    rows = ([method, *(f"{found[name]:.5g}" for name in SHOWN)] for method, found in summary.items())
    print_table(f"generation, medians of {bench['rounds']} rounds", ("method", *SHOWN.values()), rows)
    print(f"{results['same_tokens']:.0%} of the responses are the same from both")
    if "adapter" in summary:
        print(f"the adapter generates at {results['adapter_times_merged']:.2f} times the speed of merged weights")
        return
    print(f"the replica generates at {results['replica_times_vllm']:.3f} times vLLM's speed")
