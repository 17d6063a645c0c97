"""Names the first module of trainer or replica whose result is wrong by more than rounding.

    megasync bisect runs/rl                        # the newest checkpoint, a response of the run
    megasync bisect runs/rl --step 50 --prompt 1   # the second response that was sampled with the weights of step 50
    megasync bisect runs/rl --swap self_attn.attn  # besides: the share of all attention in the gap, computed in float64

Both sides, a real vLLM replica and then the trainer's megatron-core model, compute one response; each module is compared
with transformers' own in float64, given the same inputs. Exit codes: 0 nothing but rounding; 1 a module is wrong; 2 nothing was
started; 3 failed on the way; 130 after Ctrl-C, 143 after SIGTERM. Leaves out experts, Gemma 3, multi-latent attention and
replicas of several workers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.config import SpeculationConfig
from engine.config import DTYPE_BYTES, ParallelConfig
from megasync.checks.served_sizes import cache_errors
from megasync.config.errors import main_errors, refuse
from megasync.config.schema import Config
from megasync.data.prompts import Prompts
from megasync.models.folder import model_shape
from megasync.report.log import json_text
from megasync.tools.bisect.choose import Chosen, choose
from megasync.tools.bisect.response import Response, check_length, generated, recorded
from megasync.tools.serving.options import check_servable, of_rollout
from megasync.tools.serving.replicas import DOCTOR, scratch_folder, served

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from engine.trace import Forward
    from megasync.tools.bisect.compare import Finding, References

WRONG, FAILED = 1, 3
SPARE_TOKENS = 1024  # of a KV cache: blocks that are not full, and one that vLLM keeps for itself
MIN_UTILIZATION = 0.01  # of a GPU's memory, which vLLM only asks for at its start where the cache's size is given
Serve = Callable[[Config], AbstractContextManager["ReplicaPool"]]


def served_unwarmed(config: Config) -> AbstractContextManager[ReplicaPool]:
    """One response needs few of the kernels that vLLM would compile at its start."""
    return served(config, warms_up=False)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    description = "The first module of trainer or replica that is wrong by more than rounding."
    parser = argparse.ArgumentParser(prog="megasync bisect", description=description)
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/rl")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the run's config")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest); 0: the model it starts from")
    parser.add_argument("--prompt", type=int, metavar="I", help="which response of that step in samples.jsonl (default: 0)")
    parser.add_argument("--swap", default="", metavar="MODULE", help="computed in float64 in the trainer, such as mlp.act_fn")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str], serve: Serve = served_unwarmed) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given = parse(arguments)
    with scratch_folder() as scratch:
        with main_errors():
            chosen = choose(given.run, scratch, given.step, given.overrides)
            config = for_one_replica(chosen.served)
            check_servable(config)
            refuse(cache_errors(config, model_shape(Path(config.model.path))))
            prompts = Prompts(config.model.path, config.data)
            response = recorded(given.run, prompts, chosen.step, given.prompt)
            if response is not None:
                check_length(response, config)
            if given.swap:
                check_swapped(given.swap, chosen)
        try:
            response, found = compared(chosen, config, response, prompts, given.swap, serve, scratch)
        except SystemExit:  # by end_on_sigterm; while Ray waits its code was seen to become 1 (ray 2.60.0)
            return 128 + signal.SIGTERM
        except Exception as error:  # noqa: BLE001 - Python's own exit code of an error, 1, says here that a module is wrong
            return failed(error)
    show(chosen, response, found, given)
    return WRONG if found.culprit is not None else 0


def failed(error: Exception) -> int:
    """The exit code. Prints the error, with its place unless it is one that a machine or its files cause."""
    from safetensors import SafetensorError

    if not isinstance(error, RuntimeError | ValueError | OSError | MemoryError | SafetensorError):
        traceback.print_exception(error)
    print(f"{str(error) or type(error).__name__}\n{DOCTOR}", file=sys.stderr)
    return FAILED


def check_swapped(swap: str, chosen: Chosen) -> None:
    """ConfigError where the model has no such module."""
    from megasync.tools.bisect.compare import check_swap
    from megasync.tools.bisect.reference import meta_model, sites_of_model

    check_swap(swap, sites_of_model(meta_model(Path(chosen.served.model.path))), is_exact=chosen.config.model.exact)


def for_one_replica(config: Config) -> Config:
    """For one worker, whose modules are called one by one: neither compiled nor in CUDA graphs. Its cache has room for two of the
    longest sequences.
    """
    one = {"replicas": 1, "min_replicas": 1, "tensor_parallel": 1, "max_num_seqs": 1, "ray_address": "local"}
    config = of_rollout(config, enforce_eager=True, speculation=SpeculationConfig(), **one)  # a pass has one token
    if longest := config.rollout.max_model_len:
        shape = model_shape(Path(config.model.path))
        token_bytes = shape.num_cached_layers * shape.cached_numbers(1) * DTYPE_BYTES[config.model.dtype]
        needed = token_bytes * (2 * longest + SPARE_TOKENS)
        cache = min(needed, config.rollout.kv_cache_bytes or needed)
        config = of_rollout(config, kv_cache_bytes=cache, gpu_memory_utilization=MIN_UTILIZATION)
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": ""})})


def compared(
    chosen: Chosen, config: Config, response: Response | None, prompts: Prompts, swap: str, serve: Serve, scratch: Path
) -> tuple[Response, Finding]:
    """`config`: the replica's, which comes first and ends before the trainer's model is built: a device needs room for one.

    Raises:
        RuntimeError, ValueError, OSError, MemoryError, SafetensorError: one of them did not start, or failed.
    """
    from megasync.tools.bisect.compare import compare, trace_replica

    begin = time.monotonic()
    with serve(config) as pool:
        started = time.monotonic()
        response = response or generated(pool, prompts, config)
        passes = trace_replica(pool, response, config.rollout.temperature, scratch)
        passed = time.monotonic()
    ended = time.monotonic()
    with trainer(chosen) as (forward, references):
        built = time.monotonic()
        found = compare(forward, passes, response, references, swap)
    found.seconds.update({"replica's start": started - begin, "its passes": passed - started, "its end": ended - passed})
    found.seconds["trainer's start"] = built - ended
    return response, found


@contextmanager
def trainer(chosen: Chosen) -> Iterator[tuple[Forward, References]]:
    """The trainer's model, and the references of both sides: one where both have the same weights."""
    import torch

    from engine.runtime import parallel
    from engine.runtime.device import compute_device
    from engine.trace import Forward
    from megasync.tools.bisect.compare import References
    from megasync.tools.bisect.reference import Reference

    config, folder = chosen.config, Path(chosen.served.model.path)
    temperature = config.rollout.temperature
    parallel.initialize(ParallelConfig(), config.run.seed)
    try:
        folders = {"adapter_path": chosen.adapter} if chosen.adapter else {"weights_path": chosen.base}
        forward = Forward(config.model, config.engine, temperature=temperature, **folders)
        arguments = getattr(torch, config.model.dtype), compute_device(), temperature
        replica = Reference(folder, *arguments)
        own = Reference(chosen.base, *arguments, adapter_of(chosen.adapter)) if chosen.adapter else replica
        yield forward, References(own, replica)
    finally:
        parallel.shutdown()


def adapter_of(folder: Path) -> dict[str, tuple[Any, Any, float]]:
    """A, B and the scale of each linear of a PEFT folder."""
    from engine.peft.folder import read_fields, scale_of
    from megasync.models.merge import factors_of

    scale = scale_of(read_fields(folder))
    return {linear: (a, b, scale) for linear, (a, b) in factors_of(folder).items()}


def show(chosen: Chosen, response: Response, found: Finding, given: argparse.Namespace) -> None:
    from megasync.tools.bisect.text import as_json, lines

    if given.json:
        print(json_text(as_json(chosen.name, response, found), indent=2))
    else:
        print("\n".join(lines(chosen.name, response, found, given.swap)))
