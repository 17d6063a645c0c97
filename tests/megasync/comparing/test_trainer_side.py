"""The trainer's side of bisect begins beside a replica where the device has room for both; weights are read once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import SafetensorError

from megasync import bisect
from megasync.bisect import for_one_replica
from megasync.comparing import trainer_side
from megasync.comparing.response import Response
from megasync.comparing.shape import Parameters
from megasync.comparing.trainer_side import SPARE_BYTES, TrainerSide, both_fit, weight_bytes
from megasync.comparing.weights import Chosen
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.hf.folder import model_shape
from megasync.planning.hardware import GIB
from megasync.planning.replicas import cache_bytes_per_token
from tests.support.config_files import write_runnable
from tests.support.tiny_models import write_tiny_model


def test_a_replica_to_be_compared_has_a_cache_for_two_sequences_and_no_more(tmp_path: Path) -> None:
    given = ["rollout.max_model_len=64", "rollout.kv_cache_bytes=40GiB", "rollout.tensor_parallel=2"]
    config = load_config(write_runnable(tmp_path), given)
    one = for_one_replica(config)
    per_token = cache_bytes_per_token(one, model_shape(Path(config.model.path)))
    assert 2 * 64 * per_token < (one.rollout.kv_cache_bytes or 0) < 2 * (2 * 64 + 1024) * per_token
    small = config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": 64 * per_token})})
    assert for_one_replica(small).rollout.kv_cache_bytes == 64 * per_token
    assert (one.rollout.tensor_parallel, one.rollout.max_num_seqs, one.rollout.enforce_eager) == (1, 1, True)


@pytest.mark.parametrize(("free_bytes", "expected"), [(40 * GIB, True), (SPARE_BYTES, False)])
def test_both_fit_where_weights_are_there_three_times(tmp_path: Path, free_bytes: int, expected: bool) -> None:
    config = for_one_replica(load_config(write_runnable(tmp_path), ["rollout.max_model_len=64"]))
    assert both_fit(config, free_bytes) is expected
    unknown = config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": None})})
    assert not both_fit(unknown, free_bytes)  # vLLM takes what is free


def test_weights_that_are_kept_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3")
    plain = Parameters(folder, torch.bfloat16, torch.device("cpu"))
    names = [name for name in plain._file_of if name.endswith("weight")]
    some = sum(plain[name].nbytes for name in names) // 8  # half of them: two bytes an element
    kept = Parameters(folder, torch.bfloat16, torch.device("cpu"), keep_bytes=some)
    kept.read_ahead()
    assert 0 < len(kept._kept) < len(names)
    expected = {name: plain[name] for name in kept._kept}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0, atol=0)


def test_weights_count_in_the_dtype_that_they_are_computed_in(tmp_path: Path) -> None:
    config = load_config(write_runnable(tmp_path), ["model.dtype=bfloat16"])
    wide = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    assert weight_bytes(wide) == 2 * weight_bytes(config) > 0


def test_what_fails_beside_the_replica_is_made_again_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(write_runnable(tmp_path))
    made: list[int] = []

    def fail(_: TrainerSide, keep_bytes: int) -> None:
        made.append(keep_bytes)
        raise RuntimeError("no memory")

    monkeypatch.setattr(TrainerSide, "_make", fail)
    monkeypatch.setattr("megasync.comparing.trainer_side.both_fit", lambda config, free: True)
    chosen = Chosen(config, config, "run", None, Path(config.model.path))
    with TrainerSide(chosen, config, None) as side:
        side.begin()
        side.judge(cast(Any, None), Response((1,), (2,), ""), "")
        with pytest.raises(RuntimeError, match="no memory"):
            side.found()
    assert len(made) == 2


@pytest.mark.parametrize("error", [RuntimeError("memory"), OSError("file"), SafetensorError("tensor"), KeyError("name")])
def test_what_the_trainers_thread_raises_while_the_replica_starts_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    config = load_config(write_runnable(tmp_path))
    config.run.folder.mkdir(parents=True)
    save_config(config, config.run.folder / "config.yaml")

    def free_bytes() -> int:
        raise error

    @contextmanager
    def serve(_: Config, begin: Callable[[], None]) -> Iterator[Any]:
        begin()
        yield None

    monkeypatch.setattr(trainer_side, "free_bytes", free_bytes)
    monkeypatch.setattr(bisect, "traced", lambda *_: (None, None))
    assert bisect.main([str(config.run.folder)], serve) == bisect.FAILED
    told = capsys.readouterr().err
    assert f"{error}\n`megasync doctor`" in told
    assert ("Traceback" in told) == isinstance(error, KeyError)


def test_sigterm_is_no_module_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Ray waits its exit code becomes 1."""
    config = load_config(write_runnable(tmp_path))
    config.run.folder.mkdir(parents=True)
    save_config(config, config.run.folder / "config.yaml")
    monkeypatch.setattr(bisect, "compared", lambda *_: sys.exit(1))
    assert bisect.main([str(config.run.folder)]) == 128 + signal.SIGTERM


def test_nothing_is_made_for_a_replica_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write_runnable(tmp_path))
    made: list[int] = []
    monkeypatch.setattr(trainer_side, "free_bytes", lambda: 0)
    monkeypatch.setattr(TrainerSide, "_make", lambda _, keep_bytes: made.append(keep_bytes))
    given: Any = None  # which nobody looks at
    with TrainerSide(given, config, None) as trainer:
        trainer.begin()
        trainer.judge(given, given, "")
    assert not made
