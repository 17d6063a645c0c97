"""The plan of a run on CPUs once more, on the machine as it is now: docs/bench/plan_cpu_again.py RUN [--lengths]

Prints what it predicts, a line of JSON. `--lengths`: of rollouts with the mean length of the run's responses, not with the guess
that the run's own plan was made with. `plan_cases_cpu.sh` calls it right after each run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}

from megasync.config.load import load_config
from megasync.planning.hardware import hardware
from megasync.planning.lengths import mean_response_tokens
from megasync.planning.make import make_plan
from megasync.planning.record import PLAN_FILE
from megasync.planning.shapes import Request


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--lengths", action="store_true")
    given = parser.parse_args()
    config = load_config(given.run / "config.yaml", [])
    first = json.loads((given.run / PLAN_FILE).read_text(encoding="utf-8"))
    lengths, mean = tuple(first["response_lengths"]), first["mean_response_tokens"]
    if given.lengths and not lengths:
        mean = mean_response_tokens(config, None, given.run)
    plan = make_plan(config, Request(first["num_ranks"], hardware("cpu"), mean, first["prompt_tokens"], lengths)).as_dict()
    print(json.dumps({"predicted": plan["predicted"], "seconds": plan["seconds"]}))


if __name__ == "__main__":
    main()
