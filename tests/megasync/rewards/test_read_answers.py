# ruff: noqa: RUF001, E501 # characters as they stand in people's texts
"""Which part of a response is the answer, and which answers are equal. math-verify is the real package."""

from __future__ import annotations

import logging
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.rewards.answers.equal import equal
from megasync.rewards.answers.read import opens_thinking, read_answer
from megasync.rewards.functions import RewardInput, math_verify
from tests.megasync.rewards.compare_answers import ours, pairs, wrong

READ = [  # (response, its answer)
    ("<think>6*7 = 42</think>\n<answer>17</answer>", "17"),
    (r"<think>so \boxed{42}</think> The answer is 17.", "17"),
    ("<think>6*7 = 42", None),
    ("6*7 = 42</think>\n\n17", "17"),
    ("<think>a</think> 12 <think>42", None),
    ("<thinking>42</thinking>17<|im_end|>", "17"),
    ("<reasoning>\n42\n</reasoning>\n<answer>\n17\n</answer>\n", "17"),
    ("[THINK]42[/THINK]17", "17"),
    ("◁think▷42◁/think▷17", "17"),
    ("<|channel|>analysis<|message|>42<|end|><|start|>assistant<|channel|>final<|message|>17<|return|>", "17"),
    ("<|channel|>analysis<|message|>42", None),
    ("analysisWe get 42.assistantfinal17", "17"),
    ("<answer>17</answer> or <answer>42", "17"),
    ("<answer>17</answer>, no, <answer>42</answer>", "42"),
    (r"<answer>17</answer> \boxed{42}", "17"),
    ("<answer>42", None),
    (r"<answer>so \boxed{42}", "42"),
    ("<answer></answer> 42", None),
    ("<Answer> 42 </Answer>", "42"),
    ("<|begin_of_box|>42<|end_of_box|>", "42"),
    ("48 + 24 = 72\n#### 72", "72"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\fbox{5}", "5"),
    (r"\boxed 5", "5"),
    (r"\boxed{17} then \boxed{4", "17"),
    (r"\boxed{4", None),
    (r"\boxed{}", None),
    (r"\boxed{13} and \boxed{50}", "13, 50"),
    (r"$\boxed{13}$, $\boxed{50}$.", "13, 50"),
    (r"We get \boxed{3}. Then the other is \boxed{5}", "5"),
    (r"\boxed{5}. That is rule 7.", "5"),
    ("答:小明还剩9个苹果,比朋友多5个。", "9 个苹果"),
    ("答：小明比朋友多5个。", "5 个"),
    ("The answer is 9 apples, 5 more than his friend.", "9 apples"),
    ("So the price is $12, which is $3 less than before.", "$12"),
    ("He ran 5 km, 2 km farther than Ann, and 2 more laps than Bo.", "5 km"),
    ("Tom has 9 apples and Sam 4, so Tom has 5 more than Sam.", "5"),
    ("answer:42", "42"),
    ("**Answer:** 42", "42"),
    ("### Final Answer\n\nThe answer is 42 because 6*7=42.", "42"),
    ("The answer is:\n\\[\n x = 2 \n\\]", "x = 2"),
    ("The answer is not 42.", "not 42"),
    ("The answer is 42. This answer is correct.", "42"),
    (r'{"answer": "\sqrt{2}"}', r"\sqrt{2}"),
    (r'{"answer": "\\sqrt{2}"}', r"\sqrt{2}"),
    (r'{"answer": "\frac{1}{2}"}', r"\frac{1}{2}"),
    ('{"answer": "a\tb"}', "a\tb"),
    ('The answer is 42. In code: {"value": 7}', "42"),
    ('{"answer": 3} is not it: the answer is 42', "42"),
    ('The answer is 3.\n{"result": 42}', "42"),
    ('{"result": 42}\nThe answer is correct.', "42"),
    ("The answer is July 4.", "July 4"),
    ("The answer is Emily Brontë.", "Emily Brontë"),
    ("The answer is approximately 4.5.", "4.5"),
    ("We choose A to be a set of 5 numbers, which has 32 subsets.", "32"),
    ("Because it is odd, we select (C).", "(C)"),
    ("答案是42", "42"),
    ("答案：**42**", "42"),
    ("故选：B", "B"),
    ("Réponse : 42", "42"),
    ('{"answer": 15}', "15"),
    ("There are 42 apples in total.", "42"),
    ("It costs $18 and $5 more, so $23.", "$23"),
    ("It isn't 42", "It isn't 42"),
    ("I get 42 or 43", "42 or 43"),
    ("`42`", "42"),
    ("Answer: `42`", "42"),
    ("The answer is:\n```\n42\n```", "42"),
    ("The answer is 41? No, it must be 42.", "42."),
    ("答案不是24。", "答案不是24"),
    ("The correct choice is (D) 12.", "(D) 12"),
    (r"$x = \boxed{1}$ or $x = \boxed{2}$", "1, 2"),
    ("The bus leaves at 5:45 PM.", "5:45 PM."),
    ("*42*", "42"),
    ("**1,234**", "1,234"),
    ("x = 5", "x = 5"),
    ("There is no solution", "no solution"),
    ("", None),
    ("  \n", None),
]
HOSTILE = [
    "9**9**9", "$9^{9^{9^9}}$", "$10000000!$", r"\boxed{x^{10^{10^{10}}}}", r"\boxed{2^{2^{2^{2^{2^{2}}}}}}", r"\boxed{1.1^{999999999}}",
    r"\boxed{\frac{1}{0}}", r"\boxed{0/0}", r"\boxed{\sin(10^{500})}", r"\boxed{(x+1)^{100} - (x+2)^{100}}", "1e99999999", "\0\x01\ud800",
    r"\boxed{" * 5000, "(" * 5000 + "1" + ")" * 5000, r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", "<answer>" * 12000, "<think>" * 12000,
    "$" * 100000, "\\(" * 50000, "*" * 100000, " " * 100000 + "x", "a. " * 33000, "answer: " * 12500, "answer is ( " * 8000, "\\frac{" * 15000,
    "{" * 100000, "}" * 100000, "1," * 50000, "1 and " * 16000, "." * 100000, "_a " * 33000, "答案是" * 33000, "一" * 100000, "1" * 100000, "\n" * 100000,
    r"\boxed{" + "1+" * 150 + "1}", r"\boxed{" + "1," * 150 + "1}", "__a" * 30000, "`a" * 50000, r"\text{" * 20000, "a" * 100000, "```\n" * 25000, "[1," * 30000, "<|a|>" * 20000,
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer"), READ)
def test_where_the_answer_stands(response: str, answer: str | None) -> None:
    assert read_answer(response) == answer


def test_thinking_that_the_prompt_began() -> None:
    assert [opens_thinking(text) for text in ("1+1=<think>\n", "1+1=", "Use <think> tags. 1+1=", "<think></think>")] == [
        True,
        False,
        False,
        False,
    ]
    assert read_answer("42", in_thinking=True) is None
    assert read_answer("42</think>17", in_thinking=True) == "17"
    rewards = [math_verify(RewardInput("6*7?<think>\n", text, "42", 2, 8)) for text in ("42", "17</think>42", "42</think>17")]
    assert rewards == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("origin", ["development", pytest.param("held out", marks=pytest.mark.long)])
def test_pairs_of_many_shapes_and_forms(origin: str) -> None:
    """No wrong answer is accepted, and at most one right one in a hundred is rejected."""
    chosen = [pair for pair in pairs() if pair.origin.startswith(origin)]
    assert len(chosen) >= 300
    accepted, rejected = wrong(ours, chosen)
    assert accepted == []
    assert len(rejected) <= 0.01 * sum(pair.is_right for pair in chosen), rejected


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_worth_0_in_time(response: str) -> None:
    begin = time.monotonic()
    assert [math_verify(RewardInput("1+1=", response, gold, 2, 8)) for gold in ("42", "x^2+1")] == [0, 0]
    assert time.monotonic() - begin < 12  # two time limits; each takes milliseconds


def test_equal_text_is_right_whatever_it_says() -> None:
    for text in ("10:00", "cannot be determined", "f'(x) \\pmod{n}", "((", "\\frac{", "1, 2; 3", "無", "42 \\ldots", "a" * 5000):
        assert ours(text, text) and ours(text, f"<think>17</think><answer>{text}</answer>"), text
    assert not ours("", "") and not ours(" ", "\n")


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"\sin 30^\circ", r"\frac12", r"\sin 30"),
        (r"\{x \mid x > 5\}", r"(5, \infty)", r"\{x \mid x \ge 5\}"),
        (r"x = 2k\pi, k \in \mathbb{Z}", r"x = 2k\pi (k \in \mathbb{Z})", r"x = 2k\pi (k \in \mathbb{N})"),
        ("x+y=7", "y=7-x", "7"),
        ("8", "x = 5 + 3 = 8", "7 = 8"),
        ("0.33", "1/3 = 0.33", "1/2 = 0.33"),
        ("500", "Rs. 500", "Rs. 50"),
        ("2½", "5/2", "21/2"),
    ],
)
def test_forms_beside_wrong_ones(gold: str, right: str, wrong: str) -> None:
    assert equal(gold, right) and not equal(gold, wrong)


def spellings(value: Fraction) -> list[str]:
    """Of one number, as people and models write it."""
    written = [str(value), f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"+{value}" if value > 0 else str(value)]
    if value.denominator == 1:
        number = value.numerator
        written += [
            f"{number:,}",
            f"{number}.0",
            f"{number:,}".replace(",", "{,}"),
            f"{number}.",
            f"x = {number}",
            f"{number} apples",
        ]
        written += [
            f"{number}\\text{{ cm}}",
            f"\\text{{{number}}}",
            f"{number}\\,",
            f"\\mathbf{{{number}}}",
            str(number).replace("-", "−"),
        ]
    elif (value * 1000).denominator == 1:
        written += [
            f"{float(value):.3f}",
            f"{float(value)}",
            f"{float(value)}".replace("0.", ".") if abs(value) < 1 else f"{float(value)}",
        ]
    elif value > 1:
        whole = value.numerator // value.denominator
        written += [f"{whole}\\frac{{{value.numerator - whole * value.denominator}}}{{{value.denominator}}}"]
    return written


FORMS = [
    "{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think>{other}</think><answer>{}</answer>", "{other}</think>The answer is {}.", "#### {}",
    "First {other}.\n\nSo the answer is: **{}**", "Answer: ${}$", "We see {other}, so that it is $\\boxed{{{}}}$.", "\\[ \\boxed{{{}}} \\]", "`{}`",
    "答案是{}。", "**Final Answer**\n\\({}\\)", "<think>\\boxed{{{other}}}</think>\n${}$", "\\boxed{{{other}}} is wrong. Then \\boxed{{{}}}",
]  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-(10**7), 10**7).map(Fraction),
    st.integers(-50, 50).map(Fraction),
    st.fractions(-100, 100, max_denominator=40),
    st.integers(-9999, 9999).map(lambda n: Fraction(n, 100)),
)


@settings(max_examples=300, deadline=None)
@given(NUMBERS, NUMBERS, st.data())
def test_any_number_in_any_form(value: Fraction, other: Fraction, data: st.DataObject) -> None:
    right, form = (data.draw(st.sampled_from(choices)) for choices in (spellings(value), FORMS))
    gold = data.draw(st.sampled_from([spelt for spelt in spellings(value) if not spelt.endswith(("apples", "cm}"))]))
    assert ours(gold, form.format(right, other=other))
    if value != other:
        assert not ours(gold, form.format(data.draw(st.sampled_from(spellings(other))), other=right))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4, unique=True), st.data())
def test_any_parts_in_any_notation(parts: list[int], data: st.DataObject) -> None:
    """A list and a set in any order, a tuple only in its own; a part too few or too many is wrong."""
    texts = [str(part) for part in parts]
    mixed = data.draw(st.permutations(texts))
    as_list = data.draw(st.sampled_from([", ".join, " and ".join, lambda parts: "\\{" + ",".join(parts) + "\\}", " or ".join]))
    assert equal(", ".join(texts), as_list(mixed)) and equal(as_list(texts), as_list(mixed))
    point = f"({','.join(texts)})"
    assert equal(point, f"\\left({', '.join(texts)}\\right)") and equal(point, f"({', '.join(mixed)})") == (mixed == texts)
    assert not any(equal(as_list(texts), as_list(other)) for other in (mixed[1:], [*mixed, "100"], ["100", *mixed[1:]]))


def test_a_time_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("megasync.rewards.functions.MATH_SECONDS", 1)
    with caplog.at_level(logging.WARNING, logger="megasync.rewards.functions"):
        assert math_verify(RewardInput("1+1=", r"\boxed{\binom{100000000}{50000000}}", "46", 2, 8)) == 0
    assert "Timeout" in caplog.text
