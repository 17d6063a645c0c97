"""vLLM replicas that tests look into: they score given tokens, and give back the tensors that they compute with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from bridge.config import OnUpdate, ReplicaConfig
from bridge.generation import Completion, GenerationRequest
from bridge.notes import note
from bridge.vllm.serving import patches, requests as vllm_requests
from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import Replica
from tests.support.shards import assemble


def numbers(completion: Completion) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], str]:
    """What compares and hashes by value."""
    tokens, log_probs = tuple(completion.token_ids.tolist()), tuple(completion.log_probs.tolist())
    return tokens, log_probs, tuple(completion.weight_versions.tolist()), completion.finish_reason


class OpenReplica(Replica):
    async def serves(self) -> int | None:
        self._notice_death()
        return self.version

    async def settings(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        return {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        }

    async def take_lock(self) -> None:
        """As a call does that hands requests in; until `release_lock`."""
        await self._generator.lock.acquire()

    async def release_lock(self) -> None:
        self._generator.lock.release()

    async def hold_lock_until_sync(self) -> None:
        """Until a sync waits for it."""
        async with self._generator.lock:
            while self._generator._is_no_sync_waiting.is_set():
                await asyncio.sleep(0.01)

    async def damage(self, name: str) -> None:
        await self._engine.collective_rpc("tests_damage", args=(name,))

    async def num_threads(self) -> list[int]:
        return list(await self._engine.collective_rpc("tests_num_threads"))

    async def read_back(self, names: list[str] | None) -> dict[str, torch.Tensor]:
        answers = await self._engine.collective_rpc("tests_read_shards", args=(names,))
        return assemble(shard for answer in answers for shard in answer)


class OpenPool(ReplicaPool):
    replica_class = OpenReplica
    damaged = ""

    @classmethod
    def start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        arguments = {"worker_extension_cls": "tests.support.worker.OpenWorkerExtension", **config.engine_arguments}
        return super().start(dataclasses.replace(config, engine_arguments=arguments), num_replicas)

    def score_all(self, token_id_lists: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probs (temperature 1) of the tokens of each list, from its second token on; dealt out in turns."""
        found: list[list[float]] = [[] for _ in token_id_lists]
        for place, replica in enumerate(self.members):
            own = range(place, len(token_id_lists), len(self.members))
            scores = self.score(replica, [token_id_lists[index] for index in own], 60.0) if own else []
            for index, values in zip(own, scores, strict=True):
                found[index] = values.tolist()
        return found

    def resume(self, replicas: Sequence[int] | None = None) -> None:
        """Of `damaged`, a worker's parameter, what was received is no more there then."""
        super().resume(replicas)
        if self.damaged:
            self._call(lambda actor: actor.damage.remote(self.damaged), 60.0, replicas)

    def settings(self) -> dict[str, Any]:
        """Some of what vLLM of the first replica was started with, by names of EngineArgs."""
        (found,) = self._call(lambda actor: actor.settings.remote(), 60.0, [0])
        return dict(found)

    def num_threads(self) -> list[int]:
        """Of OpenMP, by worker of the first replica."""
        (found,) = self._call(lambda actor: actor.num_threads.remote(), 60.0, [0])
        return list(found)

    @property
    def versions(self) -> list[int | None]:
        """What each replica serves; None while it has nothing that it may serve."""
        return [self._serves(replica) for replica in sorted(self.wanted)]

    def _serves(self, replica: int) -> int | None:
        try:
            return self._call(lambda actor: actor.serves.remote(), 60.0, [replica])[0]
        except RuntimeError:
            return None

    def read_back(self, names: list[str] | None = None, replica: int = 0) -> dict[str, torch.Tensor]:
        """Full tensors by HF name of what a replica computes with; all when `names` is None."""
        (tensors,) = self._call(lambda actor: actor.read_back.remote(names), None, [replica])
        return dict(tensors)


class SpawnedReplica(OpenReplica):
    """Its core and workers are new processes, as on GPUs, and not forked, which it notes."""

    async def start(self) -> int:
        patches.fork_processes = lambda: note("spawned")
        return await super().start()


class SpawnedPool(OpenPool):
    replica_class = SpawnedReplica


class StampedReplica(OpenReplica):
    """Also tells the versions that vLLM stamped on its outputs by itself, and takes on another `on_update`.

    It stamps what its core says, so that the core says each token of a group's first sample at once.
    """

    async def start(self) -> int:
        plain, requests = vllm_requests.to_completion, vllm_requests.core_requests
        self.stamps: list[list[int]] = []

        def to_completion(output: object, *rest: Any) -> Completion:
            spans = output.outputs[0].weight_versions  # type: ignore[attr-defined]
            self.stamps.append([int(span.version) for span in spans for _ in range(span.start, span.end)])
            return plain(output, *rest)

        async def core_requests(engine: Any, request: GenerationRequest, samples: Mapping[str, int], **options: Any) -> list[Any]:
            made = await requests(engine, request, samples, **options)
            for one, sample in zip(made, samples.values(), strict=True):
                one.sampling_params.detokenize = sample == 0
            return made

        vllm_requests.to_completion, vllm_requests.core_requests = to_completion, core_requests  # type: ignore[assignment]
        return await super().start()

    async def take_stamps(self) -> list[list[int]]:
        taken, self.stamps = self.stamps, []
        return taken

    async def set_on_update(self, mode: OnUpdate, recompute: bool) -> None:
        self._generator.on_update = mode
        self.config = dataclasses.replace(self.config, on_update=mode, recomputes_cache=recompute)


class StampedPool(OpenPool):
    replica_class = StampedReplica

    def set_on_update(self, mode: OnUpdate, recompute: bool = False) -> None:
        self._call(lambda actor: actor.set_on_update.remote(mode, recompute), 60.0)
