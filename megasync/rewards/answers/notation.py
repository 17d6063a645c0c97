r"""Answers taken apart by their notation: lists, tuples, intervals, sets, unions, matrices; and numbers, times, bases.

    notation(r"\{1, \sqrt{2}\}")      # Notation("set", ("1", r"\sqrt{2}"))
    number(r"1.5 \times 10^3")        # Number(Fraction(1500), decimals=None)

Every text in here is in the spelling of tidy.py. Leaves out the values of formulas (equal.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megasync.rewards.answers.tidy import CLOSING, OPENING, THOUSANDS, closing

Kind = Literal["one", "list", "tuple", "set", "union", "matrix"]
MAX_EXPONENT = 1000  # of ten in a number; above it is a formula, which math-verify judges where it can


@dataclass(frozen=True, slots=True)
class Notation:
    """The parts of an answer: of a matrix row by row, each with `columns` parts."""

    kind: Kind
    parts: tuple[str, ...]
    brackets: str = ""  # of a tuple or an interval
    columns: int = 0


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written; `decimals`: the digits after its point, None: it has none, so that it is meant exactly."""

    value: Fraction
    decimals: int | None

    def latex(self) -> str:
        """LaTeX for math-verify: with its decimals, which it rounds, if `may_be_rounded`, else as a fraction."""
        if self.may_be_rounded and self.decimals is not None:
            digits = str(abs(round(self.value * 10**self.decimals))).zfill(self.decimals + 1)
            return "-" * (self.value < 0) + f"{digits[: -self.decimals]}.{digits[-self.decimals :]}"
        above, below = self.value.as_integer_ratio()
        return f"\\frac{{{above}}}{{{below}}}" if below > 1 else str(above)

    @property
    def may_be_rounded(self) -> bool:
        """Whether it counts as equal to a value that it is rounded from: six decimals and five significant digits."""
        return self.decimals is not None and self.decimals >= 6 and abs(self.value) * 10**self.decimals >= 10_000


SEPARATOR = re.compile(r"\\[{}]|\\[A-Za-z]+|[,;(){}\[\]]|,?\s(?:and|or|&|as well as)\s|\\")
MATRIX = re.compile(r"[\[(]?\s?\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s?[\])]?(\^\{?T\}?)?")
BOTH_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
FRENCH = re.compile(r"([\[\]])([^\[\]()]*[,;][^\[\]()]*)([\[\]])")
DIGITS = r"(?:\d{1,3}(?:[ ,]\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
POWER_OF_TEN = r"(?:[eE]([-+]?\d{1,5})|\s?(?:\\times|\\cdot|\*|x|X)\s?10\s?\^\s?(?:\{\s?([-+]?\d{1,5})\s?\}|([-+]?\d{1,5})))"
PLAIN = re.compile(rf"([-+]?)\s?({DECIMAL})(?:{POWER_OF_TEN})?")
FRACTION = re.compile(
    rf"([-+]?)\s?(?:(\d+)\s?(?:\s|\+\s?|(?=\\)))?(?:\\frac\{{\s?([-+]?{DECIMAL})\s?\}}\s?\{{\s?({DECIMAL})\s?\}}|({DECIMAL})\s?/\s?({DECIMAL}))"
)
REPEATING = re.compile(r"([-+]?)\s?(\d*)\.(\d*)\s?(?:\\overline|\\bar|\\dot)\s?\{?(\d+)\}?")
TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s?(?:([apAP])\.?\s?[mM]\.?)?(?:\s?(?:o'clock|h))?")
BASED = re.compile(
    r"\(?([0-9A-Za-z]+)\)?\s?(?:_\s?(?:\{?\s?(?:base|\\text\{base\})?\s?(\d+|[a-z]+)\s?\}?)"
    r"|\s?\(?(?:in )?base[ -](\d+|[a-z]+)\)?)"
)
BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
         "twelve": "12", "sixteen": "16"}  # fmt: skip


def split(text: str) -> list[str]:
    """At commas, semicolons, "and" and "or" that are in no brackets; a comma before three digits may belong to a number."""
    if not re.search(r",\s|;", text):
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text) if not _is_inside_brackets(text) else text
    parts, depth, begin = [], 0, 0
    for mark in SEPARATOR.finditer(text):
        token = mark[0]
        if token in {"\\{", "\\begin", *OPENING}:
            depth += 1
        elif token in {"\\}", "\\end", *CLOSING}:
            depth -= 1
        elif depth == 0 and not token.startswith("\\"):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
    parts.append(text[begin:].strip())
    return [part for part in (re.sub(r"\A(?:and|or)\s", "", part) for part in parts) if part]


def _is_inside_brackets(text: str) -> bool:
    return text[:1] in OPENING or text.startswith("\\{")


def notation(text: str) -> Notation:  # noqa: PLR0911 - one return a notation
    """The outermost notation of an answer."""
    if (matrix := MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix[2]) if matrix[3] is None and matrix[1][0] != "v" else Notation("one", (text,))
    if (french := FRENCH.fullmatch(text)) is not None and (french[1] == "]" or french[3] == "["):
        text = ("[" if french[1] == "[" else "(") + french[2] + ("]" if french[3] == "]" else ")")
    parts = split(text)
    if len(parts) > 1:
        return Notation("list", _all_signs(parts))
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 1) == len(text) - 1:
        inner = text[2:-2].strip()
        return Notation("one", (text,)) if re.search(r"\\mid|\||:", inner) else Notation("set", _all_signs(_inner_parts(inner)))
    if text[:1] in ("(", "[") and closing(text, 0) == len(text) - 1 and len(parts := _inner_parts(text[1:-1])) > 1:
        return Notation("tuple", tuple(parts), text[0] + text[-1])
    if len(parts := re.split(r"\s*\\cup(?![A-Za-z])\s*", text)) > 1:
        return Notation("union", tuple(parts))
    if len(BOTH_SIGNS.findall(text)) == 1 and "=" not in text and "\\{" not in text:
        return _both_signs(text)
    return Notation("one", (text,))


def _inner_parts(text: str) -> list[str]:
    """The parts in brackets, where any comma before digits separates, unless other commas are followed by a space."""
    return split(
        re.sub(r",(?=\S)", ", ", text)
        if not re.search(r",\s", text)
        else THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    )


def _matrix(body: str) -> Notation:
    rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", body) if row.strip()]
    columns = len(rows[0]) if rows else 0
    if any(len(row) != columns for row in rows):
        return Notation("one", (body,))
    return Notation("matrix", tuple(cell.strip() for row in rows for cell in row), columns=columns)


def _both_signs(text: str) -> Notation:
    r"""Both values of 1 \pm \sqrt{2}; of several signs \pm and \mp the values with all upper and with all lower signs."""
    upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    return Notation("set", tuple(part.strip().removeprefix("+").strip() for part in (upper, lower)))


def _all_signs(parts: list[str]) -> tuple[str, ...]:
    return tuple(each for part in parts for each in (_both_signs(part).parts if BOTH_SIGNS.search(part) else (part,)))


def number(text: str) -> Number | None:  # noqa: PLR0911 - one return a form
    r"""A number written in digits: 1,500, 1.5e3, 3/4, 2 1/3, 0.1\overline{6}; None: it is another formula."""
    if len(text) > MAX_EXPONENT:
        return None
    if (plain := PLAIN.fullmatch(text)) is not None:
        digits = re.sub("[ ,]", "", plain[2])
        power = int(next((found for found in plain.groups()[2:] if found), "0"))
        if abs(power) > MAX_EXPONENT:
            return None
        point = digits.partition(".")[2]
        value = Fraction(digits.rstrip(".") or "0") * Fraction(10) ** power
        return Number(-value if plain[1] == "-" else value, max(0, len(point) - power) if point else None)
    if (mixed := FRACTION.fullmatch(text)) is not None:
        above, below = (Fraction(re.sub("[ ,+]", "", part).rstrip(".")) for part in (mixed[3] or mixed[5], mixed[4] or mixed[6]))
        if below == 0 or (mixed[2] and (above < 0 or above >= below)):
            return None
        value = Fraction(mixed[2] or 0) + above / below
        return Number(-value if mixed[1] == "-" else value, None)
    if (repeating := REPEATING.fullmatch(text)) is not None:
        shift, period = len(repeating[3]), len(repeating[4])
        value = Fraction(int(repeating[2] + repeating[3] or "0")) / 10**shift + Fraction(
            int(repeating[4]), (10**period - 1) * 10**shift
        )
        return Number(-value if repeating[1] == "-" else value, None)
    return None


def time_of_day(text: str) -> tuple[int, bool] | None:
    """A time of the day in seconds, from midnight where it says so, and whether it says a.m. or p.m.; None: it is no time."""
    found = TIME.fullmatch(text)
    if found is None or not (found[2] or found[4]) or int(found[1]) > 24:
        return None
    hour = int(found[1])
    if found[4]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if found[4] in "pP" else 0)
    return hour * 3600 + int(found[2] or 0) * 60 + int(found[3] or 0), bool(found[4])


def based(text: str) -> tuple[str, str] | None:
    """Digits and their base, of 1010_{2} or "1010 base 2", also at the end of a chain; None: it is no such number."""
    found = BASED.fullmatch(re.sub(r"\A[^G-Za-z\\]*=\s?", "", text))
    base = found and (found[2] or found[3])
    base = BASES.get(base, base) if base else None
    if found is None or base is None or not base.isdigit() or not 2 <= int(base) <= 36 or not re.search(r"\d", found[1]):
        return None
    digits = found[1].upper().lstrip("0") or "0"
    return (digits, base) if all(int(digit, 36) < int(base) for digit in digits) else None
