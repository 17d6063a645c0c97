"""What the pydantic models say of a key: full name, choices, bounds; and which key is nearest to a misspelt one. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasync.config.errors import nearest_name

ALIASES = {  # other projects' names, by the last part of ours
    "batch": "batch_size", "bs": "batch_size", "cp": "context", "ep": "expert", "lr": "learning_rate", "n": "group_size",
    "max_tokens": "max_new_tokens", "num_generations": "group_size", "output_dir": "dir", "pp": "pipeline", "sp": "sequence",
    "temp": "temperature", "tp": "tensor", "vpp": "virtual_pipeline",
}  # fmt: skip
ANY_NAME = "NAME"  # stands for a name that the config gives, in keys below a mapping of such names
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # attributes of annotated_types' constraints


def all_keys(root: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key by its full name, in order; a section before what is in it."""
    keys: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        keys[prefix + name] = field
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                full = prefix + name if part is field.annotation else f"{prefix}{name}.{ANY_NAME}"
                keys |= {full: keys.get(full) or FieldInfo.from_annotation(part), **all_keys(part, f"{full}.")}
    return keys


def with_any_name(keys: Iterable[str], path: Sequence[str]) -> list[str]:
    """The path with ANY_NAME in the place of a name that the config gives."""
    generic: list[str] = []
    for part in path:
        named = ".".join([*generic, ANY_NAME])
        generic.append(ANY_NAME if any(key.startswith(f"{named}.") for key in keys) else part)
    return generic


def below(keys: Iterable[str], section: str) -> list[str]:
    """Full names of the keys right below a section, or at the top for an empty name."""
    return [key for key in keys if key.rpartition(".")[0] == section]


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def choices(field: FieldInfo) -> list[str]:
    """The texts that a value may be; empty where it is free."""
    return list(dict.fromkeys(part for part in _parts(field.annotation) if isinstance(part, str)))


def bounds(field: FieldInfo) -> str:
    """The range of a number in words, such as `at least 0 and below 1`."""
    constraints = list(field.metadata)
    for part in _parts(field.annotation):
        if get_origin(part) is Annotated:
            constraints += [each for one in part.__metadata__ for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
    found = [(name, getattr(one, name)) for one in constraints for name in BOUNDS if hasattr(one, name)]
    if kind_of(field) is int:
        found = [("ge", number + 1) if name == "gt" else (name, number) for name, number in found]
    return " and ".join(f"{BOUNDS[name]} {number}" for name, number in found)


def kind_of(field: FieldInfo) -> type:
    """What YAML should hold: bool, int, float, str, dict or list; of an optional value what it is when it is there."""
    kind: Any = field.annotation
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    return {Literal: str, tuple: list}.get(origin) or (origin if origin in (bool, int, float, str) else dict)


def nearest_key(keys: Iterable[str], unknown: str) -> str:
    """The key that was probably meant; empty when none is near.

    In this order: a key with the same last part, a sibling, another project's name for a key, one near as a whole or in its last
    part.
    """
    above, _, name = unknown.rpartition(".")
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(keys))}
    siblings = {key.rpartition(".")[2]: key for key in below(keys, above)}
    if name in by_last:
        return nearest_name(unknown, [key for key in keys if key.endswith(f".{name}")]) or by_last[name]
    if (near := nearest_name(name, siblings)) and (above or name not in ALIASES):
        return siblings[near]
    if name in ALIASES:
        return by_last[ALIASES[name]]
    return nearest_name(unknown, keys) or by_last.get(nearest_name(name, by_last), "")
