"""What columns hold is decoded by their schema, noted or refused; never is a text taken for what it stands for, or the reverse.

python -m pytest tests/megasync/data/test_columns.py
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from megasync.config.errors import ConfigError
from megasync.data.data import Example, load_examples

MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}]
ROW = {"question": "1+1=", "answer": "2"}
OF_DATASETS = """
import sys
from datasets import ClassLabel, Dataset, Features, Image, Json, List, Value, disable_progress_bars
disable_progress_bars()
message = {"role": Value("string"), "content": Value("string"), "name": Value("string")}
features = Features({
    "prompt": Json(), "turns": List(message), "answer": ClassLabel(names=["no", "yes"]), "level": ClassLabel(names=["a", "b"]),
    "tools": List(Json()), "about": {"ground": Json(), "score": Value("float32")}, "picture": Image(),
})
turns = [{"role": "user", "content": "2+2?"}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {"default": None}}}}}
about = {"ground": {"a": [1]}, "score": 0.3}
row = {"prompt": turns, "turns": turns, "answer": 1, "level": 0, "tools": [tool], "about": about, "picture": None}
Dataset.from_list([row] * 2, features=features).to_parquet(sys.argv[1] + "/of.parquet")
Dataset.from_list([row] * 2, features=features).save_to_disk(sys.argv[1] + "/saved")
"""


def load(path: Path, prompt_key: str = "question", answer_key: str = "answer") -> tuple[list[Example], list[str]]:
    notes = list[str]()
    return load_examples(path, prompt_key, answer_key, note=notes.append), notes


def written(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_of_datasets_are_what_datasets_gives(tmp_path: Path) -> None:
    """JSON columns at any depth, class labels, float32, of Parquet with and without Arrow's schema, and of a saved set."""
    subprocess.run([sys.executable, "-c", OF_DATASETS, str(tmp_path)], check=True)
    table = parquet.read_table(tmp_path / "of.parquet")
    plain = table.set_column(0, "prompt", table["prompt"].cast(pa.string()))
    with parquet.ParquetWriter(tmp_path / "plain.parquet", plain.schema, store_schema=False) as writer:
        writer.write_table(plain)
        writer.add_key_value_metadata(table.schema.metadata)
    for name in ("of.parquet", "saved", "plain.parquet"):
        for prompt_key in ("prompt", "turns"):
            found, notes = load(tmp_path / name, prompt_key)
            assert found[1].messages == ({"role": "user", "content": "2+2?"},) and found[1].answer == "yes"
            assert found[1].extra["about"] == {"ground": {"a": [1]}, "score": 0.3} and found[1].extra["level"] == 0
            assert found[1].tools[0]["function"]["parameters"] == {
                "properties": {"x": {"default": None}}
            }  # JSON's own null stays
            assert ["no, yes" in note for note in notes].count(True) == 1 and any("picture" in note for note in notes)


@pytest.mark.parametrize("write", [json.dumps, str])
def test_messages_written_as_texts_are_messages(tmp_path: Path, write: Any) -> None:
    """As JSON, or as Python writes a list, in Parquet, CSV and JSONL; a text among others that looks like it stays one."""
    text = write(MESSAGES)
    for path in (
        written(tmp_path / "a.parquet", question=[text, text], answer=["4", "4"]),
        lines(tmp_path / "a.jsonl", {"question": text, "answer": "4"}),
    ):
        found, notes = load(path)
        assert found[0].messages == tuple(MESSAGES) and found[0].prompt == "2+2?"
        assert len(notes) == 1 and "'question' holds lists of messages" in notes[0]
    found, notes = load(lines(tmp_path / "b.jsonl", {"question": text, "answer": "4"}, ROW))
    assert [example.prompt for example in found] == [text, "1+1="] and "1 of 2 texts" in notes[0]
    for other in ("[1, 2]", '["role"]', "[role", "[]"):
        assert load(lines(tmp_path / "c.jsonl", {"question": other, "answer": "4"})) == ([Example(other, "4", 1)], [])


@pytest.mark.parametrize(
    ("text", "is_noted"),
    [
        (str(np.array(MESSAGES, dtype=object)), True),  # without commas
        (repr(np.array(MESSAGES, dtype=object)), True),
        (json.dumps({"messages": MESSAGES}), True),
        (json.dumps(MESSAGES[0]), True),
        (json.dumps([MESSAGES]), True),
        ("[role] {content: x}", False),
        ('{"answer": "role", "content": "x"}', False),
        ('What is [{"role": "user", "content": "x"}]?', False),
    ],
)
def test_texts_like_messages_that_cannot_be_read_as_such_are_noted(tmp_path: Path, text: str, is_noted: bool) -> None:
    found, notes = load(lines(tmp_path / "a.jsonl", {"question": text, "answer": "4"}, {"question": "1+1=", "answer": "2"}))
    assert found[0].prompt == text and not found[0].messages
    assert [note.partition(" texts")[0] for note in notes] == ["1 of 2"] * is_noted


@pytest.mark.parametrize(
    ("answers", "is_noted"),
    [(["72.0", "-7.0"], True), (["72.0", ""], True), (["72.0", "7"], False), (["72.0", "7.5"], False), (["v1.0", "1.0"], False)],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_whole_numbers_that_pandas_wrote_with_a_point_are_noted(
    tmp_path: Path, suffix: str, answers: list[str], is_noted: bool
) -> None:
    path = written(tmp_path / "a.parquet", question=["a", "b"], answer=answers)
    if suffix == "csv":
        path = tmp_path / "a.csv"
        path.write_text("question,answer\n" + "".join(f"a,{answer}\n" for answer in answers))
    found, notes = load(path)
    assert [example.answer for example in found] == answers and ["'72.0'" in note for note in notes] == [True] * is_noted


@pytest.mark.parametrize(
    ("values", "right"),
    [
        (pa.array([72.0, 0.5]), ["72", "0.5"]),
        (pa.array([0.1, 1e-5], pa.float32()), ["0.1", "0.00001"]),
        (pa.array([0.1, 3.0], pa.float16()), ["0.1", "3"]),
        (pa.array([1e20, -0.0]), ["100000000000000000000", "-0"]),
        (pa.array([2**60 + 1, 7]), ["1152921504606846977", "7"]),
        (pa.array(["72.0", " 7"]), ["72.0", " 7"]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    ],
)
def test_answers_of_columns_are_what_a_model_would_write(tmp_path: Path, values: pa.Array, right: list[str]) -> None:
    found, notes = load(written(tmp_path / "a.parquet", question=["a", "b"], answer=values))
    assert [example.answer for example in found] == right
    is_noted = pa.types.is_floating(values.type)
    assert is_noted == any("floating-point numbers" in note for note in notes)
    assert any("2**53" in note for note in notes) == (right[0] == "100000000000000000000")


def test_numbers_of_json_lines(tmp_path: Path) -> None:
    found, notes = load(lines(tmp_path / "a.jsonl", {"question": "a", "answer": 72.0}, {"question": "b", "answer": 72}))
    assert [example.answer for example in found] == ["72", "72"] and "1 of 2 answers 'answer'" in notes[0]


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, ["question", "answer", "answer"]), path)
    with pytest.raises(ValueError, match=r"a\.parquet: has several columns of the name 'answer'"):
        load(path)
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema([("question", pa.string())] * 2)) as stream:
        stream.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["question"] * 2))
    with pytest.raises(ValueError, match="has several columns of the name 'question'"):
        load(tmp_path / "a.arrow")
    for name, content in {
        "a.jsonl": '{"question": "a", "question": "b", "answer": "2"}',
        "b.jsonl": '{"question": "a", "answer": "2", "more": [{"x": 1, "x": 2}]}',
        "a.csv": "question,question,answer\na,b,2\n",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=r"(the key '(question|x)' is there twice|several columns of the name 'question')"):
            load(tmp_path / name)


def test_fields_that_a_table_fills_with_null_are_not_rendered(tmp_path: Path) -> None:
    """Objects of one column have all fields of each other; what a reward gets is as datasets gives it."""
    tools = [
        {"name": "add", "parameters": {"properties": {"x": {"type": "int"}}}},
        {"name": "mul", "parameters": {"properties": {"y": {"type": "int"}}}},
    ]
    rows = [{"question": MESSAGES, "answer": "4", "tools": tools, "about": [{"a": 1}, {"b": 2}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    ((found,), _) = load(tmp_path / "a.parquet")
    assert list(found.tools) == tools and found.extra["about"] == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_maps_and_times(tmp_path: Path) -> None:
    """As Spark writes them: a map is an object, a time goes to the reward, and is no answer."""
    when = pa.array([dt.datetime(2024, 1, 1)])
    about = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    ((found,), _) = load(written(tmp_path / "a.parquet", question=["a"], answer=["1"], about=about, when=when))
    assert found.extra == {"about": {"a": 1}, "when": dt.datetime(2024, 1, 1)}
    with pytest.raises(ValueError, match="row 1: 'answer' is a datetime"):
        load(written(tmp_path / "a.parquet", question=["a"], answer=when))


def test_pictures_and_sounds_are_no_prompts(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", question=[{"bytes": b"\x89PNG", "path": "a.png"}], answer=["1"])
    with pytest.raises(ValueError, match="row 1: 'question' is a dict, a text or a number"):
        load(path)


def test_json_that_is_none_is_named(tmp_path: Path) -> None:
    features = {"info": {"features": {"question": {"_type": "Json"}}}}
    table = pa.table({"question": ["{"], "answer": ["1"]}).replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 1: 'question' is JSON by the file's schema"):
        load(tmp_path / "a.parquet")


def test_other_forms_of_tables(tmp_path: Path) -> None:
    """CSV and TSV, whose values are texts as they are written; one JSON list; Arrow's file format beside its streams."""
    right = [Example("1, 1\n=", "007", 1), Example('"', "72.0", 2)]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1, 1\n=",007\r\n\r\n"""",72.0\r\n')
    (tmp_path / "a.tsv").write_text('question\tanswer\n"1, 1\n="\t007\n""""\t72.0\n')
    (tmp_path / "a.json").write_text(json.dumps([{"question": each.prompt, "answer": each.answer} for each in right], indent=1))
    feather.write_feather(pa.table({"question": ["1, 1\n=", '"'], "answer": ["007", "72.0"]}), tmp_path / "a.arrow")
    for name in ("a.csv", "a.tsv", "a.json", "a.arrow"):
        assert load(tmp_path / name) == (right, []), name


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"question,answer\na,1\nb\n", "row 2: has 1 values for 2 columns"),
        ("a.csv", b"question,answer\na,1,2\n", "row 1: has 3 values for 2 columns"),
        ("a.csv", b'question,answer\n"a"b,1\n', "line 2: "),
        ("a.csv", b"question,answer\n\xff,1\n", "not UTF-8"),
        ("a.csv", b"", "holds no examples"),
        ("a.json", b"[]", "holds no examples"),
        ("a.json", b'[{"question": "a", "answer": "1"}', "not JSON"),
        ("a.json", b'[{"question": "a", "answer": "1"}, 3]', "row 2: a int, not an object"),
        ("a.json", b'[{"question": "a", "answer": "\\ud83d"}]', "row 1: .*a lone surrogate"),
        ("a.csv", b"\x1f\x8b", "is compressed"),
    ],
)
def test_what_is_wrong_with_them_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load(tmp_path / name)


def test_a_row_without_a_class_has_no_answer(tmp_path: Path) -> None:
    """-1 stands for none in `datasets`."""
    labels = {"question": {"dtype": "string", "_type": "Value"}, "answer": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    table = pa.table({"question": ["a", "b"], "answer": [1, -1]})
    metadata = {"huggingface": json.dumps({"info": {"features": labels}})}
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"row 2: 'answer' is empty"):
        load(tmp_path / "a.parquet")
