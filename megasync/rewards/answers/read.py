# ruff: noqa: RUF001, RUF002 # characters as they stand in people's texts
r"""The answer in a response: which part of a text counts, whatever form it has. equal.py says whether two are equal.

`read_answer` is what every reward that looks for an answer reads with. Its contract, the first that applies:

1. Only what follows the thinking counts. Thinking ends with </think>, </thinking>, </reasoning>, </thought>, [/THINK], ◁/think▷,
   </seed:think>, <|END_THINKING|>, <|end_of_thought|>, <channel|> or the channel `final`, also where the prompt began it.
   A text whose thinking does not end has no answer.
2. The last <answer>...</answer> that closed (also <final_answer>, [ANSWER], <|begin_of_box|>, <|begin_of_solution|>), read by the
   rules below. An empty one has no answer, nor has one that is cut off, but for a complete \boxed in it.
3. The last line, where it begins with ####.
4. The last \boxed{...} or \fbox{...} that closed, be it by the $ of its formula; several that "and", "or" or a comma join are the
   parts of one answer. Where the last is only part of a formula (-\boxed{5}, 3\boxed{5}, \boxed{5}^2) or is denied
   ("not \boxed{5}"), there is no answer: an earlier one does not count.
5. What follows the last "the answer is", "answer:", "答案是", "答：" or the like, up to the end of the sentence or line, unless
   it is denied ("the answer cannot be 7"), or the last "answer" or "result" of JSON, whichever comes later.
6. A text that is nothing but a value. Else the only text in bold of the last line, where it is a value or the line. Else the
   last number, formula or list in it with its unit, or the sentence where a word before it denies it ("not", "than"); words
   where there is none.
   From 5 on, words in parentheses behind a value and a last paragraph that only comments ("Note: ...") are left out.

    read_answer(r"<think>6*7 = 42</think> So it is \boxed{17}.")      # "17"
    read_answer("<think>6*7 = 42")                                    # None

Leaves out the value among words (last_value.py), and what an answer means: times, units, bases and formulas (equal.py). No torch
in here.
"""

from __future__ import annotations

import json
import re

from megasync.rewards.answers.last_value import DENIED, DOUBT, MATH, MONTHS, NOT_EQUAL, YES_NO, last_value, unmarked
from megasync.rewards.answers.notation import BASES
from megasync.rewards.answers.tidy import ASIDE
from megasync.rewards.answers.units import split_unit

THINKING = re.compile(
    r"(?P<open><think(?:ing)?>|<reasoning>|<thought>|\[THINK\]|◁think▷|<seed:think>|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel>thought|<\|channel\|>(?!final)|\Aanalysis(?=.*?assistantfinal))"
    r"|</think(?:ing)?>|</reasoning>|</thought>|\[/THINK\]|◁/think▷|</seed:think>|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<channel\|>|<\|channel\|>final[^<]{0,40}<\|message\|>|assistantfinal",
    re.IGNORECASE | re.DOTALL,
)
SPECIAL_END = re.compile(
    r"(?:(?:\$?\\(?:blacksquare|square|qed|Box)\$?|Q\.?E\.?D\.?|[■□∎]"
    r"|<\|(?!end_of_(?:box|solution))[\w ]{1,40}\|>|</s>|<eos>|<end_of_turn>)\s*)+\Z"
)
TAG = re.compile(
    r"(?P<open><(?:final_)?answer(?: [^<>]{0,80})?>|\[ANSWER\]|<\|begin_of_(?:box|solution)\|>)"
    r"|</(?:final_)?answer\s{0,3}>|\[/ANSWER\]|<\|end_of_(?:box|solution)\|>",
    re.IGNORECASE,
)
FINAL_LINE = re.compile(r"\s*####(?!#)(.*)")
BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox|bbox(?:\[[^\]\n]{0,99}\])?)\s{0,9}|(?<![A-Za-z\\])boxed)(?P<braced>\{)"
                 r"|\\(?:boxed|fbox)\s{0,9}(?P<bare>\\[dt]?frac\{[^{}]{1,99}\}\{[^{}]{1,99}\}|[^\s{}$\\]+)"
                 r"|\\(?:boxed|fbox)|\\.|[{}]", re.DOTALL)  # fmt: skip
DOLLAR = re.compile(r"(?<!\\)\$(?!\d[\d,.]*(?:[\s);:!?]|\Z))")  # of a formula, not of a price
BETWEEN_BOXES = re.compile(
    r"(?:\\text\s?\{|[\s$.}]|\\[()\[\]])*(?:(?:[,;&、]|,?\s*\b(?:and|or)\b|和|或|\\quad)(?:[\s$}]|\\[()\[\]])*)*(?:[A-Za-z]\s?=\s?)?"
)
PHRASE = re.compile(
    r"\b(?:ans(?:wers?)?|(?:correct|right|best|final)\s(?:option|choice))\b(?!\s*(?:key|sheet|as)\b)[^.\n:=：。]{0,60}?(?:\b(?:is|are|equals|be)\b|[:：=]|(?<=answer)\s[-–—→]+(?=\s))|(?:\A|\n)[^\w\n]*ans(?:wer)?\.(?=\s*[$\\\d(])|答案】|答案(?:应该|应|就)?(?:选|是|为|等于|[:：=])"
    r"|(?:\A|\W)答\s?[:：]|(?:故|应|我)?(?<!不)选(?:择|项)?(?:是|为)?[:：]?(?=[\s*(（]{0,4}[A-H]{1,5}(?![A-Za-z]))|\b(?:antwort|réponse|respuesta|resposta|risposta|ответ)\b[^.\n:=]{0,40}?(?:\b(?:ist|est|es|é|è)\b|[:—])"
    r"|\b(?:pick|choose|select)(?=\s(?:option\s|choice\s)?[(*]{0,3}[A-H][)*]{0,3}(?:\s*(?:[.;:!\n]|\Z)|,?\s(?:because|since|as)\b))|(?:答え|정답)\s?(?:は|은|[:：])",
    re.IGNORECASE,
)
CHOSEN = re.compile(r"(?<![A-Za-z])\(?([A-H])\)?[\s*]+is\s(?:the\s)?(?:correct|right)\b")
AFTER_PHRASE = re.compile(
    r"(?:[\s*_`:：=#>}]|\b(?:is|are|thus|therefore|(?:approximate|certain|clear|definite|evident|exact|final|name|obvious|precise|rough|simp)ly|donc|also|entonces|então|quindi)\b[:\s]|(?:option|choice)\s)*",
    re.IGNORECASE,
)
NO_VALUE = re.compile(r"(?:correct|right|helpful|clear|verified|confirmed|found|given)\b(?!\s*\d)", re.IGNORECASE)
SENTENCE_END = re.compile(
    r"\.(?=\**(?:\s|\Z))|[。！？]|[!?](?=\s|\Z)|\s(?:because|since|which|where|when|as|so|not)\s|,\s*(?:because|since|which|so|not|as|but)\s"
    r"|(?<=[\d}$)%*]),\s(?!(?:and|or|x|y)\b)[a-z]{2,}\s|;\s[a-z]{3,}\s|\s(?:instead|rather)\s|[,，]\s?也就是"
    r"|(?<=\S),?\s(?:or|that is|i\.e\.)?,?\s?(?:approximately|about|roughly)\s"
)
DISPLAY = re.compile(r"\$\$([^$]{1,2000})\$\$|\\\[(.{1,2000}?)\\\]", re.DOTALL)
BOLD = re.compile(r"([^*]*)\*\*([^*]+)(?<!:)\*\*([^*\d\\=$]*)")  # the one value of a line in bold, and nothing like it behind
JSON_ANSWER = re.compile(
    r'"(?:(?:final[_ ]?)?answer|result)"\s{0,9}:\s{0,9}("(?:[^"\\\n]|\\.){0,999}"|[^",{}\n]{1,999})',
    re.IGNORECASE,
)
SINGLE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\[A-Za-z]{2}(?<!\\u[0-9a-fA-F])")  # of LaTeX; one letter, as in \\n, is JSON's
OPENING_WORD = re.compile(  # of a text that is more than a value
    rf"[\W_]*(?!(?:{MONTHS}|yes|all|any|every|both|no|not|at|more|less|between|base|minus|negative|infinitely|sin|cos|tan|log|ln|exp"
    r"|text|frac|sqrt|boxed|left|begin|pi|binom|room|day|option|choice|case)\b)(?<!\\)(?<!\$)[^\W\d_]{3,}(?![\w(])[^=\n]*\s",
    re.IGNORECASE,
)
BASE_AFTER_BOX = re.compile(rf"(_\{{?|\$?\s\(?(?:in )?base[ -])([2-9]|[1-3]\d|{'|'.join(BASES)})(?![\w-])")
UNIT_AFTER_BOX = re.compile(
    r"\$?(?:\\,|[\s~]){0,3}(?:\\(?:text|mathrm)\s?\{[\s~]?)?((?:square |sq\.? |cubic )?[A-Za-z]+(?:/[A-Za-z]+)?)"
    r"\}?\$?(\^\{?\d\}?)?\$?\s{0,3}(?=[.,;!?\n]|\Z)"
)
BEFORE_BOX = re.compile(  # makes the box behind it a part: a sign, a factor, an operator, a root, a fraction; or denies it
    r"(?:(?<![:：-])(?<![a-z]{2})-|\d|\d[*/]|[\w)}] ?[+^]|(?<![\w</])[a-z] ?[<>] ?|(?:\A|[\n$=(]) ?\d+ ?[-*/] ?"
    r"|\\(?:neq?|cdot|times|sqrt) ?|frac\{?(?:[^{}\n]*\}\{)?)[({]*\Z|(?:\bnot|n't|不是|不等于|并非) ?(?:be )?[$({]*\Z"
)
AFTER_BOX = re.compile(  # the same behind a box: a power (no degrees, no ordinal), a factor, an operator; or denies it
    r"(?i)[})]{0,3}(?:[²³]|\^(?! ?\{? ?(?:\\circ|\\text|\\mathrm|°|st|nd|rd|th))| ?\\(?:cdot|times|pi|sqrt)(?![a-z])"
    r"| ?[-*/<] ?\d|\$? < [\w\\]| ?\+ ?[\w\\]|[xyzin](?![a-z])|[$*\s]{0,4}(?:(?:is|was) (?:wrong|incorrect"
    r"|not (?:the )?(?:answer|correct|right))\b|\(wrong|\?\s?no\b))"
)
PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
NOT_BUT = re.compile(r"\bnot\s[^.\n]{1,40}?\sbut\s(?:rather\s)?|不是[^。\n]{1,20}?而是", re.IGNORECASE)
COMMENT = re.compile(  # how a last paragraph begins that only comments
    r"\W*(?:(?:note|explanation|verification|check|remark|justification|reason|注|说明|检验|验证|解析)[*_]*[:：]"
    r"|if \w+ (?:were|had)\b(?!.*\bso\b)(?:[^.;\n]|\.\d){0,300}\bwould\b(?:[^.;\n]|\.\d){0,300}\.?\Z"  # a single sentence
    r"|(?:note that|let me know|(?:i )?hope|(?:we can |to )(?:verify|check)|feel free)\b)",
    re.IGNORECASE,
)
CONCLUSION = re.compile(r"\b(?:thus|hence|therefore|so the)\b|答", re.IGNORECASE)
CALCULATION = re.compile(r"<<[^<>\n]{0,200}=[^<>\n]{0,40}>>")  # GSM8K's, before its result
CHINESE_DIGITS = "零一二三四五六七八九两十百千"
DIGIT = "[一二三四五六七八九两]"
CHINESE_NUMERAL = f"({DIGIT}?[百千]|{DIGIT}百(?:零{DIGIT}|{DIGIT}十{DIGIT}?)|{DIGIT}?十{DIGIT}?|{DIGIT})"
CHINESE_FRACTION = re.compile(  # that is the whole number: no mixed one, negative one, decimal or factor
    r"(?:\A|(?<=[\n。:：=是为占剩了得到约])|(?<=等于)|(?<=[是为占：:=]\s)|(?<=[长数量程部来]的)|(?<=[剩余]下)|(?<=[还只]有))"
    rf"{CHINESE_NUMERAL}分之{CHINESE_NUMERAL}(?=\s*(?:[，,。.；;！!)*]|\Z))"
)
MAX_READ = 20_000  # characters, from the end, where a value is looked for among words


def read_answer(text: str, *, in_thinking: bool = False) -> str | None:
    """The answer's text as it stands there, without marks around it; None: there is none.

    `in_thinking`: the text begins in the midst of the thinking, which the prompt opened. Time is linear in the length of `text`.
    """
    body = after_thinking(text, in_thinking=in_thinking)
    if body is None:
        return None
    body = body.strip()
    body = CALCULATION.sub("", body[:-400] + SPECIAL_END.sub("", body[-400:]).rstrip())
    tagged, is_cut = _last_tagged(body)
    if is_cut:
        return _last_boxes(tagged)[0]
    return _untagged(body if tagged is None else tagged) or None


def _chinese(numeral: str) -> int:
    """A numeral below 10,000, as 二百零五."""
    total, digit = 0, 0
    for character in numeral:
        if (power := CHINESE_DIGITS.index(character) - 10) > 0:
            total, digit = total + (digit or 1) * 10**power, 0
        else:
            digit = power + 10 if power else 2
    return total + digit


def after_thinking(text: str, *, in_thinking: bool = False) -> str | None:
    """The text after the thinking, or the whole text if there is none; None if the thinking does not end."""
    end = None if in_thinking else 0
    for mark in THINKING.finditer(text):
        end = None if mark["open"] is not None else mark.end()
    return None if end is None else text[end:]


def opens_thinking(prompt: str) -> bool:
    """Whether the prompt ends within the thinking, as those of some chat templates do."""
    end = prompt[-100:].rstrip()
    return any(mark["open"] is not None and mark.end() == len(end) for mark in THINKING.finditer(end))


def _last_tagged(text: str) -> tuple[str | None, bool]:
    """The text in the last closed tags, else the text after the last open tag; and whether it is cut off there."""
    begin, found = None, None
    for mark in TAG.finditer(text):
        if mark["open"] is not None:
            begin = mark.end()
        elif begin is not None:
            begin, found = None, text[begin : mark.start()]
    if found is None and begin is not None:
        return text[begin:], True
    return found, False


def _untagged(text: str) -> str:
    if (final := FINAL_LINE.fullmatch(text.rpartition("\n")[2])) is not None:
        return last_value(_last_boxes(final[1])[0] or _last_phrase(final[1]) or final[1])
    boxed, is_there = _last_boxes(text)
    if is_there:
        if not boxed or boxed.startswith("\\boxed"):
            return _untagged(boxed) if boxed else ""
        said = None if re.search(r"\d", re.split("because|since|if and only if", boxed)[0]) else YES_NO.match(boxed)
        return said[1] if said else boxed
    if PLAIN.fullmatch(text):
        return text
    text = text[-MAX_READ:].translate({ord("（"): "(", ord("）"): ")"})
    text = CHINESE_FRACTION.sub(lambda found: f"{_chinese(found[2])}/{_chinese(found[1])}", text)
    head, _, last = text.rpartition("\n\n")
    if head and COMMENT.match(last) and not CONCLUSION.search(last):
        text = head
    text = re.sub(r"(?<=[.!?])\s\([A-Z][^()]*[.!]\)\Z", "", text)
    text = NOT_BUT.sub("", ASIDE.sub("", text))
    return _last_phrase(text) or _last_bold(text) or last_value(text, is_prose=OPENING_WORD.match(text) is not None)


def _last_boxes(text: str | None) -> tuple[str | None, bool]:
    r"""The content of the last \boxed, or of the last few that are joined; and whether there is any, even one that is cut off."""
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int] | None] = []  # where a box and its content begin; None: another brace
    text, is_there = text or "", False
    for mark in BOX.finditer(text):
        is_there = is_there or mark[0].startswith(("\\boxed", "\\fbox", "boxed"))
        if mark["braced"]:
            opened.append((mark.start(), mark.end()))
        elif mark["bare"]:
            found.append((mark.start(), mark.end(), mark["bare"].rstrip(".,;")))
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (box := opened.pop()) is not None:
            while found and found[-1][0] > box[0]:  # nested in this one
                found.pop()
            found.append((box[0], mark.end(), text[box[1] : mark.start()]))
    if opened and (box := opened[-1]) is not None and not (found and found[-1][0] > box[0]):
        found += _closed_by_dollar(text, *box)
    if not found or BEFORE_BOX.search(text, max(0, found[-1][0] - 40), found[-1][0]) or AFTER_BOX.match(text, found[-1][1]):
        return None, is_there
    begin, end, content = found.pop()
    contents = [content.strip() + (_unit_after(text, end) if PLAIN.fullmatch(content.strip()) else "")]
    while found and found[-1][1] <= begin and len(gap := text[found[-1][1] : begin]) < 40 and BETWEEN_BOXES.fullmatch(gap):
        begin, _, content = found.pop()
        contents.insert(0, content.strip())
    return ", ".join(dict.fromkeys(contents)), True


def _closed_by_dollar(text: str, begin: int, inner: int) -> list[tuple[int, int, str]]:
    r"""The box that ends with its formula, as in $\boxed{12$; `inner`: where its content begins. Empty: no formula ends there."""
    before, rest = text[:begin].rpartition("\n")[2], text[inner:].partition("\n")[0]
    is_in_formula = len(DOLLAR.findall(before)) % 2 == 1 and "$" in rest
    return [(begin, inner + rest.index("$"), rest.partition("$")[0])] if is_in_formula else []


def _unit_after(text: str, end: int) -> str:
    """The base that follows a number's box, or the unit that ends its sentence or line; empty: another word follows, or none."""
    if (base := BASE_AFTER_BOX.match(text, end)) is not None:
        return f"_{base[2]}" if base[1][0] == "_" else f" (base {base[2]})"
    word = UNIT_AFTER_BOX.match(text, end)
    unit = f" {word[1]}{word[2] or ''}" if word is not None else ""
    _, name, factor = split_unit(f"1{unit}")
    return unit if (name and name[0] != "?") or factor != 1 else ""


def _last_phrase(text: str) -> str:
    """The text after the last "the answer is" or the like, or the last answer in JSON; empty if there is none."""
    of_json = list(JSON_ANSWER.finditer(text))
    within_json = {place for mark in of_json for place in range(*mark.span())}
    phrases = [mark for mark in PHRASE.finditer(text) if mark.start() not in within_json]
    for mark in sorted([*of_json, *phrases], key=re.Match.start, reverse=True):
        if mark.re is JSON_ANSWER:
            return last_value(_json_value(mark[1]))
        begin = AFTER_PHRASE.match(text, mark.end()).end()  # type: ignore[union-attr]
        if (display := DISPLAY.match(text, begin)) is not None:
            return (display[1] or display[2]).strip()
        rest = text[begin : begin + 2000].partition("\n")[0]
        end = next((end.start() for end in SENTENCE_END.finditer(rest) if "$" not in rest[end.start() :]), len(rest))
        if rest[end : end + 1] in {"?", "？"} or DOUBT.search(text[max(0, mark.start() - 20) : mark.start()] + "\0" + mark[0]):
            continue
        found = unmarked(rest[:end])
        if found and not NO_VALUE.match(found):
            return last_value(found)
    chosen = CHOSEN.findall(text)
    return chosen[-1] if chosen else ""


def _json_value(text: str) -> str:
    """The text of a JSON value; LaTeX whose backslashes were not doubled is returned unchanged."""
    if not text.startswith('"'):
        return text
    try:
        return text[1:-1] if SINGLE_BACKSLASH.search(text) else str(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def _last_bold(text: str) -> str:
    """The only bold text of the last line, where it is a number or a formula, a word that something "is", or the line."""
    bold = BOLD.fullmatch(text.rpartition("\n")[2])
    if bold is None or NOT_EQUAL.search(bold[1].rstrip()) or DENIED.match(bold[3].strip()):
        return ""
    is_said = re.search(r"\b(?:is|are|was|be|on|has|have)(?: an?)? \Z|[=是为的]\s?\Z|\A\Z", bold[1]) is not None
    return last_value(bold[2]) if is_said or MATH.search(bold[2]) else ""
