"""Memory of each process by part, and seconds of a step, before a run starts.

Needs no GPU, and of the model its config.json alone. Exit code 0: it fits; 1: it does not; 2: training would refuse the config.

    megasync plan CONFIG [key=value ...] [--gpus N] [--gpu h100|h200|a100|b200] [--json FILE]
    megasync plan --compare RUN
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from megasync.config.errors import ConfigError, main_errors
from megasync.tools.plan.hardware import KINDS


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megasync plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="a YAML file")
    help_ = "override a key of the file, such as engine.wrap=ddp"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: those here, else the fewest possible)")
    parser.add_argument("--gpu", choices=KINDS, help="their kind (default: that of the GPUs here)")
    help_ = "default: half of rollout.max_new_tokens; of supervised steps as in data.train"
    parser.add_argument("--mean-response-tokens", type=float, metavar="N", help=help_)
    parser.add_argument("--mean-prompt-tokens", type=int, metavar="N", help="default: of data.train, if it can be read, else 128")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="take lengths of responses from a run's metrics")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")
    help_ = "plan a run's config with its lengths of responses, and print it beside the run's metrics"
    parser.add_argument("--compare", type=Path, metavar="RUN", help=help_)
    given = parser.parse_intermixed_args(argv)
    if given.compare is not None:
        given.overrides = [each for each in (given.config, *given.overrides) if each]
        given.config, given.run = str(given.compare / "config.yaml"), given.run or given.compare
    if given.config is None:
        parser.error("a config, or --compare RUN, is expected")
    if given.gpus is not None and given.gpus < 1:
        parser.error(f"--gpus {given.gpus}: at least 1")
    if given.mean_prompt_tokens is not None and given.mean_prompt_tokens < 1:
        parser.error(f"--mean-prompt-tokens {given.mean_prompt_tokens}: at least 1")
    return given


def main(arguments: Sequence[str]) -> int:
    """Print the plan."""
    given = parse(arguments)
    with main_errors():
        return _plan(given)


def _plan(given: argparse.Namespace) -> int:
    from megasync.config.files import write_atomically
    from megasync.config.load import load_config
    from megasync.models.folder import check_model_config
    from megasync.tools.plan.layout import Request

    config = load_config(given.config, given.overrides)
    if not config.model.path:
        raise ConfigError("model.path is not set", remedy="set model.path to a Hugging Face folder; its config.json is enough")
    check_model_config(Path(config.model.path))
    request = Request.of(config, given)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}  # nothing is computed: no device, no compiler
    from megasync.tools.plan.make import make_plan
    from megasync.tools.plan.run_comparison import compare
    from megasync.tools.plan.text import show

    plan = make_plan(config, request)
    response = statistics.fmean(plan.work.lengths)
    print(f"mean lengths: {plan.work.prompt_tokens} tokens of a prompt, {response:.0f} of a response")
    print(show(plan) if given.compare is None else compare(plan, given.compare))
    if given.json:
        write_atomically(given.json, json.dumps(plan.as_dict(), indent=1) + "\n")
    return int(bool(plan.problems))
