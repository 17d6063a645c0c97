"""The pool of vLLM replicas, as rank 0 of the trainer sees it: Ray actors that generate and take part in syncs.

Leaves out how they start and end (actors.py) and what an actor does (replica.py).

    pool = ReplicaPool.start(ReplicaConfig(model_path="Qwen3-0.6B"), num_replicas=2)
    completions = pool.generate([GenerationRequest(prompt_ids=(1, 2, 3))]).result()
    pool.close()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from bridge.generation import Completion, GenerationRequest, GroupRequest, Speculation
from bridge.messages import BeginSync, ReplicaState, StageSpan
from bridge.replicas.actors import ReplicaActors
from bridge.replicas.launched import ReplicaActor, wait_while_alive

CONTROL_SECONDS = 60.0  # calls that no generation and no transfer holds up


class Generation:
    """Completions on their way. `result` has them in the order of the requests."""

    def __init__(self, pool: ReplicaPool, refs: list[Any], num_requests: int) -> None:
        self._pool, self._refs, self._num_requests = pool, refs, num_requests

    def result(self) -> list[list[Completion]]:
        """Wait for all; one list of `num_samples` completions a request.

        Raises:
            RuntimeError: a replica died or is out of service.
        """
        parts = self._pool.gather(self._refs)
        of_requests = (parts[i % len(parts)][i // len(parts)] for i in range(self._num_requests))
        return [[completion.copy() for completion in completions] for completions in of_requests]


class ReplicaPool(ReplicaActors):
    """Replicas that generate and are brought to new weights. Use `start`."""

    _num_pauses = 0  # and sleeps, of all members

    def generate(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Send requests off, dealt out in turns to the members; does not wait."""
        members = self._chosen()
        shares = [list(requests[i :: len(members)]) for i in range(min(len(members), len(requests)))]
        refs = []
        for actor, share in zip(members, shares, strict=False):
            refs.append(actor.handle.generate.remote(share))
            actor.num_sent += 1  # a pause comes after: calls of an actor may overtake each other
        return Generation(self, refs, len(requests))

    def hand_in(self, replica: int, groups: Sequence[GroupRequest]) -> Any:
        """Let a replica begin with these groups; a Ray reference. `collect` has their samples."""
        (actor,) = self._chosen([replica])
        return actor.handle.hand_in.remote(list(groups), actor.num_collects)

    def collect(self, replica: int, seconds: float) -> Any:
        """A Ray reference to Collected: samples that the replica has finished since the last call, after `seconds` at the latest.

        An older call that has no answer yet gets no samples any more, in whichever order the two reach the replica.
        """
        (actor,) = self._chosen([replica])
        actor.num_collects += 1
        return actor.handle.collect.remote(seconds, actor.num_collects)

    def abort_groups(self, replica: int, keys: Sequence[int]) -> Any:
        """Let a replica stop with these groups, which `collect` has no samples of then; a Ray reference."""
        (actor,) = self._chosen([replica])
        return actor.handle.abort_groups.remote(list(keys))

    def score(self, replica: int, sequences: Sequence[Sequence[int]], timeout: float) -> list[npt.NDArray[np.float32]]:
        """Natural log-probs, at temperature 1, of the tokens of each sequence from its second on.

        Raises:
            RuntimeError: the replica died or gives no answer in time.
        """
        ref = self.ask(replica, "score", [tuple(map(int, ids)) for ids in sequences], 0)
        return [scores.log_probs.copy() for scores in self.gather([ref], timeout, [replica], "score")[0]]

    def generate_by(self, replica: int, requests: Sequence[GenerationRequest], timeout: float) -> list[list[Completion]]:
        """Completions of each request, by one replica. Raises RuntimeError as `score`."""
        (parts,) = self.gather([self.ask(replica, "generate", list(requests))], timeout, [replica], "generate")
        return [[completion.copy() for completion in completions] for completions in parts]

    def ask(self, replica: int, method: str, *given: Any) -> Any:
        """Call `generate` or `score` of a replica; a Ray reference. Does not wait."""
        (actor,) = self._chosen([replica])
        ref = getattr(actor.handle, method).remote(*given)
        actor.num_sent += 1
        return ref

    def ask_silence(self, replica: int) -> Any:
        """A Ray reference to how long the replica's vLLM has owed an answer, in seconds."""
        (actor,) = self._chosen([replica])
        return actor.handle.silent_seconds.remote()

    def trace(self, replica: int, token_ids: Sequence[int], num_prompt: int, temperature: float, path: Path) -> None:
        """A given response through the replica, prefilled and then a token at a time, with all tensors on the way in `path`.

        An eager replica of one worker, on this machine, and of a family whose modules are known (vllm/serving/trace.py).
        """
        (actor,) = self._chosen([replica])
        ref = actor.handle.trace.remote([int(token) for token in token_ids], num_prompt, temperature, str(path))
        actor.num_sent += 1
        self.gather([ref], None, [replica], "trace")

    def forget_prefixes(self) -> None:
        """Clear the prefix caches of all members."""
        self._call(lambda actor: actor.forget_prefixes.remote(), CONTROL_SECONDS)

    # The steps of a sync (messages.py), driven by Publisher.

    @property
    def reader_names(self) -> list[str]:
        width = self.config.tensor_parallel
        return [f"replica {replica} worker {worker}" for replica in self.members for worker in range(width)]

    @property
    def reader_numbers(self) -> list[int]:
        """The members' readers, by their numbers among the workers of all replicas: each is on the device of its number."""
        width = self.config.tensor_parallel
        return [replica * width + worker for replica in self.members for worker in range(width)]

    def reader_hosts(self) -> list[str]:
        """processes.host_identity of each reader."""
        hosts = self._call(lambda actor: actor.host.remote(), CONTROL_SECONDS, what="host")
        return [host for host in hosts for _ in range(self.config.tensor_parallel)]

    def pause(self, slot: int = 0) -> None:
        """No new requests; running ones are waited for, held, or restarted (`ReplicaConfig.on_update`).

        Of several slots those of `slot` are waited for. They take as long as they take, for as long as vLLM gives signs of life.

        Raises:
            RuntimeError: a replica is out of service; says how to restart it.
        """
        calls, ask = self._after_sent("pause", dict(zip(self.members, self._chosen(), strict=True)), slot=slot)
        wait_while_alive(calls, ask, self.config.answer_timeout_seconds, "pause")

    def sleep(self, *, keep_weights: bool) -> None:
        """Give device memory up; waits for running requests. `pause`, or `wake` where weights were kept, ends it.

        Lost members release theirs when they end; a member that fails here is lost, too, and is restarted.
        """
        calls, ask = self._after_sent("sleep", self._present_members(), keep_weights=keep_weights)
        for replica, call in calls.items():
            with self._replacing(replica):
                wait_while_alive({replica: call}, ask, self.config.answer_timeout_seconds, "sleep")
        self.wait_for_ends()

    def wake(self) -> None:
        """Generate again with the weights that were kept; a member that fails here is lost, and is restarted."""
        calls = {replica: actor.handle.resume.remote() for replica, actor in self._present_members().items()}
        for replica, call in calls.items():
            with self._replacing(replica):
                self.gather([call], CONTROL_SECONDS, [replica], "resume")

    @contextmanager
    def _replacing(self, replica: int) -> Iterator[None]:
        """Restart the replica instead of raising RuntimeError; `drain_notes` has the reason."""
        try:
            yield
        except RuntimeError as error:
            self._notes.append(f"replica {replica} is lost and is restarted: {error}")
            self.replace(replica)

    def _present_members(self) -> dict[int, ReplicaActor]:
        """The members that were not lost."""
        return {replica: actor for replica, actor in self._actors.items() if replica in self.members}

    def _after_sent(
        self, method: str, actors: Mapping[int, ReplicaActor], **options: Any
    ) -> tuple[dict[int, Any], Callable[[int], Any]]:
        """Call what comes after all generation that was sent; references by replica, and what `wait_while_alive` asks."""
        self._num_pauses += 1
        number = self._num_pauses
        sent = {replica: (getattr(actor.handle, method), actor.num_sent) for replica, actor in actors.items()}
        calls = {replica: call.remote(num_sent, number, **options) for replica, (call, num_sent) in sent.items()}
        return calls, lambda replica: actors[replica].handle.silent_seconds.remote()

    def begin(self, message: BeginSync) -> list[str]:
        """Offer the sync to all; reasons of refusal by replica, none when all accept."""
        calls = [actor.handle.begin.remote(own) for actor, own in self._own(message)]
        refusals = self.gather(calls, CONTROL_SECONDS, self.members, f"begin of version {message.version}")
        for actor, refused in zip(self._chosen(), refusals, strict=True):
            actor.manifest_digest = "" if refused else message.manifest_digest
        if all(refused == refusals[0] for refused in refusals):
            return list(refusals[0])
        return [f"replica {r}: {reason}" for r, reasons in zip(self.members, refusals, strict=True) for reason in reasons]

    def receive(self, message: BeginSync) -> list[Any]:
        """Let all replicas load the stream of a manifest that they have accepted; a Ray reference each."""
        refs = [actor.handle.receive.remote(own) for actor, own in self._own(message)]
        for actor in self._chosen():
            actor.manifest_digest = message.manifest_digest
        return refs

    def _own(self, message: BeginSync) -> Iterator[tuple[ReplicaActor, BeginSync]]:
        """Each replica's actor and message; the manifest is sent only to replicas that do not hold it."""
        width = self.config.tensor_parallel
        for place, (replica, actor) in enumerate(zip(self.members, self._chosen(), strict=True)):
            first = place * width
            known = actor.manifest_digest == message.manifest_digest
            yield (
                actor,
                dataclasses.replace(
                    message,
                    replica=replica,
                    endpoints=message.endpoints[first : first + width],
                    first_reader=first,
                    manifest_json=None if known else message.manifest_json,
                ),
            )

    def raise_if_failed(self, refs: list[Any], seconds: float = 0.0) -> list[int]:
        """The members whose reference is not done within `seconds`; raises the first error of the others."""
        finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=seconds)
        if finished:
            self.gather(finished)
        return [replica for replica, ref in zip(self.members, refs, strict=True) if ref in waiting]

    def commit(self, version: int, timeout: float) -> None:
        self._call(lambda actor: actor.commit.remote(version), timeout, what=f"commit of version {version}")

    def resume(self, replicas: Sequence[int] | None = None) -> None:
        self._call(lambda actor: actor.resume.remote(), CONTROL_SECONDS, replicas, "resume")

    def abort(self, timeout: float = CONTROL_SECONDS) -> tuple[list[int], list[int]]:
        """Leave the sync on all replicas at once; returns the replicas out of service, and the ones that wait for another sync.

        A replica that does not answer within `timeout` seconds is out of service, too.
        """
        refs = {replica: actor.handle.abort.remote(self._num_pauses) for replica, actor in self._present_members().items()}
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
        states = dict.fromkeys(self.members, ReplicaState.FAILED)
        for replica, ref in refs.items():
            try:
                (states[replica],) = self.gather([ref], 0.0)
            except RuntimeError:
                states[replica] = ReplicaState.FAILED
        failed = [replica for replica, state in states.items() if state is ReplicaState.FAILED]
        return failed, [replica for replica, state in states.items() if state is ReplicaState.STALE]

    def loader_fallback(self) -> dict[str, str]:
        """See SyncReport."""
        (layers,) = self._call(lambda actor: actor.loader_fallback.remote(), CONTROL_SECONDS, self.members[:1], "loader_fallback")
        return dict(layers)

    def memory_bytes(self) -> tuple[int, int]:
        """The most memory of the host that was resident in a worker, and the most that is taken now of a worker's GPU, by all
        processes; zeros where a replica does not answer, and without GPUs.
        """
        try:
            sizes = self._call(lambda actor: actor.memory_bytes.remote(), CONTROL_SECONDS, what="memory_bytes")
        except RuntimeError:  # nothing depends on it
            return 0, 0
        return max((host for host, _ in sizes), default=0), max((device for _, device in sizes), default=0)

    def take_speculation(self) -> Speculation:
        """Counts of all members since the last call, without those of lost replicas."""
        try:
            counts = self._call(lambda actor: actor.take_speculation.remote(), CONTROL_SECONDS, what="take_speculation")
        except RuntimeError:  # nothing depends on it
            return Speculation()
        return sum(counts, Speculation())

    def sync_spans(self) -> list[list[StageSpan]]:
        """Stages of the last sync, by replica."""
        return self._call(lambda actor: actor.sync_spans.remote(), CONTROL_SECONDS)

    def read_digests(self, timeout: float, replicas: Sequence[int] | None = None) -> dict[int, dict[str, int]]:
        """digest.digest_value of each weight by HF name, for each of these replicas (None: all)."""
        chosen = self.members if replicas is None else replicas
        digests = self._call(lambda actor: actor.read_digests.remote(), timeout, chosen, "read_digests")
        return dict(zip(chosen, digests, strict=True))
