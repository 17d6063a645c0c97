"""Which weights are compared, and how each side has them: a checkpoint of a run, or the model that it starts from.

chosen = choose(Path("runs/rl"), scratch, step=None, overrides=[])
chosen.served.model.path      # what the replica loads: whole, an adapter merged
chosen.engine_arguments       # what the trainer's model loads besides chosen.config.model.path
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import LoraConfig
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.export import checkpoints_of
from megasync.hf.folder import check_model_folder, read_json_object
from megasync.reporting.log import CONFIG_FILE
from megasync.serving.source import ADAPTER, HF, find_source, hold, is_of_log, to_serve

if TYPE_CHECKING:
    from megasync.comparing.cases import Adapter

MAX_FORMERS = 3


@dataclass(frozen=True)
class Chosen:
    """`config` is the trainer's. `base`: the folder that the trainer's linears have their weights of, beside the adapter."""

    config: Config
    served: Config
    name: str
    step: int | None
    base: Path
    adapter: Path | None = None
    formers: dict[str, Path] = field(default_factory=dict)  # other weights of the run, by what they are called

    @property
    def engine_arguments(self) -> dict[str, Path]:
        if self.adapter is not None:
            return {"adapter_path": self.adapter}
        return {"weights_path": self.base}


def choose(run: Path, scratch: Path, step: int | None, overrides: list[str]) -> Chosen:
    """
    Raises:
        ConfigError: it is no run, it has no such checkpoint, or the model is of a family whose modules are not known.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{run}: is no run: it holds no {CONFIG_FILE}", remedy="name a run's folder, such as runs/rl")
    config = load_config(run / CONFIG_FILE, overrides)
    found = checkpoints_of(run)
    is_trained = bool(step or (found and step is None))
    is_whole = not config.engine.lora.rank or is_of_log(run, step)  # a checkpoint of an adapter needs the model beside it
    refuse_if(
        is_trained and is_whole and any(each.startswith("model.path=") for each in overrides),
        f"model.path = {config.model.path}: the weights are those of {run}, step {step or max(found, default=0)}",
        remedy="leave it out, or compare the model that the run starts from by --step 0",
    )
    if step and is_of_log(run, step):
        return _of_log(run, config, scratch, step, overrides)
    if is_trained:
        chosen_step = step if step is not None else max(found)
        folder = found.get(chosen_step, run)
        adapter = hold(folder / ADAPTER, scratch, run) if (folder / ADAPTER).is_dir() else None
        source = find_source(run, scratch, chosen_step, overrides)
        step = chosen_step
        others = {} if adapter else {n: path / HF for n, path in found.items() if n != step}
        near = sorted(others, key=lambda n: abs(n - chosen_step))[:MAX_FORMERS]
        formers = {f"step {n}": hold(others[n], scratch, run) for n in near if others[n].is_dir()}
        base = Path(config.model.path if adapter else source.config.model.path)
        config = by_folder(config, base)
        chosen = Chosen(config, source.config, f"{run}, step {step}", step, base, adapter, formers)
    else:
        refuse_if(
            config.engine.lora.adapter_path,
            f"{run}: has no checkpoint, and starts from an adapter",
            remedy="train with checkpoint.every_steps above 0, and name its step",
        )
        base = Path(config.model.path)
        check_model_folder(base)
        chosen = Chosen(config, to_serve(config, base), f"{run}, the model that it starts from", 0, base)
    check_family(base)
    return chosen


def _of_log(run: Path, config: Config, scratch: Path, step: int, overrides: list[str]) -> Chosen:
    """A version of the run's log of versions: whole weights, adapters merged."""
    served = find_source(run, scratch, step, overrides).config
    base = Path(served.model.path)
    check_family(base)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"lora": LoraConfig()})})
    return Chosen(by_folder(config, base), served, f"{run}, version {step}", step, base)


def by_folder(config: Config, folder: Path) -> Config:
    """The trainer's model as the config.json beside its weights says: where the run had its model need not be there any more."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def check_family(folder: Path) -> None:
    """ConfigError where the modules of the model are not known one by one."""
    from engine.config import GEMMA, LATENT_FAMILIES, MOE_FAMILIES

    family = read_json_object(folder / "config.json").get("model_type")
    refuse_if(
        family in (*MOE_FAMILIES, *LATENT_FAMILIES, GEMMA),
        f"{folder}: model_type = {family!r}: its modules are not followed one by one",
        choices="llama, mistral, qwen2, qwen3",
        remedy="compare another model; sync.verify=readback compares the weights of any",
    )


def adapter_of(folder: Path | None) -> Adapter:
    """A, B and the scale of each linear of a PEFT folder."""
    from engine.peft.folder import read_fields, scale_of
    from megasync.hf.merge import factors_of

    if folder is None:
        return {}
    scale = scale_of(read_fields(folder))
    return {linear: (a, b, scale) for linear, (a, b) in factors_of(folder).items()}
