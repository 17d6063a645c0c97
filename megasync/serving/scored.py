"""What a step was trained on, scored by the trainer's model: each token by the weights of the version that sampled it.

At any staleness this tells how far trainer and replica are apart: a step's own log-probs are of its weights, those of the rollout
of former ones. A token counts where all before it was computed by its version: with `rollout.cache_on_update: keep`, keys and
values from before an update stay, and what comes after it is left out. Leaves out replicas, and where weights are (replay.py).

    sequences = sequences_of(members, recomputes=True)
    scores = score(config, folder_of_version_3, having(sequences, 3))       # by the packing of the trainer
    compared.add(3, sequence, scores[0])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.rollouts.records import RecordedGroup

Scores = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A response, or a branch of an episode. `counts` [n]: the response's tokens that can be compared."""

    name: str
    sample: Sample
    is_sampled: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.bool_]

    def of(self, version: int) -> npt.NDArray[np.bool_]:
        """The tokens that can be compared with this version's."""
        own: npt.NDArray[np.bool_] = self.counts & (self.sample.weight_versions == version)
        return own


@dataclass
class Compared:
    """Of one step, for --json and the lines."""

    step: int
    episodes: int
    tokens: int = 0  # that were sampled then
    compared_tokens: int = 0
    differing_tokens: int = 0
    later_tokens: int = 0  # that were sampled after an update in their midst, over what was computed before it
    without_weights: dict[int, int] = field(default_factory=dict)  # tokens by version
    mean_gap: float = 0.0
    largest_gap: float = 0.0
    first: str = ""  # that differs

    def leave_out(self, tokens: Mapping[int, int], missing: Iterable[int]) -> None:
        """`tokens`: of each version; of those that are missing none were compared."""
        self.without_weights |= {version: tokens[version] for version in missing if tokens.get(version)}

    def add(self, version: int, sequence: Recorded, scores: npt.NDArray[np.float32]) -> None:
        """`scores`: of all tokens of the response, by this version's weights."""
        own = sequence.of(version)
        theirs = np.asarray(sequence.sample.rollout_log_probs)
        gaps = np.abs(theirs[own].astype(np.float64) - scores[own])
        differing = np.flatnonzero((theirs != scores) & own)
        if len(differing) and not self.first:
            place = int(differing[0])
            self.first = f"{sequence.name}, token {place + 1}: replica {theirs[place]:.9g}, trainer {scores[place]:.9g}"
        number = self.compared_tokens + int(own.sum())
        self.mean_gap += (float(gaps.sum()) - int(own.sum()) * self.mean_gap) / max(1, number)
        self.largest_gap = max(self.largest_gap, float(gaps.max(initial=0.0)))
        self.compared_tokens, self.differing_tokens = number, self.differing_tokens + len(differing)


def sequences_of(members: Mapping[tuple[int, int], RecordedGroup], *, recomputes: bool) -> list[Recorded]:
    """`recomputes`: rollout.cache_on_update."""
    return [each for (_, member), group in members.items() for each in _of_member(group, member, recomputes)]


def _of_member(group: RecordedGroup, member: int, recomputes: bool) -> Iterator[Recorded]:
    done, name = group.members[member], f"episode {group.key}/{member}"
    if isinstance(done, Completion):
        sample = Sample(np.array(group.request.prompt_ids, np.int32), done.token_ids, done.log_probs, done.weight_versions)
        yield _sequence(name, sample, recomputes)
        return
    for number, branch in enumerate(done.branches):
        begin = branch.prompt_length
        prompt, response = branch.token_ids[:begin], branch.token_ids[begin:]
        told = branch.log_probs[begin:], branch.weight_versions[begin:]
        sample = Sample(prompt, response, *told, is_sampled=branch.is_sampled[begin:])
        yield _sequence(f"{name}, branch {number}", sample, recomputes)


def _sequence(name: str, sample: Sample, recomputes: bool) -> Recorded:
    versions = np.asarray(sample.weight_versions)
    is_sampled = np.asarray(sample.is_sampled) if len(sample.is_sampled) else np.ones(len(versions), np.bool_)
    is_first = np.logical_and.accumulate(versions == versions[:1])
    return Recorded(name, sample, is_sampled, is_sampled if recomputes else is_sampled & is_first)


def versions_of(sequences: Iterable[Recorded]) -> set[int]:
    """Those that sampled something that can be compared."""
    return {int(version) for each in sequences for version in np.unique(each.sample.weight_versions[each.counts])}


def tokens_by_version(sequences: Iterable[Recorded]) -> dict[int, int]:
    """That can be compared."""
    found = Counter[int]()
    for each in sequences:
        found.update(each.sample.weight_versions[each.counts].tolist())
    return dict(sorted(found.items()))


def begun(step: int, num_episodes: int, sequences: Sequence[Recorded], there: Iterable[int]) -> Compared:
    """What is to be compared, and what cannot be. `there`: the versions whose weights are there."""
    without = {version: number for version, number in tokens_by_version(sequences).items() if version not in there}
    tokens, counted = (sum(int(getattr(each, name).sum()) for each in sequences) for name in ("is_sampled", "counts"))
    return Compared(step, num_episodes, tokens, later_tokens=tokens - counted, without_weights=without)


def compare_all(
    config: Config,
    folders: Iterable[tuple[int, Path]],
    sequences: Mapping[int, Sequence[Recorded]],
    done: Sequence[Compared],
) -> None:
    """Every step's sequences by each of the versions, one after the other. `folders`: versions with their weights."""
    from engine.config import ParallelConfig
    from engine.runtime import parallel

    parallel.initialize(ParallelConfig(), config.run.seed)
    try:
        for version, folder in folders:
            chosen = [(each, one) for each in done for one in sequences[each.step] if one.of(version).any()]
            found = score(config, folder, [one for _, one in chosen])
            for (each, one), scores in zip(chosen, found, strict=True):
                each.add(version, one, scores)
    finally:
        parallel.shutdown()


def score(config: Config, folder: Path, sequences: Sequence[Recorded]) -> Scores:
    """Log-probs of all tokens of the responses, by the trainer's model with the weights of `folder`, adapters merged."""
    from engine.config import LoraConfig
    from engine.trace import Forward

    engine = config.engine.model_copy(update={"lora": LoraConfig()})
    forward = Forward(config.model, engine, temperature=config.rollout.temperature, weights_path=folder)
    return forward.score([each.sample for each in sequences], engine.tokens_per_microbatch)


def lines(each: Compared) -> list[str]:
    """What there is to say of a step."""
    told = f"step {each.step}: {each.episodes} episodes, {each.compared_tokens} of {each.tokens} tokens compared"
    found = f"{each.differing_tokens} differ; log-probs are {each.mean_gap:.3g} apart on average, {each.largest_gap:.3g} at most"
    first = [f"  differs first in {each.first}"] if each.first else []
    left_out = [f"{each.later_tokens} tokens that follow an update in their midst"] if each.later_tokens else []
    lacking = each.without_weights.items()
    left_out += [f"{number} tokens of version {version}, whose weights are not there" for version, number in lacking]
    not_compared = [f"  not compared: {'; '.join(left_out)}"] if left_out else []
    return [f"{told}: {found}" if each.compared_tokens else told, *first, *not_compared]


def total(done: Sequence[Compared]) -> str:
    compared, differing = (sum(getattr(each, name) for each in done) for name in ("compared_tokens", "differing_tokens"))
    mean = sum(each.mean_gap * each.compared_tokens for each in done) / max(1, compared)
    most = max((each.largest_gap for each in done), default=0.0)
    return f"all: {compared} tokens compared, {differing} differ; {mean:.3g} apart on average, {most:.3g} at most"
