"""The canary: after each sync a few prompts are scored by the trainer and by one replica in turn, which have to agree.

The replica then decodes a few tokens, whose log-probs have to equal those of scoring them: a kernel or a graph for
decoding alone may still read what was there before the sync. The scoring finds what digests of the bytes that were sent cannot:
weights that reached the wrong place, or changed there, and layers with other outputs. Leaves out the scoring itself
(Engine.score, ReplicaPool) and the read-back (Publisher).

    canary = Canary(sequences, prompts, tolerance=0.2, answer_seconds=60.0, note=print)
    canary.score_by_trainer(engine)                 # the weights that are published next
    canary.compare(version, pool, publisher)        # {"sync/canary_gap": 0.006, ...}; raises CanaryError
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bridge.config import CANARY_SEQUENCES, CANARY_TOKENS
from bridge.generation import GenerationRequest
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from engine.config import PLAIN_FAMILIES
from engine.engine import Engine
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.data.load import RunData
from megasync.models.folder import model_fields
from megasync.report.log import RunLog
from megasync.run.rank_zero import on_rank_zero

LAYER = re.compile(r".*?\.layers\.\d+(?=\.)")
DECODED_TOKENS = 4  # of each sequence
FP8_GAP = 5  # times sync.canary_tolerance: on its prompts quantised replicas of SmolLM2-135M are 0.37 nats a token away
Scores = list[npt.NDArray[np.float32]]


class CanaryError(RuntimeError):
    """A replica gives other log-probs than the trainer; the same text on every rank."""


class Canary:
    """Compares replicas with the trainer in one run. Methods are collective."""

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        tolerance: float,
        answer_seconds: float,
        note: Callable[[str], None],
        remedy: Callable[[int], str] = lambda _: "",
    ) -> None:
        """
        Args:
            sequences: of two tokens or more.
            prompts: the replica decodes tokens after these; some of the tokens are not certain.
            tolerance: the largest mean of |gap| over all tokens, in nats.
            answer_seconds: of a replica; one that takes longer is left to those who look after replicas.
            note: logs a line for the user.
            remedy: for the error, by the version on which both sides differ.
        """
        self.sequences, self.prompts = sequences, prompts
        self.tolerance, self.answer_seconds, self.note = tolerance, answer_seconds, note
        self.remedy = remedy
        self._num_compared, self._seconds = 0, 0.0
        self._own: Scores = []

    def score_by_trainer(self, engine: Engine) -> None:
        """By the weights that are published next. Those of a trainer that shares its devices have to be there."""
        begin = time.monotonic()
        samples = [Sample(np.array(ids[:1], np.int32), np.array(ids[1:], np.int32)) for ids in self.sequences]
        self._own = [scores.numpy() for scores in engine.score(samples)]
        self._seconds = time.monotonic() - begin

    def compare(self, version: int, pool: ReplicaPool | None, publisher: Publisher | None) -> dict[str, float]:
        """Metrics; without the gap where the replica whose turn it is does not answer.

        Raises:
            CanaryError: the gap is above the tolerance, or no number. Names the first layer whose read-back differs.
        """
        begin = time.monotonic()
        replica, scores, decoding_gap = on_rank_zero(lambda: self._ask_replica(pool))
        seconds = {"sync/canary_seconds": self._seconds + time.monotonic() - begin}
        if scores is None:
            return seconds
        gap = mean_gap(self._own, scores)
        if not gap <= self.tolerance:
            assert publisher is not None
            reason = read_back_difference(*publisher.diff_with_replica(replica))
            raise CanaryError(
                f"sync of version {version}: replica {replica} gives other log-probs than the trainer, by {gap:.3g} a token "
                f"on average, and sync.canary_tolerance allows {self.tolerance:g}: {reason}{self.remedy(version)}"
            )
        if not decoding_gap <= self.tolerance:
            raise CanaryError(
                f"sync of version {version}: replica {replica} decodes tokens with other log-probs than it scores them with, by "
                f"{decoding_gap:.3g} a token on average, and sync.canary_tolerance allows {self.tolerance:g}: try "
                f"rollout.enforce_eager=true{self.remedy(version)}"
            )
        return {"sync/canary_gap": gap, "sync/canary_decoding_gap": decoding_gap, **seconds}

    def _ask_replica(self, pool: ReplicaPool | None) -> tuple[int, Scores | None, float]:
        """On rank 0: the replica, its scores, and the gap of its decoding."""
        assert pool is not None
        replica = pool.members[self._num_compared % len(pool.members)]
        self._num_compared += 1
        try:
            scores = pool.score(replica, self.sequences, self.answer_seconds)
            return replica, scores, self._decoding_gap(pool, replica)
        except RuntimeError as error:
            self.note(f"replica {replica} did not score the canary: {error}")
            return replica, None, 0.0

    def _decoding_gap(self, pool: ReplicaPool, replica: int) -> float:
        """The replica decodes the first tokens of responses, and scores them."""
        starts = [tuple(map(int, ids)) for ids in self.prompts]
        requests = [GenerationRequest(start, max_new_tokens=DECODED_TOKENS, seed=0) for start in starts]
        decoded = [completion for (completion,) in pool.generate_by(replica, requests, self.answer_seconds)]
        whole = [(*start, *map(int, each.token_ids)) for start, each in zip(starts, decoded, strict=True)]
        scores = pool.score(replica, whole, self.answer_seconds)
        scored = [row[len(start) - 1 :] for row, start in zip(scores, starts, strict=True)]
        return mean_gap([each.log_probs for each in decoded], scored)


def build_canary(config: Config, data: RunData | None, log: RunLog) -> Canary | None:
    """None where it is switched off. `data` is rank 0's. Collective."""
    tolerance = config.sync.canary_tolerance
    sequences, prompts = on_rank_zero(lambda: _sequences(config, data)) if tolerance else ([], [])
    if not sequences:
        return None
    seconds = config.rollout.answer_timeout_seconds
    return Canary(sequences, prompts, largest_gap(config), seconds, log.note, lambda version: bisect_remedy(config, version))


def largest_gap(config: Config) -> float:
    """The largest mean of |gap| that is no error, in nats."""
    if config.model.exact:
        return 0.0
    return (config.sync.canary_tolerance or 0.0) * (FP8_GAP if config.rollout.dtype == "fp8" else 1)


def bisect_remedy(config: Config, version: int) -> str:
    """The command that compares both sides module by module: with this version where its weights are kept. Empty: none does."""
    if model_fields(Path(config.model.path)).get("model_type") not in PLAIN_FAMILIES:
        return ""
    step = f" --step {version}" if config.sync.log == "deltas" else ""
    of = "" if step else ", of the newest checkpoint (sync.log=deltas keeps every version)"
    return f"; `megasync bisect {config.run.folder}{step}` names the first module whose outputs differ{of}"


def _sequences(config: Config, data: RunData | None) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """To score, and to decode after: none is longer than a prompt with its response, which has room everywhere."""
    assert data is not None
    prompts = [data.prompts.prompt_ids(example) for example in data.train[: CANARY_SEQUENCES * CANARY_TOKENS]]
    most_new = config.rollout.max_new_tokens
    longest = max(len(ids) for ids in prompts) + most_new - 1
    room = max(1, longest + 1 - DECODED_TOKENS)
    begun = [tuple(ids[-min(CANARY_TOKENS, room) :]) for ids in prompts[:CANARY_SEQUENCES]]
    return probe_sequences(prompts, CANARY_SEQUENCES, min(CANARY_TOKENS, longest)), begun


def probe_sequences(prompts: Sequence[Sequence[int]], num_sequences: int, length: int) -> list[tuple[int, ...]]:
    """The tokens of all prompts, one after another and over again, cut into sequences of `length`; none below two tokens each."""
    tokens: Iterable[int] = cycle([token for ids in prompts for token in ids])
    return [tuple(islice(tokens, length)) for _ in range(num_sequences)] if length > 1 else []


def mean_gap(own: Scores, others: Scores) -> float:
    """Mean of |difference| over all tokens of all sequences."""
    return float(np.abs(np.concatenate(own) - np.concatenate(others)).mean(dtype=np.float64))


def read_back_difference(differing: Sequence[str], problem: str) -> str:
    """In words; `differing` are names of tensors in the model's order."""
    if problem:
        return f"its weights could not be read back: {problem}"
    if not differing:
        return "it holds what was sent but its outputs differ: look at rollout.engine_arguments, dtypes and vLLM's kernels"
    layer = match[0] if (match := LAYER.match(differing[0])) else differing[0].rpartition(".")[0]
    return f"the first layer whose read-back differs is {layer}, in {differing[0]}; tensors that differ: {len(differing)}"
