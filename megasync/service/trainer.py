"""The four calls in process, without a server: `megasync.open`. One process, on a CPU or a GPU.

    with megasync.open("config.yaml", "engine.wrap=ddp", "engine.lora.rank=8") as trainer:
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(learning_rate=1e-4)
        (completions,) = trainer.sample([[1, 2, 3]], max_new_tokens=8)
        trainer.save("after-one-step")

The config needs what `megasync serve` needs. Replicas start at the first `sample`. Leaves out several ranks and a log of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bridge.generation import Completion, GenerationRequest
from engine.driven import Datum, Passed
from engine.runtime import parallel
from engine.runtime.random_state import use_deterministic
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.scope import listen_on_loopback
from megasync.run.rank_zero import RankZero
from megasync.run.replica_start import ReplicaStart
from megasync.service.calls import path_of
from megasync.service.command import check_service
from megasync.service.worker import Worker, build_engine

MODEL = "local:train:0"
SHOWN = "shown"  # the name of the weights that were last sampled


@contextmanager
def open_trainer(config: str | Path, *overrides: str) -> Iterator[Trainer]:
    """One adapter of `engine.lora.rank` on the base model; replicas and process groups end with the block.

    Raises:
        ConfigError: the config cannot work, or is for several ranks.
    """
    loaded = load_config(str(config), overrides)
    check_service(loaded, 1)
    listen_on_loopback()  # before anything imports ray
    if loaded.run.deterministic:
        use_deterministic()  # also by its environment, which replicas inherit
    with ExitStack() as ends:
        parallel.initialize(loaded.engine.parallel, loaded.run.seed)
        ends.callback(parallel.shutdown)
        yield Trainer(loaded, ends)


class Trainer:
    """Made by `open_trainer`."""

    def __init__(self, config: Config, ends: ExitStack) -> None:
        self.config, self._ends = config, ends
        self.worker = Worker(config, build_engine(config), None)
        self.worker.create_model(MODEL, {"rank": config.engine.lora.rank, "seed": config.run.seed})
        self._pool: RankZero[Any] | None = None
        self._num_changes, self._num_sampled, self._num_requests = 0, -1, 0  # _num_sampled: of the changes when last synced

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float] | None = None, *, has_gradients: bool = True
    ) -> Passed:
        """Add the gradients of a loss of engine/objective/token_losses.py, a sum over all positions.

        Raises:
            RefusedError: the loss is not finite.
        """
        return self.worker.forward_backward(MODEL, list(data), loss, dict(options or {}), has_gradients=has_gradients)

    def optim_step(self, **parameters: float) -> float:
        """One step of AdamW by the fields of AdamParameters; the norm of the gradients."""
        self._num_changes += 1
        norm: float = self.worker.optim_step(MODEL, parameters)["metrics"]["grad_norm:mean"]
        return norm

    def sample(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[Completion]]:
        """Completions of each prompt by the weights of now. `sampling`: fields of GenerationRequest; `seed` differs by prompt."""
        pool = self._synced_pool()
        seed = sampling.pop("seed", self._num_requests)
        self._num_requests += len(prompts)
        placed = enumerate(prompts, seed)
        requests = [GenerationRequest(prompt_ids=tuple(each), seed=number, **sampling) for number, each in placed]
        completions: list[list[Completion]] = pool.generate(requests).result()
        return completions

    def save(self, name: str) -> Path:
        """The folder of the whole state; `adapter` in it is PEFT's."""
        self.worker.save_weights(MODEL, name)
        return self.worker.folder_of(path_of(MODEL, "weights", name), "weights")

    def load(self, name: str, *, with_optimizer: bool = True) -> None:
        """Load the weights that `save` wrote."""
        self._num_changes += 1
        self.worker.load_weights(MODEL, path_of(MODEL, "weights", name), with_optimizer=with_optimizer, is_new=False)

    def _synced_pool(self) -> Any:
        if self._pool is None:
            start = ReplicaStart(self.config, detokenizes=True)
            self._ends.callback(start.close)
            self._pool = RankZero(start.finish)
            self.worker.connect(self._pool)
            self._ends.callback(self.worker.close)
        if self._num_sampled != self._num_changes:
            self.worker.save_weights_for_sampler(MODEL, SHOWN)
            self.worker.sync(path_of(MODEL, "sampler_weights", SHOWN))
            self._num_sampled = self._num_changes
        return self._pool.here
