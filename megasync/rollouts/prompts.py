"""Text to tokens and back, with the tokenizer of the model's folder. Leaves out sampling and rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from engine.sample import Sample
from megasync.rollouts.data import Example


class Prompts:
    """Encodes prompts (as one user turn with `chat_template`), decodes responses, knows where a response ends."""

    def __init__(self, model_path: str, chat_template: bool) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.chat_template = chat_template
        if chat_template and not self.tokenizer.chat_template:
            raise ValueError(
                f"data.chat_template=true: the tokenizer in {model_path} has no chat template. Remedy: "
                "data.chat_template=false, or a model folder whose tokenizer has one"
            )
        self.stop_token_ids = _stop_token_ids(model_path, self.tokenizer.eos_token_id)
        self.prompt_ids = lru_cache(maxsize=100_000)(self._prompt_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """A response's text without its end-of-sequence and other special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def supervised(self, example: Example) -> Sample:
        """The example as a sample whose response is the answer and the end of the sequence."""
        answer = self.tokenizer.encode(example.answer, add_special_tokens=False)
        return Sample(self.prompt_ids(example), (*answer, *self.stop_token_ids[:1]))

    def _prompt_ids(self, example: Example) -> tuple[int, ...]:
        if self.chat_template:
            turns = [{"role": "user", "content": example.prompt}]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(self.tokenizer.encode(example.prompt))


def _stop_token_ids(model_path: str, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's end of sequence first, then those of generation_config.json."""
    found = [] if tokenizer_eos is None else [tokenizer_eos]
    path = Path(model_path) / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not found:
        raise ValueError(f"model.path: {model_path} names no end-of-sequence token, in its tokenizer or generation_config.json")
    return tuple(dict.fromkeys(found))
