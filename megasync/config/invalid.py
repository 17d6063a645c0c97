"""What pydantic finds wrong in a config, in words that name key, value, source, what is allowed and the remedy. No torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megasync.config.errors import ConfigError, explain, nearest_name
from megasync.config.keys import all_keys, bounds, choices, full_name, kind_of, nearest_key, section_at

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping of names to values",
    list: "a list of texts",
}
EXAMPLES = {bool: "true", int: "8", float: "0.5", str: "some-text"}
OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
ELSEWHERE = {"bench": "python -m megasync.bench", "bench_train": "python -m megasync.bench train"}  # sections of other commands


def explain_invalid(error: ValidationError, root: type[BaseModel], sources: Mapping[tuple[str, ...], str]) -> ConfigError:
    """The first thing that is wrong, unknown keys before others."""
    found = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    path = tuple(part for part in found["loc"] if isinstance(part, str))
    given = [source for length in range(len(path) + 1) if (source := sources.get(path[:length]))]
    source = given[-1] if given else "the defaults"
    if found["type"] == "extra_forbidden":
        return _unknown_key(root, path, found["input"], source)
    key = ".".join(path)
    field = all_keys(root).get(key)
    if field is None:  # a section
        inside = next(full for full in all_keys(root) if full.startswith(f"{key}."))
        return _wrong_type(key, found["input"], KINDS[dict], source, remedy=f"set for example {inside}=...")
    return _bad_value(key, field, found, source)


def _unknown_key(root: type[BaseModel], path: tuple[str, ...], value: object, source: str) -> ConfigError:
    above, full = path[:-1], full_name(path[:-1], path[-1], value)
    section = section_at(root, above) or root
    nearest = nearest_key(root, full)
    remedy = f"write {nearest} instead" if nearest else "take the key out, or write one of the choices"
    if path[0] in ELSEWHERE:
        nearest, remedy = "", f"take {path[0]} out: a run does without it; {ELSEWHERE[path[0]]} --config FILE reads it"
    siblings = ", ".join(".".join((*above, sibling)) for sibling in section.model_fields)
    message = f"{'.'.join(full)}: there is no such key"
    return ConfigError(explain(message, given_in=source, nearest=nearest, choices=siblings, remedy=remedy))


def _wrong_type(key: str, value: object, expected: str, source: str, *, remedy: str, allowed: str = "") -> ConfigError:
    message = f"{key} = {reprlib.repr(value)}: {expected} is expected"
    return ConfigError(explain(message, given_in=source, choices=allowed, remedy=remedy))


def _bad_value(key: str, field: FieldInfo, found: ErrorDetails, source: str) -> ConfigError:
    value, context, allowed, kind = found["input"], found.get("ctx", {}), choices(field), kind_of(field)
    if found["type"] in OUT_OF_RANGE:
        lines = {"allowed": bounds(field), "remedy": f"write a number {bounds(field)}"}
        return ConfigError(explain(f"{key} = {value}: out of range", given_in=source, **lines))
    if found["type"] == "literal_error" and isinstance(value, str):
        near = nearest_name(value, allowed)
        lines = {"choices": ", ".join(allowed), "nearest": near, "remedy": f"write {key}={near or allowed[0]}"}
        return ConfigError(explain(f"{key} = {reprlib.repr(value)}: not one of the choices", given_in=source, **lines))
    if "example" in context:  # from a validator of ours, which says what it expects
        remedy = f"write for example {key}={context['example']}"
        message = f"{key} = {value!r}: {found['msg']}"
        return ConfigError(explain(message, given_in=source, choices=context["choices"], remedy=remedy))
    example = f"[{', '.join(allowed)}]" if kind is list else allowed[0] if allowed else _example(kind, value)
    remedy = f"write for example {key}={example}" if example else f"set for example {key}.NAME=..."
    return _wrong_type(key, value, KINDS[kind], source, remedy=remedy, allowed=", ".join(allowed))


def _example(kind: type, value: Any) -> str:
    is_whole = kind is int and isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if is_whole else EXAMPLES.get(kind, "")
