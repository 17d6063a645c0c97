r"""Whether two answers are equal: by their text, by their notation part by part, and a formula by math-verify.

    equal("13 and 50", "50, 13")              # True
    equal(r"\sqrt{8}", r"2\sqrt{2}")          # True
    equal("east", "seat")                     # False: words are no products of letters

Text, notation and parts are compared here; what is left, a formula, is judged by math-verify (formulas.py). Leaves out where an
answer stands in a text (read.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from megasync.rewards.answers.formulas import judge, letters_of
from megasync.rewards.answers.notation import Notation, based, notation, number, time_of_day
from megasync.rewards.answers.tidy import key, tidy
from megasync.rewards.answers.values import NAME, is_label, named, same_single, same_value

MAX_CHARACTERS, MAX_PARTS, MAX_DEPTH = 2000, 60, 24  # of an answer; of a longer one only the text is compared
CHOICE = re.compile(r"(?:(?:option|choice|Option|Choice)\s)?(?:\(([A-Z])\)|([A-Z])(?=[.:)]|\Z))[.:)]?\s*(.*)", re.DOTALL)
NO_TEXT = re.compile(  # behind an option's letter: another letter, or what denies or joins it
    r"\A\W*(?:[A-H]\W*\Z|is (?:not|wrong|incorrect|false)\b|isn't\b|(?:or|and|no\W) ?\(?[A-H]\b)|\b[A-H](?:[):]|\. )|\A\?"
)
POINT = re.compile(r"([A-Z])\s?(\([^()]*(?:\([^()]*\)[^()]*)*\))")
RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![a-z])|\A[a-z] (?:and|or) [a-z]\Z")
INDEX = re.compile(r"_\{?\d\}?\Z")
IS_IN = "\\in\\mathbb"
RESIDUE = re.compile(r"(?P<name>[A-Za-z]\s?\\equiv\s?)?(?P<value>\d+)\s*\(?\s*\\?[pb]?mod\s*\{?\s*(?P<modulus>\d+)\s*\}?\s*\)?")

LINEAR = re.compile(r"(?P<name>[A-Za-z])\s?=\s?(?P<modulus>[1-9]\d*)\s?(?P<free>(?!(?P=name))[a-z])\s?(?P<value>[+-]\s?\d+)"
                    r"(?:\s?[,(]?\s?(?P=free)\s?\\in\s?\\mathbb\{Z\}\)?)?")  # fmt: skip


def same_text(gold: str, answer: str) -> bool:
    """Whether both, in one spelling, are the same text, which is not empty."""
    if gold.strip() == answer.strip():
        return gold.strip() != ""
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    return key(tidy(gold)) == key(tidy(answer)) != ""


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` is equal to the reference answer `gold`: text that is equal always is, and every part is needed.

    Raises:
        ValueError: an answer is too long, nested too deep or worth too large a number to be compared.
        Exception: whatever sympy raises on a formula.
    """
    if same_text(gold, answer):
        return True
    for text in (gold, answer):
        if len(text) > MAX_CHARACTERS or _depth(text) > MAX_DEPTH:
            raise ValueError(f"an answer of {len(text)} characters, nested {_depth(text)} deep, is compared by its text alone")
    return bool(gold.strip() and answer.strip()) and _same(tidy(gold), tidy(answer))


def _depth(text: str) -> int:
    return max(
        itertools.accumulate(
            (text_depth for text_depth in map({"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get, text) if text_depth),
            initial=0,
        )
    )


def _same(gold: str, answer: str) -> bool:  # noqa: PLR0911 - one return a rule
    if not gold or not answer:
        return False
    if key(gold) == key(answer):
        return True
    for rule in (_same_join, _same_choice, _same_time, _same_base, _same_residue, _same_ratio):
        if (verdict := rule(gold, answer)) is not None:
            return verdict
    for text, other in ((gold, answer), (answer, gold)):
        exact = text.rpartition("\\approx")[0].strip()
        if re.search(r"\d|\\pi", exact) and not NAME.fullmatch(
            exact
        ):  # 3\sqrt{5} \approx 6.708; but an answer's 6 \approx 5 is 6
            rough = text.rpartition("\\approx")[2].strip()
            either = (exact, rough) if text is gold or ("\\" in exact and "." in rough) else (exact,)
            return any(_same(part, other) if text is gold else _same(other, part) for part in either)
    (our_name, ours), (their_name, theirs) = _apart(gold), _apart(answer)
    if max(len(ours.parts), len(theirs.parts)) > MAX_PARTS:
        raise ValueError(f"answers of {len(ours.parts)} and {len(theirs.parts)} parts are compared by their text alone")
    if our_name and their_name and key(our_name) != key(their_name):
        return False
    if ours.kind == theirs.kind == "one":
        return same_single(gold, answer)
    return _same_parts(ours, theirs)


# ---------------------------------------------------------------------------------------------------- forms that are no formulas


def _same_join(gold: str, answer: str) -> bool | None:
    """Conditions that "and" joins are others than those that "or" joins."""
    return False if RELATION.search(gold) and {" or ", " and "} <= set(re.findall(" and | or ", gold + answer)) else None


def _same_choice(gold: str, answer: str) -> bool | None:
    """(A), "A. 42" or "option A": the letter counts, else what follows it."""
    listed = any("," in text for text in (gold, answer))
    many = [_choices(text, listed=listed) for text in (gold, answer)]
    if all(many):
        return many[0] == many[1]
    ours, theirs = (_choice(text) for text in (gold, answer))
    if ours and theirs:
        return ours[0] == theirs[0] and not (ours[1] and theirs[1] and not _same(ours[1], theirs[1]))
    if ours:
        return bool(ours[1]) and _same(ours[1], answer)
    return _same(gold, theirs[1]) if theirs and theirs[1] else None


def _choice(text: str) -> tuple[str, str] | None:
    found = CHOICE.fullmatch(text)
    return (found[1] or found[2], found[3].strip()) if found and not NO_TEXT.search(found[3]) else None


def _choices(text: str, *, listed: bool = False) -> list[str] | None:
    """Several letters, as "BD" or "B, D", and "DB" beside letters that are `listed`."""
    run = text.replace(" ", "")
    is_run = re.fullmatch("[A-H]{2,8}", run) is not None and (listed or "".join(sorted(run)) == run)
    letters = sorted(run) if is_run else sorted(notation(text).parts)
    is_several = (
        len(letters) > 1 and all(re.fullmatch("[A-H]", letter) for letter in letters) and len(set(letters)) == len(letters)
    )
    return letters if is_several else None


def _same_time(gold: str, answer: str) -> bool | None:
    ours, theirs = time_of_day(gold), time_of_day(answer)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return False
    half_day = 12 * 3600
    is_half = not ours[1] and theirs[1] and 3600 <= ours[0] < half_day + 3600  # the data's 5:00 may be either
    return ours[0] == theirs[0] or (is_half and ours[0] % half_day == theirs[0] % half_day)


def _same_residue(gold: str, answer: str) -> bool | None:
    r"""5 \pmod{1000}, a least residue, is 5, but x \equiv 5 \pmod{1000} is not."""
    ours, theirs = RESIDUE.fullmatch(gold), RESIDUE.fullmatch(answer)
    if ours and theirs:
        return ours["modulus"] == theirs["modulus"] and int(ours["value"]) == int(theirs["value"])
    found, other = ours or theirs, answer if ours else gold
    if found is not None and found["name"] and (linear := LINEAR.fullmatch(other)) is not None:
        difference = int(linear["value"].replace(" ", "")) - int(found["value"])
        is_same = linear["modulus"] == found["modulus"] and difference % int(found["modulus"]) == 0
        return found["name"][0] == linear["name"] and is_same
    if found is None or found["name"] or int(found["value"]) >= int(found["modulus"]):
        return None
    return _same(found["value"], other)


def _same_base(gold: str, answer: str) -> bool | None:
    ours, theirs = based(gold), based(answer)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        plain, other = (gold, theirs) if ours is None else (answer, ours)
        is_said = theirs is not None and "base" in answer  # the question says which, so that the data may leave it out
        return other is not None and (other[1] == "10" or is_said) and _same(plain, other[0])
    return ours == theirs


def _same_ratio(gold: str, answer: str) -> bool | None:
    ours, theirs = gold.split(":"), answer.split(":")
    if len(ours) == len(theirs) == 1 or any("\\{" in text for text in (gold, answer)):
        return None
    if len(ours) == len(theirs):
        return all(map(_same, ours, theirs))
    quotient = ours if len(theirs) == 1 else theirs
    plain = number((gold if len(ours) == 1 else answer).strip())
    is_whole = plain is not None and plain.value.denominator == 1
    if is_whole or len(quotient) != 2 or min(len(ours), len(theirs)) != 1 or not all(number(part.strip()) for part in quotient):
        return False
    return same_value(
        *(text if ":" not in text else "\\frac{{{}}}{{{}}}".format(*map(str.strip, quotient)) for text in (gold, answer))
    )


# ---------------------------------------------------------------------------------------------------- parts


def _apart(text: str) -> tuple[str, Notation]:
    """The name that stands before "=" or "in", of an answer of several parts, and the parts."""
    apart = notation(text)
    if apart.kind == "one":
        name, value = named(text)
        inner = notation(value)
        if (point := POINT.fullmatch(text)) is not None and notation(point[2]).kind == "tuple":
            return point[1], notation(point[2])
        if name and is_label(name) and inner.kind != "one":
            names = name.strip("() ").split(",")
            if inner.kind == "tuple" and len(names) == len(inner.parts) > 1:  # (x, y) = (1, 2)
                return "", Notation("list", tuple(f"{each} = {part}" for each, part in zip(names, inner.parts, strict=True)))
            return name, inner
    return "", apart


def _same_parts(ours: Notation, theirs: Notation) -> bool:  # noqa: PLR0911 - one return a rule
    kinds = {ours.kind, theirs.kind}
    if "one" in kinds:
        return _same_as_one(ours, theirs)
    if kinds == {"matrix"}:
        return ours.columns == theirs.columns and _pairwise(ours.parts, theirs.parts)
    if kinds == {"tuple"}:
        is_bound = len(ours.parts) == 2
        return (ours.brackets == theirs.brackets or not is_bound) and _pairwise(ours.parts, theirs.parts)
    if kinds == {"tuple", "list"}:
        brackets, listed = (ours.brackets or theirs.brackets), (ours if ours.kind == "list" else theirs)
        is_point = brackets == "()" or (brackets == "[]" and len(listed.parts) > 2)
        return is_point and _pairwise([named(part)[1] for part in ours.parts], [named(part)[1] for part in theirs.parts])
    if kinds <= {"list", "set"}:
        return _same_list(ours.parts, theirs.parts)
    if "union" in kinds and kinds <= {"union", "list"}:
        return _unordered(ours.parts, theirs.parts) or (
            kinds == {"union"} and judge("\\cup".join(ours.parts), "\\cup".join(theirs.parts))
        )
    return False


def _same_as_one(ours: Notation, theirs: Notation) -> bool:
    """One of both is a single value or formula: equal to a set that holds it alone, or to an interval by another form."""
    one, several = (ours, theirs) if ours.kind == "one" else (theirs, ours)
    text = one.parts[0]
    if several.kind == "set" or (several.kind == "list" and ours.kind == "one"):
        return all(re.search(r"\d", part) and "=" not in part and _same(text, part) for part in several.parts)
    is_set = re.search(r"\\(?:cup|cap|setminus|mathbb)|[<>|]|\\[lg]e(?![a-z])|\\ne(?![a-z])", text) is not None
    if several.kind in {"union", "tuple"} and is_set:
        joined = (
            "\\cup".join(several.parts)
            if several.kind == "union"
            else several.brackets[0] + ",".join(several.parts) + several.brackets[1]
        )
        return judge(*((text, joined) if one is ours else (joined, text)), has_bound_variable=len(letters_of(text)) == 1)
    return False


def _same_list(gold: Sequence[str], answer: Sequence[str]) -> bool:
    r"""In any order; where the parts of one have different names, the other's have the same or none, and then its order.

    A condition that both have, such as k \in \mathbb{Z}, is left out.
    """
    shared = {key(part) for part in gold if IS_IN in part} & {key(part) for part in answer if IS_IN in part}
    if shared:
        gold, answer = ([part for part in parts if key(part) not in shared] for parts in (gold, answer))
        return _same(", ".join(gold), ", ".join(answer))
    ours, theirs = [[named(part) for part in parts] for parts in (gold, answer)]
    our_names, their_names = ({key(name) for name, _ in parts if name} for parts in (ours, theirs))
    if len(our_names) > 1 and len(their_names) > 1:
        return _unordered(gold, answer)
    stems = [{INDEX.sub("", name) for name in names} for names in (our_names, their_names)]
    if stems[0] == stems[1] and min(len(our_names), len(their_names)) == 1:  # x = 1 or x = 2 beside x_1 = 1, x_2 = 2
        our_names = their_names = stems[0]
    our_values, their_values = ([value for _, value in parts] for parts in (ours, theirs))
    if len(our_names) > 1 or len(their_names) > 1:
        return not (our_names and their_names) and _pairwise(our_values, their_values)
    if our_names and their_names and our_names != their_names:
        return False
    return _unordered(our_values, their_values)


def _pairwise(gold: Sequence[str], answer: Sequence[str]) -> bool:
    return len(gold) == len(answer) and all(map(_same, gold, answer))


def _unordered(gold: Sequence[str], answer: Sequence[str]) -> bool:
    rest = list(answer)
    for part in gold:
        found = next((place for place, other in enumerate(rest) if _same(part, other)), None)
        if found is None:
            return False
        del rest[found]
    return not rest
