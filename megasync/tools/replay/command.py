"""Samples the responses of recorded steps again, by the weights that sampled them, and says whether each token is the same.

    megasync replay runs/agents/calculator --step 12             # or: --step 1-20, --step all
    megasync replay runs/agents/calculator --step 12 --episode 352/1
    megasync replay runs/rl --step all --trainer

Each turn is asked for with its recorded prompt, sampling and seed, so that no tool and no environment is called. With --trainer
nothing is sampled: the trainer's model scores each token by the weights that sampled it. Exit codes: 0 all is the same (or was
scored, of a run that is not exact); 1 something differs, weights of the run's log cannot be read, or it failed on the way; 2
nothing was started.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasync.config.errors import ConfigError, main_errors, refuse_if
from megasync.config.load import load_config
from megasync.data.prompts import Prompts
from megasync.models.folder import check_model_folder
from megasync.report.log import CONFIG_FILE
from megasync.rollouts.records import RecordedGroup, StepRecord, load_record, paths_of
from megasync.tools.replay import sampled, scored
from megasync.tools.replay.results import MAX_SHOWN, StepResult, as_json, as_lines
from megasync.tools.serving.replicas import Serve, machine_errors, scratch_folder, served
from megasync.tools.serving.source import each_version, versions_of

ALL = "all"
MAX_CHARACTERS = 300  # of a list of episodes
Members = Mapping[tuple[int, int], RecordedGroup]  # by group and member


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megasync replay", description="The responses of recorded steps, sampled again.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as runs/rl")
    help_ = "of the run's config, such as rollout.replicas=2"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    parser.add_argument("--step", required=True, metavar="S", help="a step from 1 on, several as 1-20, or all")
    parser.add_argument("--episode", action="append", default=[], metavar="GROUP[/MEMBER]", help="only these; several times")
    parser.add_argument("--trainer", action="store_true", help="compare log-probs with the trainer's, no sampling")
    parser.add_argument("--json", action="store_true", help="print one object")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str], serve: Serve = served) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given, unreadable = parse(arguments), dict[int, str]()
    how: Any = scored if given.trainer else sampled
    with scratch_folder() as scratch:
        with main_errors():
            message, remedy = f"{given.run}: holds no {CONFIG_FILE}, and is no run", "name a run's folder"
            refuse_if(not (given.run / CONFIG_FILE).is_file(), message, remedy=remedy)
            config = load_config(given.run / CONFIG_FILE, given.overrides)
            records = [load_record(path) for path in chosen_paths(given.run, given.step)]
            steps = {record.step: chosen_members(record, given.episode) for record in records}
            check_model_folder(config.model.path)
            pieces = {step: how.pieces_of(members, config) for step, members in steps.items()}
            done: list[Any] = [how.result_of(step, len(steps[step]), of_step) for step, of_step in pieces.items()]
            versions = versions_for(given.run, done)
            text_of = Prompts(config.model.path, config.data).detokenizer.text
        weights = each_version(given.run, scratch, given.overrides, versions, unreadable)
        with machine_errors():
            how.compare(config, weights, pieces, done, serve)
    for each in done:
        each.leave_out(set(versions) - unreadable.keys())
    if given.json:
        print(as_json(given.run, done, unreadable))
    else:
        total = scored.total(done, config) if given.trainer else []
        print("\n".join([*as_lines(done, unreadable, text_of), *total]))
    is_same = all(each.is_same for each in done) or (given.trainer and not config.model.exact)
    return 0 if is_same and not unreadable else 1


def chosen_paths(run: Path, steps: str) -> list[Path]:
    """The records of `--step`: a number, FIRST-LAST, or all.

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
    listed = f"{min(there)} to {max(there)}" if len(there) > MAX_SHOWN else ", ".join(map(str, there))
    message = f"--step {steps}: there is no record of step {missing}"
    refuse_if(missing is not None, message, there=listed, remedy="write one of them")
    refuse_if(not wanted, f"--step {steps}: is no range", remedy="write the lower step first")
    return [there[step] for step in wanted]


def chosen_members(record: StepRecord, names: Sequence[str]) -> Members:
    """The episodes of these names, GROUP or GROUP/MEMBER, with their groups; all without any.

    Raises:
        ConfigError: there is none of a name.
    """
    found = {(group.key, member): group for group in record.groups for member in group.members}
    wanted = set[tuple[int, int]]()
    for name in names:
        group, _, member = name.partition("/")
        own = {key for key in found if str(key[0]) == group and member in ("", str(key[1]))}
        there = ", ".join(f"{group}/{member}" for group, member in found)
        shown = there if len(there) < MAX_CHARACTERS else f"{there[:MAX_CHARACTERS]} ..."
        refuse_if(not own, f"--episode {name}: step {record.step} has no such episode", there=shown, remedy="write one of them")
        wanted |= own
    return {key: group for key, group in found.items() if key in wanted or not names}


def versions_for(run: Path, done: Sequence[StepResult]) -> list[int]:
    """The versions that sampled something and whose weights are there.

    Raises:
        ConfigError: those of none are.
    """
    needed = sorted(set[int]().union(*(each.tokens_by_version for each in done)))
    there = sorted(versions_of(run))
    found = [version for version in needed if version in there]
    if needed and not found:
        able = [version + 1 for version in there if version + 1 in paths_of(run)]
        raise ConfigError(
            f"{run}: the weights of the versions that sampled these steps are not there",
            needed=", ".join(map(str, needed)),
            there=", ".join(map(str, there)) + " (0: the model folder)",
            steps_with_weights=", ".join(map(str, able)) or "none",
            remedy="train with sync.log=deltas, or with checkpoint.every_steps=1 and checkpoint.keep=N, or take such a step",
        )
    return found
