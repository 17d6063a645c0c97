# ruff: noqa: RUF001 # characters as they stand in people's texts
r"""One spelling of an answer: without what does not change its meaning.

    tidy(r"$\mathbf{\dfrac12}\,\text{ cm}.$")      # r"\frac{1}{2} cm"

Leaves out numbers, units and the order of parts, which equal.py compares by their value.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable

from megasync.rewards.answers.units import MATH_WORDS

CHARACTERS = str.maketrans(
    dict(zip("−–—﹣－‐‑⁄", "-------/", strict=True))
    | {"π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "÷": "/", "·": "\\cdot ", "⋅": "\\cdot ", "∗": "*"}
    | {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset "}
    | {"∈": "\\in ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "º": "°", "′": "'"}
    | {"…": "\\ldots ", "≈": "\\approx ", "∠": "\\angle ", "△": "\\triangle ", "∶": ":"}
    | {"、": ",", "。": ".", "和": " and ", "或": " or ", "且": " and "}
    | dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060", "")
    | dict.fromkeys("“”„«»「」", '"')
)
COMMANDS = {  # LaTeX's: one spelling of those of one meaning
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "\\frac"), **dict.fromkeys(("leq", "leqslant"), "\\le "),
    **dict.fromkeys(("geq", "geqslant"), "\\ge "), "neq": "\\ne ", "lt": "<", "gt": ">", "langle": "(", "rangle": ")",
    "lbrace": "\\{", "rbrace": "\\}", **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("infin", "infinity"), "\\infty "), **dict.fromkeys(("varnothing", "O"), "\\emptyset "),
    **dict.fromkeys(("dots", "cdots", "dotsc", "hdots"), "\\ldots "), **dict.fromkeys(("degree", "textdegree"), "°"),
    **dict.fromkeys(("quad", "qquad"), " "),
    **dict.fromkeys(("displaystyle", "textstyle", "checkmark", "limits", "nolimits"), ""),
    **dict.fromkeys(("large", "Large", "LARGE", "huge", "Huge", "bf", "rm"), ""),
}  # fmt: skip
SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
SCRIPTS = re.compile(f"[{RAISED}]+|[{LOWERED}]+")
FROM_SCRIPT = str.maketrans(RAISED + LOWERED, "0123456789+-n" * 2)
FRACTIONS = re.compile("[¼½¾⅐-⅞]")
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|normal)?|mbox|math(?:rm|bf|it|sf|tt)|operatorname|boldsymbol|bm|underline|(?:text)?color\s?\{\w+\})"
    r"\*?\s*\{([^{}]*)\}"
)
# Words in parentheses behind a value, as in 36 marbles (12 red and 24 blue)
ASIDE = re.compile(
    r"(?<=[\d}%°a-z$*)])(?<!\\left)(?:\s+\((?!\s*(?:or|and|mod|base|in base|but|actually"
    r"|alternatively|possibly|maybe|perhaps|corrected|approx\w*|[^()\n]{0,99}\b(?:wrong|incorrect))\b)(?=[^()\n]*\S\s)"
    r"(?=[^()\n]{0,300}(?:(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|mod|lim|max|min|sqrt|pi|alpha|beta|gamma|delta|theta|lambda|phi)\b)"
    r"[A-Za-z]{3}|[\u4e00-\u9fff]))[^()\n]{0,300}\)|\((?=[\u4e00-\u9fff])[^()\n]{0,300}\))|(?<=[\u4e00-\u9fff])\(即[^()\n]{0,300}\)"
)
MONEY = (
    r"([¤€£¥₹])\s*((?:\d{1,3}(?: \d{3})+(?!\d)|\d[\d,\x01]*)(?:\.\d+)?|\.\d+|\\frac\{\d+\}\{\d+\})"
    r"(\s*(?:hundred|thousand|million|billion|trillion)\b|[KMB]\b)?"
)
QUANTIFIER = (  # for all real x
    r",?\s(?:for|where|with) (?:[a-z] (?:is|=) )?(?:all|any|every|each|some|an?) "
    r"(?:real |positive |nonzero |natural |integers? |numbers? |constants? )*[a-z]?"
    r"(?:\s?\\in\s?\\mathbb\{[A-Z]\}(?:\^[+*])?)?[\s.]*\Z"
)


def _root(found: re.Match[str]) -> str:
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[found[1]]
    return f"\\sqrt{degree}{{{found[2].strip('()')}}}" if found[2] else f"\\sqrt{degree} "


def _chosen(kind: str, among: str, num: str) -> str:
    """Combinations, and permutations by P or A."""
    return f"\\binom{{{among}}}{{{num}}}" + ("" if kind == "C" else f" {num}!")


def _numeral(found: re.Match[str]) -> str:
    """A number below 100 in words, and its digits in parentheses where they agree."""
    tens, ones = (found[1] or "").lower(), (found[2] or found[3] or "zero").lower()
    value = str((10 * TENS.index(tens) + 20 if tens else 0) + SMALL.index(ones))
    return value if found[4] in {None, value} else found[0]


REPLACED: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$|US\$|USD\s?(?=\d)", "¤"),
        (r"\bRs\.?\s*(?=\d)", "₹"),
        (r"\{:\}|(?<=\d)\s+to\s+(?=\d)", ":"),
        (r"\$([^$]*)\$", r" \1 "),
        (r"\$(?=\s?[\d.])", "¤"),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"([√∛∜])\s?(\d+|[a-z]|\([^()]*\))?", _root),
        (r"\\(?:text)?color\s?\{\w+\}", ""),
        (r"(?:\{\s?\})?\s?\^\s?\{?(\d+)\}?\s?([CP])_\s?\{?(\d+)\}?", lambda found: _chosen(found[2], found[1], found[3])),
        (r"(?<![A-Za-z\\])([CA])_\s?\{?(\d+)\}?\s?\^\s?\{?(\d+)\}?", lambda found: _chosen(*found.groups())),
        (r"\^\s?\{?(\d+)\}?\s?/\s?_\s?\{?(\d+)\}?", r"\\frac{\1}{\2}"),
        (r"\b([a-z])\s?:\s?([a-z])\s?\\mapsto\s?", r"\1(\2) = "),
        (r"(?<=\d)(?:\\?[\s,;~])*\\mu\s*(?=[mgslLAVFTCNW]\b)", " μ"),
        (r"(?i)\A\s*(?:the set of )?all (?:reals|real (?:numbers?|values))(?: x| of x)?[\s.]*\Z", r"\\mathbb{R}"),
        (r"\{\s*,\s*\}|,\s?\\!\s*", "\x01"),  # a separator of thousands for sure
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?|\\phantom\{[^{}]*\}", ""),
        (r"\\!", ""),
        (
            r"\A(?:\s*[^\s=][^=]*[^\s=]\s*=.*|\s*)(?:\\(?:therefore|implies|(?:Longr|R)ightarrow)(?![A-Za-z])|[∴⇒⟹])|\A\s*[=-]>",
            "",
        ),
        (r"(?<!\\)\\[,;:> ]|(?<!\\)~", " "),
        (r"\\([%.])", r"\1"),
        (r":=|≔", "="),
        (r"\s?\(or ([^()]*)\)\s*\Z", r" or \1"),
        (r"(?<=\d)(?:\\?[\s,;~])*\\Omega(?![A-Za-z])", " Ω"),
        (r"\\\\|\\([A-Za-z]+)", lambda found: COMMANDS.get(found[1], found[0])),
        (r"\s*\^\s*\{?\s*(?:\\circ(?![A-Za-z])|°)\s*\}?", "°"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"([\^_])\s?\{\s?(\w)\s?\}", r"\1\2"),
        (r"\A(\d{1,3})['_](\d{3})\Z", r"\1\2"),
        (r"\\frac(?:\s*(\d)|\s+([A-Za-z]))", r"\\frac{\1\2}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([A-Za-z\d])", r"\\frac\1{\2}"),
        (r"\\mathbb\s?([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"(?<=\d)\s+\((?!false)([a-z-]+)\)\s*\Z", r" \1"),
        ("<=", r"\\le "),
        (">=", r"\\ge "),
        (r"\\not\s*=|(?<![\d)!])!=", r"\\ne "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|oo)(?![A-Za-z])", r"\\infty "),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        (MONEY, r"\2\3 \1"),
        (r"(?<=\d)\s?([KMB])(?= ¤)", lambda found: {"K": " thousand", "M": " million", "B": " billion"}[found[1]]),
        (
            rf"(?i)\A\s*(?:({'|'.join(TENS)})(?:[\s-]?({'|'.join(SMALL[1:10])}))?|({'|'.join(SMALL)}))(?: \((\d+)\))?\W*\Z",
            _numeral,
        ),
        (r"(?i)(infinitely many) (?:solutions|values|pairs|integers)[\s.]*\Z", r"\1"),
        (r"(?i)(?<=[a-z]) wins[\s.]*\Z", ""),
        (r"(?i)\A\s*(?:all|every|any|the)\s+(?=[a-z]\s?=)", ""),
        (r"(?i)\A\s*(?:all|every|any)\s+([a-z ]{3,40})\s([a-z])[\s.]*\Z", r"\2 is \1"),  # all even n
        (r"\s?,\s?\(?n\s?(?:\\ge\s?1|>\s?0)\)?\s*\Z", ""),
        (r"(充分|必要|充要)条件\Z", r"\1"),
        (r"\A\s*([A-H]+)(?:项|是?正确的?)+\s*\Z", r"\1"),
        (r"\*\*", "^"),
        (r"\A\s*(?:(?i:at|about|around|approximately|roughly|exactly|only|just)\s|\\approx\s?)\s*(?=[-\d\\])", ""),
        (r"(?i)\A\s*(?:the )?(?:final )?answer(?: is|:)\s*", ""),
        (r"\A\s*(?:negative|minus)\s+(?=[\d\\])", "-"),
        (r"\A\s*([\"'`]{1,2})(.*?)(?:\1|'')[\s.]*\Z", r"\2"),
        (r"(?<=\d)(?:''|\")\s*\Z", " inch"),
        (r"\A\s*DNE\W*\Z", "does not exist"),
        (r"(?<=\d)\s?(?:\^\s?\{?\s?)?(?:st|nd|rd|th)(?![A-Za-z])\s?\}?", ""),
        (r"\s+", " "),
        (r" (?:und|et|и) ", " and "),
        (r" (?:oder|ou|или) ", " or "),
        (QUANTIFIER, ""),
        (r"\A ?\\\{ ?([a-z]) ?(?:\\in ?\\mathbb ?\{R\} ?)?(?:\\mid|\||:) ?(?=.*\1)(.*?) ?\\\} ?\Z", r"\2"),  # {x | x > 2}
        (r"\s?\(([^()]*\\in ?\\mathbb[^()]*)\) ?\Z", r", \1"),  # k\pi (k \in Z)
    )
]
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
EMOJI = "(?![☓✕✖✗✘❌❎❓❔➕➖➗👎🚫])[\u2600-\u27bf\U0001f300-\U0001faff]"  # but those that deny or count
ENDS = re.compile(rf"^(?:[\s,;:]|{EMOJI}|>>>)+|(?:\s-(?=\s*$)|[\s,;:。।–—■□∎\ufe0f]|{EMOJI}|(?<![\\.])\.|\\)+$")
RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
SHORT_WORDS = frozenset(re.split(" ", "no on up in at it is or of to by if an as he we me us go so my do be am pm"))
OPENING, CLOSING = "([{", ")]}"


@functools.lru_cache(maxsize=1024)  # the data's answer comes once a sample
def tidy(text: str) -> str:
    """The answer in one spelling. Time is linear in its length."""
    text = FRACTIONS.sub(r" \g<0>", text.translate(CHARACTERS))
    text = SCRIPTS.sub(lambda run: f"{'^' if run[0][0] in RAISED else '_'}{{{run[0].translate(FROM_SCRIPT)}}}", text)
    text = unicodedata.normalize("NFKC", text).translate(CHARACTERS)
    for _ in range(5):
        text, count = TEXT.subn(r" \1 ", text)
        if not count:
            break
    for pattern, replacement in REPLACED:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=\d)\x01\s*(?=\d{3})", "", text).replace("\x01", ",")
    former = None
    while former != text:
        former, text = text, _without_brackets(ENDS.sub("", text))
    return text


def _without_brackets(text: str) -> str:
    """Without braces around the whole, and without parentheses around a single value."""
    if text[:1] == "{" and closing(text, 0) == len(text) - 1:
        return text[1:-1]
    is_single = text[:1] == "(" and "," not in text and ";" not in text and closing(text, 0) == len(text) - 1
    return text[1:-1] if is_single else text


def closing(text: str, begin: int) -> int:
    """The place where the bracket at `begin` is closed, by any kind of bracket, as in [2,5); -1: it is not closed."""
    depth = 0
    for place in range(begin, len(text)):
        if text[place] in OPENING:
            depth += 1
        elif text[place] in CLOSING:
            depth -= 1
            if depth == 0:
                return place
    return -1


def key(text: str) -> str:
    """A key that answers of equal text share: white space counts only between digits or words, case only outside of words."""
    text = re.sub(r"(?<![\w])\s+|\s+(?![\w])|(?<=\d)\s+(?=[^\W\d_])|(?<=[A-Za-z])\s+(?=\d)", "", text)
    if not has_words(text):
        return re.sub(r"(?<=[A-Za-z])\s(?=[A-Za-z])", "", text)
    text = re.sub(r"\A(?:(?:the|an?|it|there)\s(?:is\s)?)+", "", text.lower())
    return re.sub(r"(?<=[a-z]),(?=[a-z])|[.'!]|(?<=[a-z]{3})s\b", "", text) if "\\" not in text else text


def has_words(text: str) -> bool:
    """Whether there are words in it, which are no products of letters: "xy", "abc" and "GMm" may be products, "east" is none."""
    if re.search("[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]", text):
        return True
    is_letters = re.fullmatch(r"[A-Za-z\s]*", text) is not None
    return any(is_word(run) or (is_letters and run.lower() in SHORT_WORDS) for run in RUN.findall(text))


def is_word(run: str) -> bool:
    """At least three letters, with a vowel, that are not in alphabetical order, in which no two words are one product."""
    if run in MATH_WORDS or len(run) < 3 or run not in {run.lower(), run.upper(), run.capitalize()}:
        return False
    return re.search("[aeiou]", run.lower()) is not None and (run == run.capitalize() or "".join(sorted(run)) != run)
