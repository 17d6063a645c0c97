"""Rows of data files: JSONL, JSON, CSV, Parquet and Arrow.

pyarrow reads tables, memory-mapped, since importing datasets takes longer than reading most files. Python reads JSON and CSV,
since pyarrow and datasets convert texts that look like numbers and dates. Leaves out finding files (files.py), decoding columns
(columns.py) and checks of rows (data.py). No torch in here.

    for place, row in read_rows(Path("gsm8k/main"), "train", "data.split"):
        row["question"]
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config.errors import ConfigError, refuse_if
from megasync.data.columns import decoders, holds_bytes, readable
from megasync.data.files import data_files

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Note = Callable[[str], None]
SHAPE_REMEDY = 'every line is one JSON object, such as {"question": "1+2=", "answer": "3"}'
ROWS_AT_ONCE = 4096
SURROGATE = re.compile("[\ud800-\udfff]")
LFS_POINTER = b"version https://git-lfs"
PARQUET_MAGIC, FILE_MAGIC = b"PAR1", b"ARROW1"
PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}
MEDIA = ("audio", "audios", "image", "images", "video", "videos")  # names of columns
MAX_NESTING = 100  # rows are pickled for rewards and episodes, and pickle fails at some hundred levels
MAX_FIELD_BYTES = 2**30  # of a CSV file


def read_rows(
    path: Path, split: str, split_key: str, columns: Sequence[str] = (), note: Note = lambda _: None
) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row in order; `place` names file and line or row, both from 1. Blank lines are passed over.

    Columns of bytes, such as images, are read only if `columns` names them. `split` is the value of the config key `split_key`.
    `note` gets a line about each conversion.

    Raises:
        ConfigError: names file, line or row, reason and remedy.
    """
    for file in data_files(path, split, split_key, note):
        if file.suffix in (".parquet", ".arrow"):
            yield from _table_rows(file, columns, note)
        elif file.suffix in (".csv", ".tsv"):
            yield from _csv_rows(file)
        else:
            yield from _json_rows(file)


def media_columns(path: Path, split: str, split_key: str) -> list[str]:
    """Columns of images, sounds or videos in the first of the files, by their names or, in tables, since they hold bytes."""
    file = data_files(path, split, split_key, lambda _: None)[0]
    if file.suffix not in (".parquet", ".arrow"):
        _, row = next(read_rows(path, split, split_key), ("", {}))
        return [name for name, value in row.items() if name in MEDIA and value]
    with _reading(file), _opened(file) as (schema, batches):
        names = [field.name for field in schema if field.name in MEDIA or holds_bytes(field.type)]
        batch = next(batches(names), None) if names else None
        return [name for name in names if batch is not None and batch[name].null_count < len(batch)]


# ------------------------------------------------------------------------------------------------------------- text


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    name = str(path)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                _refuse_others(path, raw)
                if raw.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
                    yield from _listed_rows(name, raw + file.read())
                    return
            if raw.strip():
                place = f"{name}:{number}"
                yield place, _checked(place, _loaded(place, raw, SHAPE_REMEDY), raw)


def _listed_rows(name: str, raw: bytes) -> Iterator[tuple[str, Row]]:
    """Rows of a file that is one list of objects."""
    for number, fields in enumerate(_loaded(name, raw, f"the file is one list of objects, or {SHAPE_REMEDY}"), start=1):
        yield f"{name}: row {number}", _checked(f"{name}: row {number}", fields, json.dumps(fields).encode())


def _loaded(place: str, raw: bytes, remedy: str) -> Any:
    try:
        return DECODER.decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        message = f"{place}: not UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError(message, remedy="save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        message = f"{place}: not JSON: {error.msg} at column {error.colno}"
        raise ConfigError(message, line=_cut(raw), remedy=remedy) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a list in a list in a list ...
        change = "take one of them out" if isinstance(error, _TwiceError) else "write it as one text"
        remedy = f"{change}, or take the line out"
        raise ConfigError(f"{place}: cannot be read: {error}", line=_cut(raw), remedy=remedy) from error


class _TwiceError(ValueError):
    """An object has a key twice."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def _checked(place: str, fields: Any, raw: bytes) -> Row:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: a {type(fields).__name__}, not an object", remedy=SHAPE_REMEDY)
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _is_nested(fields, MAX_NESTING):
        message = f"{place}: lists and objects are nested more than {MAX_NESTING} levels deep"
        raise ConfigError(message, line=_cut(raw), remedy="write them as one text, or take the line out")
    if b"\\ud" in raw.lower() and SURROGATE.search(json.dumps(fields, ensure_ascii=False)):
        message = f"{place}: has a lone surrogate (\\ud800 to \\udfff), which is not a character"
        raise ConfigError(message, line=_cut(raw), remedy="write the whole pair, or take the line out")
    return fields


def _is_nested(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_is_nested(each, levels - 1) for each in inner))


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """All values are texts, since the way a number is written is part of an answer."""
    with path.open("rb") as begin:
        _refuse_others(path, begin.read(len(LFS_POINTER)))
    csv.field_size_limit(MAX_FIELD_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
            twice = sorted({name for name in names if names.count(name) > 1})
            refuse_if(
                twice, f"{path}: has several columns of the name {', '.join(map(repr, twice))}", remedy="rename one of them"
            )
            for number, values in enumerate((each for each in rows if each), start=1):
                place, remedy = f"{path}: row {number}", "quote values that contain the delimiter or a line feed"
                message = f"{place}: has {len(values)} values for {len(names)} columns"
                refuse_if(len(values) != len(names), message, columns=", ".join(names[:12]), remedy=remedy)
                yield place, dict(zip(names, values, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"line {rows.line_num}: {error}"
            raise ConfigError(f"{path}: {reason}", remedy="write it again as UTF-8, with quotes doubled within quotes") from error


# ------------------------------------------------------------------------------------------------------------- tables


def _table_rows(path: Path, columns: Sequence[str], note: Note) -> Iterator[tuple[str, Row]]:
    number = 0
    with _reading(path):
        for batch in _batches(path, columns, note):
            decode = decoders(batch.schema, columns, note)
            for row in _rows(path, batch):
                number += 1
                for name, one in decode.items():
                    row[name] = _decoded(f"{path}: row {number}", name, one, row[name])
                yield f"{path}: row {number}", row


def _decoded(place: str, name: str, decode: Callable[[Any], Any], value: Any) -> Any:
    try:
        return decode(value)
    except (ValueError, RecursionError) as error:
        message = f"{place}: {name!r} is JSON by the file's schema, and is not: {error}"
        raise ConfigError(message, value=f"{value!r:.100}", remedy="write the data set again") from error


def _batches(path: Path, columns: Sequence[str], note: Note) -> Iterator[pa.RecordBatch]:
    with _opened(path) as (schema, batches_of):
        yield from batches_of(readable(path, schema, columns, note))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pa.Schema, Callable[[list[str]], Iterator[pa.RecordBatch]]]]:
    """The schema, and a function from names of columns to batches of them."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    if path.suffix == ".parquet":
        with ParquetFile(path, memory_map=True) as parquet:
            schema = parquet.schema_arrow
            yield schema, lambda names: (
                batch.replace_schema_metadata(schema.metadata) for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=names)
            )
        return
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC  # as pyarrow.feather writes; datasets writes streams
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as stream:
            batches = (stream.get_batch(index) for index in range(stream.num_record_batches)) if is_file else stream
            yield stream.schema, lambda names: (batch.select(names) for batch in batches)


def _rows(path: Path, batch: pa.RecordBatch) -> list[Row]:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]
    except (ValueError, OverflowError, KeyError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist(maps_as_pydicts="strict")
            except (ValueError, OverflowError, KeyError) as error:
                message = f"{path}: the column {name!r} holds a value that Python cannot represent: {error}"
                raise ConfigError(message, remedy="write it as a column of texts, or remove it") from error
        raise


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if find_spec("pyarrow") is None:
        remedy = "install the packages that locks/ pins, or use a JSONL file"
        raise ConfigError(f"{path}: needs pyarrow, which is not installed", remedy=remedy)
    with path.open("rb") as file:
        _refuse_others(path, file.read(len(LFS_POINTER)))
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
        message = f"{path}: cut off, or not {kind} file: {str(error).splitlines()[0]}"
        raise ConfigError(message, remedy="write or download it again") from error


def _refuse_others(path: Path, begin: bytes) -> None:
    """ConfigError if the first bytes are those of a Git LFS pointer, a compressed file, or a format other than the suffix's."""
    remedy = "run `git lfs pull` in the data set's repository"
    refuse_if(begin.startswith(LFS_POINTER), f"{path}: a Git LFS pointer, not the data", remedy=remedy)
    for magic, program in PACKED.items():
        remedy = f"unpack it with {program}, and name the unpacked file"
        refuse_if(begin.startswith(magic), f"{path}: is compressed", remedy=remedy)
    is_other = begin.startswith(PARQUET_MAGIC) and path.suffix != ".parquet"
    refuse_if(is_other, f"{path}: is a Parquet file with another suffix", remedy=f"rename it to {path.stem}.parquet")


def _cut(raw: bytes) -> str:
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in raw[:400].decode(errors="replace").strip())
    return text if len(text) <= 100 else text[:97] + "..."
