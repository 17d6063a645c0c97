"""A case: a tiny model, a layout, and the keys that make its run's config. No torch in here.

The config goes through the check that every run's goes through; what that refuses is unsupported, with the check's own reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from bench.config import BenchRoot
from engine.config import FAMILIES
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.checks.check import check_config
from megasync.config.errors import ConfigError, nearest_name
from megasync.config.load import with_changes
from megasync.config.schema import Config

Keys = dict[str, Any]
WRAPS = tuple(SHARDS_PARAMETERS)
WHAT_IS_COMPUTED = ("algorithm.", "engine.lora.", "engine.balance")  # keys that a case's reference has, too
NUM_LAYERS = 4  # of the tiny models
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


class Layout(NamedTuple):
    """`keys`: of engine.parallel; data parallelism takes the ranks that are left."""

    title: str
    num_ranks: int
    keys: dict[str, Any]


ONE = "one"
LAYOUTS = {name: Layout(**fields) for name, fields in TABLES["layouts"].items()}


def layout_keys(layout: str, wrap: str) -> Keys:
    """Full keys."""
    return {"engine.wrap": wrap, **{f"engine.parallel.{name}": value for name, value in LAYOUTS[layout].keys.items()}}


@dataclass(frozen=True)
class Model:
    """A tiny model. `tied`: None, as its family's table in models.py has it."""

    family: str
    tied: bool | None = None
    num_layers: int = NUM_LAYERS

    @property
    def name(self) -> str:
        tied = "" if self.tied is None else "_tied" if self.tied else "_untied"
        return self.family + tied + (f"_{self.num_layers}_layers" if self.num_layers != NUM_LAYERS else "")


@dataclass(frozen=True)
class Case:
    """`layout`: one of LAYOUTS, or empty. `keys` by full names, those of the layout and the wrap among them."""

    model: Model
    layout: str
    num_ranks: int
    keys: Keys = field(hash=False)

    @property
    def wrap(self) -> str:
        return str(self.keys["engine.wrap"])

    @property
    def data_size(self) -> int:
        sizes = [int(self.keys.get(f"engine.parallel.{name}", 1)) for name in ("tensor", "pipeline", "context")]
        return self.num_ranks // (sizes[0] * sizes[1] * sizes[2])

    @property
    def name(self) -> str:
        shown = f"{self.layout} {self.wrap}" if self.layout else " ".join(f"{key}={value}" for key, value in self.keys.items())
        return f"{self.model.name} {shown}" + ("" if self.layout else f" on {self.num_ranks} ranks")

    @property
    def reference(self) -> Case:
        """The same on one rank with DDP."""
        kept = {key: value for key, value in self.keys.items() if key.startswith(WHAT_IS_COMPUTED)}
        return Case(self.model, ONE, 1, {**layout_keys(ONE, "ddp"), **kept})


def table(config: BenchRoot) -> list[Case]:
    """Every chosen family in every chosen layout under every chosen wrap; the references, on one rank, come first."""
    chosen = config.bench_equivalence
    families = _chosen("families", chosen.families, FAMILIES)
    layouts = _chosen("layouts", chosen.layouts, tuple(LAYOUTS))
    wraps = _chosen("wraps", chosen.wraps, WRAPS)
    cases = [
        Case(Model(family), layout, LAYOUTS[layout].num_ranks, layout_keys(layout, wrap))
        for layout, family, wrap in product(layouts, families, wraps)
    ]
    return sorted(cases, key=lambda case: case.num_ranks)


def read_back_families(config: BenchRoot) -> tuple[str, ...]:
    """The families of `bench_equivalence.vllm`."""
    names = config.bench_equivalence.vllm
    return () if names == ("none",) else _chosen("vllm", names, FAMILIES, "all", "none")


def _chosen(key: str, names: Sequence[str], known: Sequence[str], *others: str) -> tuple[str, ...]:
    """In the order of `known`. ConfigError: a name is none of these."""
    choices = (*(others or ("all",)), *known)
    for name in (name for name in names if name not in (*known, "all")):
        remedy = f"write bench_equivalence.{key}=[{nearest_name(name, choices) or 'all'}]"
        message = f"bench_equivalence.{key}: {name!r} is not among the choices"
        raise ConfigError(message, choices=", ".join(choices), remedy=remedy)
    return tuple(name for name in known if name in names or "all" in names)


def case_config(config: BenchRoot, case: Case, model_path: Path, tokens_per_microbatch: int) -> Config:
    """The config of a run with the case's keys.

    Raises:
        ValueError: a value that no config has.
    """
    own: Keys = {"model.path": str(model_path), "engine.tokens_per_microbatch": tokens_per_microbatch}
    own["run.steps"] = config.bench_equivalence.steps
    plain = Config(**{section: getattr(config, section) for section in Config.model_fields})
    return with_changes(plain, own | case.keys)


def refusal(config: Config, num_ranks: int) -> str:
    """The first line of what the check of a run's config says; empty where it can run."""
    try:
        check_config(config, num_ranks, needs_data=False)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""
