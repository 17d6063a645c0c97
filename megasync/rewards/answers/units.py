"""Units, currencies and words for powers of ten, by one name each. Leaves out conversions: 5 km is no 5000 m.

split_unit("5 square cm")      # ("5", "cm^2")
"""

from __future__ import annotations

import re
from fractions import Fraction

NAMES = {  # a unit's name here: its other names, without a plural's s
    "m": "meter metre 米", "km": "kilometer kilometre 千米 公里", "cm": "centimeter centimetre 厘米",
    "mm": "millimeter millimetre 毫米", "dm": "decimeter decimetre 分米", "mile": "mi 英里", "ft": "foot feet 英尺",
    "inch": "inche 英寸", "yd": "yard", "g": "gram gm 克", "kg": "kilogram kilo 千克 公斤", "mg": "milligram 毫克",
    "t": "tonne ton 吨", "lb": "pound-mass lbs", "oz": "ounce", "l": "L liter litre 升", "ml": "mL milliliter millilitre 毫升",
    "gal": "gallon", "s": "sec second 秒", "min": "minute 分钟 分", "h": "hr hour 小时 时", "day": "天 日", "week": "wk 周",
    "month": "月 个月", "year": "yr 年 岁", "dollar": "USD usd buck 美元 ¤", "cent": "¢ 美分", "euro": "EUR €",
    "pound": "GBP £", "rupee": "Rs Rs. INR ₹", "yuan": "RMB CNY 元 块", "yen": "JPY", "¥": "", "°": "degree deg 度",
    "°C": "celsius ℃ 摄氏度", "°F": "fahrenheit", "rad": "radian 弧度", "mile/h": "mph", "km/h": "kmph kph kmh",
    "m/s": "mps", "J": "joule", "N": "newton", "W": "watt", "V": "volt",
    "C": "coulomb", "K": "kelvin", "A": "ampere amp", "F": "farad", "T": "tesla",
    "Hz": "hertz", "Pa": "pascal",
    "%": "percent pct percentage", "unit": "", "acre": "", "hectare": "", "mol": "mole", "cm^2": "平方厘米", "m^2": "平方米",
    "km^2": "平方千米 平方公里", "cm^3": "cc 立方厘米", "m^3": "立方米", "ohm": "Ω",
}  # fmt: skip
CANONICAL = {other: name for name, others in NAMES.items() for other in (name, *others.split())}
SINGLE_LETTERS = frozenset("mgshlLJNWVCKAFT")  # which count as a unit only after a space; others are variables
MAGNITUDES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12,
    "百": 2, "千": 3, "万": 4, "百万": 6, "千万": 7, "亿": 8, "万亿": 12,
}  # fmt: skip
MATH_WORDS = frozenset(re.split(" ",
    "sin cos tan cot sec csc log ln lg exp sqrt pi inf max min gcd lcm mod det arg dim deg rank arcsin arccos arctan sinh"
    " cosh tanh infty alpha beta gamma theta lambda mu sigma omega phi and or oo bmod pmod"))  # fmt: skip
CJK = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
PREFIXED = re.compile("[kMGTPcdnpμµm](?:m|g|s|[lL]|J|N|W|V|A|Hz|Pa|mol|T|C|F|K|Wb|bit|B|cal)|[kMGT]?eV|AU|[kM]?pc|ly|erg")
POWER = r"(?:\s?\^\s?\{?-?[1-4]\}?)?"
NAME = rf"(?:°\s?[CF]?(?![a-z])|[%€£¥₹¢¤Ω]|[A-Za-zμ][A-Za-z.'-]*{POWER}|[{CJK}]+)"
TAIL = re.compile(
    r"(?P<body>.*?(?:[\d})\]!]|\\pi|\\infty))(?P<space>\s*)"
    rf"(?P<unit>{NAME}(?:\s*/\s*{NAME}|\s*\\cdot\s*{NAME}|\s+{NAME})*)\s*\Z",
    re.DOTALL,
)
BEFORE_CLAUSE = re.compile("[\u4e00-\u9fff]{1,4}?(?=(?:后|后?(?:两[车人船])?相遇|(?<=[元块])钱|(?<=[米里])路)\\Z)")
ANGLE_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
SQUARES = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
NO_UNITS = frozenset(re.split(" ",
    "if when where or and not to than mod is are more less times plus minus over from at least most factorial base half"
    " halves third quarter fourth fifth tenth hundredth thousandth squared cubed doubled tripled halved recurring repeating"
    " inverse reciprocal root power negative below above wrong incorrect isn't wasn't maybe"
    " remainder with without by ten tens score"))  # fmt: skip
NO_NOUN = re.compile(r"\A(?:折|个?半|个多|多个|以[上下内]|左右|次方|阶乘|的[平倒相]|[成十余错]\Z)|吗|不[是对到]|分之|ない|아니")


def canonical(word: str) -> str | None:
    """The unit's name, whether in the plural or not; None: it is none that is known."""
    for each in (word, word.rstrip("."), word.lower(), word.lower().rstrip(".")):
        for name in (each, each.removesuffix("s"), each.removesuffix("es")):
            if name in CANONICAL and (len(name) > 1 or name == each):
                return CANONICAL[name]
    return word if PREFIXED.fullmatch(word) else None


def is_unit(word: str) -> bool:
    """Whether the word, after a number, belongs to it: a known unit, a part of one, or a power of ten."""
    word = re.sub(r"\^\{?\d\}?\Z|[²³]\Z", "", word)
    return canonical(word) is not None or word.lower() in {*MAGNITUDES, *SQUARES, "per", "/", "dozen"}


def split_unit(text: str) -> tuple[str, str, Fraction]:
    """The text before the unit, the name of the unit, and the factor of a word such as million.

    A unit that is not known is "?" with its words, as in "42 apples": "?apple". Without a unit both text and "" are as they were.
    """
    found = TAIL.fullmatch(text) if len(text) <= 200 else None
    if found is None:
        return text, "", Fraction(1)
    if found["unit"] == "°" and ANGLE_FUNCTION.search(found["body"]):
        return text, "", Fraction(1)
    words = re.findall(rf"°\s?[CF]?|[%€£¥₹¢¤Ω/]|[A-Za-zμ][A-Za-z.'-]*{POWER}|[{CJK}]+", found["unit"])
    if "of" in words[1:]:  # cups of feed
        words = words[: words.index("of")]
    elif words[0] == "of":
        words = []
    words = [_beginning(word) for word in words]
    factor = Fraction(1)
    while words and (power := _magnitude(words)) is not None:
        factor *= power
    is_algebra = re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", found["body"]) is not None
    unit = _unit(words, attached=is_algebra or not found["space"])
    return (text, "", Fraction(1)) if unit is None else (found["body"].strip(), unit, factor)


def _beginning(word: str) -> str:
    """The known unit at the begin of Chinese words without spaces, as in 4时两车相遇, else the word."""
    found = BEFORE_CLAUSE.match(word)
    return found[0] if found is not None and found[0] in CANONICAL else word


def _magnitude(words: list[str]) -> int | None:
    """The first word's power of ten, which is taken off; of Chinese text the first characters."""
    first = words[0]
    if first.lower() in {"dozen", "dozens"}:
        del words[0]
        return 12
    for length in (len(first), 2, 1) if re.match(f"[{CJK}]", first) else (len(first),):
        name = first[:length].lower().removesuffix("s")
        if name in MAGNITUDES and first not in CANONICAL:
            words[:1] = [_beginning(first[length:])] if first[length:] else []
            return int(10 ** MAGNITUDES[name])
    return None


def _unit(words: list[str], *, attached: bool) -> str | None:
    """The unit's name, "" without words; None: the words are no unit. `attached`: they follow the number without a space."""
    names, power, is_known = list[str](), 1, False
    for place, word in enumerate(words):
        base, exponent = re.fullmatch(r"([^\s^]*)\s?\^?\s?\{?(-?\d)?\}?", word).groups("")  # type: ignore[union-attr]
        if exponent.startswith("-"):
            names.append("/")
            exponent = exponent.strip("-1")
        if base.lower() in SQUARES and len(words) > 1:
            power = SQUARES[base.lower()]
            continue
        if base in {"/", "per", "a", "each"} and place:
            names.append("/")
            continue
        is_letter = len(base) == 1 and base.isascii() and base.isalpha()
        known = None if is_letter and (attached or base not in SINGLE_LETTERS) else canonical(base)
        if base == "in" and place == len(words) - 1:
            known = "inch"
        if known is None and not _is_noun(base, attached=attached):
            return None
        is_known = is_known or known is not None
        exponent = exponent or (str(power) if power > 1 else "")
        power = 1
        names.append((known or base.lower().removesuffix("s")) + (f"^{exponent}" if exponent else ""))
    joined = re.sub(r"° (?=°)", "", " ".join(names).replace(" / ", "/"))
    return joined if is_known or not names else f"?{joined}"


def _is_noun(word: str, *, attached: bool) -> bool:
    """Whether a word that is no known unit can name the thing that is counted."""
    if re.match(f"[{CJK}]", word):
        return NO_NOUN.search(word) is None
    lower = word.lower()
    return (
        not attached
        and len(word) > 2
        and lower.removesuffix("s") not in MATH_WORDS | NO_UNITS
        and lower not in NO_UNITS
        and re.search("[aeiouy]", lower) is not None
        and not set(lower) <= set("abcdxyz")
    )


def units_agree(gold: str, answer: str) -> bool:
    """Whether both may mean the same: one is missing, they are equal, or one names counted things more closely."""
    if {gold.partition("/")[0], answer.partition("/")[0]} == {"%"}:  # a year
        return True
    names = gold.partition("^"), answer.partition("^")
    if not gold or not answer or gold == answer or ("unit" in {names[0][0], names[1][0]} and names[0][2] == names[1][2]):
        return True
    if "¥" in {gold, answer}:
        return {gold, answer} <= {"¥", "yuan", "yen"}
    if gold[0] == answer[0] == "?":
        if re.match(rf"\?[{CJK}]", gold) or re.match(rf"\?[{CJK}]", answer):
            return True
        ours, theirs = set(gold[1:].split()), set(answer[1:].split())
        return ours <= theirs or theirs <= ours
    return False
