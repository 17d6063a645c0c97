"""Rows of data files: JSONL, Parquet, folders of either, and folders that datasets.save_to_disk wrote.

pyarrow alone reads them, in part mapped into memory: importing datasets takes longer than reading most files. Leaves out what
a row must hold (data.py). No torch in here.

    for place, row in read_rows(Path("gsm8k/main"), "train", "data.split"):
        row["question"]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config.errors import ConfigError, nearest_name, refuse_if, some

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
SHAPE_REMEDY = 'every line is one JSON object, such as {"question": "1+2=", "answer": "3"}'
FOLDER_REMEDY = "name a file, a folder of *.parquet or *.jsonl, or one that datasets.save_to_disk wrote"
SHARD = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]+)?$")  # train-00000-of-00002.parquet
SUFFIXES = (".parquet", ".jsonl")
TRAIN_KEY = "data.split"  # the others are of held-out data
ROWS_AT_ONCE = 4096
SURROGATE = re.compile("[\ud800-\udfff]")
LFS_POINTER = b"version https://git-lfs"
PARQUET_MAGIC = b"PAR1"
PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}
MOST_NESTED = 100  # what goes on to a reward or an episode is pickled, which Python does to some hundred


def read_rows(path: Path, split: str, split_key: str, columns: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row in order; `place` names file and line or row, both from 1. Blank lines are passed over.

    Columns that hold bytes, such as images, are read where `columns` names them only. `split` is what `split_key` says.

    Raises:
        ConfigError: names file, line or row, reason and remedy.
    """
    for file in data_files(path, split, split_key):
        if file.suffix in (".parquet", ".arrow"):
            yield from _table_rows(file, columns)
        else:
            yield from _json_rows(file)


# ------------------------------------------------------------------------------------------------------------- which files


def data_files(path: Path, split: str, split_key: str) -> list[Path]:
    """The files that hold a split, in order; of a file itself."""
    if path.is_file():
        message = f"{path}: is one file, and {split_key} = {split!r} is for folders"
        refuse_if(split, message, remedy=f"take {split_key} out, or name the folder")
        return [path]
    looked_in = str(path.resolve().parent)
    refuse_if(not path.is_dir(), f"{path}: there is no such data file", looked_in=looked_in, remedy=FOLDER_REMEDY)
    if (path / "dataset_dict.json").is_file():
        chosen = _choose(path, _json_of(path / "dataset_dict.json").get("splits") or [], split, split_key)
        return _saved_files(path / chosen)
    if (path / "state.json").is_file():
        own = _json_of(path / "state.json").get("_split") or ""
        refuse_if(split and split != own, f"{path}: is the split {own!r}, not {split!r}", remedy=f"take {split_key} out")
        return _saved_files(path)
    return _loose_files(path, split, split_key)


def _saved_files(folder: Path) -> list[Path]:
    """Of a Dataset that datasets.save_to_disk wrote."""
    entries = _json_of(folder / "state.json").get("_data_files") or []
    files = [folder / str(entry["filename"]) for entry in entries]
    missing = ", ".join(file.name for file in files if not file.is_file())
    refuse_if(missing, f"{folder}: state.json names files that are not there", missing=missing, remedy="save the data set again")
    return files


def _loose_files(path: Path, split: str, split_key: str) -> list[Path]:
    """Of a folder, or of `data` in it, as data sets are kept on the Hugging Face hub."""
    by_split: dict[str, list[Path]] = {}
    for folder in (path, path / "data"):
        for file in sorted(folder.iterdir()) if folder.is_dir() and not by_split else ():
            if file.suffix in SUFFIXES and file.is_file():
                by_split.setdefault(SHARD.sub("", file.stem), []).append(file)
    if not by_split:
        inner = sorted({str(file.parent.relative_to(path)) for suffix in SUFFIXES for file in path.glob(f"*/*{suffix}")})
        remedy = f"name one of the folders, such as {path / inner[0]}" if inner else FOLDER_REMEDY
        raise ConfigError(f"{path}: is a folder without data files", folders_with_some=", ".join(inner[:12]), remedy=remedy)
    chosen = _choose(path, list(by_split), split, split_key)
    files = by_split[chosen]
    kinds = sorted({file.suffix for file in files})
    refuse_if(len(kinds) > 1, f"{path}: holds {files[0].stem} as {' and as '.join(kinds)}", remedy="name one of the files")
    _check_shards(path, chosen, files)
    return files


def _check_shards(path: Path, split: str, files: Sequence[Path]) -> None:
    """A split is in one file, or in each of its shards once, which are numbered from 0 or 1 on."""
    numbers = sorted((int(match[1]), int(match[2])) if (match := SHARD.search(file.stem)) else (0, 1) for file in files)
    first, total = numbers[0]
    is_whole = first in (0, 1) and numbers == [(first + number, total) for number in range(total)]
    message = f"{path}: {split} is not whole, or there twice"
    remedy = "download the shards that are missing, take out those of another download, or name one of the files"
    refuse_if(not is_whole, message, files=some(file.name for file in files), remedy=remedy)


def _choose(path: Path, splits: Sequence[str], split: str, split_key: str) -> str:
    if split in splits:
        return split
    if not split and len(splits) == 1:
        return splits[0]
    near = nearest_name(split, splits) if split else ""
    problem = f"has no split {split!r}" if split else "holds several splits"
    remedy = f"write {_setting(path, split_key, near or _likeliest(splits, split_key))}"
    raise ConfigError(f"{path}: {problem}", splits=", ".join(splits) or "none", nearest=near, remedy=remedy)


def _likeliest(splits: Sequence[str], split_key: str) -> str:
    """The one to train on for data.split, for others the first of the rest, so that nobody is told to train on the test."""
    of_training = [name for name in splits if name.startswith("train")]
    others = [name for name in splits if name not in of_training]
    return next(iter([*of_training, *others] if split_key == TRAIN_KEY else [*others, *of_training]), "NAME")


def _setting(path: Path, split_key: str, split: str) -> str:
    """How the split is written: with a data.eval that is a path there is no key for it yet."""
    return f"data.eval='{{NAME: {{path: {path}, split: {split}}}}}'" if split_key == "data.eval" else f"{split_key}={split}"


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="save the data set again") from error
    return content if isinstance(content, dict) else {}


# ------------------------------------------------------------------------------------------------------------- their rows


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                _refuse_others(path, raw)
            if raw.strip():
                yield f"{path}:{number}", _json_row(f"{path}:{number}", raw)


def _json_row(place: str, raw: bytes) -> Row:
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        remedy = "save the file as UTF-8"
        raise ConfigError(f"{place}: not UTF-8: {error.reason} at byte {error.start}", remedy=remedy) from error
    except json.JSONDecodeError as error:
        message = f"{place}: not JSON: {error.msg} at column {error.colno}"
        raise ConfigError(message, line=_cut(raw), remedy=SHAPE_REMEDY) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a list in a list in a list ...
        remedy = "write it as one text, or take the line out"
        raise ConfigError(f"{place}: cannot be read: {error}", line=_cut(raw), remedy=remedy) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: a {type(fields).__name__}, not an object", remedy=SHAPE_REMEDY)
    if raw.count(b"[") + raw.count(b"{") > MOST_NESTED and _is_nested(fields, MOST_NESTED):
        message = f"{place}: more than {MOST_NESTED} lists and objects lie in each other"
        raise ConfigError(message, line=_cut(raw), remedy="write them as one text, or take the line out")
    if b"\\ud" in raw.lower() and SURROGATE.search(json.dumps(fields, ensure_ascii=False)):
        message = f"{place}: \\ud800 to \\udfff stand for a character in pairs only, and here is a half"
        raise ConfigError(message, line=_cut(raw), remedy="write the whole pair, or take the line out")
    return fields


def _is_nested(value: Any, most: int) -> bool:
    """Whether more than so many lists and objects lie in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(_is_nested(each, most - 1) for each in inner))


def _table_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    number = 0
    with _reading(path):
        for batch in _batches(path, columns):
            for row in _rows(path, batch):
                number += 1
                yield f"{path}: row {number}", row


def _batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    if path.suffix == ".parquet":
        with ParquetFile(path, memory_map=True) as parquet:
            yield from parquet.iter_batches(ROWS_AT_ONCE, columns=_readable(parquet.schema_arrow, columns))
    else:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            chosen = _readable(stream.schema, columns)
            for batch in stream:
                yield batch.select(chosen)


def _rows(path: Path, batch: pa.RecordBatch) -> list[Row]:
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except (ValueError, OverflowError) as error:
                message = f"{path}: the column {name!r} holds what Python has no value for: {error}"
                raise ConfigError(message, remedy="write it as a column of texts, or take it out") from error
        raise


def _readable(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    return [field.name for field in schema if field.name in columns or not _holds_bytes(field.type)]


def _holds_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types

    is_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(holds(kind) for holds in is_bytes) or any(_holds_bytes(each) for each in inner)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{path}: needs pyarrow, which is not there", remedy="install what locks/ pins, or take a JSONL file")
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
    """ConfigError for a file that begins as no data does, or as other data does than its name says."""
    remedy = "run `git lfs pull` in the data set's repository"
    refuse_if(begin.startswith(LFS_POINTER), f"{path}: a Git LFS pointer, not the data", remedy=remedy)
    for magic, program in PACKED.items():
        remedy = f"unpack it with {program}, and name what comes out of it"
        refuse_if(begin.startswith(magic), f"{path}: is compressed", remedy=remedy)
    is_other = begin.startswith(PARQUET_MAGIC) and path.suffix != ".parquet"
    refuse_if(is_other, f"{path}: is a Parquet file by another name", remedy=f"rename it to {path.stem}.parquet")


def _cut(raw: bytes) -> str:
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in raw[:400].decode(errors="replace").strip())
    return text if len(text) <= 100 else text[:97] + "..."
