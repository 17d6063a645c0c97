"""Measures weight sync against the two usual ways, generation, training, a batch's way to the ranks, faults and equivalence.

Starts the trainer ranks itself (sync.py, rollout.py, throughput.py, staleness.py, train_rank.py, arrays.py, faults/ and
equivalence/ say what is measured and how), then prints tables and, with --json, writes every round down.

    python -m megasync.bench sync --config configs/bench_cpu.yaml [key=value ...] [--json FILE] [--picture FILE.svg]
    python -m megasync.bench rollout --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
    python -m megasync.bench staleness --config configs/bench_staleness.yaml [key=value ...] [--json FILE]
    python -m megasync.bench train --config configs/bench_train.yaml [key=value ...] [--json FILE]
    python -m megasync.bench arrays --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
    python -m megasync.bench faults --config configs/bench_faults.yaml [key=value ...] [--json FILE]
    python -m megasync.bench equivalence --config configs/bench_equivalence.yaml [key=value ...] [--json FILE] [--to FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.ddp_fields import SHARDS_PARAMETERS
from megasync.bench import train
from megasync.bench.config import NEED_GPUS, WAYS, BenchRoot
from megasync.bench.equivalence import run as equivalence
from megasync.bench.faults import run as faults
from megasync.bench.machine import describe_machine
from megasync.bench.model import write_model
from megasync.bench.picture import check_picture, draw_sync
from megasync.bench.summary import summarise_rollout, summarise_staleness, summarise_sync
from megasync.bench.tables import show_rollout, show_staleness, show_sync
from megasync.config.check import check_config
from megasync.config.check_sizes import MAX_SERVED_RANK
from megasync.config.errors import ConfigError, explain, main_errors, refuse_if
from megasync.config.load import load_config, save_config
from megasync.config.model_folder import check_model_folder
from megasync.devices import visible_devices
from megasync.files import write_atomically
from megasync.launch.processes import run_to_end, torchrun
from megasync.launch.scope import listen_on_loopback

Results = dict[str, Any]
VERBS: dict[str, tuple[Callable[[Results], Results], Callable[[Results], None]]] = {
    "sync": (summarise_sync, show_sync),
    "rollout": (summarise_rollout, show_rollout),
    "staleness": (summarise_staleness, show_staleness),
}
PREPARE: dict[str, Callable[[BenchRoot], BenchRoot]] = {
    "train": train.prepare,
    "faults": faults.prepare,
    "equivalence": equivalence.prepare,
}


def prepare(config: BenchRoot, verb: str) -> BenchRoot:
    """The config with a model, which is written into the run's folder where model.path is empty.

    Raises:
        ConfigError: it cannot be measured; nothing was started.
    """
    sizes, folder = config.bench, config.run.folder / "model"
    if not config.model.path:
        message = f"bench.num_heads = {sizes.num_heads}: not a multiple of bench.num_kv_heads = {sizes.num_kv_heads}"
        refuse_if(sizes.num_heads % sizes.num_kv_heads, message, remedy=f"write bench.num_kv_heads={sizes.num_heads}")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            write_model(config, folder)
        except OSError as error:
            remedy = "write run.dir=FOLDER for a folder of yours, with room for the model"
            raise ConfigError(explain(f"{folder}: cannot be written: {error.strerror}", remedy=remedy)) from error
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    check_config(config, sizes.num_ranks, needs_data=False)
    _check_ways(config)
    _check_lora(config, verb)
    if verb == "staleness":
        _check_staleness(config)
    return config


def _check_staleness(config: BenchRoot) -> None:
    algorithm, num_ranks = config.algorithm.name, config.bench.num_ranks
    message = f"algorithm.name = {algorithm}: bench staleness trains by grpo"
    refuse_if(algorithm != "grpo", message, remedy="take configs/bench_staleness.yaml")
    message = f"bench.num_ranks = {num_ranks}: bench staleness has one trainer rank"
    refuse_if(num_ranks > 1, message, remedy="write bench.num_ranks=1")
    message = f"bench.lora_rank = {config.bench.lora_rank}: bench staleness trains all weights"
    refuse_if(config.bench.lora_rank, message, remedy="write bench.lora_rank=0")


def _check_ways(config: BenchRoot) -> None:
    bench, wrap = config.bench, config.engine.wrap
    negates_shards = bench.update == "negate" and SHARDS_PARAMETERS[wrap]
    message = f"bench.update = negate: not with engine.wrap = {wrap}, whose weights are shards"
    refuse_if(negates_shards, message, choices="step", remedy="write bench.update=step")
    choices = ", ".join(way for way in WAYS if way not in NEED_GPUS)
    for way in bench.ways:
        needs = way in NEED_GPUS and not visible_devices()
        refuse_if(needs, f"bench.ways: {way} needs GPUs", choices=choices, remedy="write bench.ways=[all]")


def _check_lora(config: BenchRoot, verb: str) -> None:
    sizes, rollout = config.bench, config.rollout
    rank = config.engine.lora.rank
    remedy = f"write bench.lora_rank={rank}, without engine.lora"
    refuse_if(rank, f"engine.lora.rank = {rank}: the bench has a rank of its own", remedy=remedy)
    shape = check_model_folder(config.model.path)
    most = 0 if shape.num_experts else min(shape.hidden_size, shape.intermediate_size, MAX_SERVED_RANK)
    message = f"bench.lora_rank = {sizes.lora_rank}: not possible for bench {verb} with this model"
    refuse_if(sizes.lora_rank > most, message, allowed=f"0 to {most}", remedy=f"write bench.lora_rank={min(32, most)}")
    length, generates = sizes.prompt_tokens + rollout.max_new_tokens, verb in ("rollout", "staleness")
    median, longest = sizes.median_tokens, rollout.max_new_tokens
    is_off = median is not None and generates and (sizes.lora_rank or median > longest)
    needs = f"bench.lora_rank = 0, at most rollout.max_new_tokens = {longest}"
    message = f"bench.median_tokens = {median}: not possible for this bench {verb}"
    refuse_if(is_off, message, needs=needs, remedy="take bench.median_tokens out, or set what it needs")
    is_too_long = generates and rollout.max_model_len is not None and length > rollout.max_model_len
    message = f"bench.prompt_tokens = {sizes.prompt_tokens}: with rollout.max_new_tokens too long for a sequence"
    remedy = f"write rollout.max_model_len={length}"
    refuse_if(is_too_long, message, allowed=f"together at most {rollout.max_model_len}", remedy=remedy)


def measure(verb: str, config: BenchRoot, json_path: Path | None) -> tuple[int, Results | None]:
    """Run worker.py on all ranks; its exit code, and what it measured, if only of whole rounds before it failed."""
    folder, (summarise, _) = config.run.folder, VERBS[verb]
    config_path, results_path = folder / "config.yaml", folder / f"bench_{verb}.json"
    save_config(config, config_path)
    results_path.unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listen_on_loopback()
    if verb == "rollout" and not config.bench.lora_rank:
        command = [sys.executable, "-m", "megasync.bench.throughput", str(config_path), str(results_path)]
    else:
        command = torchrun(config.bench.num_ranks, "megasync.bench.worker", verb, str(config_path), str(results_path))
    code = run_to_end(command)
    if not results_path.exists():
        return code or 1, None
    results: Results = json.loads(results_path.read_text(encoding="utf-8"))
    results = {"bench": verb, **describe_machine(), "config": config.model_dump(), **results}
    results |= summarise(results)
    for path in filter(None, (results_path, json_path)):
        write_atomically(path, json.dumps(results, indent=1) + "\n")
    return code, results


def _run_other(verb: str, config: BenchRoot, json_path: Path | None, document_path: Path | None) -> int:
    """The benches that need no ranks of one kind for all that they measure."""
    if verb == "arrays":
        from megasync.bench import arrays  # it needs torch

        return arrays.run(config, json_path)
    if verb == "equivalence":
        return equivalence.run(config, json_path, document_path)
    return (train.run if verb == "train" else faults.run)(config, json_path)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: measured; 2: the config is wrong, nothing was started; 1: failed while measuring, rounds before that count."""
    parser = argparse.ArgumentParser(prog="python -m megasync.bench", description=__doc__.splitlines()[0])
    about = "sync: ours, message by message, over the disk, LoRA's two ways; rollout: tokens/s, also beside vLLM's; the others"
    parser.add_argument("verb", choices=[*VERBS, *PREPARE, "arrays"], help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as bench.rounds=3")
    parser.add_argument("--config", required=True, metavar="FILE", help="such as configs/bench_cpu.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it there; sync alone: .svg, .png or .pdf")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write the tables there in Markdown; equivalence alone")
    given = parser.parse_intermixed_args(arguments)
    with main_errors():
        message, remedy = f"--to {given.to}: bench {given.verb} writes no such file", "leave --to out, or write --json FILE"
        refuse_if(given.to and given.verb != "equivalence", message, remedy=remedy)
        if given.picture is not None:
            check_picture(given.verb, given.picture)
        config = load_config(given.config, given.overrides, BenchRoot)
        if given.verb != "arrays":
            config = prepare(config, given.verb) if given.verb in VERBS else PREPARE[given.verb](config)
    if given.verb not in VERBS:
        return _run_other(given.verb, config, given.json, given.to)
    code, results = measure(given.verb, config, given.json)
    if results is None:
        return 1
    if given.picture is not None:
        draw_sync([results], given.picture)
    VERBS[given.verb][1](results)
    if not results["is_complete"]:
        print(f"cut off; rounds until then are in {config.run.folder / f'bench_{given.verb}.json'}", file=sys.stderr)
    return int(code != 0)
