"""Bad inputs of episodes, a table: what is refused before anything starts, and what is a failure of one episode with its name.

    python -m pytest tests/megasync/episodes/test_bad_inputs.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.config.errors import ConfigError
from megasync.episodes.resolve import resolve_episode
from megasync.train import main
from tests.megasync.episodes.test_episode_pool import Reported, failure, play, pool_of
from tests.support.bad_episodes import KINDS
from tests.support.chat_families import FAMILIES
from tests.support.config_files import write_runnable

BAD = "tests.support.bad_episodes"
REFUSED = {  # the value of rollout.episode: what is said of it
    "episode": "is not the name of an episode",
    f"{BAD}.episode": "is not the name of an episode",
    f"{BAD}:episode()": "is not the name of an episode",
    "no.such.module:episode": "cannot be imported: ModuleNotFoundError",
    "raises_at_import:episode": "cannot be imported: ZeroDivisionError: division by zero",
    "exits_at_import:episode": "cannot be imported: SystemExit: 3",
    "no_python:episode": "cannot be imported: SyntaxError",
    f"{BAD}:episod": "nearest: episode",
    f"{BAD}:KINDS": "KINDS is no async function",
    f"{BAD}:yields": "yields is no async function",
    f"{BAD}:talk": "talk is no async function",
    f"{BAD}:too_many": "cannot be called with a task and a model: missing a required argument: 'more'",
    f"{BAD}:by_name": "cannot be called with a task and a model: too many positional arguments",
    f"{BAD}:NoReset": "NoReset has no methods reset and step",
    f"{BAD}:TwoArguments": "cannot be made with a task: missing a required argument: 'folder'",
}
MODULES = {"raises_at_import": "1 / 0", "exits_at_import": "import sys; sys.exit(3)", "no_python": "async def episode(:"}
FAILURES = {  # the kind of episode: what its failure is called
    "text": "returned 'good', a finite number is expected",
    "nan": "returned nan, a finite number is expected",
    "infinite": "returned inf, a finite number is expected",
    "list": "returned [1.0, 0.0], a finite number is expected",
    "dict": "returned {'reward': 1.0}, a finite number is expected",
    "message": "returned {'role': 'assistant'",
    "metric_text": "returned the metric calls = 'two', a finite number is expected",
    "metric_nan": "returned the metric calls = nan, a finite number is expected",
    "metrics_list": "returned metrics of type list, a mapping of names to numbers is expected",
    "info_text": "returned info of type str, a mapping is expected",
    "turn_rewards": "returned 2 turn_rewards for 0 turns",
    "turn_text": "returned a turn's reward 'much', a finite number is expected",
    "raises": "raised ZeroDivisionError: on purpose",
    "system_exit": "raised SystemExit: 3",
    "missing_module": "raised ModuleNotFoundError: No module named 'my_tools'",
    "no_messages": "episodes.messages.MessageError: there are no messages: write at least one, of the user",
    "messages_text": "episodes.messages.MessageError: messages are of type str: write a list of messages",
    "no_role": "episodes.messages.MessageError: a message has no role",
    "unknown_role": "episodes.messages.MessageError: a message's role is 'robot': write system, user, assistant or tool",
    "content_number": "episodes.messages.MessageError: content is int: write a text",
    "image": "episodes.messages.MessageError: content has a part of type 'image_url': only text is taken",
    "call_text": "episodes.messages.MessageError: a tool call has no function with a name: 'add(1, 2)'",
    "call_nameless": "episodes.messages.MessageError: a tool call has no function with a name",
    "tool_nameless": "episodes.messages.MessageError: a tool has no name",
    "tool_text": "episodes.messages.MessageError: a tool has no name: 'add'",
    "tool_function": "episodes.messages.MessageError: a tool has no name: <built-in function print>",
    "tool_schema": "episodes.messages.MessageError: a tool's parameters are 'two numbers'",
    "no_ids": "raised ValueError: there are no tokens for a turn to continue",
    "ids_text": "raised ValueError: token ids are of type str: write a list of whole numbers",
    "ids_numbers": "raised ValueError: token ids have 1.5 among them: write whole numbers from 0",
    "ids_negative": "raised ValueError: token ids have -1 among them: write whole numbers from 0",
    "ids_unknown": "raised ValueError: a turn was refused: no such token",
    "ids_huge": "raised ValueError: token ids have 1000000000000 among them",
    "no_new_tokens": "raised ValueError: a limit of tokens is 0: write a whole number from 1 on",
    "new_tokens_text": "raised ValueError: a limit of tokens is 'many': write a whole number from 1 on",
    "stop_number": "raised ValueError: stop = [7]: write a list of texts",
    "tool_stops": "raised RuntimeError: the tool raised StopIteration",
    "step_two": "raised TypeError: step gave a tuple of 2",
    "step_reward": "raised TypeError: step gave the reward 'much', a number is expected",
    "step_nothing": "raised TypeError: step gave NoneType",
    "http_messages": "raised openai.BadRequestError: Error code: 400 - a message has no role",
    "http_format": "response_format: the policy writes text",
    "http_limit": "max_tokens = -1: write a whole number from 1",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_play_is_refused_before_anything_starts(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve_episode(path)
    reported = " ".join(str(caught.value).split())
    assert f"rollout.episode = {path!r}" in reported and REFUSED[path] in reported and "remedy: " in reported


def test_the_command_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(path), f"rollout.episode={BAD}:TwoArguments", "--check"])
    assert ended.value.code == 2 and "rollout.episode" in capsys.readouterr().err


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """All of them side by side in one process, beside a good one."""
    folder = tmp_path_factory.mktemp("model")
    FAMILIES["qwen3"].tokenizer().save_pretrained(folder)
    return play(pool_of(str(folder), episode=f"{BAD}:episode", episode_timeout_seconds=60.0), list(KINDS))


def test_each_kind_is_in_the_table() -> None:
    assert KINDS.keys() == FAILURES.keys() and len(FAILURES) + len(REFUSED) > 20


@pytest.mark.parametrize("kind", FAILURES)
def test_a_mistake_is_a_failure_with_its_name(reported: Reported, kind: str) -> None:
    assert FAILURES[kind] in failure(reported, kind)
