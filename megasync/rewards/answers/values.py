r"""Whether two answers of one part are equal: a number, a number with its unit, words, a formula, with its name before "=".

    same_single("x = 3/2", "1.5 cm")      # True

Leaves out answers of several parts, times and bases (equal.py).
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from megasync.rewards.answers.formulas import judge, letters_of
from megasync.rewards.answers.notation import Number, number
from megasync.rewards.answers.tidy import has_words, key
from megasync.rewards.answers.units import split_unit, units_agree

DEGREES = re.compile(r"(-?[\d.]+)\s?°")
FALLING = re.compile(r"([^<>]+)(>|\\ge(?![a-z]))([^<>]+?)(>|\\ge(?![a-z]))([^<>]+)")
PART = re.compile(r"(\([a-h]\))\s+((?:-?(?:\d|\\(?:frac|sqrt)(?![a-z]))|[A-Za-z]{3}|[A-Za-z]\s?=).*)")  # (a) 10, but not (a) + b
EQUALS = re.compile(r"(?<![<>:])=|\\in(?![A-Za-z])|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z])")
NAME = re.compile(
    r"\s*(?:\\(?:sin|cos|tan|cot|sec|csc)\s?)?"
    r"(?:(?:[A-Zf-h]\s?\^\s?\{-1\}|[A-Z]\s?\^T|[A-Za-z](?:_\{?[\w ]+\}?)?'*)(?:\s?\([^()]*\))?|\\(?!pi\b)[a-z]+(?:_\{?\w+\}?)?"
    r"|[|]?[A-Z]{1,4}[|]?|\|[a-z]\||\([A-Za-z](?:\s?,\s?[A-Za-z])+\)"
    r"|\\(?:angle|triangle|overline|vec|hat|mathbf|mathcal)\s?\{?[A-Za-z]+\}?)\s*°?"
)


def named(text: str) -> tuple[str, str]:
    """The text before the first "=" outside of brackets, and the text after the last; ("", text) if there is none.

    Of 7 = 8 both are empty. A part's label, as (a), is a name, too.
    """
    if (part := PART.fullmatch(text)) is not None:
        return part[1], part[2]
    depth, sides, begin = 0, [], 0
    for mark in re.finditer(rf"{EQUALS.pattern}|[(\[{{)\]}}]", text):
        if mark[0] in "([{":
            depth += 1
        elif mark[0] in ")]}":
            depth -= 1
        elif depth == 0:
            sides.append(text[begin : mark.start()].strip())
            begin = mark.end()
    sides.append(text[begin:].strip())
    if len(sides) == 2 and NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]) and not letters_of(sides[0]):
        sides.reverse()  # 5 = x
    if any(has_words(side) or "\\ne" in side or (sides[0] and side.endswith(sides[0])) for side in sides[1:-1]):
        return "", ""  # x = 4 instead of x = 3
    if len(sides) > 1 and (before := number(sides[-2])) and (last := number(sides[-1])) and not _is_rounded(before, last):
        return "", ""
    if len(sides) > 2 and not NAME.fullmatch(sides[0]) and not letters_of(sides[-2]):
        return "", sides[-1]  # \pi r^2 = \pi 3^2 = 9\pi
    return (sides[0] if len(sides) > 1 else ""), sides[-1]


def same_single(gold: str, answer: str) -> bool:
    (our_name, ours), (their_name, theirs) = named(gold), named(answer)
    if their_name and not letters_of(their_name) and not has_words(their_name) and not NAME.fullmatch(their_name):
        their_name = ""  # 12 + 34 = 46
    if our_name and not letters_of(our_name) and not has_words(our_name) and not NAME.fullmatch(our_name):
        our_name = ""
    if not ours or not theirs:
        return False
    if our_name and their_name:
        is_of_values = any(re.search(r"[A-Za-z]\([^A-Za-z()]+\)", name) for name in (our_name, their_name))  # f(3)
        return (key(our_name) == key(their_name) and same_value(ours, theirs)) or (not is_of_values and judge(gold, answer))
    if our_name or their_name:
        is_name = NAME.fullmatch(our_name) is not None or has_words(our_name) if our_name else is_label(their_name)
        return is_name and same_value(ours, theirs)
    return same_value(ours, theirs)


def is_label(text: str) -> bool:
    """Whether what stands before "=" names what is asked for: x, f(2), "total" or m+n, but not 2x, which is not x."""
    return NAME.fullmatch(text) is not None or has_words(text) or len(letters_of(text)) > 1


def same_value(gold: str, answer: str) -> bool:  # noqa: PLR0911 - one return a rule
    if key(gold) == key(answer):
        return True
    if FALLING.fullmatch(gold) or FALLING.fullmatch(answer):
        return judge(_rising(gold), _rising(answer))
    if ("°" in gold) != ("°" in answer) and "\\pi" in gold + answer:  # of 120° and 2\pi/3
        return judge(*(DEGREES.sub(r"\\frac{\1 \\pi}{180}", text) for text in (gold, answer)))
    (ours, our_unit, our_factor), (theirs, their_unit, their_factor) = split_unit(gold), split_unit(answer)
    is_percent = "%" in {our_unit, their_unit} and "" in {our_unit, their_unit}
    if not is_percent and not units_agree(our_unit, their_unit):
        return False
    if has_words(ours) or has_words(theirs):
        return key(ours) == key(theirs) and our_factor == their_factor
    first, second = number(ours), number(theirs)
    if first is not None and second is not None:
        first, second = Number(first.value * our_factor, first.decimals), Number(second.value * their_factor, second.decimals)
        if not is_percent:
            return _same_number(first, second)
        percent, plain = (first, second) if our_unit == "%" else (second, first)
        hundredth = Number(percent.value / 100, percent.decimals and percent.decimals + 2)
        return (_same_number(percent, plain) and abs(plain.value) >= 1) or _same_number(hundredth, plain)
    if our_factor != their_factor:
        return False
    return key(ours) == key(theirs) or judge(first.latex() if first else ours, second.latex() if second else theirs)


def _is_rounded(first: Number, second: Number) -> bool:
    """Equal up to the last decimal of that which has fewer."""
    decimals = [number.decimals for number in (first, second) if number.decimals is not None]
    return abs(first.value - second.value) <= (Fraction(1, 10 ** min(decimals)) if decimals else 0)


def _rising(text: str) -> str:
    """2 < x < 5 from 5 > x > 2, which math-verify can read."""
    if (found := FALLING.fullmatch(text)) is None:
        return text
    high, first, middle, second, low = found.groups()
    signs = {">": "<", "\\ge": "\\le "}
    return f"{low}{signs[second]}{middle}{signs[first]}{high}"


def _same_number(first: Number, second: Number) -> bool:
    """Equal, or one is the other rounded or cut off (`may_be_rounded`)."""
    if first.value == second.value:
        return True
    rough, exact = sorted((first, second), key=lambda one: math.inf if one.decimals is None else one.decimals)
    if rough.decimals is None or not rough.may_be_rounded:
        return False
    scaled = exact.value * 10**rough.decimals
    return rough.value * 10**rough.decimals in {round(scaled), math.trunc(scaled)}
