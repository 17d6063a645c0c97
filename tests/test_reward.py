"""Rewards by name and by import path. math-verify is the real package."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from megasync.rollouts.reward import REWARDS, RewardInput, resolve_reward


def sample(response: str, answer: str, num_tokens: int = 2, max_tokens: int = 8) -> RewardInput:
    return RewardInput("1+1=", response, answer, num_tokens, max_tokens)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("46", "46", 1),
        (" 46\n", "46", 1),
        ("46", "46 ", 1),
        ("4 6", "46", 0),
        ("460", "46", 0),
        ("", "46", 0),
        ("", "", 1),
    ],
)
def test_exact_match(response: str, answer: str, expected: float) -> None:
    assert resolve_reward("exact_match")(sample(response, answer)) == expected


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
    assert resolve_reward("math_verify")(sample(response, answer)) == expected


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
    assert resolve_reward("math_verify")(sample(response, answer)) == 1


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_math_verify_gives_0_to_other_values(response: str, answer: str) -> None:
    assert resolve_reward("math_verify")(sample(response, answer)) == 0


def test_math_verify_is_worth_0_with_a_reason_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megasync.rollouts.reward"):
        assert resolve_reward("math_verify")(sample("$9^{9^{9^9}}$", "46")) == 0  # cannot be worked out in any time
    assert "9^{9^{9^9}}" in caplog.text
    assert "Timeout" in caplog.text


def test_math_verify_outside_of_the_main_thread() -> None:
    results: list[float] = []
    reward = resolve_reward("math_verify")
    thread = threading.Thread(target=lambda: results.append(reward(sample("$\\frac{92}{2}$", "46"))))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_token_count() -> None:
    assert resolve_reward("token_count")(sample("x", "y", num_tokens=2, max_tokens=8)) == 0.25


@pytest.mark.parametrize("name", ["exact", "contains", "", "a.b:", ":f", "a b:f", "a:b:c", "a.:f", "1a:f"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match="there is no such reward") as caught:
        resolve_reward(name)
    assert ", ".join(REWARDS) in str(caught.value)
    assert "remedy:" in str(caught.value)


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "our_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "short.py").write_text(
        "def brevity(sample):\n    return 1 / (1 + len(sample.response))\n"
        "def broken(sample):\n    return None\n"
        "def endless(sample):\n    return float('inf')\n"
        "number = 3\n"
        "class Judge:\n    pass\n"
        "def two(sample, model):\n    return 1\n"
        "async def later(sample):\n    return 1\n"
    )
    (package / "needy.py").write_text("import not_installed_anywhere\n")
    (package / "wrong.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "our_rewards.short"


def test_a_function_of_your_own(rewards_module: str) -> None:
    assert resolve_reward(f"{rewards_module}:brevity")(sample("abc", "")) == 0.25


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("our_rewards.short:brevty", "nearest: brevity"),
        ("our_rewards.short:number", "number is no ordinary function"),
        ("our_rewards.short:Judge", "Judge is no ordinary function"),
        ("our_rewards.short:later", "later is no ordinary function"),
        ("our_rewards.short:two", "two cannot be called with one argument: missing a required argument: 'model'"),
        ("our_rewards.wrong:f", "ZeroDivisionError"),
        ("our_rewards.none:f", "No module named 'our_rewards.none'"),
        ("our_rewards.needy:f", "No module named 'not_installed_anywhere'"),
        ("nowhere_at_all:f", "PYTHONPATH"),
    ],
)
def test_a_function_that_cannot_be_had(rewards_module: str, path: str, word: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.reward") as caught:
        resolve_reward(path)
    assert path in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize("name", ["broken", "endless"])
def test_a_function_that_returns_no_number(rewards_module: str, name: str) -> None:
    with pytest.raises(ValueError, match="a finite number is expected") as caught:
        resolve_reward(f"{rewards_module}:{name}")(sample("abc", ""))
    assert "abc" in str(caught.value)
