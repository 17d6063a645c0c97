"""The benches' results as tables for people. Leaves out how they were measured and summarised."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from megasync.bench.summary import OURS, SPREAD

MIB = 2**20
WAYS = {
    "floor": "as many bytes broadcast in buckets, nothing else",
    "stream": "ours: one stream of buckets",
    "unverified": "ours without digests",
    "packed": "vLLM's packed broadcast, from ready tensors",
    "mbridge packed": "mbridge export_weights, vLLM's packed broadcast",
    "per_tensor": "mbridge export_weights, a message a tensor",
    "disk": "safetensors to the disk, vLLM reload",
    "lora merged": "ours: adapters merged into the stream",
    "lora adapter": "ours: adapters alone, to a vLLM that serves them",
}
TARGETS = {
    "disk_times_ours": "disk takes {:.2f} times as long as ours",
    "stream_times_unverified": "digests: stream takes {:.2f} times as long as unverified",
    "lora_merged_times_stream": "lora merged takes {:.2f} times as long as stream",
    "stream_times_lora_adapter": "lora adapter is {:.1f} times as fast as stream",
}
OUTSIDE = ("pause", "resume")  # of the time that is measured
STAGES = {
    "pause": "running requests end",
    "begin": "replicas check the manifest",
    "gather": "shards become Hugging Face tensors, adapters merged",
    "pack": "copy into the bucket, digest",
    "wait": "vLLM has not yet loaded the bucket before last",
    "load": "vLLM loads the last buckets",
    "commit": "vLLM finishes, prefix cache reset",
    "readback": "what vLLM holds is compared",
    "resume": "requests go on",
}


def show_sync(results: dict[str, Any]) -> None:
    """`bench sync`."""
    model, config, summary = results["model"], results["config"], results["summary"]
    adapter = f"; LoRA rank {config['bench']['lora_rank']}" if "adapter" in results else ""
    print(
        f"{model['parameters'] / 1e6:.1f} M parameters, {model['tensors']} tensors, {model['bytes'] / MIB:.0f} MiB; "
        f"{config['bench']['num_ranks']} trainer ranks, {config['engine']['wrap']}, tensor parallel "
        f"{config['engine']['parallel']['tensor']}{adapter}; {config['bench']['rounds']} rounds"
    )
    for way in summary:
        print(f"{way:<16}{WAYS[way]}")
    titles = ("way", "ms", "least", "most", "x ours", "x floor", "messages", "MiB")
    rows = [
        [
            way,
            *(f"{1000 * s[name]:.1f}" for name in SPREAD),
            f"{s['times_ours']:.2f}",
            f"{s['times_floor']:.2f}" if "times_floor" in s else "",
            str(s["messages"]),
            f"{s['bytes'] / MIB:.1f}",
        ]
        for way, s in summary.items()
    ]
    print_table("weight sync, medians", titles, rows)
    rows = [
        [process, *(f"{s['extra_bytes_most'].get(process, 0) / MIB:.0f}" for s in summary.values())]
        for process in summary["stream"]["extra_bytes_most"]
    ]
    print_table("peak memory above what was there before, MiB", ("process", *summary), rows)
    print("shared memory and mapped files count in every process that touches them\n")
    _print_stages(results)
    _print_targets(results)


def show_rollout(results: dict[str, Any]) -> None:
    """`bench rollout`."""
    sizes, summary, longest = results["config"]["bench"], results["summary"], results["config"]["rollout"]["max_new_tokens"]
    is_lora = "adapter" in summary
    how = f"{longest} new tokens each, greedy; LoRA rank {sizes['lora_rank']}" if is_lora else f"at most {longest} new tokens"
    print(f"{sizes['num_prompts']} prompts of {sizes['prompt_tokens']} tokens, {how}; {sizes['rounds']} rounds")
    titles = ("way", "tokens/s", "seconds", "least", "most", "tokens")
    rows = [
        [
            way,
            f"{s['tokens_per_second_median']:.1f}",
            *(f"{s[name]:.3f}" for name in SPREAD),
            str(s["tokens"]),
        ]
        for way, s in summary.items()
    ]
    print_table("generation, medians", titles, rows)
    if not is_lora:
        _print_beside_vllm(results)
        return
    print(
        f"the adapter generates at {results['adapter_times_merged']:.2f} times the speed of merged weights; "
        f"{results['same_tokens']:.0%} of the completions are the same from both"
    )


def show_staleness(results: dict[str, Any]) -> None:
    """`bench staleness`."""
    config, lengths = results["config"], results["lengths"]
    data, rollout, sizes = config["data"], config["rollout"], config["bench"]
    print(
        f"{sizes['num_batches']} batches of {data['batch_size']} prompts x {rollout['group_size']} samples, of "
        f"{lengths['median']:g} tokens in the median, {lengths['mean']:.1f} on average, {lengths['most']} at most; "
        f"{rollout['replicas']} replicas"
    )
    print("; ".join(f"{who}: core {', '.join(map(str, cores))}" for who, cores in results["cores"].items()))
    titles = ("max_staleness, on_update", "seconds", "x 0", "trainer waits", "pauses", "staleness", "most")
    rows = [
        [
            row,
            *(f"{s[name]:.2f}" for name in ("seconds", "times_synchronous", "wait_seconds", "pause_seconds", "staleness_mean")),
            f"{s['staleness_max']:.0f}",
        ]
        for row, s in results["summary"].items()
    ]
    print_table("seconds of all batches", titles, rows)
    target = results["targets"]["staleness_4_continue"]
    print(f"4 with continue takes {target['is']:.2f} of the time of 0; aimed at: at most {target['at_most']:g}")


def _print_beside_vllm(results: dict[str, Any]) -> None:
    for way, spent in results["cpu_seconds_median"].items():
        print(f"{way:<8}{spent['asks']:.2f} CPU seconds in the process that asks, {spent['computes']:.2f} in the engine's")
    ratio = results["targets"]["replica_times_vllm"]
    print(
        f"a replica generates at {ratio['is']:.3f} times the speed of vLLM's LLM.generate; aimed at: at least "
        f"{ratio['at_least']:g}; {results['same_tokens']:.0%} of the completions are the same from both"
    )


def _print_stages(results: dict[str, Any]) -> None:
    stages, summary = results["stage_seconds_median"], results["summary"]
    ways = [way for way in OURS if way in stages]
    rows = []
    for name in stages["stream"]:
        cells = [f"{1000 * stages[way].get(name, 0.0):.1f}" for way in ways]
        share = stages["stream"][name] / summary["stream"]["seconds_median"]
        rows.append([name, *cells, f"{share:.0%}" if name not in OUTSIDE else ""])
    print_table("where our time goes, on rank 0, ms", ("stage", *ways, "of stream"), rows)
    for name in stages["stream"]:
        print(f"{name:<9}{STAGES[name]}")
    print()


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Where there is no terminal, as wide as the widest table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140, soft_wrap=True, highlight=False).print(table)


def _print_targets(results: dict[str, Any]) -> None:
    targets, largest, bucket = results["targets"], results["model"]["largest_tensor"], results["bucket_bytes"]
    memory = targets["stream_extra_bytes"]
    print(
        f"ours takes at most {memory['is'] / MIB:.1f} MiB more in any process; aimed at: at most "
        f"{memory['at_most'] / MIB:.1f} MiB, 2 buckets of {bucket / MIB:g} MiB and the largest tensor, {largest['name']} of "
        f"{largest['bytes'] / MIB:g} MiB"
    )
    for name, says in TARGETS.items():
        if name in targets:
            target = targets[name]
            bound = f"at most {target['at_most']:g}" if "at_most" in target else f"at least {target['at_least']:g}"
            print(f"{says.format(target['is'])}; aimed at: {bound}")
    if "lora_adapter_bytes" in targets:
        print(
            f"lora adapter moves {targets['lora_adapter_bytes']['is'] / MIB:.3f} MiB for the "
            f"{results['adapter']['bytes'] / MIB:.3f} MiB that are trained; aimed at: at most 1 % more"
        )
