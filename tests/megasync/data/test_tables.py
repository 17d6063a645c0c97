"""Parquet files, folders of data, and what datasets.save_to_disk writes: all examples in order, or an error that names the file.

python -m pytest tests/megasync/data/test_tables.py
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megasync.data.data import Example, load_examples
from megasync.rewards.functions import RewardInput
from megasync.rewards.resolve import resolve_rewards
from megasync.data.files import data_files
from megasync.data.tables import media_columns

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(7)]
EXAMPLES = [Example(row["question"], row["answer"], n, extra={"level": row["level"]}) for n, row in enumerate(ROWS, start=1)]


def load(path: Path, split: str = "") -> list[Example]:
    return load_examples(path, "question", "answer", split=split)


def refused(path: Path, split: str = "") -> str:
    with pytest.raises(ValueError, match=path.name) as caught:
        load(path, split)
    message = str(caught.value)
    assert "remedy:" in message and len(message.splitlines()) <= 6
    return message


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_to_disk(folder: Path, splits: dict[str, list[dict[str, Any]]], *, num_shards: int = 1, as_dict: bool = True) -> Path:
    """By datasets itself, in a process of its own."""
    code = (
        "import datasets, json, sys; datasets.disable_progress_bars(); folder, splits, shards, as_dict = json.loads(sys.argv[1]);"
        "sets = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()};"
        "datasets.DatasetDict(sets).save_to_disk(folder, num_shards=dict.fromkeys(sets, shards)) if as_dict else "
        "next(iter(sets.values())).save_to_disk(folder, num_shards=shards)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps([str(folder), splits, num_shards, as_dict])], check=True)
    return folder


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    assert load(write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=2)) == EXAMPLES
    assert load(write_jsonl(tmp_path / "a.jsonl", ROWS)) == EXAMPLES


def test_images_are_left_where_they_are(tmp_path: Path) -> None:
    """Nor are other bytes read, unless they are asked for: then they are refused."""
    rows = [{**row, "image": {"bytes": b"\x89PNG", "path": "a.png"}, "raw": [b"x"]} for row in ROWS]
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert load(path) == EXAMPLES
    with pytest.raises(ValueError, match="row 1: 'raw' is a list, a text or a number"):
        load_examples(path, "question", "raw")
    with pytest.raises(ValueError, match=r"row 1: 'image.bytes' is a bytes, a text or a number"):
        load_examples(path, "question", "image.bytes")


def test_columns_of_images_are_those_with_a_value(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**row, "image": None, "picture": None} for row in ROWS]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.Table.from_pylist(rows, pa.schema([*pa.Table.from_pylist(ROWS).schema, ("image", kind), ("picture", kind)]))
    parquet.write_table(table, tmp_path / "none.parquet")
    assert media_columns(tmp_path / "none.parquet", "", "data.split") == []
    rows[1]["picture"] = {"bytes": b"x", "path": ""}
    parquet.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "one.parquet")
    assert media_columns(tmp_path / "one.parquet", "", "data.split") == ["picture"]


def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """Shards of a split in their order; `data` below the folder; beside it what is no data."""
    for number, rows in enumerate((ROWS[:3], ROWS[3:])):
        write_parquet(tmp_path / "main" / "data" / f"train-{number:05d}-of-00002-0123abcd.parquet", rows)
    write_parquet(tmp_path / "main" / "data" / "test-00000-of-00001.parquet", ROWS[5:])
    (tmp_path / "main" / "README.md").write_text("...")
    assert load(tmp_path / "main", "train") == EXAMPLES
    assert [example.prompt for example in load(tmp_path / "main", "test")] == ["5+1=", "6+1="]
    write_jsonl(tmp_path / "one" / "train.jsonl", ROWS)
    assert load(tmp_path / "one") == load(tmp_path / "one", "train") == EXAMPLES


def test_what_datasets_saves(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "both", {"train": ROWS, "test": ROWS[:2]}, num_shards=2)
    assert load(folder, "train") == EXAMPLES == load(folder / "train")
    assert len(data_files(folder, "train", "data.split")) == 2
    assert load(folder, "test") == EXAMPLES[:2]
    message = refused(folder, "tset")
    assert "has no split 'tset'" in message and "splits:  train, test" in message and "write data.split=test" in message
    assert "holds several splits" in refused(folder)
    (folder / "test" / "data-00001-of-00002.arrow").unlink()
    assert "state.json names files that are not there" in str(refused(folder / "test"))
    alone = save_to_disk(tmp_path / "alone", {"train": ROWS}, as_dict=False)
    assert load(alone) == EXAMPLES
    assert "is the split '', not 'train'" in refused(alone, "train")
    arrow = alone / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:200])
    assert "data-00000-of-00001.arrow: cut off, or not an Arrow file" in refused(alone)


def test_a_folder_that_cannot_be_read_is_reported_why(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "a" / "test.jsonl", ROWS)
    assert "holds several splits\n  splits: test, train\n" in refused(tmp_path / "a")
    write_parquet(tmp_path / "a" / "train.parquet", ROWS)
    assert "holds train as .jsonl and as .parquet" in refused(tmp_path / "a", "train")
    message = refused(tmp_path)
    assert "is a folder without data files" in message and f"such as {tmp_path}/a" in message
    assert "is one file, and data.split = 'train' is for folders" in refused(tmp_path / "a" / "test.jsonl", "train")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "dataset_dict.json").write_text("{")
    assert "dataset_dict.json: cannot be read" in str(refused(tmp_path / "c"))


def test_a_parquet_file_that_cannot_be_read_is_reported_why(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"nonsense"):
        path.write_bytes(content)
        assert "cut off, or not a Parquet file" in refused(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "a Git LFS pointer, not the data" in refused(path) and "git lfs pull" in refused(path)
    path.rename(tmp_path / "a.jsonl")
    assert "a Git LFS pointer, not the data" in refused(tmp_path / "a.jsonl")
    parquet.write_table(pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    assert "holds no examples" in refused(path)


@pytest.mark.parametrize(("pack", "program"), [(gzip.compress, "gunzip"), (bz2.compress, "bunzip2"), (lzma.compress, "unxz")])
def test_a_compressed_file_is_reported_how_to_unpack(tmp_path: Path, pack: Callable[[bytes], bytes], program: str) -> None:
    for name in ("train.jsonl.gz", "train.jsonl", "train.parquet"):
        (tmp_path / name).write_bytes(pack(b'{"question": "1+1=", "answer": "2"}\n'))
        message = refused(tmp_path / name)
        assert f"{name}: is compressed" in message and f"unpack it with {program}" in message


def test_a_file_by_another_name_is_reported_what_it_is(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS).rename(tmp_path / "a.jsonl")
    assert "a.jsonl: is a Parquet file" in refused(path) and "rename it to a.parquet" in refused(path)
    path.write_bytes(b"\x1b[2J\x00{")
    assert all(line.isprintable() for line in refused(path).splitlines())


def test_a_value_that_python_does_not_have_is_reported_with_its_column(tmp_path: Path) -> None:
    far, twice = pa.array([2**62], pa.timestamp("us")), pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    for column in (far, twice):
        table = pa.table({"question": ["1+1="], "answer": ["2"], "more": column})
        parquet.write_table(table, tmp_path / "train.parquet")
        assert "the column 'more' holds a value that Python" in refused(tmp_path / "train.parquet")


def test_a_machine_without_pyarrow_is_reported_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setattr("megasync.data.tables.find_spec", lambda _: None)
    assert "needs pyarrow" in refused(path)
    assert load(write_jsonl(tmp_path / "a.jsonl", ROWS)) == EXAMPLES


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": None}, "a.parquet: row 8: 'answer' is empty"),
        ({"question": None, "answer": "2"}, "a.parquet: row 8: 'question' is empty"),
        ({"question": "", "answer": "2"}, "a.parquet: row 8: the prompt 'question' is empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    assert words in refused(write_parquet(tmp_path / "a.parquet", [*ROWS, row]))


def test_gsm8k_and_math_as_they_come(tmp_path: Path) -> None:
    """Their answer columns are what math_verify compares with."""
    steps = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
    row = {"question": "How many?", "answer": steps}
    gsm8k = write_parquet(tmp_path / "gsm8k" / "main" / "test-00000-of-00001.parquet", [row])
    solution = "We have $x^2 = \\frac{1}{4}$ with $x > 0$, so that $x = \\boxed{\\frac{1}{2}}$."
    row = {"problem": "Solve.", "level": "Level 1", "type": "Algebra", "solution": solution}
    math = write_jsonl(tmp_path / "math.jsonl", [row])
    (first,) = load_examples(gsm8k.parent, "question", "answer", split="test")
    (second,) = load_examples(math, "problem", "solution")
    assert second.extra == {"level": "Level 1", "type": "Algebra"}
    (reward,) = resolve_rewards("math_verify")
    cases = [(first, "She sold $\\boxed{72}$.", "71"), (second, "Thus \\boxed{0.5}.", "\\boxed{1/3}")]
    for example, right, wrong in cases:
        rewards = [reward.function(RewardInput(example.prompt, response, example.answer, 5, 8)) for response in (right, wrong)]
        assert rewards == [1.0, 0.0]
