"""Weights of a run that goes on: each command reads what it found, whatever the run removes meanwhile (checkpoint.keep: 1).

Another process holds the run's lock and commits checkpoints and versions as fast as it can, by the trainer's own functions.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.tools.bisect.choose import choose
from megasync.tools.export.command import export, export_version
from megasync.tools.export.find import checkpoints_of
from megasync.tools.serving.source import each_version, find_source, versions_of
from tests.megasync.test_export_cli import adapter_run
from tests.support.config_files import write_runnable
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.long

LOOK_SECONDS, CALLS = 3.0, 4  # at least
RUN = """
import itertools, shutil, sys, time
from pathlib import Path
from safetensors.torch import load_file
from bridge.versions.prune import VersionPruner
from bridge.versions.writer import VersionWriter
from engine.checkpoint.saving import _commit
from megasync.config.files import lock
run, content = map(Path, sys.argv[1:])
lock(run)
weights = load_file(next(content.glob("*/*.safetensors")))
writer = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=2)
pruner = VersionPruner(run / "versions", keep=1)
for step in itertools.count(1):
    folder = run / "checkpoints" / f".partial_{step}"
    shutil.copytree(content, folder)
    _commit(folder, run / "checkpoints" / f"step_{step:08d}", keep=1)
    writer.write(step, iter(weights.items()))
    pruner.prune()
    if step == 2:
        print(flush=True)
"""


@contextmanager
def going_on(run: Path, content: Path) -> Iterator[None]:
    """A run whose checkpoints hold what `content` does."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(run), str(content)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def repeated(run: Path, call: Callable[[Path], None], scratch: Path) -> tuple[int, list[str]]:
    """How often `call` did not fail while the run went on, and the errors."""
    done, errors, begin, first = 0, list[str](), time.monotonic(), newest(run)
    while time.monotonic() - begin < LOOK_SECONDS or done + len(errors) < CALLS:
        folder = scratch / f"{done + len(errors)}"
        folder.mkdir(parents=True)
        try:
            call(folder)
        except ConfigError as error:
            errors.append(str(error))
        else:
            done += 1
    assert newest(run) >= first + CALLS, "the run did not go on"
    return done, errors


def newest(run: Path) -> int:
    while not (found := checkpoints_of(run)):
        pass
    return max(found)


def is_read(folder: Path) -> None:
    assert len(load_file(folder / "model.safetensors")) > 5 and (folder / "tokenizer.json").read_bytes()


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Path]:
    run = tmp_path / "runs" / "rl"
    run.mkdir(parents=True)
    save_config(load_config(write_runnable(tmp_path)), run / "config.yaml")
    return run, write_tiny_model(tmp_path / "content" / "hf", "qwen3").parent


def test_the_newest_checkpoint_is_read_whole(whole: tuple[Path, Path], tmp_path: Path) -> None:
    run, content = whole

    def use(scratch: Path) -> None:
        export(run, scratch / "out")
        is_read(scratch / "out")
        is_read(Path(find_source(run, scratch, None, []).config.model.path))
        chosen = choose(run, scratch, None, [])
        is_read(chosen.base)
        assert chosen.step > 0

    with going_on(run, content):
        done, errors = repeated(run, use, tmp_path / "scratch")
    assert done >= CALLS and not errors, errors


def test_an_adapter_is_exported_and_merged_whole(tmp_path: Path) -> None:
    run = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    (checkpoint,) = checkpoints_of(run).values()
    content = checkpoint.rename(tmp_path / "content")

    def use(scratch: Path) -> None:
        export(run, scratch / "adapter", adapter=True)
        export(run, scratch / "whole", merge=True)
        chosen = choose(run, scratch, None, [])
        assert chosen.adapter is not None and (chosen.adapter / "adapter_config.json").read_bytes()
        is_read(Path(chosen.served.model.path))

    with going_on(run, content):
        done, errors = repeated(run, use, tmp_path / "scratch")
    assert done >= CALLS and not errors, errors


def test_an_old_step_or_version_is_gone_and_nothing_else(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Each of these numbers was there when it was asked for."""
    run, content = whole

    def use(scratch: Path) -> None:
        unreadable = dict[int, str]()
        versions = sorted(versions_of(run))
        for _, config in each_version(run, tmp_path, [], versions[1:], unreadable):
            is_read(Path(config.model.path))
        assert all(" is gone: " in text or "has no version" in text or " removed it " in text for text in unreadable.values())
        export(run, scratch / "out", newest(run))
        export_version(run, scratch / "version", max(versions))

    with going_on(run, content):
        done, errors = repeated(run, use, tmp_path / "scratch")
    right = ("has no checkpoint of step", " removed it while", " is gone: ", "has no version")
    assert done + len(errors) >= CALLS and not [error for error in errors if not any(each in error for each in right)]
