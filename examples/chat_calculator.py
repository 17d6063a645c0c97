r"""The calculator as a tool in a chat: a small model that calls `multiply` in the form of its chat template, and its data.

    system: multiply     user: 57*68     assistant: <tool_call>{"name": "multiply", "arguments": {"a": 57, "b": 68}}</tool_call>
    tool: 3876           assistant: 3876

The fixed words of a call are single tokens, so that a model of 1 M parameters has little to write. clients.py has episodes with
it. Running it needs transformers and torch, for the model's folder.

    python -m examples.chat_calculator --to FOLDER     # model, warm_up*.jsonl, conversations*.jsonl, train.jsonl, ...
"""

from __future__ import annotations

import argparse
import re
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.calculator import pairs_of, write_lines
from megasync.tools.assets.small_qwen3 import EOS, PAD, UNKNOWN, write_small_qwen3

TOOL = "multiply"
USER, ASSISTANT, TOOL_RESULT, TOOLS, SYSTEM = "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", "<|system|>"
CALL, AND, END_CALL = f'<tool_call>{{"name": "{TOOL}", "arguments": {{"a": ', ', "b": ', "}}</tool_call>"
WORDS = (TOOL, CALL, AND, END_CALL)
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in ("a", "b")}, "required": ["a", "b"]}
MULTIPLY = {"type": "function", "function": {"name": TOOL, "description": "The product of a and b.", "parameters": NUMBERS}}
ROLES = (USER, ASSISTANT, TOOL_RESULT, TOOLS, SYSTEM)
CHARACTERS = [each for each in string.printable if each.isprintable() or each == "\n"]
TEMPLATE = (
    "{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<eos>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vocabulary_of(words: Sequence[str] = WORDS) -> tuple[str, ...]:
    """A token for each id; a multiple of 64, so that ranks can split it."""
    named = (PAD, EOS, UNKNOWN, *ROLES, *words, *CHARACTERS)
    return (*named, *(f"<unused{number}>" for number in range(-len(named) % 64)))


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The parts of the texts between numbers, each once, as tokens: a small model need not read them letter by letter."""
    return tuple(dict.fromkeys(part for text in texts for part in re.split("[0-9]+", text) if len(part) > 1))


def build_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """A tokenizer with one token for each character, each role and each of `words`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(vocabulary_of(words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(role, normalized=False) for role in ROLES])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


def lines(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The lines of each file. Prompts of the warm-up are rendered by the chat template, with tools; conversations have the same
    turns as messages.
    """
    kinds = ("train", "warm_up", "conversations")
    found: dict[str, list[dict[str, Any]]] = {f"{kind}{end}": [] for kind in kinds for end in ("", "_held_out")}
    found["held_out"] = found.pop("train_held_out")
    for left, right, is_held_out in pairs_of(seed):
        question, product = f"{left}*{right}", str(left * right)
        asked, call = f"{TOOLS}{TOOL}{EOS}{USER}{question}{EOS}{ASSISTANT}", f"{CALL}{left}{AND}{right}{END_CALL}"
        found["held_out" if is_held_out else "train"].append({"question": question, "answer": product})
        turns = found["warm_up_held_out" if is_held_out else "warm_up"]
        turns.append({"question": asked, "answer": call})
        turns.append({"question": f"{asked}{call}{EOS}{TOOL_RESULT}{product}{EOS}{ASSISTANT}", "answer": product})
        conversation = found["conversations_held_out" if is_held_out else "conversations"]
        conversation.append({"messages": _messages(left, right), "tools": [MULTIPLY]})
    return found


def _messages(left: int, right: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"a": left, "b": right}}}
    return [
        {"role": "user", "content": f"{left}*{right}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(left * right)},
        {"role": "assistant", "content": str(left * right)},
    ]


def write(folder: Path, seed: int = 0) -> None:
    """Writes model and data below `folder`; existing files are overwritten."""
    write_small_qwen3(folder / "model", vocabulary_of(), seed, "float32", max_position_embeddings=256)
    build_tokenizer().save_pretrained(folder / "model")
    write_lines(folder, lines(seed))


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.chat_calculator", description="A model with a tool.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    write(given.to, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
