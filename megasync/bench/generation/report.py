"""What `bench rollout`, `staleness` and `episodes` come to: medians, ratios, targets and their tables. No torch in here."""

from __future__ import annotations

import statistics

from megasync.bench.common.results import Results, medians, print_figures, print_targets, rounds_by, spread

EPISODE_FIGURES = ("tool_share", "render_share", "process_share", "prefix_hits", "tokens", "given_tokens")
STALENESS_FIGURES = ("seconds", "wait_seconds", "pause_seconds", "staleness_mean", "staleness_max")
ROLLOUT_COLUMNS = (
    "tokens/s: {tokens_per_second_median:.1f} | samples/s: {samples_per_second_median:.1f} | seconds: {seconds_median:.3f}"
    "| least: {seconds_least:.3f} | most: {seconds_most:.3f} | tokens: {tokens}"
)
STALENESS_COLUMNS = (
    "seconds: {seconds:.2f} | x synchronous: {times_synchronous:.2f} | trainer waits: {wait_seconds:.2f}"
    "| pauses: {pause_seconds:.2f} | staleness: {staleness_mean:.2f} | most: {staleness_max:.0f}"
)
EPISODE_COLUMNS = (
    "tokens/s: {pace:.0f} | without tools: {pace_without:.0f} | busy: {busy:.3f}"
    "| seconds: {seconds:.2f} | without tools: {seconds_without:.2f} | whole: {whole:.3f}"
)
EPISODE_SHARES = (
    "in tools: {tool_share:.2%} | rendering: {render_share:.2%} | of the processes: {process_share:.2%}"
    "| prefix hits: {prefix_hits:.2%}"
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


def summarise_staleness(results: Results) -> Results:
    """Medians over the rounds, by max_staleness and on_update, each also as a share of the synchronous row's seconds."""
    named = ({"row": f"{one['max_staleness']} {one['on_update']}", **one} for one in results["rounds"])
    summary = {row: medians(STALENESS_FIGURES, rounds) for row, rounds in rounds_by("row", named).items()}
    base = summary["0 drain"]["seconds"]
    for figures in summary.values():
        figures["times_synchronous"] = figures["seconds"] / base
    target = {"staleness_4_continue": {"is": summary["4 continue"]["times_synchronous"], "at_most": 0.75}}
    return {"summary": summary, "targets": target}


def show_staleness(results: Results) -> None:
    """Tables for people."""
    config, lengths = results["config"], results["lengths"]
    data, rollout, bench = config["data"], config["rollout"], config["bench"]
    print(
        f"{bench['num_batches']} batches of {data['batch_size']} prompts x {rollout['group_size']} samples, of "
        f"{lengths['median']:g} tokens in the median, {lengths['mean']:.1f} on average, {lengths['most']} at most; "
        f"{rollout['replicas']} replicas"
    )
    print("; ".join(f"{who}: core {', '.join(map(str, cores))}" for who, cores in results["cores"].items()))
    print_figures("seconds of all batches", "max_staleness, on_update", STALENESS_COLUMNS, results["summary"])
    print_targets(results["targets"])


def summarise_episodes(results: Results) -> Results:
    """Medians over the rounds, by slots; in the same round, `busy`: the pace with tools, as a share of that without; `whole`: all
    seconds without tools, as a share of those with them.
    """
    rounds, summary = results["rounds"], Results()
    for slots in dict.fromkeys(one["slots"] for one in rounds):
        tools, none = ([one for one in rounds if one["slots"] == slots and one["waits"] is waits] for waits in (True, False))
        if not tools or not none:
            continue
        summary[str(slots)] = {
            "busy": statistics.median(_pace(own) / _pace(without) for own, without in zip(tools, none, strict=False)),
            "whole": statistics.median(without["seconds"] / own["seconds"] for own, without in zip(tools, none, strict=False)),
            "pace": statistics.median(map(_pace, tools)),
            "pace_without": statistics.median(map(_pace, none)),
            "seconds": statistics.median(one["seconds"] for one in tools),
            "seconds_without": statistics.median(one["seconds"] for one in none),
            **medians(EPISODE_FIGURES, tools),
        }
    targets = {f"busy, {slots} slots": {"is": figures["busy"], "at_least": 0.85} for slots, figures in summary.items()}
    targets |= {f"rendering, {slots} slots": {"is": of["render_share"], "at_most": 0.02} for slots, of in summary.items()}
    return {"summary": summary, "targets": targets}


def _pace(measured: Results) -> float:
    return float(measured["pace_tokens"] / measured["pace_seconds"])


def show_episodes(results: Results) -> None:
    """Tables for people."""
    bench, length = results["config"]["bench"], results["config"]["rollout"]["max_new_tokens"]
    least, most = bench["least_tool_seconds"], bench["most_tool_seconds"]
    turns = f"{bench['turns']} turns of {length} tokens"
    print(f"{bench['num_prompts']} episodes at a time, {turns}, tools of {least:g} to {most:g} s")
    title = "with tools and without, while all episodes are under way (busy), and until all have ended (whole)"
    print_figures(title, "slots", EPISODE_COLUMNS, results["summary"])
    title = "shares of the episodes' time, of that of their processes, and of prompts"
    print_figures(title, "slots", EPISODE_SHARES, results["summary"])
    print_targets(results["targets"])
