r"""Whether two formulas are equal, by math-verify, which is asked about nothing but formulas.

    judge(r"\frac{x+1}{x-1}", r"1+\frac{2}{x-1}")      # True

Its yes is doubted where numbers substituted for the variables say no: it takes differences below 1e-15 for none. What its parser
drops or reads otherwise (primes, dots, units, a space between numbers, capitals) is not given to it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from fractions import Fraction
from typing import Any

from megasync.rewards.answers.notation import Number, number
from megasync.rewards.answers.tidy import closing, has_words
from megasync.rewards.answers.units import ANGLE_FUNCTION

MAX_FORMULA = 400  # characters
MAX_DIGITS = 20_000  # of a number that a formula is worth
UNJUDGED = re.compile(  # what the parser leaves out or takes for something else
    r"['\"]|\\ldots|\\(?:text|prime|pmod|cdots|hat|tilde|partial)(?![A-Za-z])|[:?@#&]|\.\.|\A\+\s?/?\s?-"  # signs that it drops
    r"|(?<!_)\d\s+\d|(?<![\\A-Za-z])[A-Za-z]\s*\d|\d\s*\\frac.*\\frac\{[^{}]*[a-z]|\([a-h]\)\s?\d"  # no products
    r"|\d\s(?:to|by|in|of|if|or|at|up|is|on|no)\s|\A[A-Z]{3,}\Z|\d+-\d+-\d|\d/\d+/\d"  # words, names, dates
    r"|(?<![a-z])d[a-z]\}?\s?(?:/\s?|\}?\{)d[a-z]|(?<![\\A-Za-z])[fgh]\s?\^\s?\{-1\}\s?\("  # derivatives, inverses
    r"|(?<![\\A-Za-z])[AB]\s?\\times\s?[AB](?![A-Za-z])|\A\[\D*\]\Z"  # products of sets, which do not commute; integer parts
)
CAPITAL = re.compile(r"\\[A-Z][a-z]+")  # Greek, which the parser takes for the small letter
FUNCTIONS = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|lg|exp|arcsin|arccos|arctan|sinh|cosh|tanh|gcd|min|max|det|pi|theta|alpha|beta)(?![a-z])"
)
CONSTANTS = {"e", "i"}  # letters that may be numbers
PROBES = (0.7390851332, 1.3247179572, 0.5671432904, 2.6854520010, 1.1319882487, 0.9159655941, 1.6449340668, 2.2955871493)


def letters_of(text: str) -> set[str]:
    """The letters that stand for variables."""
    text = re.sub(r"\\mathbb\s?\{.\}|\\(?:begin|end)\{[a-z]+\}", " ", text)
    return set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def judge(gold: str, answer: str, *, has_bound_variable: bool = False) -> bool:
    """Whether math-verify finds formulas equal. `has_bound_variable`: one is a condition, the other a set without a variable."""
    if set(CAPITAL.findall(gold)) != set(CAPITAL.findall(answer)):
        return False
    if any(len(text) > MAX_FORMULA or UNJUDGED.search(text) or has_words(_latex(text)) for text in (gold, answer)):
        return False
    ours, theirs = (letters_of(_latex(text)) for text in (gold, answer))
    if not ours ^ theirs <= CONSTANTS and not has_bound_variable:
        return False
    first, second = (_parsed(_without_capitals(_latex(text), ours | theirs)) for text in (gold, answer))
    if first is None or second is None:
        return False
    for formula in (first, second):
        if _digits(formula) > MAX_DIGITS:
            raise ValueError("a formula is worth too large a number")
    if (verdict := _agree(first, second)) is not None and (not verdict or _is_identity(first, second)):
        return verdict
    return bool(_package().verify(first, second, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))


def _without_capitals(latex: str, letters: set[str]) -> str:
    """With an unused letter for each capital whose small letter is there, too: the parser takes C for c."""
    clashing = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    unused = sorted(set("abcfghjklmnopqrstuvwxyz") - {letter.lower() for letter in letters})
    renamed = dict(zip(clashing, (f" {letter} " for letter in unused), strict=False))
    return re.sub(r"\\[A-Za-z]+|[A-Z]", lambda found: renamed.get(found[0], found[0]), latex) if clashing else latex


@functools.cache
def _package() -> Any:
    import math_verify  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that are off: the caller has one for all
    return math_verify


@functools.cache
def _extraction() -> list[Any]:
    """How math-verify reads a formula alone: no unit is stripped (it takes the t of 2t for one)."""
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]

    form = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    return [_package().LatexExtractionConfig(normalization_config=form)]


@functools.lru_cache(maxsize=4096)
def _parsed(latex: str) -> Any:
    import sympy  # type: ignore[import-untyped]

    found = _package().parse(f"${latex}$", _extraction(), fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    if not found or not hasattr(found[0], "free_symbols"):
        return found[0] if found else None
    return found[0].subs({symbol: sympy.I for symbol in found[0].free_symbols if symbol.name == "i"})


def _latex(text: str) -> str:
    """With commands for functions that are written without, and braces where LaTeX needs them."""
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*(?=[({])", r"\\sqrt", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:\\sqrt)\s*(?=\()|\^\s*(?=\()", lambda found: found[0].strip() + "\0", text)
    while (place := text.find("\0")) >= 0:
        end = closing(text, place + 1)
        text = f"{text[:place]}{{{text[place + 2 : end]}}}{text[end + 1 :]}" if end > 0 else text.replace("\0", "")
    if number(text) is None:  # decimals within a formula are meant exactly
        text = re.sub(r"(?<![\d.])\d+\.\d+", lambda found: f"{{{Number(Fraction(found[0]), None).latex()}}}", text)
    text = FUNCTIONS.sub(r"\\\1 ", text)
    return re.sub(r"(\d+)\s?°", r"(\\frac{\1\\pi}{180})", text) if ANGLE_FUNCTION.search(text) else text.replace("°", "")


def _digits(formula: Any) -> float:
    """An upper bound of the digits before the point of what a formula's numbers are worth, before sympy works them out."""
    arguments = [_digits(part) for part in getattr(formula, "args", ())]
    if getattr(formula, "is_Number", False):
        return (
            math.log10(abs(formula) + 1)
            if formula.is_finite and abs(formula) < 10**300
            else (len(str(formula)) if formula.is_Rational else 0)
        )
    largest = max(arguments, default=0.0)
    if getattr(formula, "is_Pow", False) and not formula.exp.free_symbols:
        return max(largest, arguments[0] * 10 ** min(arguments[1], 6))
    if type(formula).__name__ in {"factorial", "binomial", "exp", "gamma", "factorial2", "subfactorial"}:
        return max(largest, 10 ** min(largest, 6) * max(largest, 1))
    return sum(arguments) if getattr(formula, "is_Mul", False) else largest


def _agree(gold: Any, answer: Any) -> bool | None:
    """Whether numbers for the variables give equal values, of equations proportional ones; None: it cannot be said."""
    import sympy

    sides = []
    for formula in (gold, answer):
        is_relation = isinstance(formula, sympy.core.relational.Relational)
        if not all(isinstance(side, sympy.Expr) for side in (formula.args if is_relation else (formula,))):
            return None
        sides.append((formula.lhs - formula.rhs) if is_relation else formula)
    is_relation = isinstance(gold, sympy.core.relational.Relational)
    if is_relation != isinstance(answer, sympy.core.relational.Relational):
        return None
    tolerance = 1e-5 if any(side.has(sympy.Float) for side in sides) else 1e-9
    names = sorted({symbol.name for side in sides for symbol in side.free_symbols})
    ratios = []
    for shift in range(3 if is_relation else 2 if names else 1):
        values = dict(zip(names, itertools.islice(itertools.cycle(PROBES), shift, None), strict=False))
        try:
            ours, theirs = (complex(side.evalf(30, subs={one: values[one.name] for one in side.free_symbols})) for side in sides)
        except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError):
            return None
        if math.isnan(abs(ours)) or math.isnan(abs(theirs)):
            return None
        if not is_relation and ours != theirs and not abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs)):
            return False
        ratios.append(ours / theirs if is_relation and theirs else ours)
    return not is_relation or all(abs(ratio - ratios[0]) <= 1e-9 * abs(ratios[0]) for ratio in ratios)


def _is_identity(gold: Any, answer: Any) -> bool:
    """Whether formulas that agree for positive numbers agree for negative ones, too, where both are real."""
    import sympy

    steps = (sympy.Float, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Piecewise, sympy.sign)
    sides = (gold, answer)
    if not all(isinstance(side, sympy.Expr) and side.free_symbols and not side.has(*steps) for side in sides):
        return False
    if max(map(_digits, sides)) > 9:
        return False
    names = sorted({symbol.name for side in sides for symbol in side.free_symbols})
    values = dict(zip(names, itertools.cycle(-probe for probe in PROBES), strict=False))
    try:
        ours, theirs = (complex(side.evalf(30, subs={one: values[one.name] for one in side.free_symbols})) for side in sides)
    except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError):
        return False
    num_real = sum(abs(side.imag) < 1e-12 for side in (ours, theirs))
    return num_real == 0 or abs(ours - theirs) <= 1e-9 * max(abs(ours), abs(theirs))
