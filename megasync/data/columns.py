"""Decodes a table's columns by its schema, as datasets does (features.py of datasets 5.2), without its slow import.

Leaves out reading the files (tables.py). No torch in here.

    decode = decoders(schema, chosen=["messages"], note=print)      # by name, of columns that need decoding
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megasync.config.errors import refuse_if, some

if TYPE_CHECKING:
    import pyarrow as pa

Decode = Callable[[Any], Any]
METADATA = b"huggingface"  # key of a schema's metadata that holds the data set's features


def readable(path: Path, schema: pa.Schema, chosen: Collection[str], note: Callable[[str], None]) -> list[str]:
    """Names of the columns to read. Columns of bytes, such as images, are read only if they are `chosen`; `note` gets the others.

    Raises:
        ConfigError: two columns have one name.
    """
    names = list(schema.names)
    twice = sorted({name for name in names if names.count(name) > 1})
    remedy = "rename or remove one of them"
    refuse_if(twice, f"{path}: has several columns of the name {', '.join(map(repr, twice))}", remedy=remedy)
    left_out = [field.name for field in schema if field.name not in chosen and holds_bytes(field.type)]
    if left_out:
        note(f"columns of bytes, such as images, are not read: {', '.join(left_out)}")
    return [name for name in names if name not in left_out]


def decoders(schema: pa.Schema, chosen: Collection[str], note: Callable[[str], None]) -> dict[str, Decode]:
    """A function by column name, for columns whose values need decoding: JSON texts are parsed, and float32 becomes the shortest
    decimal that rounds to it. In `chosen` columns class labels become their names, and null fields are removed from objects,
    since all objects of a table have the same fields. `note` gets a line about class labels.
    """
    info = json.loads((schema.metadata or {}).get(METADATA, b"{}")).get("info", {})
    features = info.get("features") or {}
    found = {}
    for field in schema:
        feature = features.get(field.name)
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and field.name in chosen and feature.get("names"):
            names = some(feature["names"])
            note(f"the column {field.name!r} holds numbers of classes, which are read as their names: {names}")
            found[field.name] = _label(feature["names"])
        elif decode := _decoder(field.type, feature, drops_nulls=field.name in chosen):
            found[field.name] = decode
    return found


def _decoder(kind: pa.DataType, feature: Any, *, drops_nulls: bool) -> Decode | None:
    """None: the values need no decoding."""
    from pyarrow import types

    if (isinstance(feature, dict) and feature.get("_type") == "Json") or getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if types.is_float32(kind) or types.is_float16(kind):
        shortest = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: value if value is None else float(str(shortest(value)))
    if types.is_struct(kind):
        named = feature if isinstance(feature, dict) and "_type" not in feature else {}
        parts = {field.name: _decoder(field.type, named.get(field.name), drops_nulls=drops_nulls) for field in kind}
        return _object(parts, drops_nulls=drops_nulls) if drops_nulls or any(parts.values()) else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = feature.get("feature") if isinstance(feature, dict) else feature[0] if isinstance(feature, list) else None
        item = _decoder(kind.value_type, inner, drops_nulls=drops_nulls)
        return (lambda value: value if value is None else [item(each) for each in value]) if item else None
    return None


def _object(parts: dict[str, Decode | None], *, drops_nulls: bool) -> Decode:
    def decode(value: Any) -> Any:
        if value is None:
            return None
        made = {name: part(value[name]) if (part := parts[name]) else value[name] for name in value}
        return {name: each for name, each in made.items() if each is not None} if drops_nulls else made

    return decode


def _label(names: list[str]) -> Decode:
    """-1 means no label and becomes None."""
    return lambda value: names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def holds_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types

    is_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(holds(kind) for holds in is_bytes) or any(holds_bytes(each) for each in inner)
