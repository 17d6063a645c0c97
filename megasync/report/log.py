"""Writes a run's config.yaml, metrics.jsonl, evaluations.jsonl, samples.jsonl and summary.json, and calls the loggers.

Leaves out the line on the terminal (progress.py), the loggers (loggers.py), the trace (timeline.py) and plots (page.py).

    log = RunLog(config, first_step=0, write=rank == 0)
    log.evaluation(0, {"eval/reward": 0.3})
    log.step(1, {"reward/mean": 0.4, "loss/policy": 0.1})
    log.summary({"eval_reward_before": 0.3, "eval_reward_after": 0.8})
    log.close()
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megasync.config.data_section import TRAIN_SET
from megasync.config.errors import explain, names_place, refuse_if
from megasync.config.files import EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, write_atomically
from megasync.config.load import save_config
from megasync.config.schema import Config
from megasync.report.loggers import Logger, open_loggers
from megasync.report.progress import figures, make_progress
from megasync.report.timeline import Timeline

Scalar = float | int | bool | str | None
CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
TIMELINE_FILE = "timeline.json"
WORKER_PEAK = "memory/worker_host_peak_bytes"  # in summary.json: the largest peak of a vLLM worker's resident memory
WORKER_DEVICE = "memory/worker_device_bytes"  # in summary.json: memory in use on a vLLM worker's GPU at the end of the run
TRAINING_DEVICE = "memory/training_device_bytes"  # memory in use on a GPU shared with a replica, while the replica sleeps
FILES = (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)


class RunLog:
    """A run's log. The rank with `write` writes; the other ranks make the same calls, which do nothing.

    Each step is one line, flushed, so that a run that crashes keeps every finished step. `step` is the number of finished steps:
    the first step is 1, and an evaluation before it has step 0. `first_step` is the step that this process resumes from, 0 for a
    new run: existing lines of later steps are dropped, as are a truncated last line and an evaluation after `first_step`, which
    is repeated.
    """

    def __init__(self, config: Config, *, first_step: int, write: bool) -> None:
        self._folder = folder = config.run.folder
        self.timeline = Timeline(folder / TIMELINE_FILE if write else None, resume=first_step > 0)
        self._files: dict[str, TextIO] = {}
        self._loggers: list[Logger] = []
        if write:
            save_config(config, folder / CONFIG_FILE)
            self._files = {name: _open_from(folder / name, first_step) for name in FILES}
            self._loggers = open_loggers(config, first_step)
        self._progress = make_progress(config.run.progress if write else "none", config.run.steps, first_step)

    def step(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Writes the metrics of a step; numbers that are not finite become null, which plots leave out."""
        self._append(METRICS_FILE, step, values)
        self._progress.update(step, values)

    def evaluation(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Writes the metrics of an evaluation after `step` steps."""
        self._append(EVALUATIONS_FILE, step, values)
        self._progress.note(f"after {step} step{'' if step == 1 else 's'}: {figures(values)}")

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes responses of step `step`, or of an evaluation after `step` steps."""
        with names_place(self._folder):
            if lines and (file := self._file(SAMPLES_FILE)):
                file.writelines(json_text({"step": step, **line}) + "\n" for line in lines)
                file.flush()
        if lines:
            self._to_loggers(lambda logger: logger.samples(step, lines))

    def _append(self, name: str, step: int, values: Mapping[str, Scalar]) -> None:
        with names_place(self._folder):
            if file := self._file(name):
                file.write(json_text({"step": step, **values}) + "\n")
                file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._to_loggers(lambda logger: logger.metrics(step, numbers))

    def _to_loggers(self, call: Callable[[Logger], None]) -> None:
        """RuntimeError names a logger that raised."""
        for logger in self._loggers:
            try:
                call(logger)
            except Exception as error:
                problem = f"run.loggers: {type(logger).__name__} raised {type(error).__name__}: {error}"
                raise RuntimeError(problem) from error

    def _file(self, name: str) -> TextIO | None:
        """None on a rank that writes no files. RuntimeError where it was deleted: nobody could read what it takes from now on."""
        file, path = self._files.get(name), self._folder / name
        if file is not None and not os.fstat(file.fileno()).st_nlink and not path.exists():
            raise RuntimeError(f"{path}: was deleted while the run wrote it")
        return file

    def note(self, text: str) -> None:
        """Prints one line on the terminal, above the progress display; no file gets it."""
        self._progress.note(text)

    def summary(self, values: Mapping[str, Any]) -> None:
        if self._files:
            write_summary(self._folder, values)

    def close(self) -> None:
        """Writes the timeline, ends the progress display, and closes files and loggers."""
        self.timeline.write()
        self._progress.close()
        for file in self._files.values():
            file.close()
        for logger in self._loggers:
            logger.close()


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without a truncated last line. ValueError for a missing file or another malformed line."""
    path = run_folder / METRICS_FILE
    if not path.is_file():
        remedy = "name the folder of a run, such as runs/quickstart/rl"
        raise ValueError(explain(f"{path}: there is no such file", remedy=remedy))
    return _read_lines(path)


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of evaluations.jsonl, as `read_metrics`; empty if there is no such file."""
    path = run_folder / EVALUATIONS_FILE
    return _read_lines(path) if path.is_file() else []


def read_samples(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, as `read_metrics`; empty if there is no such file."""
    path = run_folder / SAMPLES_FILE
    return _read_lines(path) if path.is_file() else []


def _open_from(path: Path, first_step: int) -> TextIO:
    """Rewrites the file without lines that a resumed run repeats (see RunLog), and opens it for appending."""
    kept = [line for line in _read_lines(path) if _stays(path.name, line, first_step)] if path.is_file() and first_step else []
    write_atomically(path, "".join(json_text(line) + "\n" for line in kept))
    return path.open("a", encoding="utf-8")


def _stays(name: str, line: Mapping[str, Any], first_step: int) -> bool:
    is_of_step = name == METRICS_FILE or line.get("set") == TRAIN_SET
    return bool(line["step"] <= first_step if is_of_step else line["step"] < first_step)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    raw_lines = path.read_bytes().split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, raw in enumerate(raw_lines, start=1):
        try:
            if raw:
                line = json.loads(raw)
                line["step"] = int(line["step"])
                lines.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(raw_lines):
                break  # without a line feed: truncated
            remedy = f"remove line {number}"
            raise ValueError(explain(f"{path}:{number}: not a line of {path.stem}: {error!r}", remedy=remedy)) from error
    return lines


def write_summary(run_folder: Path, values: Mapping[str, Any]) -> None:
    """Writes summary.json; numbers that are not finite become null."""
    write_atomically(run_folder / SUMMARY_FILE, json_text(values, indent=2) + "\n")


def read_summary(run_folder: Path) -> dict[str, Any]:
    """The content of summary.json; empty if there is none yet."""
    return read_object(run_folder / SUMMARY_FILE)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a run wrote; empty if there is no such file. ValueError for a file with anything else."""
    if not path.is_file():
        return {}
    problem = "holds no JSON object"
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        found, problem = None, f"not JSON: {error}"
    remedy = "delete it: the run writes it again if it needs it"
    refuse_if(not isinstance(found, dict), f"{path}: {problem}", remedy=remedy)
    return dict(found)


def json_text(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Standard JSON: NaN and infinities become null, at any depth."""
    try:
        return json.dumps(values, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
