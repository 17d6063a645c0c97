"""Names the first module in which trainer and replica of a run compute otherwise than they should, and what it looks like.

    megasync bisect runs/rl                        # the newest checkpoint, a response of the run
    megasync bisect runs/rl --step 50 --prompt 1   # the second response that was sampled with the weights of step 50
    megasync bisect runs/rl --swap self_attn.attn  # besides: the share of all attention in the gap, computed in float64

Both sides, the trainer's megatron-core model and a real vLLM replica, are led through one response; each module is compared with
what it should give for what it got, in float64. Exit codes: 0 nothing but rounding; 1 a module is wrong; 2 nothing was started;
3 failed while it was going on; 130 after Ctrl-C, 143 after SIGTERM. Leaves out experts, Gemma 3, multi-latent
attention and replicas of several workers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.checks.sizes import check_cache
from megasync.comparing.response import Response, check_length, generated, recorded
from megasync.comparing.weights import Chosen, choose
from megasync.config.errors import main_errors
from megasync.config.schema import Config
from megasync.data.prompts import Prompts
from megasync.hf.folder import model_shape
from megasync.planning.replicas import cache_bytes_per_token
from megasync.reporting.log import json_text
from megasync.serving import answers
from megasync.serving.replicas import scratch_folder, served

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.comparing.compare import Found, Passes

WRONG, FAILED = 1, 3
SPARE_TOKENS = 1024  # of a KV cache: blocks that are not full, and one that vLLM keeps for itself
LEAST_UTILIZATION = 0.01  # of a GPU's memory, which vLLM only asks for at its start where the cache's size is given
Serve = Callable[[Config, Callable[[], None]], AbstractContextManager["ReplicaPool"]]


def served_unwarmed(config: Config, meanwhile: Callable[[], None]) -> AbstractContextManager[ReplicaPool]:
    """One response needs few of the kernels that vLLM would compile at its start."""
    return served(config, warms_up=False, meanwhile=meanwhile)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    description = "The first module that trainer and replica compute otherwise, and what it looks like."
    parser = argparse.ArgumentParser(prog="megasync bisect", description=description)
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/rl")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the run's config")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest); 0: the model it starts from")
    parser.add_argument("--prompt", type=int, metavar="I", help="which response of that step in samples.jsonl (default: 0)")
    parser.add_argument("--swap", default="", metavar="MODULE", help="computed in float64 in the trainer, such as mlp.act_fn")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str], serve: Serve = served_unwarmed) -> int:
    """The exit code. `serve`: replicas that have the config's weights; calls what is given besides once they start."""
    given = parse(arguments)
    with scratch_folder() as scratch:
        with main_errors():
            chosen = choose(given.run, scratch, given.step, given.overrides)
            config = for_one_replica(chosen.served)
            answers.check_servable(config)
            check_cache(config, model_shape(Path(config.model.path)))
            prompts = Prompts(config.model.path, config.data)
            response = recorded(given.run, prompts, chosen.step, given.prompt)
            if response is not None:
                check_length(response, config)
            if given.swap:
                refuse_unknown(given.swap, chosen)
        try:
            response, found = compared(chosen, config, response, prompts, given.swap, serve, scratch)
        except SystemExit:  # by end_on_sigterm; while Ray waits its code was seen to become 1 (ray 2.60.0)
            return 128 + signal.SIGTERM
        except Exception as error:  # noqa: BLE001 - Python's own exit code of an error, 1, says here that a module is wrong
            return failed(error)
    tell(chosen, response, found, given)
    return WRONG if found.culprit is not None else 0


def failed(error: Exception) -> int:
    """The exit code. Tells the error, and where it is from if it is none of those that a machine or its files give."""
    from safetensors import SafetensorError

    if not isinstance(error, RuntimeError | ValueError | OSError | MemoryError | SafetensorError):
        traceback.print_exception(error)
    print(f"{str(error) or type(error).__name__}\n`megasync doctor` looks at this machine", file=sys.stderr)
    return FAILED


def refuse_unknown(swap: str, chosen: Chosen) -> None:
    """ConfigError where the model has no such module."""
    from megasync.comparing.compare import check_swap
    from megasync.comparing.shape import Shape

    check_swap(swap, Shape.of(Path(chosen.served.model.path)).sites, is_exact=chosen.config.model.exact)


def for_one_replica(config: Config) -> Config:
    """Of one worker, whose modules are called one by one: neither compiled nor in CUDA graphs. Its cache has room for two of the
    longest sequences, so that it leaves some for the trainer's model.
    """
    one = {"replicas": 1, "min_replicas": 1, "tensor_parallel": 1, "max_num_seqs": 1, "ray_address": "local"}
    config = _changed(config, enforce_eager=True, **one)
    if longest := config.rollout.max_model_len:
        needed = cache_bytes_per_token(config, model_shape(Path(config.model.path))) * (2 * longest + SPARE_TOKENS)
        cache = min(needed, config.rollout.kv_cache_bytes or needed)
        config = _changed(config, kv_cache_bytes=cache, gpu_memory_utilization=LEAST_UTILIZATION)
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": ""})})


def _changed(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=keys)})


def compared(
    chosen: Chosen, config: Config, response: Response | None, prompts: Prompts, swap: str, serve: Serve, scratch: Path
) -> tuple[Response, Found]:
    """`config`: the replica's. Both sides at once where the device has room for both, else the replica first.

    Raises:
        RuntimeError, ValueError, OSError, MemoryError, SafetensorError: one of them did not start, or failed.
    """
    from megasync.comparing.trainer_side import TrainerSide

    begin = time.monotonic()
    with TrainerSide(chosen, config, response) as trainer:
        with serve(config, trainer.begin) as pool:  # Ray first: imports on both sides would share Python's lock
            started = time.monotonic()
            response, passes = traced(pool, response, prompts, config, scratch)
            passed = time.monotonic()
            trainer.judge(passes, response, swap)
        ended = time.monotonic()
        found = trainer.found()
    found.seconds.update({"replica's start": started - begin, "its passes": passed - started, "its end": ended - passed})
    return response, found


def traced(
    pool: ReplicaPool, response: Response | None, prompts: Prompts, config: Config, scratch: Path
) -> tuple[Response, Passes]:
    from megasync.comparing.compare import trace_replica

    response = response or generated(pool, prompts, config)
    return response, trace_replica(pool, response, config.rollout.temperature, scratch)


def tell(chosen: Chosen, response: Response, found: Found, given: argparse.Namespace) -> None:
    from megasync.comparing.text import as_json, lines

    if given.json:
        print(json_text(as_json(chosen.name, response, found), indent=2))
    else:
        print("\n".join(lines(chosen.name, response, found, given.swap)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
