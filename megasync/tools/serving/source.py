"""The weights to serve, as a folder that vLLM loads, and the config that says how they are sampled from.

source = find_source(Path("runs/rl"), scratch, step=None, overrides=["rollout.replicas=2"])
source.config.model.path      # the folder: a checkpoint, one merged with its adapter, a version of the run's log, the first model
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.algorithm import AlgorithmConfig
from engine.config import DTYPE_BYTES, LoraConfig
from megasync.config.errors import ConfigError, nearest_name, refuse_if
from megasync.config.files import VERSIONS
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.models.folder import check_model_folder, read_json_object
from megasync.report.log import CONFIG_FILE
from megasync.tools.export.command import export_version, merge_base
from megasync.tools.export.find import checkpoints_of, hold, hold_weights, release, run_and_step

HF, ADAPTER = "hf", "adapter"


@dataclass(frozen=True)
class Source:
    """`config.model.path` is the folder of the weights; the rest of the config says how they are sampled from.

    `step`: of the run's weights, where they have one; `adapter`: the PEFT folder that was merged into them.
    """

    config: Config
    name: str
    is_of_run: bool
    step: int | None = None
    adapter: Path | None = None


@dataclass(frozen=True)
class Weights:
    """A folder that stays there, with a name for it; `step`, `adapter`: as in Source."""

    folder: Path
    name: str
    step: int | None
    adapter: Path | None = None


def find_source(target: Path, scratch: Path, step: int | None, overrides: list[str]) -> Source:
    """`target`: a run's folder, a checkpoint's, or one in the Hugging Face format, also one of a run or a checkpoint.

    `scratch`: a folder for new ones, such as an adapter merged with its base model. `step`: of a run, see `weights_of`.

    Raises:
        ConfigError: it is none of these, or its weights cannot be served.
    """
    place = _place_in_run(Path(os.path.realpath(target)), step)
    if place is not None:
        run, step, folder = place
        config = load_config(run / CONFIG_FILE, overrides)
        found = given_weights(run, folder, scratch, step) if folder else weights_of(run, config, scratch, step)
        return Source(to_serve(config, found.folder), f"{_short(run)}, {found.name}", True, found.step, found.adapter)
    refuse_if(step is not None, f"--step {step}: {target} is no run", remedy="leave --step out, or name a run's folder")
    _check_is_model(target)
    return Source(to_serve(_config_for(target, scratch, overrides), target), str(target), False)


def given_weights(run: Path, folder: Path, scratch: Path, step: int | None) -> Weights:
    """`folder`: hf of a run, or of its checkpoint of `step`."""
    held = folder if step is None else hold(folder.parent, scratch, run) / HF
    return Weights(held, _name(run, folder), step)


def weights_of(run: Path, config: Config, scratch: Path, step: int | None) -> Weights:
    """The weights after `step` steps: of a checkpoint, where it holds an adapter merged with the base model as `megasync export
    --merge` does; else of the run's log of versions. 0: the model that the run starts from. None: the newest checkpoint, or the
    run's final weights.

    Raises:
        ConfigError: the run has no such weights.
    """
    is_checkpoint = step is None or step in checkpoints_of(run)
    if step == 0 and not is_checkpoint and not config.engine.lora.adapter_path:
        return Weights(Path(config.model.path), "the model that it starts from", step)
    if step is not None and not is_checkpoint and (run / VERSIONS).is_dir():
        export_version(run, scratch / "version", step)
        return Weights(scratch / "version", f"version {step}", step)
    weights, held = hold_weights(run, scratch, step)
    step, adapter = run_and_step(weights.parent)[1], held.with_name(ADAPTER)
    if held.is_dir() or not adapter.is_dir():
        return Weights(held, _name(run, weights), step)
    merge_base(run, adapter, scratch / "merged")
    return Weights(scratch / "merged", "adapter merged", step, adapter)


def versions_of(run: Path) -> set[int]:
    """The versions of a run whose weights are there, checkpoints and log together; 0 is the model that it starts from."""
    found = {*checkpoints_of(run)}
    if not load_config(run / CONFIG_FILE).engine.lora.adapter_path:
        found.add(0)
    if (run / VERSIONS).is_dir():
        from bridge.versions.reader import VersionReader

        found |= set(VersionReader(run / VERSIONS).with_weights)
    return found


def each_version(
    run: Path, scratch: Path, overrides: list[str], versions: Iterable[int], unreadable: dict[int, str]
) -> Iterator[tuple[int, Config]]:
    """The configs to serve these versions, one after the other. A new folder lasts until the next one, that of the first, from
    which replicas have started, until the end. `unreadable`: takes versions that the run's log should have, and why it has not.

    Raises:
        ConfigError: none of them can be read; the error of the first one.
    """
    errors, num_served = list[ConfigError](), 0
    for version in versions:
        made = Path(tempfile.mkdtemp(dir=scratch))
        try:
            config = find_source(run, made, version, overrides).config
        except ConfigError as error:
            errors.append(error)
            unreadable[version] = str(error).splitlines()[0]
        else:
            yield version, config
            num_served += 1
        if num_served != 1:
            release(made)
            shutil.rmtree(made)
    if errors and not num_served:
        raise errors[0]


def _place_in_run(target: Path, step: int | None) -> tuple[Path, int | None, Path | None] | None:
    """The run that the folder is of, or in; the checkpoint's step; the weights, where they are given themselves.

    Raises:
        ConfigError: `step` is not that of the weights that `target` names.
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


def _check_is_model(target: Path) -> None:
    """ConfigError where it is no Hugging Face folder of a whole model."""
    if not target.is_dir():
        near = nearest_name(target.name, sorted(path.name for path in target.parent.glob("*/")))
        raise ConfigError(
            f"{target}: there is no such folder",
            nearest=str(target.parent / near) if near else "",
            remedy="name a run's folder, a checkpoint's or one in the Hugging Face format, on this machine",
        )
    remedy = "name the run or the checkpoint that it is of, or merge it: PeftModel.from_pretrained(...).merge_and_unload()"
    refuse_if((target / "adapter_config.json").is_file(), f"{target}: an adapter alone", remedy=remedy)
    if not (target / "config.json").is_file():
        holds = ", ".join(sorted(path.name for path in target.iterdir())[:12]) or "nothing"
        remedy = "name a run's folder (config.yaml), a checkpoint (step_...) or a Hugging Face folder (config.json)"
        raise ConfigError(f"{target}: neither a run, nor a checkpoint, nor a model", holds=holds, remedy=remedy)
    check_model_folder(target)


def _config_for(folder: Path, scratch: Path, overrides: list[str]) -> Config:
    """Its own dtype, its chat template where it has one."""
    fields = read_json_object(folder / "config.json")
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    tokenizer = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (
        tokenizer.is_file() and bool(read_json_object(tokenizer).get("chat_template"))
    )
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": dtype if dtype in DTYPE_BYTES else "bfloat16"},
        "data": {"chat_template": has_template},
    }
    path = scratch / CONFIG_FILE
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return load_config(path, overrides)


def to_serve(config: Config, weights: Path) -> Config:
    """Whole weights in model.dtype, on GPUs of their own, with nothing of the training."""
    rollout = {"dtype": "model", "placement": "separate", "max_staleness": 0, "on_update": "drain"}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(weights)}),
            "engine": config.engine.model_copy(update={"lora": LoraConfig()}),
            "algorithm": AlgorithmConfig(),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


def _name(run: Path, weights: Path) -> str:
    return "its final weights" if weights == run / HF else weights.parent.name


def _short(path: Path) -> str:
    """Below the current folder without it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
