"""Full names, choices and bounds of keys, read from the pydantic models; and the nearest key to a misspelt one. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasync.config import others
from megasync.config.errors import nearest_name

SEPARATOR = re.compile(r"__|[/:]")  # of sections, as other programs write them
SHORT = 3  # letters; so short a name is similar to some key of any section, as `foo` to `floor`
ELSEWHERE = 0.75  # least similarity to a key of another section
ANYWHERE = ("dir", "limit", "name", "path", "split", "sync")  # last parts that are too common to match in an unknown section
ANY_NAME = "NAME"  # placeholder for a name that the user chooses, as in data.eval.NAME.path
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # attributes of annotated_types' constraints


@cache
def all_keys(root: type[BaseModel], prefix: str = "") -> Mapping[str, FieldInfo]:
    """The field of every key by its full name, in order; each section comes before its keys."""
    keys: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        keys[prefix + name] = field
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                full = prefix + name if part is field.annotation else f"{prefix}{name}.{ANY_NAME}"
                keys |= {full: keys.get(full) or FieldInfo.from_annotation(part), **all_keys(part, f"{full}.")}
    return keys


def with_any_name(keys: Iterable[str], path: Sequence[str]) -> list[str]:
    """The path with each name that the user chose replaced by ANY_NAME."""
    generic: list[str] = []
    for part in path:
        named = ".".join([*generic, ANY_NAME])
        generic.append(ANY_NAME if any(key.startswith(f"{named}.") for key in keys) else part)
    return generic


def below(keys: Iterable[str], section: str) -> list[str]:
    """Full names of the keys directly below a section; of the sections for an empty name."""
    return [key for key in keys if key.rpartition(".")[0] == section]


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def choices(field: FieldInfo) -> list[str]:
    """The allowed texts of a key with choices; empty for other keys."""
    return list(dict.fromkeys(part for part in _parts(field.annotation) if isinstance(part, str)))


def bounds(field: FieldInfo) -> str:
    """The range of a number as text, such as `at least 0 and below 1`."""
    constraints = list(field.metadata)
    for part in _parts(field.annotation):
        if get_origin(part) is Annotated:
            constraints += [each for one in part.__metadata__ for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
    found = [(name, getattr(one, name)) for one in constraints for name in BOUNDS if hasattr(one, name)]
    if kind_of(field) is int:
        found = [("ge", number + 1) if name == "gt" else (name, number) for name, number in found]
    return " and ".join(f"{BOUNDS[name]} {number}" for name, number in found)


def kind_of(field: FieldInfo) -> type:
    """The type that YAML should hold: bool, int, float, str, dict or list; for an optional value its type if it is not null."""
    kind: Any = field.annotation
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    return {Literal: str, tuple: list}.get(origin) or (origin if origin in (bool, int, float, str) else dict)


def takes_names(field: FieldInfo) -> bool:
    """Whether its value may be a mapping of names that the user chooses."""
    return any(get_origin(part) is dict for part in _parts(field.annotation))


def has_free_values(field: FieldInfo) -> bool:
    """Whether it is a mapping with values of any kind."""
    return any(get_origin(part) is dict and get_args(part)[1] is Any for part in _parts(field.annotation))


def item_of(field: FieldInfo) -> type:
    """The type of a list's items: int, float or str."""
    kinds: list[Any] = [field.annotation]
    while kinds:
        kind = kinds.pop()
        if kind in (int, float):
            return kind  # type: ignore[no-any-return]
        kinds += [] if get_origin(kind) is Literal else get_args(kind)
    return str


def nearest_key(keys: Iterable[str], unknown: str) -> tuple[str, str]:
    """(key, advice): the key that was probably meant, or advice if another project has the name and there is no such key here;
    both empty if nothing is similar.

    Tried in this order: a key of the same section, written with the section's name in it; a name of another project with at least
    two parts; a key with the same last part; a name of another project by its last part; a similar key of the same section; a key
    with a similar last part.
    """
    keys = list(keys)
    if (dotted := SEPARATOR.sub(".", unknown)) in keys:  # engine__wrap, engine/wrap
        return dotted, ""
    above, _, name = unknown.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in below(keys, above)}
    if any(found := _without_section(siblings, above.rpartition(".")[2], name)):
        return found
    found = others.meaning(unknown)
    is_section = bool(above) and name in keys  # then no key of another section is meant
    with_same = [key for key in keys if key.rpartition(".")[2] == name and (not is_section or key.startswith(f"{above}."))]
    if any(found) and (not above or found != others.meaning(name) or not with_same):
        return found
    if with_same:
        says_much = name not in ANYWHERE or not above or _is_ours(keys, above)
        return (nearest_name(unknown, with_same) or min(with_same, key=len)) if says_much else "", ""
    if is_section or (near := nearest_name(name, siblings)):
        return "" if is_section else siblings[near], ""
    elsewhere = [key for key in reversed(keys) if "." in key or not above]  # a whole section is no misspelling of a section's key
    by_last = {last: key for key in elsewhere if (last := key.rpartition(".")[2]) != ANY_NAME}
    return by_last.get(nearest_name(name, by_last, ELSEWHERE), "") if len(name) > SHORT else "", ""


def _without_section(siblings: Mapping[str, str], section: str, name: str) -> tuple[str, str]:
    """Like `nearest_key`, for a name that repeats its section's, such as checkpoint.checkpoint_every_steps."""
    rest = "_".join(part for part in name.split("_") if part != section)
    if not rest or rest == name:
        return "", ""
    near = difflib.get_close_matches(rest, siblings, 1, ELSEWHERE)
    return (siblings[near[0]], "") if near else others.meaning(f"{section}.{rest}")


def _is_ours(keys: Sequence[str], section: str) -> bool:
    """Whether the config has this section, or a section with a similar name."""
    sections = {key.rpartition(".")[0] for key in keys}
    return section in sections or bool(nearest_name(section, [each for each in sections if "." not in each]))
