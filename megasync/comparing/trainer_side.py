"""The trainer's model and the references of both sides, in a thread of their own.

    with TrainerSide(chosen, config, response) as trainer:
        with served(config, meanwhile=trainer.begin) as pool:  # it begins, where there is room for both
            passes = trace_replica(pool, ...)
            trainer.judge(passes, response, swap)
        found = trainer.found()                             # begins only now where it has not

Leaves out what is compared (compare.py).
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.config import DTYPE_BYTES
from megasync.comparing.response import NEW_TOKENS, Response
from megasync.comparing.weights import Chosen, adapter_of
from megasync.config.schema import Config
from megasync.diagnosis.limits import read_memory
from megasync.hf.folder import model_shape, most_parameters
from megasync.planning.hardware import hardware
from megasync.planning.replicas import worker_memory

if TYPE_CHECKING:
    from engine.trace import Forward
    from megasync.comparing.compare import Found, Passes, References

SPARE_BYTES = 4 * 2**30  # activations, and a context of CUDA
LARGEST_COPIES = 4  # of the largest tensor in float64, such as the output layer's while it is judged


class TrainerSide:
    """Use as a context: what it has built goes with the block."""

    def __init__(self, chosen: Chosen, served: Config, response: Response | None) -> None:
        """`served`: the replica's; `response`: None where it is not known yet."""
        self._chosen, self._served, self._response = chosen, served, response
        self._thread = ThreadPoolExecutor(1, "trainer's side")
        self._is_alone = threading.Event()  # the replica has ended
        self._is_made = False
        self._is_over = False  # nobody waits for what is found any more
        self._forward: Forward | None = None
        self._references: References | None = None
        self._found: Future[Found] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Does not wait."""
        self._thread.submit(self._make_early)

    def judge(self, passes: Passes, response: Response, swap: str) -> None:
        """Does not wait; begins beside the replica where there is room, else in `found`."""
        self._found = self._thread.submit(self._judge, passes, response, swap)

    def found(self) -> Found:
        """Once the replica has ended. Raises what making or judging raised."""
        assert self._found is not None
        self._is_alone.set()
        return self._found.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        from engine.runtime import parallel

        self._is_over = True
        self._is_alone.set()
        self._thread.shutdown(cancel_futures=True)
        parallel.shutdown()

    def _make_early(self) -> None:
        """Imports in any case, for seconds, as the replica does. What fails is made again when the device is free, then told."""
        import megasync.comparing.compare  # noqa: F401
        from engine.runtime import parallel

        try:
            if both_fit(self._served, free_bytes()):
                self._make(keep_bytes=weight_bytes(self._served))
                self._is_made = True
        except Exception:  # noqa: BLE001 # such as memory that somebody else took
            self._forward = self._references = None
            parallel.shutdown()

    def _make(self, keep_bytes: int) -> None:
        from engine.config import ParallelConfig
        from engine.runtime import parallel
        from engine.trace import Forward

        config = self._chosen.config
        compile_here()
        parallel.initialize(ParallelConfig(), config.run.seed)
        self._forward = Forward(
            config.model, config.engine, temperature=config.rollout.temperature, **self._chosen.engine_arguments
        )
        self._references = references(self._chosen, keep_bytes)
        ids = self._response or Response((0,) * 8, (0,) * NEW_TOKENS, "")
        self._forward.trace(ids.prompt_ids, ids.token_ids)  # compiles what is compiled

    def _judge(self, passes: Passes, response: Response, swap: str) -> Found:
        from megasync.comparing.compare import compare

        if not self._is_made:
            self._is_alone.wait()
            if self._is_over:
                raise CancelledError
            free = free_bytes()
            self._make(keep_bytes=min(weight_bytes(self._served), max(0, free - weight_bytes(self._served) - SPARE_BYTES) // 2))
        assert self._forward is not None
        assert self._references is not None
        return compare(self._forward, passes, response, self._references, swap)


def compile_here() -> None:
    """torch's compiler without processes of its own, for whose end a command that ends all that it has started would wait."""
    from engine.runtime.device import compiles

    if compiles():
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1


def free_bytes() -> int:
    """Of the device that both sides are on."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else read_memory()[0]


def weight_bytes(config: Config) -> int:
    """Of the model in the dtype that it is computed in, at most."""
    return most_parameters(Path(config.model.path)) * DTYPE_BYTES[config.model.dtype]


def both_fit(config: Config, free: int) -> bool:
    """Whether one device with so many bytes free has room for a replica, a trainer's model and its weights once more. Only where
    the size of the KV cache is given: vLLM otherwise takes what is free.
    """
    if config.rollout.kv_cache_bytes is None:
        return False
    import torch

    shape, weights = model_shape(Path(config.model.path)), weight_bytes(config)
    kind = hardware("h100" if torch.cuda.is_available() else "cpu")  # any GPU: the cache's size is given
    worker = worker_memory(config, shape, most_parameters(Path(config.model.path)), kind)
    largest = 8 * shape.vocab_size * shape.hidden_size * LARGEST_COPIES
    return max(worker.total, worker.host) + 2 * weights + largest + SPARE_BYTES < free


def references(chosen: Chosen, keep_bytes: int) -> References:
    """Of both sides, with one copy of the weights where both have the same; `keep_bytes` of them stay on the device."""
    import torch

    from engine.runtime.device import compute_device
    from megasync.comparing.cases import Known
    from megasync.comparing.compare import References
    from megasync.comparing.reference import Reference
    from megasync.comparing.shape import Parameters, Shape

    dtype, device, adapter = getattr(torch, chosen.config.model.dtype), compute_device(), adapter_of(chosen.adapter)
    folder, keep_bytes = Path(chosen.served.model.path), keep_bytes if device.type == "cuda" else 0
    shape, temperature = Shape.of(folder), chosen.config.rollout.temperature
    replica = Parameters(folder, dtype, device, keep_bytes=keep_bytes)
    trainer = Parameters(chosen.base, dtype, device, adapter)
    if not adapter and chosen.base.resolve() == folder.resolve():
        trainer = replica
    replica.read_ahead()
    formers = {name: Parameters(path, dtype, device) for name, path in chosen.formers.items()}
    return References(Reference(shape, trainer, temperature), Reference(shape, replica, temperature), Known(adapter, formers))
