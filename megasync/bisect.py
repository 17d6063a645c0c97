"""Names the first module in which trainer and replica of a run compute otherwise than they should, and what it looks like.

    megasync bisect runs/rl                        # the newest checkpoint, a response of the run
    megasync bisect runs/rl --step 50 --prompt 1   # the second response that was sampled with the weights of step 50
    megasync bisect runs/rl --swap self_attn.attn  # besides: the share of all attention in the gap, computed in float64

Both sides, the trainer's megatron-core model and a real vLLM replica, are led through one response; each module is compared with
what it should give for what it got, in float64. Exit codes: 0 nothing but rounding; 1 a module is wrong; 2 nothing was started;
3 failed while it was going on. On one device: the replica first, then the trainer's model. Leaves out experts, Gemma 3,
multi-latent attention and replicas of several workers.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.comparing.response import Response, generated, recorded
from megasync.comparing.weights import Chosen, adapter_of, choose
from megasync.config.errors import main_errors
from megasync.config.schema import Config
from megasync.data.prompts import Prompts
from megasync.reporting.log import json_text
from megasync.serving import answers
from megasync.serving.replicas import served
from megasync.serving.scratch import scratch_folder

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.comparing.compare import Found, Passes, References

WRONG, FAILED = 1, 3
Serve = Callable[[Config], AbstractContextManager["ReplicaPool"]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    description = "The first module that trainer and replica compute otherwise, and what it looks like."
    parser = argparse.ArgumentParser(prog="megasync bisect", description=description)
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/rl")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run's config")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest); 0: the model it starts from")
    parser.add_argument("--prompt", type=int, metavar="I", help="which response of that step in samples.jsonl (default: 0)")
    parser.add_argument("--swap", default="", metavar="MODULE", help="computed in float64 in the trainer, such as mlp.act_fn")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str], serve: Serve = served) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given = parse(arguments)
    begin = time.monotonic()
    with scratch_folder() as scratch:
        with main_errors():
            chosen = choose(given.run, scratch, given.step, given.overrides)
            config = for_one_replica(chosen.served)
            answers.check_servable(config)
            prompts = Prompts(config.model.path, config.data)
            response = recorded(given.run, prompts, chosen.step, given.prompt)
            if given.swap:
                refuse_unknown(given.swap, chosen)
        threading.Thread(target=import_engine, daemon=True).start()
        try:
            with serve(config) as pool:
                started = time.monotonic()
                response, passes = traced(pool, response, prompts, config, scratch)
                passed = time.monotonic()
            ended = time.monotonic()
            found = judged(chosen, passes, response, given.swap)
        except (RuntimeError, ValueError) as error:
            print(f"{error}\n`megasync doctor` looks at this machine", file=sys.stderr)
            return FAILED
        found.seconds.update({"replica's start": started - begin, "its passes": passed - started, "its end": ended - passed})
    tell(chosen, response, found, given)
    return WRONG if found.culprit is not None else 0


def refuse_unknown(swap: str, chosen: Chosen) -> None:
    """ConfigError where the model has no such module."""
    from megasync.comparing.compare import check_swap
    from megasync.comparing.shape import Shape

    check_swap(swap, Shape.of(Path(chosen.served.model.path)).sites, is_exact=chosen.config.model.exact)


def for_one_replica(config: Config) -> Config:
    """Of one worker, whose modules are called one by one: neither compiled nor in CUDA graphs."""
    changes = {"replicas": 1, "min_replicas": 1, "tensor_parallel": 1, "enforce_eager": True, "ray_address": "local"}
    data = config.data.model_copy(update={"eval": ""})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes), "data": data})


def traced(
    pool: ReplicaPool, response: Response | None, prompts: Prompts, config: Config, scratch: Path
) -> tuple[Response, Passes]:
    from megasync.comparing.compare import trace_replica

    response = response or generated(pool, prompts, config)
    return response, trace_replica(pool, response, config.rollout.temperature, scratch)


def import_engine() -> None:
    """What the trainer's side needs, while the replica starts: seconds of either."""
    import engine.trace  # noqa: F401
    import megasync.comparing.compare  # noqa: F401


def judged(chosen: Chosen, passes: Passes, response: Response, swap: str) -> Found:
    """With the trainer's model, in this process."""
    from engine.config import ParallelConfig
    from engine.runtime import parallel
    from engine.trace import Forward
    from megasync.comparing.compare import compare

    config = chosen.config
    parallel.initialize(ParallelConfig(), config.run.seed)
    try:
        forward = Forward(config.model, config.engine, temperature=config.rollout.temperature, **chosen.engine_arguments)
        return compare(forward, passes, response, references(chosen), swap)
    finally:
        parallel.shutdown()


def references(chosen: Chosen) -> References:
    import torch

    from engine.runtime.device import compute_device
    from megasync.comparing.cases import Known
    from megasync.comparing.compare import References
    from megasync.comparing.reference import Reference
    from megasync.comparing.shape import Parameters, Shape

    dtype, device, adapter = getattr(torch, chosen.config.model.dtype), compute_device(), adapter_of(chosen.adapter)
    shape, temperature = Shape.of(Path(chosen.served.model.path)), chosen.config.rollout.temperature
    trainer, replica = Parameters(chosen.base, dtype, device, adapter), Parameters(Path(chosen.served.model.path), dtype, device)
    formers = {name: Parameters(path, dtype, device) for name, path in chosen.formers.items()}
    return References(Reference(shape, trainer, temperature), Reference(shape, replica, temperature), Known(adapter, formers))


def tell(chosen: Chosen, response: Response, found: Found, given: argparse.Namespace) -> None:
    from megasync.comparing.text import as_json, lines

    if given.json:
        print(json_text(as_json(chosen.name, response, found), indent=2))
    else:
        print("\n".join(lines(chosen.name, response, found, given.swap)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
