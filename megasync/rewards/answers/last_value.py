# ruff: noqa: RUF001 # characters as they stand in people's texts
"""The last value in a sentence or a text: a number, a formula or a list with its unit, or the words that something is.

    last_value("So she has 5 apples and 3 left.")      # "5 apples and 3"

Rule 6 of read.py.
"""

from __future__ import annotations

import re

from megasync.rewards.answers.units import is_unit

MARKDOWN = re.compile(
    r"(?<![\w)*])(?:(\*{1,3})(?=\S)([^*\n]{1,2000}?)(?<=\S)\1|(__?)(?=\S)([^*_\n]{1,2000}?)(?<=\S)\3)(?![\w(*])"
)
GIVEN_TIME = re.compile(  # behind a number, as in "45 miles from home at the end of those 4 hours"
    r"(\d.{0,200}) (?:after|in|of|over|during|for|within) (?:the|those|these|all) \d+"
    r" (?:second|minute|hour|day|week|month|year)s\b"
)
COMPARISON = re.compile(  # behind a value, as in "9 apples, 5 more than his friend"
    r"(\d[^\n]{0,200}?)(?:,\s(?:which\s(?:is|are|was|were)\s)?\$?\d[\d,.]*%?(?:\s[\w-]+){0,2}?\s(?:more|less|[a-z]{2,}er)"
    r"(?:\s[\w-]+){0,2}?\sthan\b|[,，]比)[^\n。]*"
)
HALF_DAY = re.compile(r"[ap]\.?m", re.IGNORECASE)
HTML = re.compile(r"<(del|s)>[^<]{0,200}</\1>|</?[a-z][a-z_]{0,15}\s{0,3}/?>|~~[^~\n]{1,200}~~", re.IGNORECASE)
CJK = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
CJK_EDGE = re.compile(rf"(?<=[{CJK}])(?=[^\s{CJK}])|(?<=[^\s{CJK}])(?=[{CJK}])")
IN_CJK = re.compile(f"[{CJK}]")
TOKEN = re.compile(
    r"\$\d[\d,]*(?:\.\d+)?(?=[\s,;:!?)*]|\.(?!\d)|\Z)|\$\$[^$]{1,500}\$\$|\$[^$\n]{1,500}\$\S{0,20}|\\\(.{1,500}?\\\)\S{0,20}|\\\[.{1,500}?\\\]"
    r"|[(\[](?![^()\[\]]{0,200}[A-Za-z]{3})[^()\[\]\n]{1,200}[)\]]\S{0,20}|\S+"
)
WORD = re.compile(r"[^\W\d_]{2,}")
SCRIPT = re.compile("[\u0400-\u1fff\u3040-\u30ff\uac00-\ud7af]")  # no formula's letters: Cyrillic, Arabic, Hangul, ...
HIDDEN = re.compile(r"\$[^$\n]{1,500}\$|\\(?:text|mbox|mathrm|textbf|operatorname)\s?\{[^{}]{0,200}\}|\\[A-Za-z]+|\{[a-z]+\}")
FUNCTION_WORDS = frozenset(re.split(" ",
    "is are was were be been so the we get gets have has had there that this it makes make gives give thus therefore hence"
    " then he she they his her their my our you your which must will would can"))  # fmt: skip
PREFACE = re.compile(
    r"[^\d$\\]*(?<![^\W\d_])(?:[^\W\d_]{2,}:\s|[^\W\d_]+\s(?:[^\W\d_]{2,}|[èéà])\s+[-$\\(\d]"
    r"|[^\W\d_]{3,}\s\d[\d,.]*\s[^\W\d_]{3,}|[^\W\d_]{2,}(?:[\s-][^\W\d_]+)*,\s\$)"
)  # "Total: 5", "I got 5"
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
MATH = re.compile(r"[\d\\=^√≈π∞±≤≥<>∪]|\$.+\$")
CJK_SENTENCE = re.compile(r"\A(?:所以|因此|故|综上|该|这)|。\Z")
OPERATOR = re.compile(r"[-+*/=<>^≈≤≥≠±×÷·−∪%]+")
VARIABLE = re.compile(r"[A-Za-z]\w?|\([a-z](?:,\s?[a-z])+\)")
CONNECTOR = frozenset({"and", "or", "&", "和", "或", "und", "oder", "et", "ou", "y", "e", "и", "или"})
NOT_EQUAL = re.compile(
    r"(?i)(?:\b(?:not|never|nor|cannot|\w+n't|pas|nicht|kein|não|не|nie|niet|değil)(?:\s\w+){0,2}"
    r"|\b(?:close to|(?:half|quarter) (?:past|to)|twice|double|triple|root|far from|(?:any|every)thing (?:except|but)"
    r"|(?:doubt|wrong if) it is|(?:wrong|incorrect|(?:if|whether) the) answer is|unlikely to be|another question is|no es"
    r"|(?:negative|opposite|square|cube|root|half|reciprocal) of"
    r"|exceeds|than|least|most|below|above|under|over|als|plus de|moins de|más de|menos de|mais de|более|менее|больше|меньше)"
    r"|(?:不[是为到能]|不可能是?|不会是|不等于|并非|[小大]于|超过|[非负])|ليس|không phải|bukan)\Z"
)
NEGATION = re.compile(r"\b(?:not|never|neither|either|nor|(?<!is )(?<!are )(?<!has )(?<!have )no)\s|n't\b")
SUBJECT = re.compile(  # up to what a Chinese sentence says of it
    "\\A.*(?:是|为|在|(?<!没)有|说法|命题|结论|直线|平面|函数|数列|方程)(?=[\u4e00-\u9fff①-⑳A-H])(?=[^不非无未])"
)
CJK_SAID = re.compile("(?<![不定能会非])[是为]([\u4e00-\u9fff]{2,})\\Z")
DENIED = re.compile(
    r"(?i)(?:\(it\s)?(?:(?:is|was)\s)?(?:not|isn't|wasn't|wrong|incorrect|squared|cubed|and an?\b|to the power|th root|choose"
    r"|不[是对])|이 아니|아님|नहीं"
)
DOUBT = re.compile(  # before or within (from \0 on) "answer is"
    r"(?i)\b(?:wrong|incorrect|friend's|(?:whether|if) the)\s*\0"
    r"|\0.*(?:\b(?:not|cannot|never|another|no es|pas|nicht|não)\b|n't\b)"
)
CLAUSE = re.compile(
    r"(?<=[\d}$)a-z])[,，]\s*(?:此时|当|其中|(?:attained|achieved|reached|occurring|when|since|because|with equality"
    r"|as (?:desired|claimed|required|wanted|expected))\b).*"
)
FRAME = re.compile(r"\\[\[\]]|\\(?:begin|end)\{[a-z]+\*?\}|\$\$")
YES_NO = re.compile(r"(?i)(?:\\text\s?\{)?(yes|no|true|false)(?=\s?[,.;:!–—])(?!.*\b(?:yes|true|false|(?:but|or) no)\b)")
OF_LETTER = re.compile(  # behind a value or a name, as in "for every integer $k$" and "the required value of $y$"
    r" (?:of|for)(?: (?:all|any|every|each|some|an?))?(?: [a-z]+){0,2} \$[A-Za-z]\$(?=\W*\Z)"
)


def unmarked(text: str) -> str:
    """Without the marks of Markdown and HTML for bold, italic and code, and white space around it."""
    text = re.sub(r"\A\s*>\s(?=\*)", "", HTML.sub(" ", text).replace("`", ""))
    for _ in range(3):
        text = MARKDOWN.sub(r"\2\4", text)
    text = re.sub(r"\A\s*(?:#{1,6}\s|[a-z]\)\s(?=[-\d$\\])|>\s(?!\d)|\*\*|__)", "", text)
    return re.sub(r"(?<=\S)\*\*(?=\s|\Z)|\*\*\s*\Z|(?<=[.。])\*+\s*\Z", "", text).strip()


def last_value(text: str, *, is_prose: bool = False) -> str:
    """The text itself where it is nothing but a value, else the last value in it."""
    text = COMPARISON.sub(r"\1", CLAUSE.sub("", unmarked(text)))
    words = [word.lower() for word in WORD.findall(HIDDEN.sub(" ", text))]
    is_sentence = len(words) > 6 or not FUNCTION_WORDS.isdisjoint(words) or PREFACE.match(text) or CJK_SENTENCE.search(text)
    is_prose = (is_prose and MATH.search(text) is not None) or "\n" in text or bool(is_sentence)
    num_cjk = len(IN_CJK.findall(re.sub("[或和与且]", "", text)))
    is_foreign = num_cjk > (4 if re.match(r"[-\d\\$.]", text) else 0) or SCRIPT.search(text) is not None
    is_cjk_prose = re.search(r"\d", text) is not None and is_foreign
    if not re.search(r"\d", text) and (said := YES_NO.match(text)) is not None:
        return said[1]
    if not (is_prose or is_cjk_prose) or ("\\begin" in text and not words):
        return text
    for line in reversed(text.splitlines()):
        sentences = re.split(r"(?<=[^\s\d])[.!?]\s+(?!\\\])|(?<=\d)[.!]\s+(?=[A-Z])|[。！？]", unmarked(line))
        for sentence in (OF_LETTER.sub("", each) for each in reversed(sentences)):
            if not MATH.search(sentence) or FRAME.fullmatch(sentence):
                continue
            if (said := CJK_SAID.search(sentence)) is not None and not re.search(r"\d", sentence):
                return said[1]
            if found := _last_group(sentence):
                return found
    return _last_words(text)


def _last_words(text: str) -> str:
    """The value in a text without numbers: the last line's "X is VALUE"."""
    line = re.sub(r"(?i)\A(?:therefore|thus|hence|so|then|finally),?\s+", "", text.splitlines()[-1].strip())
    if re.search("[\u4e00-\u9fff]", line):
        said = SUBJECT.sub("", line)
        return (line if re.search("[不非没未无否]", line[: len(line) - len(said)]) else said).rstrip("的。")
    if NEGATION.search(line) or re.match(r"\(?[A-H][).:]\s", line):
        return line
    if len(line.split()) > 3:
        return re.sub(r"\A.*\b(?:is|are|has|have|on(?: an?)?)\s(?!not\b)", "", line)
    return re.sub(r"\A(?:The|This) \w+ (?=[a-z]+s\b)", "", line)  # The series diverges


def _last_group(sentence: str) -> str:
    """The last run of numbers, formulas and operators among words, with its unit, and what "and" or "or" joins to it."""
    tokens = TOKEN.findall(CJK_EDGE.sub(" ", GIVEN_TIME.sub(r"\1", sentence)))
    cores = [token.strip("*`\"'.,;:!?।،") for token in tokens]
    strong = [MATH.search(core) is not None for core in cores]
    end = next((place + 1 for place in reversed(range(len(tokens))) if strong[place]), 0)
    begin = end
    while begin > 0:
        core = cores[begin - 1]
        if begin < end and re.search(r"\w:\Z", tokens[begin - 1]):
            break  # Step 3: 3*4 = 12
        if strong[begin - 1] or OPERATOR.fullmatch(tokens[begin - 1]) or (begin > 1 and strong[begin - 2] and is_unit(core)):
            begin -= 1
        elif core.lower() in CONNECTOR and begin > 1 and (joined := _joined(strong, begin - 2)) is not None:
            begin = joined
        else:
            break
    if 0 < begin < end and cores[begin - 1] in MONTHS.split("|"):
        begin -= 1
    if 0 < begin < end and OPERATOR.fullmatch(tokens[begin]) and VARIABLE.fullmatch(tokens[begin - 1]):
        begin -= 1  # x ≠ 1
    while end < len(tokens) and (
        is_unit(cores[end]) or HALF_DAY.fullmatch(cores[end]) or (IN_CJK.match(cores[end]) and end == begin + 1)
    ):
        end += 1
    group = " ".join(tokens[begin:end])
    before = cores[begin - 1].lower() if begin else ""
    beside = (" ".join(cores[max(0, begin - 4) : begin]), " ".join(tokens[end : end + 3]))
    if NOT_EQUAL.search(beside[0]) or DENIED.match(beside[1]):
        return sentence.strip()
    return f"-{group}" if before in {"minus", "negative"} else group


def _joined(strong: list[bool], place: int) -> int | None:
    """The first token of the value whose last token is at `place`, or a word or two before it, as in "3 apples and 4"."""
    return next((first for first in range(place, max(place - 3, -1), -1) if strong[first]), None)
