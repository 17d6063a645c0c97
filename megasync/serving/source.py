"""Which weights are served, and by which config they are asked: a run's own, or one made for a Hugging Face folder.

source = find_source(Path("runs/rl"), scratch, step=None, overrides=["rollout.replicas=2"])
source.config.model.path      # the folder that vLLM loads
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from engine.config import DTYPE_BYTES, AlgorithmConfig, LoraConfig
from megasync.config.errors import ConfigError, nearest_name, refuse_if
from megasync.config.files import CHECKPOINTS, METRICS_FILE, VERSIONS, lock_holder
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.export import checkpoints_of, export, export_version, find_weights, run_and_step
from megasync.hf.folder import check_model_folder, read_json_object
from megasync.reporting.log import CONFIG_FILE, read_metrics

if TYPE_CHECKING:
    from bridge.versions.reader import VersionReader

HF, ADAPTER = "hf", "adapter"


@dataclass(frozen=True)
class Source:
    """`config.model.path` is the folder of the weights; the rest of the config says how they are asked."""

    config: Config
    name: str
    is_of_run: bool


def find_source(target: Path, scratch: Path, step: int | None, overrides: list[str]) -> Source:
    """`target`: a run's folder, a checkpoint's, or one in the Hugging Face format, also one of a run or a checkpoint.

    `scratch`: a folder for what is made on the way, such as an adapter merged with its base model.

    Raises:
        ConfigError: it is none of these, or what it holds cannot be served.
    """
    place = _place_in_run(target.resolve(), step)
    if place is not None:
        run, step, folder = place
        config = load_config(run / CONFIG_FILE, overrides)
        weights = folder or _weights_of(run, step, scratch)
        held = hold(weights, scratch, run) if weights.is_relative_to(run / CHECKPOINTS) else weights
        name = "its final weights" if weights == run / HF else weights.parent.name
        if weights.parent == scratch:
            name = f"version {step}" if is_of_log(run, step) else "adapter merged"
        return Source(to_serve(config, held), f"{_short(run)}, {name}", True)
    if step is not None:
        raise ConfigError(f"--step {step}: {target} is no run", remedy="leave --step out, or name a run's folder")
    if not target.is_dir():
        there = sorted(path.name for path in target.parent.glob("*/")) if target.parent.is_dir() else []
        near = nearest_name(target.name, there)
        raise ConfigError(
            f"{target}: there is no such folder",
            nearest=str(target.parent / near) if near else "",
            remedy="name a run's folder, a checkpoint's or one in the Hugging Face format, on this machine",
        )
    if (target / "adapter_config.json").is_file():
        remedy = "name the run or the checkpoint that it is of, or merge it: PeftModel.from_pretrained(...).merge_and_unload()"
        raise ConfigError(f"{target}: an adapter alone", remedy=remedy)
    if not (target / "config.json").is_file():
        holds = ", ".join(sorted(path.name for path in target.iterdir())[:12]) or "nothing"
        remedy = "name a run's folder (config.yaml), a checkpoint (step_...) or a Hugging Face folder (config.json)"
        raise ConfigError(f"{target}: neither a run, nor a checkpoint, nor a model", holds=holds, remedy=remedy)
    check_model_folder(target)
    return Source(to_serve(_config_for(target, scratch, overrides), target), str(target), False)


def source_of_version(run: Path, scratch: Path, version: int, overrides: list[str]) -> Source:
    """The weights that `version` steps made: those of that checkpoint, or of the run's log of versions; before the first step the
    model folder's, but with an adapter to start from the log's. Of what is made in `scratch` the first, with which replicas have
    started, stays, and the last.
    """
    for path in sorted(scratch.glob("version_*"), key=lambda path: path.stat().st_mtime_ns)[1:]:
        _release(path)
        shutil.rmtree(path)
    made = scratch / f"version_{version}"
    made.mkdir()
    if version in checkpoints_of(run):
        return find_source(run, made, version, overrides)
    config = load_config(run / CONFIG_FILE, overrides)
    is_folder = version == 0 and not config.engine.lora.adapter_path
    weights = Path(config.model.path) if is_folder else made / HF
    if not is_folder:
        export_version(run, weights, version)
    return Source(to_serve(config, weights), f"{_short(run)}, version {version}", True)


def hold(folder: Path, scratch: Path, run: Path) -> Path:
    """The folder of a checkpoint; while its `run` goes on, which removes some, another one below `scratch` with the same files.

    They last until this process ends: links to those that it has opened, whose names may be gone.

    Raises:
        ConfigError: the folder has been removed.
    """
    if lock_holder(run) is None:
        return folder
    held = Path(tempfile.mkdtemp(prefix="held_", dir=scratch))
    for path in sorted(folder.parent.glob(f"{folder.name}/*")):
        try:
            opened = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            break
        (held / path.name).symlink_to(f"/proc/{os.getpid()}/fd/{opened}")
    if not folder.is_dir():
        remedy = "run the command again, or raise the run's checkpoint.keep"
        raise ConfigError(f"{folder}: was removed by the run, which goes on, while it was opened", remedy=remedy)
    return held


def _release(folder: Path) -> None:
    """What is held below the folder."""
    for path in folder.glob("held_*/*"):
        os.close(int(path.readlink().name))


def versions_there(run: Path) -> set[int]:
    """The versions that `source_of_version` has the weights of."""
    has_folder = not load_config(run / CONFIG_FILE).engine.lora.adapter_path
    return {*checkpoints_of(run), *([0] if has_folder else []), *_logged(run)}


def _logged(run: Path) -> list[int]:
    """The versions that its log has weights of, whatever `sync.log` it went on with."""
    log = _log_of(run)
    return log.with_weights if log is not None else []


def _log_of(run: Path) -> VersionReader | None:
    if not (run / VERSIONS).is_dir():
        return None
    from bridge.versions.reader import VersionReader

    return VersionReader(run / VERSIONS)


class Weights:
    """Those of a run's versions, one after the other. `missing`: those that the log should have and cannot give, and why.
    `unlogged`: those of between logged ones that were never written into it, as `sync.log` was off.
    """

    def __init__(self, run: Path, scratch: Path, overrides: list[str], needed: Iterable[int]) -> None:
        self._run, self._scratch, self._overrides = run, scratch, overrides
        self.missing, self.unlogged = _lost(run, needed)

    def each(self, versions: Iterable[int]) -> Iterator[tuple[int, Config]]:
        """
        Raises:
            ConfigError: none can be made; of the first one.
        """
        first, is_any = None, False
        for version in versions:
            try:
                config = source_of_version(self._run, self._scratch, version, overrides=self._overrides).config
            except ConfigError as error:
                shutil.rmtree(self._scratch / f"version_{version}")
                self.missing[version], first = str(error).splitlines()[0], first or error
                continue
            is_any = True
            yield version, config
        if first is not None and not is_any:
            raise first


def _lost(run: Path, needed: Iterable[int]) -> tuple[dict[int, str], list[int]]:
    """Of these versions those between others of the log that are not there, and why; and those that never were, with `sync.log`
    off. What it has by digests alone is no loss.
    """
    log = _log_of(run)
    if log is None or not (logged := log.with_weights):
        return {}, []
    kept = versions_there(run) | set(log.versions)
    gaps = [version for version in sorted(needed) if version not in kept and min(logged) < version < max(logged)]
    was_logged = _was_logged(run) if gaps else {}
    no_file = "the run's log has no file of it, but earlier and later ones"
    unknown = f"{no_file}: it is lost, or sync.log was off then ({METRICS_FILE} does not tell)"
    lost = {version: no_file if version in was_logged else unknown for version in gaps if was_logged.get(version, True)}
    return lost, [version for version in gaps if version not in lost]


def _was_logged(run: Path) -> dict[int, bool]:
    """By version, as the metrics of the step that made it tell; nothing of those that they say nothing of."""
    try:
        lines = read_metrics(run)
    except ValueError:
        return {}
    return {line["step"]: "sync/log_seconds" in line for line in lines if "sync/seconds" in line}


def _place_in_run(target: Path, step: int | None) -> tuple[Path, int | None, Path | None] | None:
    """The run that the folder is of, or in; the checkpoint's step; the weights, where they are given themselves.

    Raises:
        ConfigError: `step` is another than that of the weights that `target` names.
    """
    folder = target if target.name == HF else None
    inner = target.parent if target.name in (HF, ADAPTER) else target
    run, own = run_and_step(inner)
    if not (run / CONFIG_FILE).is_file():
        return None
    message = f"--step {step}: {target} names the weights itself"
    remedy = f"leave --step out, or name the run: {_short(run)} --step {step}"
    refuse_if(step is not None and step != own and (own is not None or folder is not None), message, remedy=remedy)
    return run, step if own is None else own, folder


def _weights_of(run: Path, step: int | None, scratch: Path) -> Path:
    """A checkpoint of an adapter becomes one of the whole model, as the replicas of a run have it (megasync export --merge).

    A step without a checkpoint is made of the run's log of versions, where it has one.
    """
    if is_of_log(run, step):
        export_version(run, scratch / "version", step or 0)
        return scratch / "version"
    weights = find_weights(run, step)
    if weights.is_dir() or not weights.with_name(ADAPTER).is_dir():
        return weights
    merged = scratch / "merged"
    export(run, merged, step, merge=True)
    return merged


def is_of_log(run: Path, step: int | None) -> bool:
    """Whether the weights of a step come out of the run's log of versions: it has no checkpoint of it."""
    return step is not None and step not in checkpoints_of(run) and (run / VERSIONS).is_dir()


def _config_for(folder: Path, scratch: Path, overrides: list[str]) -> Config:
    """Its own dtype, its chat template where it has one."""
    told = read_json_object(folder / "config.json")
    dtype = told.get("dtype") or told.get("torch_dtype")
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": dtype if dtype in DTYPE_BYTES else "bfloat16"},
        "data": {"chat_template": _has_template(folder)},
    }
    path = scratch / CONFIG_FILE
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return load_config(path, overrides)


def _has_template(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (path.is_file() and bool(read_json_object(path).get("chat_template")))


def to_serve(config: Config, weights: Path) -> Config:
    """Whole weights, on GPUs of their own, with nothing of the training."""
    rollout = {"placement": "separate", "max_staleness": 0, "on_update": "drain"}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(weights)}),
            "engine": config.engine.model_copy(update={"lora": LoraConfig()}),
            "algorithm": AlgorithmConfig(),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


def _short(path: Path) -> str:
    """Below the current folder without it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
