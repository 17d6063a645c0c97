"""What the pydantic models say of a key: full name, choices, bounds; and which key is nearest to a misspelt one. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasync.config.errors import nearest_name

ALIASES = {  # other projects' names, by the last part of ours
    "batch": "batch_size", "bs": "batch_size", "cp": "context", "ep": "expert", "lr": "learning_rate", "n": "group_size",
    "max_tokens": "max_new_tokens", "num_generations": "group_size", "output_dir": "dir", "pp": "pipeline", "sp": "sequence",
    "temp": "temperature", "tp": "tensor",
}  # fmt: skip
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # attributes of annotated_types' constraints


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a key that holds further keys."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def all_keys(root: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every value's field by its full key, in order."""
    keys: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        section = section_of(field)
        keys |= all_keys(section, f"{prefix}{name}.") if section else {prefix + name: field}
    return keys


def section_at(root: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel] | None:
    """The model whose keys are below `path`."""
    section: type[BaseModel] | None = root
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = section_of(field) if field else None
    return section


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
    words = {name: f"{word} {getattr(one, name)}" for one in constraints for name, word in BOUNDS.items() if hasattr(one, name)}
    return " and ".join(words.values())


def kind_of(field: FieldInfo) -> type:
    """What is expected in YAML: bool, int, float, str, dict or list; of an optional value what it is when it is there."""
    kind: Any = field.annotation
    while get_origin(kind) in (Annotated, Union):
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    return str if origin is Literal else list if origin is tuple else origin


def full_name(above: tuple[str, ...], name: str, value: object) -> tuple[str, ...]:
    """The path of an unknown key, on to the value that it holds where that is one alone: optimizer: {lr: 1} is optimizer.lr."""
    path = (*above, name)
    while isinstance(value, Mapping) and len(value) == 1:
        ((inner, value),) = value.items()
        path = (*path, str(inner))
    return path


def nearest_key(root: type[BaseModel], path: tuple[str, ...]) -> str:
    """The key that was probably meant by the unknown `path`; empty when none is near.

    In this order: a key with the same last part, a sibling, another project's name for a key, one near as a whole or in its last
    part.
    """
    above, name, full, keys = path[:-1], path[-1], ".".join(path), list(all_keys(root))
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    section = section_at(root, above)
    if name in by_last:
        same = [key for key in keys if key.endswith(f".{name}")]
        return nearest_name(full, same) or same[0]
    if name in ALIASES and not (section and above and nearest_name(name, section.model_fields)):
        return by_last[ALIASES[name]]
    if section and (near := nearest_name(name, section.model_fields)):
        return ".".join((*above, near))
    return nearest_name(full, keys) or by_last.get(nearest_name(name, by_last), "")
