"""Samples what a step was trained on again, by the weights that it was sampled with, and says whether each token is the same.

    megasync replay runs/agents/calculator --step 12             # or: --step 1-20, --step all
    megasync replay runs/agents/calculator --step 12 --episode 352/1
    megasync replay runs/agents/calculator --step 12 --rerun-environments
    megasync replay runs/rl --step all --trainer

Each turn is asked for with its recorded prompt, sampling and seed, so that no tool and no environment is called. With
--rerun-environments it is the other way round: these are run again, turns are answered from the record, and no replica is
started. With --trainer nothing is sampled: the trainer's model scores each token by the weights that sampled it. Exit codes: 0
all is the same (or was scored, of a run that is not exact); 1 something differs, weights that the run's log should have cannot
be made, or it failed on the way; 2 nothing was started.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config.errors import ConfigError, main_errors, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.data.prompts import Prompts
from megasync.hf.folder import check_model_folder
from megasync.reporting.log import CONFIG_FILE
from megasync.rollouts.records import RecordedGroup, StepRecord, load_record, paths_of
from megasync.rollouts.turns import episode_identity
from megasync.serving import compare, scored
from megasync.serving.replicas import Serve, scratch_folder, served
from megasync.serving.rerun import Change, rerun
from megasync.serving.send import sender
from megasync.serving.source import Weights, versions_there

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
ALL, MOST_SHOWN, MOST_STEPS = "all", 5, 20


@dataclass
class Replayed:
    """Of one step, for --json and the lines."""

    step: int
    episodes: int
    turns: int = 0
    tokens: int = 0  # that were sampled then
    compared_tokens: int = 0
    later_tokens: int = 0  # of turns that an update found in their midst, after it
    without_weights: dict[int, int] = field(default_factory=dict)  # tokens by version
    largest_gap: float = 0.0  # of log-probs, over equal tokens
    differences: list[compare.Difference] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def leave_out(self, tokens: Mapping[int, int], missing: Iterable[int]) -> None:
        """`tokens`: of each version; of those that are missing none were compared."""
        self.without_weights |= {version: tokens[version] for version in missing if tokens.get(version)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megasync replay", description="What steps were trained on, sampled again.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as runs/rl")
    help_ = "of the run's config, such as rollout.replicas=2"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    parser.add_argument("--step", required=True, metavar="S", help="a step from 1 on, several as 1-20, or all")
    parser.add_argument("--episode", action="append", default=[], metavar="GROUP[/MEMBER]", help="only these; several times")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--rerun-environments", action="store_true", help="run environments and tools again, and no replica")
    instead.add_argument("--trainer", action="store_true", help="compare log-probs with the trainer's, no sampling")
    parser.add_argument("--json", action="store_true", help="print one object")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str], serve: Serve = served) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given = parse(arguments)
    with scratch_folder() as scratch:
        with main_errors():
            config = load_config(_checked_run(given.run) / CONFIG_FILE, given.overrides)
            records = [load_record(path) for path in chosen_paths(given.run, given.step)]
            steps = {record.step: compare.chosen_members(record, given.episode) for record in records}
        if given.rerun_environments:
            return _rerun(given, config, records, steps)
        with main_errors():
            check_model_folder(config.model.path)
        if given.trainer:
            return _score(given, config, steps, scratch)
        with main_errors():
            pieces = {step: compare.pieces_of(members) for step, members in steps.items()}
            needed = {piece.version for of_step in pieces.values() for piece in of_step}
            versions, weights = versions_for(given.run, needed), Weights(given.run, scratch, given.overrides, needed)
            prompts = Prompts(config.model.path, config.data)
        done = [_counted(step, steps[step], of_step, versions) for step, of_step in pieces.items()]
        try:
            if versions:
                _sample_again(serve, weights.each(versions), pieces, done)
                for each in done:
                    each.leave_out(compare.tokens_by_version(pieces[each.step]), weights.missing)
        except (RuntimeError, ValueError) as error:
            print(f"{error}\n`megasync doctor` looks at this machine", file=sys.stderr)
            return 1
    return _say(given, done, lambda each: lines(each, prompts), weights)


# -------------------------------------------------------------------------------------------------------- what there is


def _checked_run(run: Path) -> Path:
    message = f"{run}: holds no {CONFIG_FILE}, and is no run"
    refuse_if(not (run / CONFIG_FILE).is_file(), message, remedy="name a run's folder, which is run.dir/run.name of its config")
    return run


def chosen_paths(run: Path, steps: str) -> list[Path]:
    """Those of `--step`: a number, FIRST-LAST, or all that there are.

    Raises:
        ConfigError: it is none of these, or a record is not there.
    """
    there = paths_of(run)
    remedy = "train with rollout.record=all (episodes alone: episodes), of which every step that is trained leaves a record"
    refuse_if(not there, f"{run}: has no records of what was trained", remedy=remedy)
    if steps == ALL:
        return list(there.values())
    first, _, last = steps.partition("-")
    numbers = first.isdecimal() and (last or first).isdecimal()
    refuse_if(not numbers, f"--step {steps}: is no step", remedy="write a number, two with a - between them, or all")
    wanted = range(int(first), int(last or first) + 1)
    missing = next((step for step in wanted if step not in there), None)
    told = f"{min(there)} to {max(there)}" if len(there) > MOST_SHOWN else ", ".join(map(str, there))
    message = f"--step {steps}: there is no record of step {missing}"
    refuse_if(missing is not None, message, there=told, remedy="write one of them")
    refuse_if(not wanted, f"--step {steps}: is no range", remedy="write the lower step first")
    return [there[step] for step in wanted]


def versions_for(run: Path, versions: set[int]) -> list[int]:
    """Of the versions that sampled something those whose weights are there.

    Raises:
        ConfigError: those of none are.
    """
    needed = sorted(versions)
    there = sorted(versions_there(run))
    found = [version for version in needed if version in there]
    if needed and not found:
        able = [version + 1 for version in there if version + 1 in paths_of(run)]
        raise ConfigError(
            f"{run}: what is to be looked at was sampled with versions whose weights are not there",
            needed=", ".join(map(str, needed)),
            there=", ".join(map(str, there)) + " (0: the model folder)",
            steps_with_weights=", ".join(map(str, able)) or "none",
            remedy="train with sync.log=deltas, or with checkpoint.every_steps=1 and checkpoint.keep=N, or take such a step",
        )
    return found


# ---------------------------------------------------------------------------------------------------------- the comparison


def _counted(
    step: int, members: Mapping[Any, Any], pieces: Sequence[compare.Piece], versions: Sequence[int]
) -> Replayed:
    by_version, later = compare.tokens_by_version(pieces), sum(piece.num_later for piece in pieces)
    tokens = sum(by_version.values()) + later
    without = {version: number for version, number in by_version.items() if number and version not in versions}
    return Replayed(step, len(members), len(pieces), tokens, later_tokens=later, without_weights=without)


def _sample_again(
    serve: Serve, weights: Iterator[tuple[int, Config]], pieces: Mapping[int, Sequence[compare.Piece]], done: list[Replayed]
) -> None:
    """Replicas start with the weights of the first version; those of the others are sent to them."""
    version, first = next(weights)
    with serve(first) as pool, sender(first, pool) as send:
        _compare(pool, version, pieces, done)
        for version, config in weights:
            send(version, Path(config.model.path))
            _compare(pool, version, pieces, done)


def _compare(pool: ReplicaPool, version: int, pieces: Mapping[int, Sequence[compare.Piece]], done: list[Replayed]) -> None:
    of_version = {step: [piece for piece in of_step if piece.version == version] for step, of_step in pieces.items()}
    requests = compare.requests_of(piece for of_step in of_version.values() for piece in of_step)
    sampled = dict(zip(requests, pool.generate(requests).result(), strict=True))
    for each in done:
        for piece in of_version[each.step]:
            now = sampled[piece.request][piece.sample]
            each.compared_tokens += len(piece.token_ids)
            each.largest_gap = max(each.largest_gap, compare.largest_gap(piece, now))
            if difference := compare.first_difference(piece, now):
                each.differences.append(difference)
        each.differences.sort(key=lambda one: (one.group, one.member, one.turn))


def _score(
    given: argparse.Namespace, config: Config, steps: Mapping[int, Mapping[tuple[int, int], RecordedGroup]], scratch: Path
) -> int:
    with main_errors():
        recomputes = config.rollout.cache_on_update == "recompute"
        sequences = {step: scored.sequences_of(members, recomputes=recomputes) for step, members in steps.items()}
        needed = set[int]().union(*(scored.versions_of(of_step) for of_step in sequences.values()))
        versions, weights = versions_for(given.run, needed), Weights(given.run, scratch, given.overrides, needed)
        done = [scored.begun(step, len(steps[step]), of_step, versions) for step, of_step in sequences.items()]

    try:
        folders = ((version, Path(own.model.path)) for version, own in weights.each(versions))
        scored.compare_all(config, folders, sequences, done)
        for each in done:
            each.leave_out(scored.tokens_by_version(sequences[each.step]), weights.missing)
    except (RuntimeError, ValueError) as error:
        print(f"{error}\n`megasync doctor` looks at this machine", file=sys.stderr)
        return 1
    same = not any(each.differing_tokens for each in done)
    if given.json:
        print(as_json(given.run, done, weights, same=same))
    else:
        told = [line for each in done for line in scored.lines(each)]
        print("\n".join([*told, scored.total(done), *not_compared(done, weights.missing, weights.unlogged)]))
    return 1 if (config.model.exact and not same) or weights.missing else 0


def _rerun(
    given: argparse.Namespace,
    config: Config,
    records: Sequence[StepRecord],
    steps: Mapping[int, Mapping[tuple[int, int], RecordedGroup]],
) -> int:
    with main_errors():
        message = f"{given.run}: its samples have one turn, and no environment"
        refuse_if(not config.rollout.episode, message, remedy="leave --rerun-environments out")
        identity = episode_identity(config)
        if any(record.head.get("episode") != identity for record in records):
            print(f"the file of {config.rollout.episode} is another one than it was", file=sys.stderr)
        changes = rerun(config, steps)
        done = [Replayed(step, len(members), changes=changes[step]) for step, members in steps.items()]
    return _say(given, done, rerun_lines, None)


def _say(
    given: argparse.Namespace, done: Sequence[Replayed], shown: Callable[[Replayed], list[str]], weights: Weights | None
) -> int:
    same = not any(each.differences or each.changes for each in done)
    missing, unlogged = (weights.missing, weights.unlogged) if weights is not None else ({}, [])
    if given.json:
        print(as_json(given.run, done, weights, same=same))
    else:
        print("\n".join([*(line for each in done for line in shown(each)), *not_compared(done, missing, unlogged)]))
    return 0 if same and not missing else 1


def as_json(run: Path, done: Sequence[Replayed] | Sequence[scored.Compared], weights: Weights | None, *, same: bool) -> str:
    of_weights = {"missing": weights.missing if weights else {}, "unlogged": weights.unlogged if weights else []}
    return json.dumps({"run": str(run), "same": same, **of_weights, "steps": [asdict(each) for each in done]}, indent=2)


def not_compared(
    done: Sequence[Replayed] | Sequence[scored.Compared], missing: Mapping[int, str], unlogged: Sequence[int] = ()
) -> list[str]:
    """Steps of which nothing was compared as their weights are not there, and why those of a version could not be made."""
    steps = [each.step for each in done if each.without_weights and not each.compared_tokens]
    told = [f"not compared: {len(steps)} of {len(done)} steps, whose weights are not there: {_listed(steps)}"] if steps else []
    told += [f"never logged, as sync.log was off then: versions {_listed(unlogged)}"] if unlogged else []
    shown = [f"version {version} cannot be made: {why}" for version, why in list(missing.items())[:MOST_SHOWN]]
    more = [f"... and {len(missing) - MOST_SHOWN} more versions"] if len(missing) > MOST_SHOWN else []
    return [*told, *shown, *more]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:MOST_STEPS])) + (" ..." if len(numbers) > MOST_STEPS else "")


def lines(each: Replayed, prompts: Prompts) -> list[str]:
    """What there is to say of a step."""
    compared = f"{each.compared_tokens} of {each.tokens} tokens compared"
    told = f"step {each.step}: {each.episodes} episodes, {each.turns} turns, {compared}"
    if not each.compared_tokens:
        return [told, *_left_out(each)]
    if not each.differences:
        return [f"{told}: every one is the same; log-probs within {each.largest_gap:.1e}", *_left_out(each)]
    first = each.differences[0]
    where = f"episode {first.group}/{first.member}, turn {first.turn}, token {first.token}"
    then = _token(prompts, first.sampled, first.sampled_log_prob)
    now = _token(prompts, first.now, first.now_log_prob)
    counts = f"{len(each.differences)} of {each.turns} turns differ; log-probs before that within {each.largest_gap:.1e}"
    return [told, f"  differs first in {where}: sampled was {then}, now {now}", f"  {counts}", *_left_out(each)]


def _left_out(each: Replayed) -> list[str]:
    told = [f"{each.later_tokens} tokens that a turn sampled after an update in its midst"] if each.later_tokens else []
    lacking = each.without_weights.items()
    told += [f"{number} tokens of version {version}, whose weights are not there" for version, number in lacking]
    return [f"  not compared: {'; '.join(told)}"] if told else []


def _token(prompts: Prompts, token: int | None, log_prob: float | None) -> str:
    if token is None:
        return "the end"
    return f"{token} {prompts.detokenizer.text([token])!r} ({log_prob:.4f})"


def rerun_lines(each: Replayed) -> list[str]:
    """What there is to say of a step whose environments were run again."""
    if not each.changes:
        return [f"step {each.step}: {each.episodes} episodes: every answer of their environments is the same"]
    shown = [f"  episode {one.group}/{one.member}, after turn {one.turn}: {one.what}" for one in each.changes[:MOST_SHOWN]]
    more = [f"  ... and {len(each.changes) - MOST_SHOWN} more"] if len(each.changes) > MOST_SHOWN else []
    return [f"step {each.step}: {len(each.changes)} of {each.episodes} episodes are answered otherwise", *shown, *more]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
