"""pydantic's errors of a config as messages with key, value, source, allowed values and remedy.

    except ValidationError as error:
        errors = explain_invalid(error, Config, sources)

Leaves out reading the file (load.py).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megasync.config import others
from megasync.config.errors import ConfigError, nearest_name
from megasync.config.keys import (
    ANY_NAME,
    all_keys,
    below,
    bounds,
    choices,
    item_of,
    kind_of,
    nearest_key,
    takes_names,
    with_any_name,
)

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping of names to values",
    list: "a list",
}
ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}
EXAMPLES = {bool: "true", int: "8", float: "0.5", str: "some-text"}
OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}  # other names of dtypes, not similar enough for nearest_name
OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
MOST_COUNT, MOST_BYTES, MOST_SECONDS = 2**31 - 1, 2**63 - 1, 10**9
ELSEWHERE = {"bench": "python -m bench", "bench_train": "python -m bench train"}  # sections of other commands


def explain_invalid(error: ValidationError, root: type[BaseModel], sources: Mapping[tuple[str, ...], str]) -> list[ConfigError]:
    """One error for each of pydantic's, unknown keys first. `sources`: see Sources."""
    keys, order = all_keys(root), sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    return [_explained({**found, **leaf}, keys, sources) for found in order for leaf in _leaves(found)]  # type: ignore[typeddict-item]


def too_large(section: BaseModel, sources: Mapping[tuple[str, ...], str], above: tuple[str, ...] = ()) -> Iterator[ConfigError]:
    """Numbers that overflow later: in vLLM's and numpy's arrays of integers, in time limits of the operating system."""
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), (*above, name)
        sections = value if isinstance(value, Mapping) else {None: value}
        for inner, each in sections.items():
            if isinstance(each, BaseModel):
                yield from too_large(each, sources, path if inner is None else (*path, inner))
        most = MOST_SECONDS if name.endswith("_seconds") else MOST_BYTES if name.endswith("_bytes") else MOST_COUNT
        is_counted = isinstance(value, int) or (isinstance(value, float) and most == MOST_SECONDS)
        has_own = any(hasattr(each, "le") or hasattr(each, "lt") for each in field.metadata)
        if is_counted and value > most and not has_own:
            given_in = next((sources[path[:end]] for end in range(len(path), 0, -1) if path[:end] in sources), "the defaults")
            lines = {"given_in": given_in, "allowed": f"at most {most}", "remedy": f"write a number of at most {most}"}
            yield ConfigError(f"{'.'.join(path)} = {value}: out of range", **lines)


def _leaves(found: ErrorDetails) -> list[dict[str, Any]]:
    """One entry for each key of an unknown section; one entry for any other error."""
    left, leaves = [(found["loc"], found["input"])], []
    while left:
        path, value = left.pop(0)
        if found["type"] == "extra_forbidden" and isinstance(value, Mapping) and value:
            left[:0] = [((*path, str(name)), inner) for name, inner in value.items()]
        else:
            leaves.append({"loc": path, "input": value})
    return leaves


def _explained(found: ErrorDetails, keys: Mapping[str, FieldInfo], sources: Mapping[tuple[str, ...], str]) -> ConfigError:
    path = tuple(str(part) for part in found["loc"] if not str(part).startswith("*"))  # without union tags
    value, context = found["input"], found.get("ctx", {})
    known = [source for end in range(len(path) + 1) if (source := sources.get(path[:end]))]
    given_in = known[-1] if known else "the defaults"
    if found["type"] == "extra_forbidden":
        return _unknown_key(keys, path, given_in)
    generic = with_any_name(keys, path)
    end = next(end for end in range(len(path), 0, -1) if ".".join(generic[:end]) in keys)  # without a list's index
    field = keys[".".join(generic[:end])]
    key = ".".join(path if takes_names(field) else path[:end])
    message = f"{key} = {reprlib.repr(value)}"
    allowed, kind = choices(field), kind_of(field)
    if found["type"] in OUT_OF_RANGE:
        remedy = f"write a number {bounds(field)}"
        return ConfigError(f"{key} = {value}: out of range", given_in=given_in, allowed=bounds(field), remedy=remedy)
    lines = {"given_in": given_in, "choices": ", ".join(allowed)}
    if found["type"] == "literal_error" and isinstance(value, str):
        parts = re.findall(r"[^\s,]+", value)
        is_list = kind is list and parts and {*parts} <= {*allowed}
        near = {"remedy": f"write {key}=[{','.join(parts)}]"} if is_list else _other_choice(key, value, allowed)
        return ConfigError(f"{message}: not one of the choices", **lines, **near)
    if "example" in context:  # from one of our validators, with its own message
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


def _other_choice(key: str, value: str, allowed: Sequence[str]) -> dict[str, str]:
    """The nearest choice, and the remedy."""
    if advice := others.advice_on_value(key, value):
        return {"remedy": advice}
    other = OTHER_NAMES.get(value.lower(), "")
    near = other if other in allowed else nearest_name(value, allowed)
    return {"nearest": near, "remedy": f"write {key}={near}" if near else "write one of the choices"}


def _unknown_key(keys: Mapping[str, FieldInfo], path: tuple[str, ...], given_in: str) -> ConfigError:
    section = next(above for end in range(len(path) - 1, -1, -1) if (above := ".".join(path[:end])) in keys or not end)
    unknown, has_dot = ".".join(path), any("." in part for part in path)
    path = tuple(unknown.split("."))
    generic = with_any_name(keys, path)
    section = ".".join(generic[: section.count(".") + 1]) if section else ""
    lines = {"given_in": given_in}
    if has_dot and ".".join(generic) in keys:
        remedy = f"write {''.join(f'{part}: {{' for part in path[:-1])}{path[-1]}: ...{'}' * (len(path) - 1)}"
        return ConfigError(f"{unknown}: a name in a YAML file has no dots, each section is a mapping", **lines, remedy=remedy)
    if path[0] in ELSEWHERE:
        remedy = f"remove {path[0]}: a run does not use it; {ELSEWHERE[path[0]]} --config FILE reads it"
        return ConfigError(f"{unknown}: there is no such key", **lines, choices=", ".join(below(keys, section)), remedy=remedy)
    nearest, advice = nearest_key(keys, ".".join(generic))
    given_names = [name for name, part in zip(path, generic, strict=True) if part == ANY_NAME]
    nearest = nearest.replace(ANY_NAME, given_names[0]) if given_names else nearest
    remedy = f"write {nearest} instead" if nearest else advice or "remove the key, or write one of the choices"
    lines |= {"nearest": nearest, "choices": ", ".join(below(keys, section)), "remedy": remedy}
    return ConfigError(f"{unknown}: there is no such key", **lines)


def _example(kind: type, allowed: list[str], item: type, value: object) -> str:
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return f"[{', '.join(allowed) or EXAMPLES[item]}]" if kind is list else allowed[0] if allowed else EXAMPLES.get(kind, "")
