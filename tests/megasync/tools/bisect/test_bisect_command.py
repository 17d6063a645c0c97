"""The config of the replica that is compared, and exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.tools.bisect import command as bisect
from megasync.tools.bisect.command import for_one_replica
from megasync.tools.serving.replicas import DOCTOR
from tests.support.config_files import write_runnable


def test_a_replica_to_be_compared_has_a_cache_for_two_sequences_and_no_more(tmp_path: Path) -> None:
    given = ["rollout.max_model_len=64", "rollout.kv_cache_bytes=40GiB", "rollout.tensor_parallel=2"]
    config = load_config(write_runnable(tmp_path), given)
    one, per_token = for_one_replica(config), 4 * 2 * 2 * 32 * 2  # layers, keys and values, groups, head size, bytes
    assert one.rollout.kv_cache_bytes == (2 * 64 + 1024) * per_token
    small = config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": 64 * per_token})})
    assert for_one_replica(small).rollout.kv_cache_bytes == 64 * per_token
    assert (one.rollout.tensor_parallel, one.rollout.max_num_seqs, one.rollout.enforce_eager) == (1, 1, True)


@pytest.mark.parametrize("error", [RuntimeError("memory"), OSError("file"), SafetensorError("tensor"), KeyError("name")])
def test_an_error_on_the_way_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    @contextmanager
    def serve(_: Config) -> Iterator[Any]:
        raise error
        yield

    assert bisect.main([str(started(tmp_path))], serve) == bisect.FAILED
    text = capsys.readouterr().err
    assert f"{error}\n{DOCTOR}" in text
    assert ("Traceback" in text) == isinstance(error, KeyError)


def test_sigterm_does_not_look_like_a_wrong_module(tmp_path: Path) -> None:
    """While Ray waits its exit code becomes 1."""

    @contextmanager
    def serve(_: Config) -> Iterator[Any]:
        sys.exit(1)
        yield

    assert bisect.main([str(started(tmp_path))], serve) == 128 + signal.SIGTERM


def started(folder: Path) -> Path:
    config = load_config(write_runnable(folder))
    config.run.folder.mkdir(parents=True)
    save_config(config, config.run.folder / "config.yaml")
    return config.run.folder
