"""A recorded step scored by the trainer's model: each token by the weights of the version that sampled it.

The result is the gap of the two sides alone, whatever the staleness: a step's own log-probs are of its weights, the rollout's of
former ones. With `rollout.cache_on_update: keep`, keys and values from before an update stay: tokens after it are left out.
Leaves out which steps and weights (command.py), and replicas.

    sequences = pieces_of(members, config)
    scores = score(config, folder_of_version_3, [each for each in sequences if each.of(3).any()])    # packed as in training
    result.add(3, sequences[0], scores[0])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.rollouts.records import RecordedGroup
from megasync.tools.replay.results import StepResult, TextOf, counted

Scores = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A response, or a branch of an episode. `counts` [n]: the response's tokens that can be compared. `temperature`: of its
    log-probs, those of a greedy sample are plain.
    """

    name: str
    sample: Sample
    temperature: float
    is_sampled: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.bool_]

    def of(self, version: int) -> npt.NDArray[np.bool_]:
        """The tokens that can be compared with this version's."""
        own: npt.NDArray[np.bool_] = self.counts & (self.sample.weight_versions == version)
        return own


Pieces = Mapping[int, Sequence[Recorded]]  # by step


@dataclass
class Scored(StepResult):
    differing_tokens: int = 0
    mean_gap: float = 0.0
    first: str = ""  # that differs

    @property
    def is_same(self) -> bool:
        return not self.differing_tokens

    def add(self, version: int, sequence: Recorded, scores: npt.NDArray[np.float32]) -> None:
        """`scores`: of all tokens of the response, by this version's weights."""
        own = sequence.of(version)
        theirs = np.asarray(sequence.sample.rollout_log_probs)
        gaps = np.abs(theirs[own].astype(np.float64) - scores[own])
        differing = np.flatnonzero((theirs != scores) & own)
        if len(differing) and not self.first:
            place = int(differing[0])
            self.first = f"{sequence.name}, token {place + 1}: replica {theirs[place]:.9g}, trainer {scores[place]:.9g}"
        number = self.compared_tokens + len(gaps)
        self.mean_gap += (float(gaps.sum()) - len(gaps) * self.mean_gap) / max(1, number)
        self.largest_gap = max(self.largest_gap, float(gaps.max(initial=0.0)))
        self.compared_tokens, self.differing_tokens = number, self.differing_tokens + len(differing)

    def lines(self, _: TextOf) -> list[str]:
        compared = f"step {self.step}: {self.episodes} episodes, {self.compared_tokens} of {self.tokens} tokens compared"
        first = [f"  differs first in {self.first}"] if self.first else []
        return [f"{compared}: {_gaps([self])}" if self.compared_tokens else compared, *first]


def result_of(step: int, num_episodes: int, sequences: Sequence[Recorded]) -> Scored:
    """Before anything is compared."""
    by_version = counted(v for each in sequences for v in each.sample.weight_versions[each.counts].tolist())
    later = sum(int((each.is_sampled & ~each.counts).sum()) for each in sequences)
    return Scored(step, num_episodes, by_version, later)


def total(done: Sequence[Scored], config: Config) -> list[str]:
    """Lines about all steps together."""
    found = [f"all: {sum(each.compared_tokens for each in done)} tokens compared: {_gaps(done)}"]
    replays = config.algorithm.router_replay == "rollout"
    return [*found, *(["with experts that the trainer's routers chose: records leave out the rollout's"] if replays else [])]


def _gaps(done: Sequence[Scored]) -> str:
    compared, differing = (sum(getattr(each, name) for each in done) for name in ("compared_tokens", "differing_tokens"))
    mean = sum(each.mean_gap * each.compared_tokens for each in done) / max(1, compared)
    largest = max((each.largest_gap for each in done), default=0.0)
    return f"{differing} differ; log-probs are {mean:.3g} apart on average, {largest:.3g} at most"


def pieces_of(members: Mapping[tuple[int, int], RecordedGroup], config: Config) -> list[Recorded]:
    """In the order of groups, members and branches."""
    recomputes = config.rollout.cache_on_update == "recompute"
    return [each for (_, member), group in members.items() for each in _of_member(group, member, recomputes)]


def _of_member(group: RecordedGroup, member: int, recomputes: bool) -> Iterator[Recorded]:
    done, name = group.members[member], f"episode {group.key}/{member}"
    temperature = group.request.of_sample(member).temperature or 1.0
    if isinstance(done, Completion):
        prompt_ids = np.array(group.request.prompt_ids, np.int32)
        sample = Sample(prompt_ids, done.token_ids, done.log_probs, done.weight_versions, support=done.support)
        yield _sequence(name, sample, temperature, recomputes)
        return
    for number, branch in enumerate(done.branches):
        begin = branch.prompt_length
        sample = Sample(
            branch.token_ids[:begin],
            branch.token_ids[begin:],
            branch.log_probs[begin:],
            branch.weight_versions[begin:],
            is_sampled=branch.is_sampled[begin:],
            support=branch.support[begin:],
        )
        yield _sequence(f"{name}, branch {number}", sample, temperature, recomputes)


def _sequence(name: str, sample: Sample, temperature: float, recomputes: bool) -> Recorded:
    versions = np.asarray(sample.weight_versions)
    is_sampled = np.asarray(sample.is_sampled) if len(sample.is_sampled) else np.ones(len(versions), np.bool_)
    is_first = np.logical_and.accumulate(versions == versions[:1])
    return Recorded(name, sample, temperature, is_sampled, is_sampled if recomputes else is_sampled & is_first)


def compare(config: Config, weights: Iterable[tuple[int, Config]], pieces: Pieces, done: Sequence[Scored], _: object) -> None:
    """Every step's sequences by each of the `weights`, versions with their configs, one after the other."""
    from engine.config import ParallelConfig
    from engine.runtime import parallel

    parallel.initialize(ParallelConfig(), config.run.seed)
    try:
        for version, own in weights:
            chosen = [(each, one) for each in done for one in pieces[each.step] if one.of(version).any()]
            found = score(config, Path(own.model.path), [one for _, one in chosen])
            for (each, one), scores in zip(chosen, found, strict=True):
                each.add(version, one, scores)
    finally:
        parallel.shutdown()


def score(config: Config, folder: Path, sequences: Sequence[Recorded]) -> Scores:
    """Log-probs of all tokens of the responses, by the trainer's model with the weights of `folder`, adapters merged; among the
    tokens that the rollout kept, where the records have these; at the temperatures that they were sampled at, which a resumed
    run may have changed.
    """
    from engine.config import LoraConfig
    from engine.trace import Forward

    engine = config.engine.model_copy(update={"lora": LoraConfig()})
    forward = Forward(config.model, engine, temperature=1.0, weights_path=folder)
    found = [np.empty(0, np.float32)] * len(sequences)
    for temperature in sorted({each.temperature for each in sequences}):
        forward.temperature = temperature
        places = [place for place, each in enumerate(sequences) if each.temperature == temperature]
        scored = forward.score([sequences[place].sample for place in places], engine.tokens_per_microbatch)
        for place, scores in zip(places, scored, strict=True):
            found[place] = scores
    return found
