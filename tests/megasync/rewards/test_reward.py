"""Rewards by name and by import path. math-verify is the real package. In processes of their own: test_reward_pool.py."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from megasync.rewards.functions import RewardInput
from megasync.rewards.program import numbers
from megasync.workers.failure import BadValueError
from megasync.rewards.resolve import REWARDS, Reward, resolve_rewards


def sample(response: str, answer: str, num_tokens: int = 2, max_tokens: int = 8) -> RewardInput:
    return RewardInput("1+1=", response, answer, num_tokens, max_tokens)


def resolve(name: str) -> Reward:
    (reward,) = resolve_rewards(name)
    return reward


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("46", "46", 1),
        (" 46\n", "46", 1),
        ("46", "46 ", 1),
        ("4 6", "46", 0),
        ("460", "46", 0),
        ("", "46", 0),
        ("", "", 0),
        (" \n", " ", 0),
    ],
)
def test_exact_match(response: str, answer: str, expected: float) -> None:
    assert resolve("exact_match").function(sample(response, answer)) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("46", "46", 1),
        ("So the answer is $\\boxed{\\frac{1}{2}}$.", "0.5", 1),
        ("I add them: 12 + 34 = 46", "46", 1),
        ("47", "46", 0),
        ("", "46", 0),
        ("}}{{\\frac $", "46", 0),
    ],
)
def test_math_verify(response: str, answer: str, expected: float) -> None:
    assert resolve("math_verify").function(sample(response, answer)) == expected


RIGHT = [  # (response, answer as a data set's column has it)
    (r"So it is $2\sqrt{2}$.", r"\sqrt{8}"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\sqrt{8}", r"\sqrt{8}"),
    (r"The point is $(1, 2)$.", "(1,2)"),
    ("(1,2)", "(1,2)"),
    (r"That makes \boxed{1000000}.", "10^{6}"),
    ("1,000,000", "10^{6}"),
    (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"$\{2, 1\}$", r"\{1,2\}"),
    (r"The roots are \boxed{-2, 1}.", "1,-2"),
    (r"\[ x \in (-\infty, 2] \]", r"(-\infty, 2]"),
    (r"\boxed{[2,5)}", "[2,5)"),
    (r"$(0,9)\cup(9,36)$", r"(0,9) \cup (9,36)"),
    ("0.5", r"\frac{1}{2}"),
    (r"\boxed{\frac{4}{3}}", r"\frac43"),
    (r"\(1 + x^2\)", "x^2+1"),
    (r"\boxed{90}", r"90^\circ"),
    (r"\boxed{A}", r"\text{(A)}"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{3\sqrt{13}}", r"3\sqrt{13}"),
    (r"\boxed{6-5i}", "6 - 5i"),
    (r"\boxed{11111}", r"11,\! 111"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{5}", "x=5"),
    (r"\boxed{\frac{1}{2}}", r"$\frac{1}{2}$"),
    ("I get 72.", "48 / 2 = 24 clips.\nAltogether 48 + 24 = 72.\n#### 72"),
    ("48 + 24 = 72\n#### 72", "#### 72"),
    (r"\boxed{1234}", "1,234"),
    ("$18", "$18"),
    ("073", "73"),
    ("The answer is 42.", "42 apples"),
]
WRONG = [
    (r"$2\sqrt{3}$", r"\sqrt{8}"),
    ("8", r"\sqrt{8}"),
    (r"\sqrt{2}", r"\sqrt{8}"),
    ("$(2, 1)$", "(1,2)"),
    ("$[1, 2]$", "(1,2)"),
    ("10", "10^{6}"),
    ("$10^{5}$", "10^{6}"),
    ("10^{6}", "10"),
    ("3", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{(3,\pi/3)}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"$\{1, 3\}$", r"\{1,2\}"),
    ("1", "1,-2"),
    ("2", r"(-\infty, 2]"),
    (r"$(-\infty, 2)$", r"(-\infty, 2]"),
    (r"\boxed{(2,5)}", "[2,5)"),
    ("2", r"\frac{1}{2}"),
    (r"$(x+1)^2$", "x^2+1"),
    (r"\boxed{9}", r"90^\circ"),
    (r"\boxed{B}", r"\text{(A)}"),
    (r"\boxed{\text{Angela}}", r"\text{Evelyn}"),
    ("3", r"3\sqrt{13}"),
    ("5", "6 - 5i"),
    (r"\boxed{111}", r"11,\! 111"),
    ("2", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("I get 24.", "48 / 2 = 24 clips.\nAltogether 48 + 24 = 72.\n#### 72"),
    ("48 + 24 = 72\n#### 71", "#### 72"),
    ("", r"\sqrt{8}"),
    ("4 6", "46"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_math_verify_knows_answers_in_bare_latex(response: str, answer: str) -> None:
    assert resolve("math_verify").function(sample(response, answer)) == 1


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_math_verify_gives_0_to_other_values(response: str, answer: str) -> None:
    assert resolve("math_verify").function(sample(response, answer)) == 0


def test_math_verify_is_worth_0_with_a_reason_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megasync.rewards.functions"):
        assert resolve("math_verify").function(sample("$9^{9^{9^9}}$", "46")) == 0  # cannot be worked out in any time
    assert "9^{9^{9^9}}" in caplog.text
    assert "too large a number" in caplog.text


def test_math_verify_outside_of_the_main_thread() -> None:
    results: list[float] = []
    reward = resolve("math_verify")
    thread = threading.Thread(target=lambda: results.append(reward.function(sample("$\\frac{92}{2}$", "46"))))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_token_count() -> None:
    assert resolve("token_count").function(sample("x", "y", num_tokens=2, max_tokens=8)) == 0.25


@pytest.mark.parametrize("name", ["exact", "contains", "", "a.b:", ":f", "a b:f", "a:b:c", "a.:f", "1a:f"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match="there is no such reward") as caught:
        resolve(name)
    assert ", ".join(REWARDS) in str(caught.value)
    assert "remedy:" in str(caught.value)


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "our_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "short.py").write_text(
        "from __future__ import annotations\n"
        "def brevity(sample):\n    return 1 / (1 + len(sample.response))\n"
        "def ranks(samples: Sequence[NotThere]):\n    return range(len(samples))\n"
        "def listing(samples: list):\n    return [0] * len(samples)\n"
        "def each(sample):\n    yield 1\n"
        "number = 3\n"
        "class Judge:\n    pass\n"
        "def two(sample, model):\n    return 1\n"
        "async def later(sample):\n    return 1\n"
        "def of_trl(completions, **columns):\n    return 1\n"
        "def of_verl(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"
        "def ours(completions: list[RewardInput]):\n    return [0] * len(completions)\n"
    )
    (package / "needy.py").write_text("import not_installed_anywhere\n")
    (package / "wrong.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "our_rewards.short"


def test_a_function_of_your_own(rewards_module: str) -> None:
    assert resolve(f"{rewards_module}:brevity").function(sample("abc", "")) == 0.25


def test_what_a_function_takes_is_reported_by_its_annotation(rewards_module: str) -> None:
    kinds = {"brevity": (False, False), "later": (False, True)} | dict.fromkeys(("ranks", "listing", "ours"), (True, False))
    for name, kind in kinds.items():
        reward = resolve(f"{rewards_module}:{name}")
        assert (reward.takes_list, reward.is_async) == kind, name
    rewards = resolve_rewards({"exact_match": 1.0, f"{rewards_module}:brevity": 0.2})
    assert [(reward.name, reward.weight) for reward in rewards] == [("exact_match", 1.0), (f"{rewards_module}:brevity", 0.2)]


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("our_rewards.short:brevty", "nearest: brevity"),
        ("our_rewards.short:number", "number is no function"),
        ("our_rewards.short:Judge", "Judge is no function"),
        ("our_rewards.short:each", "each is a generator"),
        ("our_rewards.short:two", "two cannot be called with one argument: missing a required argument: 'model'"),
        ("our_rewards.short:of_trl", "of_trl is written for TRL: it takes completions, columns"),
        ("our_rewards.short:of_verl", "of_verl is written for verl: it takes data_source, solution_str"),
        ("our_rewards.wrong:f", "ZeroDivisionError"),
        ("our_rewards.none:f", "No module named 'our_rewards.none'"),
        ("our_rewards.needy:f", "No module named 'not_installed_anywhere'"),
        ("nowhere_at_all:f", "PYTHONPATH"),
    ],
)
def test_a_function_that_cannot_be_had(rewards_module: str, path: str, word: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.reward") as caught:
        resolve(path)
    assert path in str(caught.value)
    assert word in str(caught.value)
    assert f"nearest: {path.partition(':')[2]}\n" not in str(caught.value)  # which is no remedy


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "high", "1", b"1", [1.0], 10**400])
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(BadValueError, match="a finite number is expected"):
        numbers(value, resolve("exact_match"), 1)


def test_a_number_a_sample_of_a_list() -> None:
    reward = Reward("of a list", 1.0, len, takes_list=True, is_async=False)
    assert numbers((1, True, 0.5), reward, 3) == numbers(np.array([1, 1, 0.5], np.float32), reward, 3) == [1.0, 1.0, 0.5]
    for value, words in {(1.0, 2.0): "2 values, a list of 3", 5: "5, a list of 3", "abc": "'abc'", (1, 2, None): "None"}.items():
        with pytest.raises(BadValueError, match=words):
            numbers(value, reward, 3)
