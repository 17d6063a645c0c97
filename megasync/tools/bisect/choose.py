"""Which weights are compared, and how each side has them: a checkpoint of a run, or the model that it starts from.

chosen = choose(Path("runs/rl"), scratch, step=None, overrides=[])
chosen.served.model.path      # the replica's folder: whole, an adapter merged
chosen.base, chosen.adapter   # the trainer's folders
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import PLAIN_FAMILIES, LoraConfig
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.models.folder import check_model_folder, is_vision_language, model_fields
from megasync.report.log import CONFIG_FILE
from megasync.tools.export.find import checkpoints_of
from megasync.tools.serving.source import find_source
from model_folder.layout import read_model_type


@dataclass(frozen=True)
class Chosen:
    """`config` is the trainer's, `served` the replica's. `adapter`: a PEFT folder that the trainer adds to `base`."""

    config: Config
    served: Config
    name: str
    step: int
    base: Path
    adapter: Path | None = None


def choose(run: Path, scratch: Path, step: int | None, overrides: list[str]) -> Chosen:
    """`step`: None for the newest checkpoint, where there is none 0: the model that the run starts from.

    Raises:
        ConfigError: it is no run, it has no such weights, or the modules of the model's family are not known one by one.
    """
    refuse_if(not (run / CONFIG_FILE).is_file(), f"{run}: is no run: it holds no {CONFIG_FILE}", remedy="name a run's folder")
    config = load_config(run / CONFIG_FILE, overrides)
    source = find_source(run, scratch, step if step is not None or checkpoints_of(run) else 0, overrides)
    adapter = source.adapter
    refuse_if(
        source.step and adapter is None and any(each.startswith("model.path=") for each in overrides),
        f"model.path = {config.model.path}: the weights are those of {run}, step {source.step}",
        remedy="leave it out, or compare the model that the run starts from by --step 0",
    )
    base = Path(config.model.path if adapter else source.config.model.path)
    check_model_folder(base)
    check_family(base)
    if adapter is None:
        model = config.model.model_copy(update={"path": str(base)})  # where the run had its model may be gone by now
        engine = config.engine.model_copy(update={"lora": LoraConfig()})
        config = config.model_copy(update={"model": model, "engine": engine})
    return Chosen(config, source.config, source.name, source.step or 0, base, adapter)


def check_family(folder: Path) -> None:
    family = model_fields(folder).get("model_type")
    if is_vision_language(folder) or family not in PLAIN_FAMILIES:
        raise ConfigError(
            f"{folder}: model_type = {read_model_type(folder)!r}: its modules are not followed one by one",
            choices=", ".join(PLAIN_FAMILIES),
            remedy="compare another model; sync.verify=readback compares the weights of any",
        )
