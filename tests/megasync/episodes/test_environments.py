"""Environments of others as they come, played with a model that says given lines. Those that are not installed are skipped."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megasync.config.errors import ConfigError
from megasync.episodes.environments import play
from megasync.episodes.task import Task
from examples import attempts, calculator, gyms, hanoi
from megasync.data import reasoning_gym as tasks
from tests.support.episodes import Guess
from tests.support.samplers import Lines, model_of


def model(*lines: str) -> Any:
    """With a chat template, as an episode gets it."""
    made = model_of(Lines(*lines))
    made.has_template = True  # type: ignore[attr-defined]
    return made


def texts(of: Any) -> list[str]:
    return [of.sampler.tokens.decode(branch.token_ids) for branch in of.recorder.branches()]


def test_gymnasiums_manner_is_played_to_its_end() -> None:
    reported = model("1", "2", "3")
    result = asyncio.run(play(Guess(Task("", (1,), "2")), Task("Guess.", (1,), "2", seed=7), reported))
    assert (result.reward, result.metrics, result.info) == (1.0, {"left": 0.0}, {"turn_rewards": [0.0, 1.0, 0.0]})
    assert result.turn_rewards == [0.0, 1.0, 0.0]
    assert "user\nGuess.<|im_end|>\n<|im_start|>user\n?7" in texts(reported)[0] and texts(reported)[-1].count("user\nno") == 2


def test_methods_that_do_not_look_like_async_ones_are_awaited() -> None:
    async def step() -> tuple[str, float, bool, bool, dict[str, float]]:
        return "", 0.5, True, False, {}

    environment = SimpleNamespace(reset=lambda: "?", step=lambda action: step())
    result = asyncio.run(play(environment, Task("Guess.", (1,), "2"), model("1")))
    assert (result.reward, result.turn_rewards) == (0.5, [0.5])


def test_finite_numbers_of_any_kind_in_an_environments_info_are_logged() -> None:
    """Gymnasium's environments return numpy's, and NaN where a figure is not defined; that is no failure of the episode."""
    numbers = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": np.array(2.0), "é数": 5, 7: True}
    numbers["e"] = torch.tensor(1.5)
    others = {"nan": math.nan, "inf": np.float64("inf"), "big": 10**400, "list": [1], "array": np.ones(1), "text": np.str_("5")}
    others |= {"complex": np.complex64(1 + 2j), "texts": np.array("5"), "none": None}
    environment = SimpleNamespace(reset=lambda: "?", step=lambda _: ("", np.float32(0.5), True, False, numbers | others))
    result = asyncio.run(play(environment, Task("Guess.", (1,), "2"), model("1")))
    assert (result.reward, result.metrics) == (0.5, {"a": 3.0, "b": 0.5, "c": 1.0, "d": 2.0, "é数": 5.0, "7": 1.0, "e": 1.5})


def test_skyrl_gyms_environment_is_played_as_it_comes() -> None:
    gym = pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed: pip install skyrl-gym")
    for answer, reward in (("So it is #### 12", 1.0), ("#### 13", 0.0)):
        environment = gym.make("gsm8k", extras={"reward_spec": {"ground_truth": "12"}})
        reported = model(answer)
        result = asyncio.run(play(environment, Task("7 + 5?", (1,), "12"), reported))
        assert result.reward == reward and len(reported.recorder.branches()) == 1


def test_skyrl_gyms_turns_are_played_until_the_answer_is_right() -> None:
    """A wrong answer in the right form is worth a fifteenth in each of three turns."""
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed: pip install skyrl-gym")
    task, reported = Task("7+5", (1,), "12"), model("11", "#### 11", "#### 12")
    result = asyncio.run(play(gyms.Skyrl(task), task, reported))
    assert (result.reward, result.metrics) == (pytest.approx(1 + 0.2 / 3), {"steps": 3.0})
    assert sum(result.info["turn_rewards"]) == pytest.approx(result.reward) and len(result.info["turn_rewards"]) == 3
    assert texts(reported)[-1].count("<|im_start|>user") == 3


def test_what_the_gyms_hold_out_is_nowhere_else() -> None:
    try:
        lines = gyms.lines(0)
    except ConfigError as error:
        pytest.skip(f"reasoning-gym cannot be fetched: {error}")
    for name in ("skyrl", "reasoning", "warm_up"):
        train, held_out = ({line["question"] for line in lines[f"{name}{end}"]} for end in ("", "_held_out"))
        assert train and held_out and not train & held_out
    assert {line["answer"].startswith("#### ") for line in lines["warm_up"]} == {True, False}


def test_a_question_of_reasoning_gym_has_several_attempts() -> None:
    try:
        tasks.reasoning_gym()
    except ConfigError as error:
        pytest.skip(f"reasoning-gym cannot be fetched: {error}")
    (line,), _ = tasks.generate_task("chain_sum", {"max_terms": 2, "max_digits": 2}, 1, 0, seed=3)
    task = Task(line["question"], (1,), line["answer"], {"entry": line["entry"]})
    assert json.loads(line["entry"])["answer"] == line["answer"]
    assert asyncio.run(attempts.episode(task, model("nothing", line["answer"]))) == 0.75
    assert asyncio.run(attempts.episode(task, model(line["answer"]))) == 1.0


def test_the_tower_of_hanoi_is_played_move_by_move() -> None:
    """Solved in as few moves as may be it is worth 1, in more less; an illegal move ends it, and so does the last turn."""
    try:
        files = hanoi.lines(0)
    except ConfigError as error:
        pytest.skip(f"reasoning-gym cannot be fetched: {error}")
    line = next(line for line in files["train"] if json.loads(line["entry"])["metadata"]["num_pegs"] == 3)
    task = Task(line["question"], (1,), line["answer"], {"entry": line["entry"]})
    best, (start, target) = line["answer"].splitlines(), hanoi.begin(json.loads(line["entry"])["metadata"])
    first, after = next(hanoi.legal(start))
    away = next(move for move, board in hanoi.legal(after) if board == start)
    illegal = best[0].replace("disk 1", "disk 2")  # onto the smaller one

    def play_of(*moves: str) -> tuple[Any, list[str]]:
        reported = model(*moves)
        return asyncio.run(play(hanoi.Hanoi(task), task, reported)), texts(reported)

    result, said = play_of(*best)
    assert (result.reward, result.metrics) == (1.0, {"solved": 1.0}) and said[-1].count(f">{target + 1}<|im_end|>") == 3
    assert play_of(first, away, *best)[0].reward == 0.6
    assert play_of(best[0], illegal)[0].reward == 0.0
    assert play_of(*[first, away] * 4)[0].metrics == {"solved": 0.0}
    assert not {line["question"] for line in files["train"]} & {line["question"] for line in files["held_out"]}
    assert {line["answer"] for line in files["warm_up"]} >= {move for move, _ in hanoi.legal(start)}


def test_the_calculator_says_what_a_call_is_worth() -> None:
    assert [calculator.calculator(asked) for asked in ("<12*34>", "<12*>", "12*34")] == [":408;", ":?;", ":?;"]
    lines = calculator.lines(0)
    held_out, trained = ({line["question"] for line in lines[name]} for name in ("held_out", "train"))
    assert len(held_out) == calculator.NUM_HELD_OUT and not held_out & trained
    assert len(lines["warm_up"]) == 2 * len(trained)

    class Model:
        def __init__(self, *said: str) -> None:
            self.said = list(said)

        async def complete(self, ids: list[int]) -> SimpleNamespace:
            return SimpleNamespace(token_ids=[0], text=self.said.pop(0))

        def encode(self, text: str) -> list[int]:
            assert text == ":408;"
            return [1]

    for said, reward in (("408", 1.0), ("40", 0.0)):
        assert asyncio.run(calculator.episode(Task("12*34=", (2,), "408"), Model("<12*34>", said))) == reward
