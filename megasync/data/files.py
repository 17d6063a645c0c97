"""Finds the files of a split of a data set: one file, a folder of shards, a folder of datasets.save_to_disk, a hub's cache.

File names follow the conventions of the datasets library (data_files.py of datasets 5.2): words such as train and test in the
name of a file or its folder name a split; files that differ by a number are shards. Unlike datasets, it does not merge files with
other names into one split. Leaves out reading rows (tables.py). No torch in here.

    data_files(Path("gsm8k/main"), "train", "data.split")      # [.../train-00000-of-00001.parquet]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megasync.config.errors import ConfigError, nearest_name, refuse_if, some

FOLDER_REMEDY = "name a file, a folder of *.parquet or *.jsonl, or one that datasets.save_to_disk wrote"
SUFFIXES = (".parquet", ".jsonl", ".arrow")
OTHER_SUFFIXES = (
    ".json",
    ".csv",
    ".tsv",
)  # used if a folder has none of the above, since files about the data often have these suffixes
NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
CACHED_RESULT = re.compile(r"(cache|tmp)[-_]?\w*\.arrow")  # of Dataset.map, beside the data
TRAIN_KEY = "data.split"  # other keys name splits of held-out data
TRAINING = {"train", "training"}
HELD_OUT = {"validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"}
UNNAMED = {"", "part", "data", "shard", "chunk", "file"}  # names of shards without the name of a split
CODEC = re.compile(r"\.(snappy|gz|gzip|zstd|zst|lz4|brotli)$")
OF_TOTAL = re.compile(r"[-_](\d+)[-_]of[-_](\d+)([-_][0-9a-f]+)?$")  # train-00000-of-00002
NUMBERED = re.compile(
    r"(?P<prefix>\D*?)[-_. ]?(?P<number>\d+)(?P<more>_\d+|-\d+(?=-[0-9a-f]{8}-))?(?P<writer>[-.].+?)?"
    r"(?:[-.]c(?P<file>\d+)|(?<=-[0-9a-f]{12})-(?P<of_task>\d+))?$"  # c000 of Spark, 00001 of Iceberg
)
PARTITION = re.compile(r"(?:\A|/)\w+=[^/]*\Z")  # year=2024, of Hive and Spark
MAX_DEPTH = 4  # levels of subfolders that are searched for data to suggest, as in a hub's cache


class Shard(NamedTuple):
    """Split and shard numbers, parsed from the name of a file."""

    split: str
    numbers: tuple[int, ...] = ()
    total: int = 0  # number of shards; 0: not in the name
    writer: str = ""  # the part of a name that all files of one write share
    is_padded: bool = False


def data_files(path: Path, split: str, split_key: str, note: Callable[[str], None] = lambda _: None) -> list[Path]:
    """The files of a split, in order; `path` itself if it is a file. `note` gets a line about files that are taken for shards.

    Raises:
        ConfigError: there are no data files, several splits, or missing shards.
    """
    if path.is_file():
        message = f"{path}: is one file, and {split_key} = {split!r} is for folders"
        refuse_if(split, message, remedy=f"take {split_key} out, or name the folder")
        return [path]
    looked_in = str(Path(os.path.realpath(path)).parent)
    problem = "is a pipe or a device, a file is expected" if path.exists() else "there is no such data file"
    refuse_if(not path.is_dir(), f"{path}: {problem}", looked_in=looked_in, remedy=FOLDER_REMEDY)
    if (path / "dataset_dict.json").is_file():
        chosen = _choose(path, _json_of(path / "dataset_dict.json").get("splits") or [], split, split_key)
        return _saved_files(path / chosen)
    if (path / "state.json").is_file():
        own = _json_of(path / "state.json").get("_split") or ""
        refuse_if(split and split != own, f"{path}: is the split {own!r}, not {split!r}", remedy=f"take {split_key} out")
        return _saved_files(path)
    return _loose_files(path, split, split_key, note)


def _saved_files(folder: Path) -> list[Path]:
    """Files of a Dataset that datasets.save_to_disk wrote."""
    entries = _json_of(folder / "state.json").get("_data_files") or []
    files = [folder / str(entry["filename"]) for entry in entries]
    missing = ", ".join(file.name for file in files if not file.is_file())
    refuse_if(missing, f"{folder}: state.json names files that are not there", missing=missing, remedy="save the data set again")
    return files


def _loose_files(path: Path, split: str, split_key: str, note: Callable[[str], None]) -> list[Path]:
    """Files of a folder, of its subfolder `data`, or of subfolders named as splits, as on the Hugging Face hub."""
    for folder in (path, path / "data"):
        if by_split := _by_split(_files_in(folder)):
            return _whole(path, by_split[_choose(path, list(by_split), split, split_key)], note)
        if split_folders := [each for each in _folders_in(folder) if _words(each.name) & (TRAINING | HELD_OUT)]:
            named = {each.name: each for each in split_folders}
            return _loose_files(named[_choose(path, list(named), split, split_key)], "", split_key, note)
    raise _no_data_error(path)


def _files_in(folder: Path) -> list[Path]:
    """Data files of a folder, with SUFFIXES if there are any; empty if there is no such folder."""
    listed = [file for file in sorted(folder.iterdir()) if _is_data(file)] if folder.is_dir() else []
    for file in listed:
        if not file.exists():  # without this check a missing shard might go unnoticed
            remedy = "download the data set again"
            raise ConfigError(f"{file}: is a link to {file.readlink()}, which is not there", remedy=remedy)
    return [file for file in listed if file.suffix in SUFFIXES] or listed


def _is_data(file: Path) -> bool:
    is_hidden = file.name.startswith(".") or file.name in NO_DATA or CACHED_RESULT.fullmatch(file.name)
    return file.suffix in (*SUFFIXES, *OTHER_SUFFIXES) and not is_hidden and not file.is_dir()


def _folders_in(folder: Path) -> list[Path]:
    """Subfolders with data files."""
    return [each for each in sorted(folder.iterdir()) if each.is_dir() and _files_in(each)] if folder.is_dir() else []


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def _unlettered(name: str) -> str:
    """The name without a letter or number at its end, such as the `split` command adds."""
    return re.sub(r"(?<=[-_.])(\d+|[a-z]{1,2})$", "", name)


def _by_split(files: Iterable[Path]) -> dict[str, dict[Path, Shard]]:
    """Files with their shards by the name of the split, in order.

    Numbered files are shards if the rest of the name is a split or in UNNAMED, and if the numbers begin with 0 or 1 or have
    leading zeros: `train-0` and `0000`, but neither `aime-24` nor `2024`.
    """
    shards = {file: _shard(file) for file in files}
    begun = {shard.split for shard in shards.values() if shard.total or shard.is_padded or shard.numbers[:1] in ((0,), (1,))}
    by_split: dict[str, dict[Path, Shard]] = {}
    for file, shard in sorted(shards.items(), key=lambda item: (item[1].split, item[1].numbers)):
        own = shard if not shard.numbers or shard.split in begun else Shard(CODEC.sub("", file.stem))
        by_split.setdefault(own.split, {})[file] = own
    return by_split


def _shard(file: Path) -> Shard:
    stem = CODEC.sub("", file.stem)
    if match := OF_TOTAL.search(stem):
        return Shard(stem[: match.start()], (int(match[1]),), int(match[2]), match[3] or "")
    if match := NUMBERED.fullmatch(stem):
        is_padded = len(match["number"]) > 3 and match["number"][0] == "0"
        is_unnamed = match["prefix"].lower() in UNNAMED
        if is_unnamed or is_padded or _words(match["prefix"]) & (TRAINING | HELD_OUT):
            numbers = [match["number"], (match["more"] or "").strip("_-"), match["file"], match["of_task"]]
            found = tuple(int(number) for number in numbers if number)
            return Shard("train" if is_unnamed else match["prefix"], found, 0, match["writer"] or "", is_padded)
    return Shard(stem)


def _whole(path: Path, shards: dict[Path, Shard], note: Callable[[str], None]) -> list[Path]:
    """Checks that the files have one suffix, come from one write, and are a complete set of shards; returns them.

    If the names do not give the number of shards, these must be numbered from 0 or 1 without gaps; except Spark's, whose names
    identify the write and may skip numbers. Names that give the number may end with a hash of the shard, as on the hub in 2023.
    """
    first, files = next(iter(shards.values())), list(shards)
    kinds = sorted({file.suffix for file in files})
    refuse_if(len(kinds) > 1, f"{path}: holds {first.split} as {' and as '.join(kinds)}", remedy="name one of the files")
    numbers = [shard.numbers or (0,) for shard in shards.values()]
    writes = {(shard.total, "" if shard.total else shard.writer) for shard in shards.values()}
    is_whole = len(set(numbers)) == len(files) and len(writes) == 1
    if first.total or not (first.writer or any(len(each) > 1 for each in numbers)):
        begin = min(numbers[0][0], 1)
        is_whole = is_whole and [each[0] for each in numbers] == list(range(begin, begin + (first.total or len(files))))
    message = f"{path}: {first.split} is not whole, or there twice"
    remedy = "download the shards that are missing, take out those of another download, or name one of the files"
    refuse_if(not is_whole, message, files=some(file.name for file in files), remedy=remedy)
    if len(files) > 1 and not first.total:
        names = some((file.name for file in files), 3)
        note(f"{path}: {len(files)} files are taken for the shards of {first.split}: {names}")
    return files


def _no_data_error(path: Path) -> ConfigError:
    patterns = ["/".join(["*"] * depth) for depth in range(1, MAX_DEPTH + 1)]
    below = [folder for pattern in patterns for folder in sorted(path.glob(pattern)) if folder.is_dir() and _files_in(folder)]
    of_splits = [folder.parent if _words(folder.name) & (TRAINING | HELD_OUT) else folder for folder in below]
    inner = list(dict.fromkeys(str(folder.relative_to(path)) for folder in of_splits))
    remedy = f"name one of the folders, such as {path / inner[0]}" if inner else FOLDER_REMEDY
    if len(inner) > 1 and all(PARTITION.search(name) for name in inner):
        remedy = "these are partitions of one table: put their files into one folder, or name the one that you want"
    holds = "" if inner else some(sorted(each.name for each in path.iterdir()))
    return ConfigError(f"{path}: is a folder without data files", folders_with_some=some(inner, 12), holds=holds, remedy=remedy)


def _choose(path: Path, splits: Sequence[str], split: str, split_key: str) -> str:
    if split in splits:
        return split
    if not split and len(splits) == 1:
        return splits[0]
    near = nearest_name(split, splits) if split else ""
    problem = f"has no split {split!r}" if split else "holds several splits"
    words, is_training = _words(split), split_key == TRAIN_KEY
    chosen = near or _likeliest(splits, is_training=bool(words & TRAINING) or (is_training and not words & HELD_OUT))
    remedy = f"write {_setting(path, split_key, chosen or 'NAME')}"
    first = chosen or next(iter(splits), "")
    if not near and first and (first[-1].isdigit() or len(set(map(_unlettered, splits))) == 1 < len(splits)):
        # level-1, level-2 or chunk-a, chunk-b: splits, or the shards of one
        remedy = f"write {_setting(path, split_key, 'NAME')} for one of them; if they are shards, call them "
        remedy += f"NAME-00000-of-{len(splits):05d}"
    raise ConfigError(f"{path}: {problem}", splits=some(splits, 12) or "none", nearest=near, remedy=remedy)


def _likeliest(splits: Sequence[str], *, is_training: bool) -> str:
    """The split to suggest, a training or a held-out one; empty if none is likely."""
    kinds = {name: "train" if _words(name) & TRAINING else "test" if _words(name) & HELD_OUT else "" for name in splits}
    wanted = ("train", "") if is_training else ("test", "")
    found = {kind: [name for name in splits if kinds[name] == kind] for kind in wanted}
    return next((names[0] for kind, names in found.items() if names and (kind or len(names) == 1)), "")


def _setting(path: Path, split_key: str, split: str) -> str:
    """The override that sets the split. If data.eval is a path, it must become a set, since only sets have a split."""
    return f"data.eval='{{NAME: {{path: {path}, split: {split}}}}}'" if split_key == "data.eval" else f"{split_key}={split}"


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="save the data set again") from error
    return content if isinstance(content, dict) else {}
