"""Which files are a split, by the names that programs give to shards; a part of the data is never taken for the whole.

python -m pytest tests/megasync/data/test_files.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megasync.config.errors import ConfigError
from megasync.data.files import data_files

UUID = "8c2b1c1a-0f3e-4b7a-9d52-1f2e3d4c5b6a"
SHARDS = {
    "the hub's conversion": ["0000.parquet", "0001.parquet", "0002.parquet"],
    "fineweb": ["000_00000.parquet", "000_00001.parquet", "001_00000.parquet"],
    "spark": [f"part-00000-{UUID}-c000.snappy.parquet", f"part-00003-{UUID}-c000.snappy.parquet"],
    "spark with a short name": ["part-00000-x.snappy.parquet", "part-00001-x.snappy.parquet"],
    "files of a task": [f"part-00000-{UUID}-c000.snappy.parquet", f"part-00000-{UUID}-c001.snappy.parquet"],
    "iceberg": [f"00000-4-{UUID}-00001.parquet", f"00001-5-{UUID}-00001.parquet", f"00001-5-{UUID}-00002.parquet"],
    "tasks": [f"00000-0-{UUID}.parquet", f"00001-1-{UUID}.parquet"],
    "dask": [f"part.{number}.parquet" for number in range(12)],
    "numbers": ["1.jsonl", "2.jsonl"],
    "of the split": ["train-0.jsonl", "train-1.jsonl", "train-2.jsonl"],
    "from 1 on": ["train_1.jsonl", "train_2.jsonl"],
    "without a sign": ["train00.parquet", "train01.parquet"],
    "a codec": ["train-00000-of-00002.zstd.parquet", "train-00001-of-00002.zstd.parquet"],
    "a hash each": ["train-00000-of-00002-a6c9fb89.parquet", "train-00001-of-00002-d6a0402e.parquet"],
    "underscores": ["train_00000_of_00002.parquet", "train_00001_of_00002.parquet"],
    "one": ["0000.parquet"],
    "one with a codec": ["train.snappy.parquet"],
}


def folder(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("")
    return path


def found(path: Path, split: str = "", key: str = "data.split") -> list[str]:
    return [str(file.relative_to(path)) for file in data_files(path, split, key)]


def refused(path: Path, split: str = "", key: str = "data.split") -> str:
    with pytest.raises(ValueError, match=re.escape(path.name)) as caught:
        data_files(path, split, key)
    return str(caught.value)


@pytest.mark.parametrize("names", SHARDS.values(), ids=SHARDS)
def test_shards_are_one_split_in_order(tmp_path: Path, names: list[str]) -> None:
    notes = list[str]()
    for split in ("", "train"):
        assert [file.name for file in data_files(folder(tmp_path, *names), split, "data.split", notes.append)] == names
    assert len(notes) == (2 if len(names) > 1 and "of" not in names[0] else 0)


@pytest.mark.parametrize("above", ["", "table/"])
def test_a_partition_is_not_suggested_for_the_table(tmp_path: Path, above: str) -> None:
    """As Hive and Spark write them; other folders are data sets of their own."""
    table = folder(tmp_path / "t", *(f"{above}year={year}/part-0.parquet" for year in (2024, 2025)))
    with pytest.raises(ConfigError) as caught:
        data_files(table, "", "data.split")
    assert "year=2024" in str(caught.value) and "year=" not in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        data_files(folder(tmp_path / "sets", "main/train.jsonl", "other/train.jsonl"), "", "data.split")
    assert str(tmp_path / "sets" / "main") in caught.value.remedy


@pytest.mark.parametrize(
    "names",
    [
        ["0000.parquet", "0002.parquet"],
        ["0001.parquet", "0003.parquet"],
        ["0002.parquet", "0003.parquet"],
        ["0007.parquet"],
        ["train-0.jsonl", "train-2.jsonl"],
        [f"part-00000-{UUID}-c000.parquet", f"part-00000-{UUID[::-1]}-c000.parquet"],
        ["part-00000-x.parquet", "part-00001-y.parquet"],
        ["train.jsonl", "train-0.jsonl"],
        ["data-0.jsonl", "0.jsonl"],
        ["train-00000-of-00003.parquet"],
        [f"00000-0-{UUID}-00001.parquet", f"00001-1-{UUID[::-1]}-00001.parquet"],
        ["train-00000-of-00002-a6.parquet", "train-00000-of-00002-b7.parquet", "train-00001-of-00002-c8.parquet"],
        ["train-00000-of-00002.parquet", "train-00001-of-00003.parquet"],
    ],
)
def test_shards_that_are_missing_or_twice_are_refused(tmp_path: Path, names: list[str]) -> None:
    message = refused(folder(tmp_path, *names))
    assert "is not whole, or there twice" in message and "data.split=" not in message


def test_a_number_alone_makes_no_shard(tmp_path: Path) -> None:
    """Years and levels are sets of their own; which of them are shards their owner knows."""
    pairs = (("aime-24", "aime-25"), ("2024", "2025"), ("level-1", "level-2"), ("chunk-a", "chunk-b"), ("x.aa", "x.ab"))
    for names in ([f"{name}.jsonl" for name in pair] for pair in pairs):
        path = folder(tmp_path / names[0], *names)
        assert found(path, names[1].removesuffix(".jsonl")) == [names[1]]
        assert "write data.split=NAME for one of them; if they are shards, call them NAME-00000-of-00002" in refused(path)


def test_folders_of_splits_are_splits(tmp_path: Path) -> None:
    """As the hub converts data sets, and as its cache keeps them."""
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    folder(snapshot / "default", "test/0000.parquet", "train/0000.parquet", "train/0001.parquet", "README.md")
    default = snapshot / "default"
    message = refused(default)
    assert "holds several splits\n  splits: test, train\n  remedy: write data.split=train" in message
    assert found(default, "train") == ["train/0000.parquet", "train/0001.parquet"] and found(default, "test") == [
        "test/0000.parquet"
    ]
    assert "data.eval.a.split=test" in refused(default, "", "data.eval.a.split")
    for above in (snapshot, tmp_path / "datasets--a--b"):
        assert f"name one of the folders, such as {default}" in refused(above)
    folder(tmp_path / "below", "data/partial-train/0000.parquet")
    assert found(tmp_path / "below") == ["data/partial-train/0000.parquet"]
    folder(tmp_path / "deeper", "train/a.jsonl", "train/b.jsonl")
    assert "train: holds several splits\n  splits: a, b" in refused(tmp_path / "deeper")


def test_what_datasets_keeps_in_its_cache(tmp_path: Path) -> None:
    names = ["gsm8k-test.arrow", "gsm8k-train-00000-of-00002.arrow", "gsm8k-train-00001-of-00002.arrow"]
    folder(tmp_path, *names, "dataset_info.json", "cache-0123456789abcdef.arrow", "._gsm8k-train.arrow")
    assert found(tmp_path, "gsm8k-train") == names[1:]
    message = refused(tmp_path)
    assert "splits: gsm8k-test, gsm8k-train\n" in message and message.endswith("write data.split=gsm8k-train")


@pytest.mark.parametrize(
    "names", [["dev.jsonl", "test.jsonl"], ["my_test.jsonl", "validation.jsonl"], ["eval/0.jsonl", "test/0.jsonl"]]
)
def test_held_out_splits_are_never_suggested_for_training(tmp_path: Path, names: list[str]) -> None:
    assert refused(folder(tmp_path, *names)).endswith("write data.split=NAME")
    folder(tmp_path, "extra/0.jsonl" if "/" in names[0] else "all.jsonl")
    assert refused(tmp_path).endswith("write data.split=NAME" if "/" in names[0] else "write data.split=all")


ADVISED = {"validation": "valid", "testing": "valid", "training": "train", "": "train"}


@pytest.mark.parametrize(("split", "advised"), ADVISED.items())
def test_the_advised_split_is_of_the_kind_that_was_asked_for(tmp_path: Path, split: str, advised: str) -> None:
    assert refused(folder(tmp_path, "train.jsonl", "valid.jsonl"), split).endswith(f"write data.split={advised}")
    for key in ("data.eval.math.split", "--split"):  # evaluates
        assert refused(tmp_path, "", key).endswith(f"write {key}=valid")


def test_a_link_whose_target_is_gone_is_no_shard_less(tmp_path: Path) -> None:
    folder(tmp_path, "0000.parquet")
    (tmp_path / "0001.parquet").symlink_to(tmp_path / "blobs" / "1")
    assert "0001.parquet: is a link to " in refused(tmp_path) and "download the data set again" in refused(tmp_path)


def test_other_kinds_of_files_only_where_there_are_no_others(tmp_path: Path) -> None:
    assert found(folder(tmp_path, "train.csv", "README.md", "dataset_info.json")) == ["train.csv"]
    assert found(folder(tmp_path, "all.jsonl")) == ["all.jsonl"]
    assert "holds: train.jsonl.gz" in refused(folder(tmp_path / "packed", "train.jsonl.gz")).replace("  ", " ")


def test_none_of_several_unrelated_files_is_advised(tmp_path: Path) -> None:
    assert "write data.split=NAME" in refused(folder(tmp_path, "gsm8k.jsonl", "math.jsonl"))
