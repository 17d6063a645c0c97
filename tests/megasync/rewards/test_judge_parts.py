"""A judge's parts: its section of the config, prompts, scores in replies, and the file that keeps replies."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from megasync.config.errors import ConfigError
from megasync.config.judge_section import JudgeConfig
from megasync.config.load import load_config, save_config
from megasync.rewards.judges.cache import ReplyCache, content_key
from megasync.rewards.judges.prompt import PromptError, messages
from megasync.rewards.judges.reply import UnparsedError, read_score
from megasync.rewards.resolve import named_judges
from tests.support.config_files import ROOT, write
from tests.support.rewards import given as samples

PROMPT = "{{ response }}"


def refused(tmp_path: Path, **keys: object) -> ConfigError:
    path = write(tmp_path / "run.yaml", json.dumps({"judges": {"quality": {"endpoint": "http://a/v1", "prompt": PROMPT} | keys}}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value


# -------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", "{{ question }}"),  # no variable of a judge's
        ("prompt", "{{ response "),
        ("system", "{% for %}"),
        ("score", "Score: [0-9]+"),  # no group
        ("score", "([0-9])([0-9])"),
        ("score", "([0-9]"),
        ("scale", [10, 0]),
        ("scale", [1]),
        ("concurrency", 0),
        ("on_unparsed", "skip"),
        ("timeout_seconds", "long"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    error = refused(tmp_path, **{key: value})
    assert error.key == f"judges.quality.{key}"
    assert error.remedy


def test_a_misspelt_key_and_a_bad_name_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, promt="x").lines["nearest"] == "judges.quality.prompt"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "b.yaml", "judges: {a/b: {path: model}}"))
    assert caught.value.key == "judges"


def test_judges_are_read_from_yaml_and_the_command_line_and_written_back(tmp_path: Path) -> None:
    text = f"judges: {{quality: {{endpoint: [http://a/v1, http://b/v1], prompt: '{PROMPT}', scale: [0, 10]}}}}"
    config = load_config(write(tmp_path / "run.yaml", text), ["judges.quality.score=json:score", "judges.other.path=model"])
    quality = config.judges["quality"]
    assert (quality.endpoint, quality.scale, quality.score) == (("http://a/v1", "http://b/v1"), (0, 10), "json:score")
    assert config.judges["other"].path == config.input_paths["judges.other.path"] == "model"
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert load_config(write(tmp_path / "none.yaml", "base: run.yaml\njudges: null")).judges == {}


def test_a_judge_that_is_not_declared_is_refused_by_name() -> None:
    assert named_judges({"judge:quality": 1, "exact_match": 1}, ["quality"]) == ["quality"]
    with pytest.raises(ConfigError) as caught:
        named_judges("judge:qualty", ["quality"])
    assert (caught.value.key, caught.value.value, caught.value.lines["nearest"]) == ("rollout.reward", "judge:qualty", "quality")


# -------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_holds_the_sample_and_its_columns() -> None:
    judge = JudgeConfig(system="Be strict.", prompt="{{ prompt }}|{{ response }}|{{ answer }}|{{ extra.level }}")
    (sample,) = samples("<b>47</b> {{ answer }}", level=3)
    rendered = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "12+34=|<b>47</b> {{ answer }}|46|3"}]
    assert messages(judge, sample) == rendered
    assert messages(judge.model_copy(update={"system": ""}), sample) == rendered[1:]


NO_TEXT = ["{{ extra.rubric }}", "{{ extra.level.deep.deeper }}", "{{ 1 / 0 }}", "{{ extra.level + 'x' }}"]


@pytest.mark.parametrize("template", NO_TEXT)
def test_a_template_without_a_text_for_a_sample_is_an_error(template: str) -> None:
    with pytest.raises(PromptError):
        messages(JudgeConfig(prompt=template), samples("x", level=3)[0])


def test_a_template_is_sandboxed() -> None:
    for template in ("{{ response.__class__.__mro__ }}", "{{ extra.update({'level': 1}) }}", "{{ ''.__class__ }}"):
        with pytest.raises(PromptError):
            messages(JudgeConfig(prompt=template), samples("x", level=3)[0])


# -------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("reply", "keys", "score"),
    [
        ("Score: 7", {}, 7),
        ("Score: 3, no: score: -2.5.", {}, -2.5),  # the last match
        ("Score: 7", {"scale": (0, 10)}, 0.7),
        ("Score: 1", {"scale": (1, 5)}, 0),
        ("<think>Score: 2</think>Score: 4", {}, 4),
        ("[[8]]", {"score": r"\[\[(\d+)\]\]"}, 8),
        ("A|", {"score": r"A|(\d)|"}, None),  # the group took no part
        ("nothing", {}, None),
        ("Score: 11", {"scale": (0, 10)}, None),
        ("<think>Score: 2", {}, None),
        ("is nan", {"score": "is (.*)"}, None),
        ("is inf", {"score": "is (.*)"}, None),
        ("is 1e400", {"score": "is (.*)"}, None),
        ("is good", {"score": "is (.*)"}, None),
        ('```json\n{"score": 7, "why": "{}"}\n```', {"score": "json:score"}, 7),
        ('{"score": 1} {"score": "2.5"} {"other": 3}', {"score": "json:score"}, 2.5),
        ('{"a": {"score": 1}}', {"score": "json:score"}, None),
        ('{"score": true}', {"score": "json:score"}, None),
        ('{"score": NaN}', {"score": "json:score"}, None),
        ('{"score": null}', {"score": "json:score"}, None),
        ('{"score": [1]}', {"score": "json:score"}, None),
        ('{"score": 1', {"score": "json:score"}, None),
        ('{"a":' * 5000, {"score": "json:score"}, None),
        ('{"score": 1' + "0" * 400 + "}", {"score": "json:score"}, None),
    ],
)
def test_the_score_in_a_reply(reply: str, keys: dict[str, object], score: float | None) -> None:
    judge = JudgeConfig(prompt=PROMPT).model_copy(update=keys)
    if score is None:
        with pytest.raises(UnparsedError):
            read_score(reply, judge)
    else:
        assert read_score(reply, judge) == score


@given(reply=st.text(), score=st.sampled_from([r"(-?\d+)", "(.*)", "json:score"]), scaled=st.booleans())
def test_a_reply_has_a_finite_score_or_none(reply: str, score: str, *, scaled: bool) -> None:
    judge = JudgeConfig(prompt=PROMPT, score=score, scale=(0, 10) if scaled else None)
    try:
        found = read_score(reply, judge)
    except UnparsedError:
        return
    assert math.isfinite(found)
    assert not scaled or 0 <= found <= 1


@given(before=st.text(), behind=st.text(alphabet="ab \n"), value=st.floats(allow_nan=False, allow_infinity=False))
def test_the_last_json_object_with_the_field_counts(before: str, behind: str, value: float) -> None:
    judge = JudgeConfig(prompt=PROMPT, score="json:score")
    text = before.replace("{", "").replace("<", "") + json.dumps({"score": 0}) + json.dumps({"score": value}) + behind
    assert read_score(text, judge) == value


# -------------------------------------------------------------------------------------------------------- cache


def test_replies_are_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    replies = {content_key(name): f"{name}\n\u2028 {{\ud800" for name in "abc"}
    cache = ReplyCache(tmp_path / "judges" / "q.jsonl")
    for key, reply in replies.items():
        cache.put(key, reply)
    assert {key: cache.get(key) for key in replies} == replies
    again = ReplyCache(tmp_path / "judges" / "q.jsonl")
    assert {key: again.get(key) for key in replies} == replies
    assert again.get(content_key("d")) is None


RUBBISH = [b"", b"\n", b"[]\n", b"1\n", b'{"key": 1}\n', b"\xff\n"]


@given(cut=st.integers(0, 400), rubbish=st.sampled_from(RUBBISH))
def test_a_file_that_is_cut_anywhere_loses_its_last_reply_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rubbish: bytes
) -> None:
    path = tmp_path_factory.mktemp("cache") / "q.jsonl"
    cache, keys = ReplyCache(path), [content_key(number) for number in range(5)]
    for key in keys:
        cache.put(key, f"reply of {key}")
    whole = path.read_bytes()
    kept = whole[: min(cut, len(whole))]
    path.write_bytes(kept + rubbish)
    opened = ReplyCache(path)
    num_whole = kept.count(b"\n")
    assert [opened.get(key) for key in keys[:num_whole]] == [f"reply of {key}" for key in keys[:num_whole]]
    opened.put("new", "reply")
    assert ReplyCache(path).get("new") == "reply"
    assert ReplyCache(path).get(keys[0]) == (f"reply of {keys[0]}" if num_whole else opened.get(keys[0]))


def test_a_reply_that_was_put_survives_kill_9(tmp_path: Path) -> None:
    program = (
        "import itertools, pathlib, sys\nfrom megasync.rewards.judges.cache import ReplyCache\n"
        "cache = ReplyCache(pathlib.Path(sys.argv[1]))\n"
        "for number in itertools.count():\n    cache.put(str(number), f'reply {number}')\n    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "q.jsonl")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(200)]
        os.kill(process.pid, signal.SIGKILL)
    cache = ReplyCache(tmp_path / "q.jsonl")
    assert [cache.get(str(number)) for number in range(200)] == [f"reply {number.strip()}" for number in seen]


def test_two_writers_never_get_each_others_replies(tmp_path: Path) -> None:
    first, second = ReplyCache(tmp_path / "q.jsonl"), ReplyCache(tmp_path / "q.jsonl")
    for number in range(20):
        (first, second)[number % 2].put(str(number), f"reply {number}")
    assert all(cache.get(str(n)) in (None, f"reply {n}") for cache in (first, second) for n in range(20))
