"""Loggers beside the run's own files: TensorBoard, W&B, trackio, and the user's own. Each gets config, metrics, and samples.

W&B runs offline, in the run's folder, if it finds no API key and WANDB_MODE is not set; trackio is local. Both are optional:
`run.loggers` selects them. Each class imports its package. Leaves out the run's own files (log.py).

    loggers = open_loggers(config, first_step=0)
    for logger in loggers:
        logger.metrics(1, {"reward/mean": 0.4})
"""

from __future__ import annotations

import inspect
import netrc
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

import yaml  # type: ignore[import-untyped]

from engine.config import is_own
from megasync.config.errors import ConfigError
from megasync.config.files import write_atomically
from megasync.config.named import own_object
from megasync.config.schema import Config

PROJECT = "megasync"
COLUMNS = ("step", "set", "prompt", "response", "answer", "reward", "tokens", "finish_reason")  # of the table of samples
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # the second from wandb 0.31 on (sdk/lib/urls.py:7)
WANDB_ID_FILE, TRACKIO_ID_FILE = "wandb_id", "trackio_id"  # in the run's folder: a resumed run continues with the same id


class Logger(Protocol):
    """Receives metrics and samples of a run; `step` is the number of finished steps."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


METHODS = {"metrics": ["step", "values"], "samples": ["step", "lines"], "close": []}  # of a Logger, with their arguments
WANTED = "a class with the constructor (config, first_step) and the methods of Logger (megasync/report/loggers.py)"


def missing_loggers(names: Sequence[str]) -> list[str]:
    """Names of loggers of ours whose package is not installed. A folder of that name, such as W&B creates, is not a package."""
    found = {name: find_spec(name) for name in names if not is_own(name)}
    return [name for name, spec in found.items() if spec is None or spec.origin is None]


def resolve_logger(path: str) -> Callable[[Config, int], Logger]:
    """The user's own class. ConfigError where it cannot be imported, or lacks a method."""
    logger = own_object("run.loggers", path, WANTED, ["config", "first_step"])
    for name, arguments in METHODS.items():
        try:
            inspect.signature(getattr(logger, name)).bind("self", *arguments)
        except (AttributeError, TypeError) as error:
            problem = f"{name}({', '.join(arguments)}): {error}"
            raise ConfigError(f"run.loggers = {path}: {problem}", remedy=f"name {WANTED}") from error
    return logger  # type: ignore[no-any-return]


def open_loggers(config: Config, first_step: int) -> list[Logger]:
    """Opens the loggers of `run.loggers`; `first_step`: as in RunLog.

    Raises:
        ConfigError: a logger does not start, such as W&B with an unknown API key.
    """
    kinds: dict[str, Callable[[Config, int], Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
    opened: list[Logger] = []
    with ExitStack() as not_all:
        for name in config.run.loggers:
            try:
                opened.append((kinds.get(name) or resolve_logger(name))(config, first_step))
            except OSError:  # such as a full disk; the run reports it
                raise
            except Exception as error:  # the packages raise exceptions of many classes
                settings = " in its settings, such as WANDB_MODE or WANDB_API_KEY" if name == "wandb" else ""
                remedy = f"correct the problem{settings}, or remove {name} from run.loggers"
                raise ConfigError(f"run.loggers: {name} does not start: {error}", remedy=remedy) from error
            not_all.callback(opened[-1].close)
        not_all.pop_all()
    return opened


def rows_of(step: int, lines: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The rows of a table of samples, in the order of COLUMNS."""
    return [[step, *(line.get(column) for column in COLUMNS[1:])] for line in lines]


class TensorBoard:
    """Scalars; config and samples as texts, in Markdown."""

    def __init__(self, config: Config, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(config.run.folder), purge_step=first_step + 1)
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        self._writer.add_text("config", f"```\n{text}\n```", first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        head = [COLUMNS, ["---"] * len(COLUMNS)]
        rows = [[str(value).replace("\n", "<br>").replace("|", "\\|") for value in row] for row in rows_of(step, lines)]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows)), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """The x axis is the metric `step`: unlike W&B's own step it may decrease when a run resumes from a checkpoint."""

    def __init__(self, config: Config, first_step: int) -> None:
        import wandb

        folder, run = config.run.folder, config.run
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=_own_id(folder / WANDB_ID_FILE, first_step),
            resume="allow" if first_step else None,
            dir=str(folder),
            mode=wandb_mode(os.environ),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        rows = [[None if value is None else str(value) for value in row] for row in rows_of(step, lines)]
        self._run.log({"step": step, "samples": self._table(columns=list(COLUMNS), data=rows)})

    def close(self) -> None:
        self._run.finish()


def wandb_mode(environment: Mapping[str, str]) -> Literal["offline"] | None:
    """offline if the user has neither set WANDB_MODE nor an API key; else None, and W&B chooses."""
    if environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY"):
        return None
    path = Path(environment.get("NETRC") or Path.home() / ".netrc")
    base = environment.get("WANDB_BASE_URL")
    hosts = (urlparse(base).hostname or "",) if base else WANDB_HOSTS
    try:
        has_key = path.is_file() and any(map(netrc.netrc(path).authenticators, hosts))
    except netrc.NetrcParseError:  # W&B finds no key in such a file either
        has_key = None
    return None if has_key else "offline"


def _own_id(path: Path, first_step: int) -> str:
    """The id in the file; a new one for a run that does not resume."""
    if not (first_step and path.is_file()):
        write_atomically(path, uuid.uuid4().hex[:12] + "\n")
    return path.read_text(encoding="utf-8").strip()


def trackio_name(config: Config, first_step: int) -> str:
    """run.name with an id, since trackio identifies runs by name: a resumed run continues, and equal names do not collide."""
    return f"{config.run.name}-{_own_id(config.run.folder / TRACKIO_ID_FILE, first_step)}"


class Trackio:
    """A local project; `trackio show --project megasync` serves it."""

    def __init__(self, config: Config, first_step: int) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=PROJECT,
            name=trackio_name(config, first_step),
            resume="allow" if first_step else "never",
            config=config.model_dump(mode="json"),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({"samples": self._table(columns=list(COLUMNS), data=rows_of(step, lines))}, step=step)

    def close(self) -> None:
        self._run.finish()
