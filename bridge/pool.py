"""The pool of vLLM replicas, as rank 0 of the trainer sees it: Ray actors that generate and take part in syncs.

Leaves out ray.init (the caller's) and what an actor does (replica.py).

    pool = ReplicaPool.start(ReplicaConfig(model_path="Qwen3-0.6B"), num_replicas=2)
    completions = pool.generate([GenerationRequest(prompt_ids=(1, 2, 3))]).result()
    pool.close()
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from bridge import vllm_api
from bridge.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.config import ReplicaConfig
    from bridge.messages import BeginSync, Completion, GenerationRequest, StageSpan

CLOSE_SECONDS = 40.0  # longer than the replica gives vLLM
UNSTARTED_CLOSE_SECONDS = 3.0  # an actor in the midst of starting cannot answer
CONTROL_SECONDS = 60.0  # calls that no generation and no transfer holds up


class Generation:
    """Completions on their way. `result` has them in the order of the requests."""

    def __init__(self, pool: ReplicaPool, refs: list[Any], num_requests: int) -> None:
        self._pool, self._refs, self._num_requests = pool, refs, num_requests
        self.ended_seconds = 0.0  # wall clock at which the last replica was done, once all are
        for ref in refs:
            ref.future().add_done_callback(self._note_end)

    def _note_end(self, _: Any) -> None:
        self.ended_seconds = max(self.ended_seconds, time.time())

    def done(self) -> bool:
        finished, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0) if self._refs else ([], [])
        return len(finished) == len(self._refs)

    def result(self) -> list[list[Completion]]:
        """Wait for all; one list of `num_samples` completions a request.

        Raises:
            RuntimeError: a replica died or is out of service.
        """
        parts = self._pool.gather(self._refs)
        return [parts[i % len(parts)][i // len(parts)] for i in range(self._num_requests)]


class ReplicaPool:
    """`num_replicas` actors, each an AsyncLLM of `tensor_parallel` workers. Use `start`."""

    replica_class: type[Replica] = Replica

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        self.config, self.num_replicas = config, num_replicas
        self._actors: list[Any] = [None] * num_replicas
        self._pids = [0] * num_replicas
        self._shared_memory: list[set[str]] = [set() for _ in range(num_replicas)]  # vLLM's, for when it is killed
        self._num_sent = [0] * num_replicas  # generate and score calls, to each actor since its launch
        self._manifest_digests = [""] * num_replicas  # of the manifest that each replica's workers hold

    @classmethod
    def start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        """Start all replicas at once, in the Ray that is already initialised.

        Raises:
            RuntimeError: a replica did not start, with vLLM's own error; nothing is left running.
            ValueError: the cluster has too few GPUs.
        """
        pool = cls(config, num_replicas)
        if torch.cuda.is_available() and not config.devices:
            needed, there = num_replicas * config.tensor_parallel, int(ray.cluster_resources().get("GPU", 0))
            if needed > there:
                raise ValueError(
                    f"rollout.replicas={num_replicas} times rollout.tensor_parallel={config.tensor_parallel} needs "
                    f"{needed} GPUs, Ray has {there}; lower one of them"
                )
        try:
            pool._launch(range(num_replicas), serves_folder=True)
        except BaseException:
            pool.close()
            raise
        return pool

    def restart(self, *replicas: int) -> None:
        """New actors in the place of those that failed or died. They generate after the next publish."""
        self._kill(replicas)
        self._launch(replicas, serves_folder=False)

    def close(self) -> None:
        """Stop everything, the engines' processes too. Safe to repeat."""
        self._kill(range(self.num_replicas))

    # Generation.

    def generate(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Send requests off, request i to replica i modulo `num_replicas`; does not wait."""
        shares = [list(requests[i :: self.num_replicas]) for i in range(min(self.num_replicas, len(requests)))]
        refs = [self._send(i, self._actors[i].generate, share) for i, share in enumerate(shares)]
        return Generation(self, refs, len(requests))

    def score(self, token_id_lists: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probs (temperature 1) of the tokens of each list, from its second token on."""
        lists = [tuple(ids) for ids in token_id_lists]
        num_shares = min(self.num_replicas, len(lists))
        shares = [lists[i :: self.num_replicas] for i in range(num_shares)]
        parts = self.gather([self._send(i, self._actors[i].score, share) for i, share in enumerate(shares)])
        return [parts[i % num_shares][i // num_shares] for i in range(len(lists))]

    def _send(self, replica: int, method: Any, share: list[Any]) -> Any:
        """Count what a pause has to come after: calls of an actor may overtake each other."""
        ref = method.remote(share)
        self._num_sent[replica] += 1
        return ref

    @property
    def versions(self) -> list[int | None]:
        """What each replica serves; None while it has nothing that it may serve."""
        return [version for _, version, _ in self._statuses()]

    # The steps of a sync (messages.py), driven by Publisher.

    @property
    def num_readers(self) -> int:
        return self.num_replicas * self.config.tensor_parallel

    @property
    def reader_names(self) -> list[str]:
        width = self.config.tensor_parallel
        return [f"replica {reader // width} worker {reader % width}" for reader in range(self.num_readers)]

    def pause(self) -> None:
        """No new requests; waits for running ones.

        Raises:
            RuntimeError: a replica is out of service; says how to restart it.
        """
        self._after_sent("pause")

    def sleep(self, *, keep_weights: bool) -> None:
        """Give device memory up; waits for running requests. `pause`, or `resume` where weights were kept, ends it."""
        self._after_sent("sleep", keep_weights=keep_weights)

    def _after_sent(self, method: str, **options: Any) -> None:
        """Call what comes after all generation that was sent."""
        sent = zip(self._actors, self._num_sent, strict=True)
        self.gather([getattr(actor, method).remote(count, **options) for actor, count in sent])

    def begin(self, message: BeginSync) -> list[str]:
        """Offer the sync to all; reasons of refusal by replica, none when all accept."""
        refusals = self.gather([actor.begin.remote(own) for actor, own in self._own(message)], CONTROL_SECONDS)
        for replica, refused in enumerate(refusals):
            self._manifest_digests[replica] = "" if refused else message.manifest_digest
        if all(refused == refusals[0] for refused in refusals):
            return list(refusals[0])
        return [f"replica {replica}: {reason}" for replica, reasons in enumerate(refusals) for reason in reasons]

    def receive(self, version: int) -> list[Any]:
        """Let all replicas load the stream that was begun; a Ray reference each."""
        return [actor.receive.remote(version) for actor in self._actors]

    def begin_and_receive(self, message: BeginSync) -> list[Any]:
        """Both in one call, where the manifest was accepted before. A refusal is an error then."""
        refs = [actor.begin_and_receive.remote(own) for actor, own in self._own(message)]
        self._manifest_digests = [message.manifest_digest] * self.num_replicas
        return refs

    def _own(self, message: BeginSync) -> Iterator[tuple[Any, BeginSync]]:
        """Each replica's actor and message; the manifest goes to those that do not hold it."""
        for replica, actor in enumerate(self._actors):
            known = self._manifest_digests[replica] == message.manifest_digest
            yield (
                actor,
                dataclasses.replace(
                    message,
                    replica=replica,
                    first_reader=replica * self.config.tensor_parallel,
                    num_readers=self.num_readers,
                    manifest_json=None if known else message.manifest_json,
                ),
            )

    def raise_if_failed(self, refs: list[Any], seconds: float = 0.0) -> bool:
        """Whether all references are done within `seconds`; raises the first error among those that are."""
        finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=seconds)
        if finished:
            self.gather(finished)
        return not waiting

    def commit(self, version: int, timeout: float) -> None:
        self._call(lambda actor: actor.commit.remote(version), timeout)

    def resume(self, replicas: Sequence[int] | None = None) -> None:
        self._call(lambda actor: actor.resume.remote(), CONTROL_SECONDS, replicas)

    def abort(self, reason: str, replicas: Sequence[int] | None = None, timeout: float = CONTROL_SECONDS) -> list[int]:
        """Leave the sync everywhere; the replicas that are out of service now. Dead ones count among them."""
        chosen = range(self.num_replicas) if replicas is None else replicas
        failed = []
        for replica in chosen:
            try:
                (out,) = self._call(lambda actor: actor.abort.remote(reason), timeout, [replica])
            except RuntimeError:
                out = True
            if out:
                failed.append(replica)
        return failed

    def ordinary_layers(self) -> dict[str, str]:
        """Layers of the first worker that take vLLM's own loader in a sync, and why."""
        (layers,) = self._call(lambda actor: actor.ordinary_layers.remote(), CONTROL_SECONDS, [0])
        return dict(layers)

    def sync_spans(self) -> list[list[StageSpan]]:
        """What the last sync's time went to, replica by replica."""
        return self._call(lambda actor: actor.sync_spans.remote(), CONTROL_SECONDS)

    def read_digests(self, names: list[str], timeout: float) -> list[dict[str, int]]:
        """verify.digest_value by HF name of what each replica holds."""
        return self._call(lambda actor: actor.read_digests.remote(names), timeout)

    def read_back(self, names: list[str] | None = None, replica: int = 0) -> dict[str, torch.Tensor]:
        """Full tensors by HF name of what a replica computes with; all when `names` is None. For small models."""
        (tensors,) = self._call(lambda actor: actor.read_back.remote(names), None, [replica])
        return dict(tensors)

    # Inside.

    def gather(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """Wait for all, then ray.get with the actor's own error, without Ray's wrapping.

        Raises:
            RuntimeError: an actor raised, died, or did not answer in time.
        """
        finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
        try:
            values = dict(zip(finished, ray.get(finished), strict=True))
        except RayTaskError as error:
            raise RuntimeError(str(error.cause)) from None
        except RayActorError as error:
            raise RuntimeError(f"a replica's actor died: {error}") from None
        if waiting:
            raise RuntimeError(f"{len(waiting)} replicas gave no answer within {timeout:g} seconds")
        return [values[ref] for ref in refs]

    def _call(
        self, method: Callable[[Any], Any], timeout: float | None, replicas: Sequence[int] | None = None
    ) -> list[Any]:
        chosen = range(self.num_replicas) if replicas is None else replicas
        return self.gather([method(self._actors[replica]) for replica in chosen], timeout)

    def _statuses(self) -> list[tuple[str, int | None, str]]:
        statuses = []
        for replica in range(self.num_replicas):
            try:
                statuses += self._call(lambda actor: actor.status.remote(), CONTROL_SECONDS, [replica])
            except RuntimeError as error:
                statuses.append(("failed", None, str(error)))
        return statuses

    def _launch(self, replicas: Sequence[int], *, serves_folder: bool) -> None:
        cuda, devices = torch.cuda.is_available(), self.config.devices
        actor_class: Any = ray.remote(self.replica_class)
        for replica in replicas:
            self._manifest_digests[replica], self._num_sent[replica] = "", 0
            own = {"CUDA_VISIBLE_DEVICES": devices[replica]} if devices else {}
            options = {
                "num_cpus": 0,
                "num_gpus": self.config.tensor_parallel if cuda and not devices else 0,
                "runtime_env": {"env_vars": vllm_api.environment(cuda=cuda) | own},
                "max_concurrency": 1000,
            }
            actor = actor_class.options(**options).remote(replica, self.config, serves_folder=serves_folder)
            self._actors[replica] = actor
        refs = [self._actors[replica].start.remote() for replica in replicas]
        for replica, pid in zip(replicas, self._wait_for_start(refs), strict=True):
            self._pids[replica] = pid
            self._shared_memory[replica] = vllm_api.shared_memory_below(pid)

    def _wait_for_start(self, refs: list[Any]) -> list[int]:
        """The actors' process ids. The first error ends the wait for the others."""
        deadline = time.monotonic() + self.config.start_timeout_seconds
        waiting = refs
        while waiting and time.monotonic() < deadline:
            finished, waiting = ray.wait(waiting, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            self.gather(finished)
        if waiting:
            raise RuntimeError(
                f"{len(waiting)} of {len(refs)} replicas did not start within {self.config.start_timeout_seconds:g} "
                "seconds (ReplicaConfig.start_timeout_seconds)"
            )
        return self.gather(refs)

    def _kill(self, replicas: Sequence[int]) -> None:
        """Ask nicely, then kill, then wait until the processes are gone; their children end with them (vllm_api)."""
        actors = {replica: self._actors[replica] for replica in replicas if self._actors[replica] is not None}
        started = all(self._pids[replica] for replica in actors)
        refs = [actor.close.remote() for actor in actors.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=CLOSE_SECONDS if started else UNSTARTED_CLOSE_SECONDS)
        for replica, actor in actors.items():
            ray.kill(actor)
            self._actors[replica] = None
        deadline = time.monotonic() + CLOSE_SECONDS
        while any(self._pids[replica] and _is_alive(self._pids[replica]) for replica in replicas):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for replica in replicas:
            self._pids[replica] = 0
            for path in self._shared_memory[replica]:  # left when Ray killed vLLM's processes before they could
                Path(path).unlink(missing_ok=True)
            self._shared_memory[replica] = set()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
