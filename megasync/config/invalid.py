"""What pydantic finds wrong in a config, in words that name key, value, source, what is allowed and the remedy. No torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.keys import ADVICE, ANY_NAME, all_keys, below, bounds, choices, item_of, kind_of, nearest_key, with_any_name

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping of names to values",
    list: "a list",
}
ITEMS = {int: "whole numbers", str: "texts"}
EXAMPLES = {bool: "true", int: "8", float: "0.5", str: "some-text"}
OTHER_NAMES = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}  # unlike the choice that is meant
OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
ELSEWHERE = {"bench": "python -m megasync.bench", "bench_train": "python -m megasync.bench train"}  # sections of other commands


def explain_invalid(error: ValidationError, root: type[BaseModel], sources: Mapping[tuple[str, ...], str]) -> ConfigError:
    """The first thing that is wrong, unknown keys before others."""
    found = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    path = tuple(str(part) for part in found["loc"] if not str(part).startswith("*"))  # without the tags of unions
    keys, value, context = all_keys(root), found["input"], found.get("ctx", {})
    known = [source for end in range(len(path) + 1) if (source := sources.get(path[:end]))]
    given_in = known[-1] if known else "the defaults"
    if found["type"] == "extra_forbidden":
        return _unknown_key(keys, path, value, given_in)
    generic = with_any_name(keys, path)
    end = next(end for end in range(len(path), 0, -1) if ".".join(generic[:end]) in keys)  # without a list's index
    key, field = ".".join(path[:end]), keys[".".join(generic[:end])]
    message = f"{key} = {reprlib.repr(value)}"
    allowed, kind = choices(field), kind_of(field)
    if found["type"] in OUT_OF_RANGE:
        remedy = f"write a number {bounds(field)}"
        return ConfigError(f"{key} = {value}: out of range", given_in=given_in, allowed=bounds(field), remedy=remedy)
    lines = {"given_in": given_in, "choices": ", ".join(allowed)}
    if found["type"] == "literal_error" and isinstance(value, str):
        other = OTHER_NAMES.get(value.lower(), "")
        near = other if other in allowed else nearest_name(value, allowed)
        lines |= {"nearest": near, "remedy": f"write {key}={near}" if near else "write one of the choices"}
        return ConfigError(f"{message}: not one of the choices", **lines)
    if "example" in context:  # from a validator of ours, which says what it expects
        remedy = f"write for example {key}={context['example']}"
        return ConfigError(f"{message}: {found['msg']}", **lines | {"choices": context["choices"]}, remedy=remedy)
    item = item_of(field)
    example = _example(kind, allowed, item, value)
    expected = f"{KINDS[kind]} of {ITEMS[item]}" if kind is list else KINDS[kind]
    below_it = f"{'.'.join(generic[:end])}."
    inside = next((full for full in keys if full.startswith(below_it) and kind_of(keys[full]) is not dict), f"{below_it}NAME")
    inside = f"{key}.{inside.removeprefix(below_it)}"
    remedy = f"write for example {key}={example}" if example else f"set for example {inside}=..."
    return ConfigError(f"{message}: {expected} is expected", **lines, remedy=remedy)


def _unknown_key(keys: Mapping[str, FieldInfo], path: tuple[str, ...], value: object, given_in: str) -> ConfigError:
    section = ".".join(path[:-1])
    while isinstance(value, Mapping) and len(value) == 1:  # optimizer: {lr: 1} is optimizer.lr
        ((inner, value),) = value.items()
        path = (*path, str(inner))
    unknown, generic = ".".join(path), with_any_name(keys, path)
    section = ".".join(generic[: section.count(".") + 1]) if section else ""
    nearest = nearest_key(keys, ".".join(generic))
    given_names = [name for name, part in zip(path, generic, strict=True) if part == ANY_NAME]
    nearest = nearest.replace(ANY_NAME, given_names[0]) if given_names else nearest
    remedy = f"write {nearest} instead" if nearest else "take the key out, or write one of the choices"
    remedy = remedy if nearest else ADVICE.get(path[-1], remedy)
    if path[0] in ELSEWHERE:
        nearest, remedy = "", f"take {path[0]} out: a run does without it; {ELSEWHERE[path[0]]} --config FILE reads it"
    lines = {"given_in": given_in, "nearest": nearest, "choices": ", ".join(below(keys, section)), "remedy": remedy}
    return ConfigError(f"{unknown}: there is no such key", **lines)


def _example(kind: type, allowed: list[str], item: type, value: object) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return f"[{', '.join(allowed) or EXAMPLES[item]}]" if kind is list else allowed[0] if allowed else EXAMPLES.get(kind, "")
