"""TensorBoard, W&B (offline) and trackio: one run's log, read back from each; and when a logger is refused or offline."""

from __future__ import annotations

import json
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.config.schema import Config, RunConfig
from megasync.report import loggers
from megasync.report.log import RunLog
from megasync.report.loggers import COLUMNS, missing_loggers, open_loggers, trackio_name, wandb_mode

STEPS: list[dict[str, Any]] = [
    {"reward/mean": 0.1 * step, "loss/policy": -1.5e-3 * step, "sync/bytes": 269030016.0, "note": "text"} for step in range(4)
]
SAMPLES = [
    {"set": "train", "prompt": "1+1=", "response": "2 | two\nor so", "answer": "2", "reward": 0.5, "finish_reason": "stop"},
    {"set": "train", "prompt": "2+2=", "response": "", "answer": "4", "reward": 0.0, "tokens": 1, "token_texts": ["x"]},
]  # fmt: skip
Found = tuple[dict[str, list[tuple[int, float]]], list[list[Any]], dict[str, Any]]  # metrics, rows of samples, config


def log_a_run(folder: Path, *names: str) -> dict[str, list[tuple[int, float]]]:
    """Four steps to these loggers; returns the values that they got."""
    log = RunLog(config_of(folder, *names), first_step=0, write=True)
    log.evaluation(0, {"eval/reward": 0.25})
    for step, values in enumerate(STEPS):
        log.samples(step, [{**sample, "reward": step / 4} for sample in SAMPLES])
        log.step(step, values)
    log.evaluation(4, {"eval/reward": 0.75})
    log.close()
    reported: dict[str, list[tuple[int, float]]] = {"eval/reward": [(0, 0.25), (4, 0.75)]}
    for key in ("reward/mean", "loss/policy", "sync/bytes"):
        reported[key] = [(step, float(values[key])) for step, values in enumerate(STEPS)]
    return reported


def config_of(folder: Path, *names: Any) -> Config:
    return Config(run=RunConfig(name=folder.name, dir=str(folder.parent), progress="none", loggers=names))


def from_tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    metrics = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    rows = [line.strip("| ").replace("\\|", "\0").split(" | ") for text in texts for line in text.splitlines()[2:]]
    cells = [[cell.replace("\0", "|").replace("<br>", "\n") for cell in row] for row in rows]
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return metrics, cells, yaml.safe_load(config.strip("`"))


def records(data: bytes) -> Iterator[bytes]:
    """Of W&B's file: LevelDB's log format behind 7 bytes; blocks of 32 KiB, fragments with checksum, size and kind."""
    place, parts = 7, list[bytes]()
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield b"".join(parts)
            parts.clear()


def from_wandb(folder: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    metrics, config = defaultdict[str, list[tuple[int, float]]](list), dict[str, Any]()
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        row = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
        for key in row.keys() - {"step", "_step", "_runtime", "_timestamp", "_wandb", "samples"}:
            if "samples" not in key:
                metrics[key].append((row["step"], row[key]))
    tables = sorted(folder.glob("wandb/offline-run-*/files/media/table/*.json"), key=lambda path: int(path.name.split("_")[1]))
    rows = [row for path in tables for row in json.loads(path.read_text())["data"]]
    return dict(metrics), rows, config


def from_trackio(folder: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    metrics, rows = defaultdict[str, list[tuple[int, float]]](list), list[list[Any]]()
    name = f"{folder.name}-{(folder / 'trackio_id').read_text().strip()}"
    for line in SQLiteStorage.get_logs("megasync", name):
        for key in line.keys() - {"step", "timestamp", "samples"}:
            metrics[key].append((line["step"], line[key]))
        rows += [[row[column] for column in COLUMNS] for row in line.get("samples", {}).get("_value", [])]
    config = SQLiteStorage.get_run_config("megasync", name)
    assert config is not None
    return dict(metrics), rows, config


READERS = {"tensorboard": from_tensorboard, "wandb": from_wandb, "trackio": from_trackio}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[tuple[int, float]]]]]:
    """A run's folder, logged by all installed loggers at once, and the values that they got."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("WANDB_MODE", "WANDB_API_KEY"):
            patch.delenv(variable, raising=False)
        patch.setenv("NETRC", str(folder / "none"))
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported, which nothing else does
        names = [name for name in READERS if not missing_loggers([name])]
        yield folder / "run", log_a_run(folder / "run", *names)


@pytest.mark.parametrize("name", READERS)
def test_what_a_run_logs_is_read_back_equal(logged: tuple[Path, dict[str, list[tuple[int, float]]]], name: str) -> None:
    """The same from every logger: metrics by step, each sample as a row, the config."""
    if missing_loggers([name]):
        pytest.skip(f"{name} is not installed: pip install {name}")
    folder, reported = logged
    metrics, rows, config = READERS[name](folder)
    assert metrics.keys() == reported.keys()
    for key, points in reported.items():
        assert [step for step, _ in sorted(metrics[key])] == [step for step, _ in points]
        assert [value for _, value in sorted(metrics[key])] == pytest.approx([value for _, value in points], rel=1e-7), key
    lines = [(step, {**sample, "reward": step / 4}) for step in range(4) for sample in SAMPLES]
    expected = [[step, *(line.get(column) for column in COLUMNS[1:])] for step, line in lines]
    assert [list(map(str, row)) for row in rows] == [list(map(str, row)) for row in expected]
    assert name in config["run"]["loggers"] and config["data"] == config_of(folder).model_dump(mode="json")["data"]


def test_wandb_is_offline_unless_the_user_has_a_key_or_a_mode(tmp_path: Path) -> None:
    none = {"NETRC": str(tmp_path / "none")}
    assert wandb_mode(none) == "offline"
    assert wandb_mode(none | {"WANDB_API_KEY": "k"}) is None and wandb_mode(none | {"WANDB_MODE": "disabled"}) is None
    for host in ("api.forge.coreweave.com", "api.wandb.ai"):
        (tmp_path / "netrc").write_text(f"machine {host} login user password k\n")
        assert wandb_mode({"NETRC": str(tmp_path / "netrc")}) is None
    (tmp_path / "broken").write_text("machine\nlogin\n")
    assert wandb_mode({"NETRC": str(tmp_path / "broken")}) == "offline"
    assert wandb_mode({"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "https://wandb.my.org"}) == "offline"


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    first = loggers._own_id(tmp_path / "wandb_id", 0)
    assert loggers._own_id(tmp_path / "wandb_id", 3) == first != loggers._own_id(tmp_path / "wandb_id", 0)


def test_a_resumed_run_of_trackio_is_its_own(tmp_path: Path) -> None:
    """Another folder's run of the same name comes between; trackio itself takes the last one of a name."""
    for name in "ab":
        (tmp_path / name / "same").mkdir(parents=True)
    first, other, resumed = (
        trackio_name(config_of(tmp_path / folder / "same", "trackio"), first_step)
        for folder, first_step in (("a", 0), ("b", 0), ("a", 2))
    )
    assert first == resumed != other and other.startswith("same-")


def test_a_logger_that_does_not_start_is_named_and_those_before_it_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard writes its file in a thread, which ends with it."""

    def refuse(*_: object) -> None:
        raise Exception("the API key is of another server")  # noqa: TRY002 # W&B's own are no ValueErrors either

    monkeypatch.setattr(loggers, "Wandb", refuse)
    before = threading.enumerate()
    with pytest.raises(ConfigError) as caught:
        open_loggers(config_of(tmp_path, "tensorboard", "wandb"), 0)
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    message = str(caught.value)
    assert message.startswith("run.loggers: wandb does not start: the API key is of another server")
    assert "WANDB_API_KEY" in message and "run.loggers" in message


def test_a_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder of its name where it ran."""
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_loggers(["not_a_package", "json"]) == ["not_a_package"]


def test_loggers_are_named_once_and_may_be_none(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {loggers: [wandb, tensorboard, wandb]}\n")
    assert load_config(path).run.loggers == ("wandb", "tensorboard")
    assert load_config(path, ["run.loggers=trackio"]).run.loggers == ("trackio",)
    assert load_config(path, ["run.loggers=[]"]).run.loggers == ()
    with pytest.raises(ValueError, match=r"run\.loggers.*neptune(?s:.*)tensorboard, wandb, trackio"):
        load_config(path, ["run.loggers=[neptune]"])
