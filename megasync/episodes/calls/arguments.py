"""Arguments of a tool call: JSON read strictly, and text read as the type that the tool's JSON schema wants.

What can be read in two ways is refused: a key that occurs twice, NaN, a text for a number. Leaves out where arguments begin and
end in what a model wrote (calls.py).

    typed([("note", "123"), ("count", "2")], {"properties": {"note": {"type": "string"}, "count": {"type": "integer"}}})
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Kinds = frozenset[str] | None  # JSON types that a schema takes; None: it does not say
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
TYPES = frozenset(KINDS.values())
OTHER_NAMES = {  # of types, as schemas that are not JSON's have them: Python's, BFCL's, Gemini's
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "hashmap"), "object"),
    "none": "null",
}
PYTHON_WORDS = {"True": True, "False": False, "None": None}
MOST_REFERENCES = 32  # one in another; a schema may refer to itself


class UnreadableError(ValueError):
    """The text of a model is not a call that can be read in exactly one way; the message says why."""


def read_json(text: str, place: int = 0) -> tuple[Any, int]:
    """The value that begins at `place`, and the place behind it. Control characters may stand in strings as they are.

    Raises:
        UnreadableError: there is none, a key of it occurs twice, or a number of it is not finite.
    """
    try:
        return DECODER.raw_decode(text, place)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableError(f"not JSON: {error}") from error
    except UnreadableError:
        raise
    except ValueError as error:  # an integer of too many digits
        raise UnreadableError(str(error)) from error


def whole_json(text: str) -> Any:
    """The value that is all of the text.

    Raises:
        UnreadableError: as above, or more text comes after it.
    """
    text = text.strip()
    value, end = read_json(text)
    if end != len(text):
        raise UnreadableError(f"not JSON: {text[end : end + 40]!r} comes after the value")
    return value


def arguments_of(given: Any) -> dict[str, Any]:
    """An object, or one written as text; no arguments where there is nothing.

    Raises:
        UnreadableError: it is something else.
    """
    value = whole_json(given) if isinstance(given, str) and given.strip() else given or None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableError(f"the arguments are of type {KINDS[type(value)]}: write an object")
    return value


def typed(values: Iterable[tuple[str, str]], parameters: Any) -> dict[str, Any]:
    """Texts as the tool's `parameters`, a JSON schema, want them: a text stays one wherever the schema takes a text.

    The one exception is `null` where it takes null, too. Where the schema does not say, valid JSON is read as JSON.

    Raises:
        UnreadableError: an argument occurs twice, or is nothing that the schema takes.
    """
    made: dict[str, Any] = {}
    for name, text in values:
        if name in made:
            raise UnreadableError(f"the argument {name} occurs twice")
        made[name] = _value(name, text, _kinds(_property(parameters, name), parameters))
    return made


def _value(name: str, text: str, kinds: Kinds) -> Any:
    if kinds is None:
        try:
            return whole_json(text)
        except UnreadableError:
            return text
    if "string" in kinds:
        return None if "null" in kinds and text.strip() == "null" else text
    try:
        value = whole_json(text)
    except UnreadableError:
        value = PYTHON_WORDS.get(text.strip(), text)
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    if KINDS[type(value)] not in kinds:
        raise UnreadableError(f"the argument {name} is {text!r:.80}: write a value of type {' or '.join(sorted(kinds))}")
    return value


def _property(parameters: Any, name: str) -> Any:
    """The schema of one argument."""
    schema = _referred(parameters, parameters)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") if isinstance(schema, Mapping) else None


def _kinds(schema: Any, root: Any, depth: int = 0) -> Kinds:
    """The types that the schema allows for the value itself, whatever it says about types inside the value. None also where it
    has a type that is not known, such as BFCL's any.
    """
    if not isinstance(schema, Mapping) or depth > MOST_REFERENCES:
        return None
    said: list[Kinds] = []
    if schema.get("type") is not None:
        named = [str(each).lower() for each in (schema["type"] if isinstance(schema["type"], list) else [schema["type"]])]
        named = [OTHER_NAMES.get(each, each) for each in named]
        also = ["integer"] * ("number" in named) + ["null"] * (schema.get("nullable") is True)
        said.append(frozenset([*named, *also]) if TYPES.issuperset(named) else None)
    if "const" in schema or isinstance(schema.get("enum"), list):
        said.append(frozenset(KINDS[type(value)] for value in schema.get("enum", [schema.get("const")])))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            options = [_kinds(each, root, depth + 1) for each in schema[name]]
            said.append(None if None in options else frozenset().union(*(each or () for each in options)))
    parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    said += [_kinds(each, root, depth + 1) for each in parts]
    if "$ref" in schema:
        said.append(_kinds(_referred(schema, root), root, depth + 1))
    known = [each for each in said if each is not None]
    return frozenset.intersection(*known) if known else None


def _referred(schema: Any, root: Any) -> Any:
    """The schema that a `$ref` to a place in its root names; the schema itself where it has none."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str):
        return schema
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise UnreadableError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise UnreadableError(f"{text} is no number that JSON has")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite, strict=False)
