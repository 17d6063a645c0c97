"""Measures weight sync and generation beside other methods, training, and whether every layout computes the same.

Starts the trainer ranks itself, then prints tables and, with --json, writes every round down.

    python -m bench sync --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
    python -m bench rollout --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
    python -m bench train --config configs/bench_train.yaml [key=value ...] [--json FILE]
    python -m bench equivalence --config configs/bench_equivalence.yaml [key=value ...] [--json FILE] [--to FILE.md]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common.processes import run_program
from bench.common.results import Results, describe, write_results
from bench.config import BenchRoot
from bench.equivalence import run as equivalence
from bench.generation import report as generation
from bench.prepare import prepare
from bench.sync import report as sync
from bench.training import report as training
from megasync.config.errors import main_errors, refuse_if
from megasync.config.load import load_config

REPORTS: dict[str, tuple[Callable[[Results], Results], Callable[[Results], None]]] = {
    "sync": (sync.summarise, sync.show),
    "rollout": (generation.summarise_rollout, generation.show_rollout),
    "train": (lambda _: {}, training.show),
}


def measure(verb: str, config: BenchRoot, json_path: Path | None) -> int:
    """Run what measures by a prepared config, and report; the exit code."""
    program = "throughput" if verb == "rollout" and not config.bench.lora_rank else verb
    num_ranks = (config.bench_train if verb == "train" else config.bench).num_ranks
    num_ranks = 0 if program == "throughput" else num_ranks
    code, measured = run_program(program, config, config.run.folder, f"bench_{verb}", num_ranks)
    if measured is None:
        return 1
    results = describe(verb, config) | measured  # maybe only whole rounds, before the ranks failed
    summarise, show = REPORTS[verb]
    results |= summarise(results)
    path = config.run.folder / f"bench_{verb}.json"
    write_results(results, path, json_path)
    show(results)
    if not results["is_complete"]:
        print(f"cut off; rounds until then are in {path}", file=sys.stderr)
    return int(code != 0)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: measured; 2: the config is wrong, nothing was started; 1: failed while measuring, rounds before that count."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=[*REPORTS, "equivalence"], help="see docs/benchmarks.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as bench.rounds=3")
    parser.add_argument("--config", required=True, metavar="FILE", help="such as configs/bench_cpu.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write the tables there in Markdown; equivalence alone")
    given = parser.parse_intermixed_args(arguments)
    with main_errors():
        message, remedy = f"--to {given.to}: bench {given.verb} writes no such file", "leave --to out, or write --json FILE"
        refuse_if(given.to and given.verb != "equivalence", message, remedy=remedy)
        config = prepare(load_config(given.config, given.overrides, BenchRoot), given.verb)
    if given.verb == "equivalence":
        return equivalence.run(config, given.json, given.to)
    return measure(given.verb, config, given.json)
