"""A run's folder: metrics, evaluations, summary, timeline, TensorBoard events and progress. The report: test_report.py."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.schema import Config, RunConfig
from megasync.config.load import load_config
from megasync.config.files import write_atomically
from megasync.report.log import (
    RunLog,
    read_evaluations,
    read_metrics,
    read_samples,
    read_summary,
    write_summary,
)
from megasync.report.timeline import Timeline
from tests.support.file_limit import file_limit, umask

ROOT = Path(__file__).resolve().parents[3]


def log_of(folder: Path, first_step: int = 0, tensorboard: bool = False) -> closing[RunLog]:
    loggers = ("tensorboard",) if tensorboard else ()
    config = Config(run=RunConfig(name=folder.name, dir=str(folder.parent), progress="none", loggers=loggers))
    return closing(RunLog(config, first_step=first_step, write=True))


# -------------------------------------------------------------------------------------------------------- metrics


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        log.step(0, {"reward/mean": 0.5, "sync/verified": True, "note": "x"})
        assert read_metrics(tmp_path) == [{"step": 0, "reward/mean": 0.5, "sync/verified": True, "note": "x"}]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        log.step(0, {"a": math.nan, "b": -math.inf, "c": 1})
        log.samples(1, [{"info": {"score": math.inf, "parts": [1.0, math.nan]}}])  # of somebody's environment
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": null, "b": null, "c": 1}\n'
    assert read_samples(tmp_path) == [{"step": 1, "info": {"score": None, "parts": [1.0, None]}}]


@settings(deadline=None, max_examples=25)
@given(logged=st.integers(0, 6), first_step=st.integers(0, 8), cut=st.integers(0, 12))
def test_resume_keeps_the_steps_before(tmp_path_factory: pytest.TempPathFactory, logged: int, first_step: int, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    with log_of(folder) as log:
        for step in range(1, logged + 1):
            log.step(step, {"x": step})
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 99, "x"'[:cut])  # killed while it wrote
    with log_of(folder, first_step=first_step) as log:
        log.step(first_step + 1, {"x": -1})
    steps = [line["step"] for line in read_metrics(folder)]
    assert steps == [*range(1, min(logged, first_step) + 1), first_step + 1]
    assert not list(folder.glob(".*"))


def test_resume_keeps_the_evaluations_before(tmp_path: Path) -> None:
    for first_step, expected in ((0, [0, 4, 8]), (8, [0, 4, 8]), (5, [0, 4, 5]), (0, [0])):
        with log_of(tmp_path, first_step=first_step) as log:
            for step in [0, 4, 8] if len(expected) == 3 and first_step == 0 else [first_step]:
                log.evaluation(step, {"eval/reward": 0.5})
        assert [line["step"] for line in read_evaluations(tmp_path)] == expected


def test_no_sample_is_there_twice_after_a_resume(tmp_path: Path) -> None:
    """Those of steps that are trained again, and of evaluations that are done again, are dropped; so is a cut-off line."""
    with log_of(tmp_path) as log:
        for step in range(1, 5):
            log.samples(step, [{"set": "train", "reward": math.nan}, {"set": "train", "prompt": "é\n"}])
            log.samples(step, [{"set": "held_out"}])
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 9, "prom')
    with log_of(tmp_path, first_step=2) as log:
        log.samples(2, [{"set": "held_out"}])
    found = [(line["step"], line["set"]) for line in read_samples(tmp_path)]
    train = [(1, "train"), (1, "train"), (2, "train"), (2, "train")]
    assert sorted(found) == sorted([*train, (1, "held_out"), (2, "held_out")])
    assert [line["prompt"] for line in read_samples(tmp_path) if "prompt" in line] == ["é\n", "é\n"]
    assert read_samples(tmp_path)[0]["reward"] is None and read_samples(tmp_path / "none") == []


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    for bad in ("{", "[]", "{}", '{"step": "x"}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
            read_metrics(tmp_path)
    with pytest.raises(ValueError, match="there is no such file"):
        read_metrics(tmp_path / "none")
    assert read_evaluations(tmp_path) == []


def test_tensorboard_events_can_be_read(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with log_of(tmp_path, tensorboard=True) as log:
        for step in range(3):
            log.step(step, {"reward/mean": step / 2, "note": "text", "loss/policy": None})
        log.evaluation(3, {"eval/reward": 0.75})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(3, 0.75)]
    assert set(events.Tags()["scalars"]) == {"reward/mean", "eval/reward"}


def test_a_run_whose_folder_is_deleted_says_so(tmp_path: Path) -> None:
    """Before a logger fails in its own words; a file that an editor has put in its place is no reason to end."""
    with log_of(tmp_path / "run", tensorboard=True) as log:
        log.step(1, {"reward/mean": 0.5})
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.unlink()
        metrics.touch()
        log.step(2, {"reward/mean": 0.5})
        shutil.rmtree(tmp_path / "run")
        log.samples(3, [])  # as a step that fails does
        for write in (lambda: log.step(3, {}), lambda: log.evaluation(3, {}), lambda: log.samples(3, [{"set": "train"}])):
            with pytest.raises(RuntimeError, match=r"\w+\.jsonl: was deleted while the run wrote it"):
                write()


def test_a_full_disk_is_named_by_the_runs_folder(tmp_path: Path) -> None:
    with log_of(tmp_path) as log, file_limit(100):
        for write in (lambda: log.step(1, {"x": "y" * 200}), lambda: log.samples(1, [{"x": "y" * 200}])):
            with pytest.raises(OSError, match=re.escape(str(tmp_path))):
                write()


def test_summary(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == {}
    write_summary(tmp_path, {"eval_reward_before": 0.25, "gap": math.nan, "num_syncs": 3})
    assert read_summary(tmp_path) == {"eval_reward_before": 0.25, "gap": None, "num_syncs": 3}


def test_a_failed_write_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file.json"
    write_atomically(path, "former")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "former"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert list(path.parent.iterdir()) == [path]


# -------------------------------------------------------------------------------------------------------- run log


def test_run_log_writes_the_whole_folder(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="a", dir=str(tmp_path), steps=2, progress="none"))
    log = RunLog(config, first_step=0, write=True)
    log.evaluation(0, {"eval/reward": 0.25})
    with log.timeline.span("train", track="trainer"):
        log.step(1, {"reward/mean": 0.5})
    log.note("a word")
    log.summary({"num_syncs": 1})
    log.close()
    assert load_config(tmp_path / "a" / "config.yaml") == config
    assert read_metrics(config.run.folder) == [{"step": 1, "reward/mean": 0.5}]
    assert read_evaluations(config.run.folder) == [{"step": 0, "eval/reward": 0.25}]
    assert read_summary(config.run.folder) == {"num_syncs": 1}
    assert "train" in (config.run.folder / "timeline.json").read_text()
    again = RunLog(config, first_step=1, write=True)
    again.step(2, {"reward/mean": 0.75})
    again.timeline.add("late", "trainer", 1.0, 2.0)
    again.close()
    assert [line["step"] for line in read_metrics(config.run.folder)] == [1, 2]
    assert {"train", "late"} <= {event["name"] for event in events_of(config.run.folder / "timeline.json")}


def test_ranks_that_do_not_write_take_the_same_calls(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="a", dir=str(tmp_path)))
    log = RunLog(config, first_step=0, write=False)
    log.evaluation(0, {"eval/reward": 0.25})
    log.timeline.add("train", "trainer", 0.0, 1.0)
    log.step(0, {"reward/mean": 0.5})
    log.note("a word")
    log.summary({})
    log.close()
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- timeline


def events_of(path: Path) -> list[dict[str, object]]:
    events: list[dict[str, object]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_timeline_spans_and_tracks(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    before = time.time()
    with timeline.span("train", track="trainer", step=3):
        time.sleep(0.01)
    timeline.add("generate", "replica 0/requests", before - 5, before - 4.5, {"version": 2})
    timeline.add("generate", "replica 0/other", before, before + 1)
    with pytest.raises(KeyError), timeline.span("fails", track="trainer"):
        raise KeyError
    timeline.write()
    events = events_of(tmp_path / "timeline.json")
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["train", "generate", "generate", "fails"]
    assert spans[0]["args"] == {"step": 3}
    assert 10_000 <= int(str(spans[0]["dur"])) < 2_000_000
    assert abs(int(str(spans[0]["ts"])) - before * 1e6) < 1e6
    assert spans[1]["dur"] == 500_000
    assert spans[1]["pid"] == spans[2]["pid"] != spans[0]["pid"] == spans[3]["pid"]
    assert spans[1]["tid"] != spans[2]["tid"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}  # type: ignore[index]
    assert names["process_name", spans[1]["pid"], spans[1]["tid"]] == "replica 0"
    assert names["thread_name", spans[1]["pid"], spans[1]["tid"]] == "requests"
    assert names["thread_name", spans[0]["pid"], spans[0]["tid"]] == "trainer"


def test_timeline_is_written_now_and_then_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, write_every_seconds=0.0, max_events=3)
    for index in range(5):
        timeline.add(f"e{index}", "t", index, index + 1)
    assert [event["name"] for event in events_of(path) if event["ph"] == "X"] == ["e2", "e3", "e4"]
    assert not (tmp_path / "other.json").exists()
    Timeline(tmp_path / "other.json", write_every_seconds=60.0).add("e", "t", 0, 1)
    assert not (tmp_path / "other.json").exists()


def test_timeline_takes_many_threads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", write_every_seconds=0.001)
    threads = [
        threading.Thread(target=lambda track=track: [timeline.add("e", f"t{track}", 0, 1) for _ in range(50)])
        for track in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.write()
    assert sum(event["ph"] == "X" for event in events_of(tmp_path / "timeline.json")) == 200
