"""TRL's columns `tools` and `chat_template_kwargs`, and tool calls, reach the template; what it would leave out is refused.

python -m pytest tests/megasync/data/test_rendered_columns.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megasync.config.load import load_config
from megasync.data.load import RunData, load_data
from tests.megasync.data.test_prompts import set_template
from tests.support.config_files import cannot_run, write_runnable

TEMPLATE = """{%- if tools %}+{{ tools | length }}{% for one in tools %}={{ one.function.parameters.x }}{% endfor %}{%- endif -%}
{%- for message in messages -%}{{ loop.index }}{%- if message.tool_calls %}{%- for call in message.tool_calls -%}
={{ call.function.arguments.x }}{%- endfor -%}{%- endif -%}{{ message.content }}{%- endfor -%}
{%- if enable_thinking is defined and not enable_thinking -%}0{%- endif -%}{%- if add_generation_prompt -%}={%- endif -%}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"x": 5}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 8}}}
USER = [{"role": "user", "content": "7"}]


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """The tokenizer knows digits, + and =."""
    path = write_runnable(tmp_path)
    set_template(path, TEMPLATE)
    return path


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    made = [{"question": "7", "answer": "2", **row} for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(made), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return f"data.train={path}"


def data_of(runnable: Path, *overrides: str) -> RunData:
    return load_data(load_config(runnable, ["data.chat_template=true", "data.batch_size=1", *overrides]))


def texts(data: RunData) -> list[str]:
    return [data.prompts.prompt_text(example) for example in data.train]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_each_row_has_its_own_tools_and_variables(runnable: Path, tmp_path: Path, suffix: str) -> None:
    """Also written as JSON; without some there are none; a row's variables go before the run's."""
    rows = [
        {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [TOOL, TOOL], "chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [], "chat_template_kwargs": None, "question": "8"},
    ]
    train = write_rows(tmp_path / f"a{suffix}", *rows)
    assert texts(data_of(runnable, train)) == ["+1=5170=", "+2=5=517=", "18="]
    of_run = "data.chat_template_arguments.enable_thinking=false"
    assert texts(data_of(runnable, train, of_run)) == ["+1=5170=", "+2=5=517=", "180="]
    written = [{name: json.dumps(row[name]) for name in ("tools", "chat_template_kwargs")} for row in rows[:2]]
    data = data_of(runnable, write_rows(tmp_path / f"b{suffix}", *written))
    assert texts(data) == ["+1=5170=", "+2=5=517="] and len(set(texts(data))) == 2
    assert data.train[0].extra["tools"] == written[0]["tools"]  # what a reward gets


def test_rows_with_tools_get_the_template_that_a_model_has_for_them(runnable: Path, tmp_path: Path) -> None:
    """As Command R and Hermes 3 have: of several by name transformers takes tool_use for them."""
    plain = "{{ messages[0].content }}{% if add_generation_prompt %}={% endif %}"
    set_template(runnable, [{"name": "default", "template": plain}, {"name": "tool_use", "template": TEMPLATE}])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert texts(data_of(runnable, write_rows(tmp_path / "a.jsonl", {"tools": [TOOL], **off}, {}))) == ["+1=5170=", "7="]
    message = cannot_run(runnable, "data.chat_template=true", write_rows(tmp_path / "b.jsonl", off))
    assert "line 1: chat_template_kwargs has 'enable_thinking'" in message


def test_calls_of_a_history_are_written(runnable: Path, tmp_path: Path) -> None:
    """With the arguments as an object or as JSON; a prompt may end with what a tool answered."""
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"x": 8}'}}
    histories = [[*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result] for call in (CALL, as_text)]
    histories.append([*USER, {"role": "assistant", "tool_calls": [CALL]}, result])
    data = data_of(runnable, write_rows(tmp_path / "a.jsonl", *({"question": history} for history in histories)))
    assert texts(data) == ["172=833="] * 3


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"tools": [TOOL]}, "{{ messages[0].content }}", "line 2: holds tools, and the model's chat template reads none"),
        ({"chat_template_kwargs": {"enable_thinkin": 1}}, TEMPLATE, "line 2: chat_template_kwargs has 'enable_thinkin', and"),
        (
            {"question": [*USER, {"role": "assistant", "content": "1", "reasoning_content": "2"}, *USER]},
            TEMPLATE,
            "line 2: a message has 'reasoning_content', which the model's chat template does not write",
        ),
        (
            {"question": [*USER, {"role": "assistant", "content": "1", "tool_calls": [CALL]}, *USER]},
            "{{ messages[0].content }}",
            "line 2: a message has 'tool_calls', which the model's chat template does not write",
        ),
    ],
)
def test_what_the_template_would_leave_out_is_refused(
    runnable: Path, tmp_path: Path, row: dict[str, Any], template: str, words: str
) -> None:
    set_template(runnable, template)
    message = cannot_run(runnable, "data.chat_template=true", write_rows(tmp_path / "a.jsonl", {}, row))
    assert message.startswith(f"data.train: {words}") and "remedy:" in message


def test_an_episode_loses_no_part_of_a_history(runnable: Path, tmp_path: Path) -> None:
    history = [*USER, {"role": "assistant", "content": "1", "tool_calls": [CALL]}, *USER]
    episode = "rollout.episode=examples.calculator:episode"
    message = cannot_run(runnable, "data.chat_template=true", episode, write_rows(tmp_path / "a.jsonl", {"question": history}))
    assert "line 1 has a message with tool_calls, and episodes get role and content alone" in message


@pytest.mark.parametrize(
    ("row", "overrides", "note"),
    [
        ({"tools": [TOOL]}, ["data.chat_template=false"], "the columns 'tools' and 'chat_template_kwargs' are for chat"),
        ({"tools": "calculator"}, [], "the column 'tools' does not have TRL's format"),
        ({"chat_template_kwargs": [1]}, [], "the column 'chat_template_kwargs' does not have TRL's format"),
        ({"system": "Be brief."}, [], "the column 'system' is not"),
        ({"system": "Be brief.", "question": [{"role": "system", "content": "1"}, *USER]}, [], ""),
    ],
)
def test_what_is_not_rendered_is_noted(
    runnable: Path, tmp_path: Path, row: dict[str, Any], overrides: list[str], note: str
) -> None:
    data = data_of(runnable, write_rows(tmp_path / "a.jsonl", row), *overrides)
    assert [each.startswith(f"data.train: {note}") for each in data.notes] == ([True] if note else [])
