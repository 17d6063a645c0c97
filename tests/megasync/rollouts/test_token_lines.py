"""What samples.jsonl keeps of tokens: of a response, of an episode's turns, and the trainer's log-probs beside them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from bridge.generation import Completion
from megasync.tools.assets.command import build_tokenizer
from megasync.config.data_section import DataConfig
from megasync.data.data import Example
from megasync.data.prompts import Prompts
from megasync.episodes.segments import Recorder, Turn
from megasync.episodes.task import EpisodeResult
from megasync.rollouts import requests
from megasync.rollouts.requests import episode_line, rows_of_first_members, token_fields, with_trainer_log_probs
from tests.support.chat_families import FAMILIES

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder: Path = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    return Prompts(str(folder), DataConfig())


def played() -> EpisodeResult:
    """Two turns, and a third that has forgotten the second."""
    recorder = Recorder()
    recorder.add(PROMPT, Turn([6, 7], [-0.1, -0.2], [4, 5]))
    recorder.add([*PROMPT, 6, 7, 10], Turn([8, 9, 8], [-0.3, -0.4, -0.5], [5, 5, 6]))
    recorder.add([*PROMPT, 6, 7, 11], Turn([9], [-0.6], [6]))
    return EpisodeResult(tuple(recorder.branches()), 1.0, num_turns=3)


def test_each_sampled_piece_has_its_tokens_and_the_trainers_log_probs(prompts: Prompts) -> None:
    line = episode_line(prompts, played(), answer="1", reward=1.0) | token_fields(prompts, played())
    rows = [np.array([-1.1, -1.2, 9.0, -1.3, -1.4, -1.5], np.float32), np.array([-1.6], np.float32)]
    first, second = with_trainer_log_probs(line, rows)["branches"]
    assert [piece["sampled"] for piece in first] == [False, True, False, True]
    assert [piece["sampled"] for piece in second] == [False, True] and second[0]["tokens"] == 6
    assert [piece.get("trainer_log_probs") for piece in (*first, *second)] == [
        None, [-1.1, -1.2], None, [-1.3, -1.4, -1.5], None, [-1.6],
    ]  # fmt: skip
    assert first[3]["rollout_log_probs"] == [-0.3, -0.4, -0.5] and first[3]["version_runs"] == [[5, 2], [6, 1]]
    assert "".join(first[3]["token_texts"]) == first[3]["text"] == "565"
    assert line["tokens"] == sum(piece["tokens"] for piece in (*first, *second) if piece["sampled"])


def test_only_the_first_tokens_are_kept(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_LOGGED_TOKENS", 4)
    first, _ = token_fields(prompts, played())["branches"]
    assert [len(piece.get("token_texts", ())) for piece in first] == [0, 2, 0, 2]
    arrays = np.arange(3, 9, dtype=np.int32), np.full(6, -0.5, np.float32), np.full(6, 2, np.int32)
    line = with_trainer_log_probs(token_fields(prompts, Completion(*arrays, "stop")), [np.full(6, -1.0, np.float32)])
    assert line["version_runs"] == [[2, 4]] and line["trainer_log_probs"] == [-1.0] * 4


def test_rows_are_those_of_each_groups_first_member() -> None:
    """Two branches of the first; the second group's first member was dropped; of the third there is nothing at all."""
    groups, members = np.array([0, 0, 0, 1, 3, 3]), np.array([0, 0, 1, 1, 0, 1])
    assert rows_of_first_members(groups, members, 4) == [[0, 1], [], [], [4]]
    without_tokens = with_trainer_log_probs({"branches": []}, [np.empty(0, np.float32)])
    assert without_tokens == {"branches": []} == with_trainer_log_probs({"branches": []}, [])


def test_a_prompt_that_begins_the_thinking(tmp_path: Path) -> None:
    """As the template renders it; rewards know it, so that a response in which the thinking does not end has no answer."""
    for name, end, begins in (("open", "<think>\n", True), ("closed", "<think>\n\n</think>\n\n", False), ("none", "", False)):
        tokenizer = copy.deepcopy(FAMILIES["qwen3"].tokenizer())
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        tokenizer.chat_template += f"{{% if add_generation_prompt %}}{end}{{% endif %}}"
        tokenizer.save_pretrained(tmp_path / name)
        prompts = Prompts(str(tmp_path / name), DataConfig(chat_template=True))
        example = Example("1+1=", "2", 1)
        assert requests.begins_thinking(prompts, example) == begins, prompts.prompt_text(example)
