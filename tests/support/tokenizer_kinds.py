"""Small tokenizers of every kind that models have, saved as folders are found: with truncation, padding and clean-up in them.

prompts = prompts_of("llama2", tmp_path)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megasync.config.data_section import DataConfig
from megasync.data.prompts import Prompts

CORPUS = ["12+30=42, the answer is 42 .", "x != y  and don't\n\ttell:  naïve Brücke", "think so, he says 'no' 東京"] * 4
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>"]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
EXTRA = ("</answer>", "<tool>", "<réponse>")  # the first is special


def byte_level(*, prefix: bool = False) -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=SPECIALS, initial_alphabet=alphabet, vocab_size=330))
    return made


def fallback(first: Callable[[Tokenizer], None], last: list[Any]) -> Tokenizer:
    """BPE in which what has no token is bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    first(made)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=SPECIALS, vocab_size=120, limit_alphabet=40))
    state = json.loads(made.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {each: len(vocabulary) + number for number, each in enumerate(BYTES)}
    return Tokenizer.from_str(json.dumps(state))


def llama2() -> Tokenizer:
    def prepend(made: Tokenizer) -> None:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

    return fallback(prepend, [decoders.Strip(" ", 1, 0)])


def mistral() -> Tokenizer:
    def metaspace(made: Tokenizer) -> None:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)

    return fallback(metaspace, [decoders.Strip(" ", 1, 0)])


def gemma() -> Tokenizer:
    def replace(made: Tokenizer) -> None:
        made.normalizer = normalizers.Replace(" ", "▁")

    return fallback(replace, [])


def metaspace(model: str, scheme: str) -> Tokenizer:
    """As T5's and XLNet's (Unigram), and sentencepiece's BPE without bytes."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz0123456789+=!?.,:'\n\t"]
    made = Tokenizer(models.Unigram() if model == "unigram" else models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    of_model = trainers.UnigramTrainer if model == "unigram" else trainers.BpeTrainer
    unknown = {"unk_token": "<unk>"} if model == "unigram" else {}
    made.train_from_iterator(CORPUS, of_model(special_tokens=SPECIALS, vocab_size=150, initial_alphabet=letters, **unknown))
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=True)
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=SPECIALS, vocab_size=150))
    return made


def characters() -> Tokenizer:
    """WordLevel, a character a token, as the quickstart's."""
    letters = sorted({*"".join(CORPUS), *"abcdefghijklmnopqrstuvwxyz0123456789+=!?.,:' \n\t"})
    made = Tokenizer(models.WordLevel({each: number for number, each in enumerate([*SPECIALS, *letters])}, "<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return made


def words() -> Tokenizer:
    """WordLevel without a decoder."""
    known = dict.fromkeys([*SPECIALS, *" ".join(CORPUS).split()])
    made = Tokenizer(models.WordLevel({each: number for number, each in enumerate(known)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_prefix": functools.partial(byte_level, prefix=True),
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
    **{f"metaspace_{each}": functools.partial(metaspace, "bpe", each) for each in ("always", "first", "never")},
    **{f"unigram_{each}": functools.partial(metaspace, "unigram", each) for each in ("always", "first", "never")},
    "word_piece": word_piece,
    "characters": characters,
    "words": words,
}
OF_WORDS = ("word_piece", "words")  # whose tokens do not say where white space was
WITH_BYTES = ("byte_level", "byte_level_prefix", "llama2", "mistral", "gemma")  # that have every text


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


def write_kind(kind: str, folder: Path) -> Path:
    """A model's folder with the tokenizer and nothing else."""
    made = Tokenizer.from_str(_tokenizer(kind).to_str())
    made.add_special_tokens([AddedToken(EXTRA[0], special=True)])
    made.add_tokens([AddedToken(each, special=False) for each in EXTRA[1:]])
    made.enable_truncation(4)
    made.enable_padding(pad_id=made.token_to_id("<pad>"), pad_token="<pad>", length=8)
    fields = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **fields, clean_up_tokenization_spaces=True).save_pretrained(folder)
    return folder


@functools.cache
def _prompts(kind: str, folder: Path) -> Prompts:
    return Prompts(str(write_kind(kind, folder)), DataConfig())


def prompts_of(kind: str, root: Path) -> Prompts:
    """Cached for a root."""
    return _prompts(kind, root / kind)
