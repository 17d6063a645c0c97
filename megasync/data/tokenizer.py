"""Loads the tokenizer of a model's folder, and finds the tokens that end a response. No torch in here.

Leaves out encoding (encoding.py) and decoding (bridge/detokenizer.py).

    tokenizer, notes = load_tokenizer(Path("Qwen3-0.6B"))
    stop_token_ids(Path("Qwen3-0.6B"), tokenizer.eos_token_id, vocab_size=151936)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge import detokenizer
from megasync.config.errors import ConfigError, refuse_if
from megasync.models.folder import read_json_object
from megasync.models.tensors import DOWNLOAD

GENERATION = "generation_config.json"


def load_tokenizer(folder: Path) -> tuple[Any, list[str]]:
    """(tokenizer, notes), from tokenizer.json only: AutoTokenizer imports torch, and creates an empty tokenizer if the file is
    missing. Saved truncation, padding and clean-up are switched off, with a note for each.

    Raises:
        ConfigError: a file is missing or broken.
    """
    if not (folder / "tokenizer.json").is_file():
        remedy = "put it there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise ConfigError(f"model.path = {folder}: the folder holds no tokenizer.json", remedy=remedy)
    path = folder / "tokenizer_config.json"
    length = read_json_object(path).get("model_max_length") if path.is_file() else None
    message = f"{path}: model_max_length = {length!r}: a number of tokens of at least 1 is expected"
    refuse_if(length is not None and not (type(length) in (int, float) and length >= 1), message, remedy=DOWNLOAD)
    try:
        tokenizer, off = detokenizer.load(folder)
    except Exception as error:  # the tokenizers package raises plain ones
        message = f"model.path = {folder}: its tokenizer cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(message, remedy=DOWNLOAD) from error
    return tokenizer, [f"model.path: the tokenizer's files ask for {each}; it is switched off" for each in off]


def vocabulary_difference(folder: Path, other: Path, *, shared_only: bool = False) -> str:
    """Describes the first token to which two folders' tokenizers give different ids; empty if none. `shared_only`: tokens
    that one of them does not have may differ.
    """
    own, theirs = (_vocabulary(each) for each in (folder, other))
    compared = own.keys() & theirs.keys() if shared_only else own.keys() | theirs.keys()
    different = [token for token in compared if own.get(token) != theirs.get(token)]
    if not different:
        return ""
    token = min(different, key=lambda each: (min(own.get(each, 2**31), theirs.get(each, 2**31)), each))
    return f"the token {token!r} is {own.get(token, 'none')} in one and {theirs.get(token, 'none')} in the other"


def _vocabulary(folder: Path) -> dict[str, int]:
    """The number of each token of tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: the folder holds no tokenizer.json", remedy="save the model's tokenizer into it")
    fields = read_json_object(folder / "tokenizer.json")
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise ConfigError(f"{folder / 'tokenizer.json'}: model.vocab: the tokens are not there", remedy=DOWNLOAD)
    if isinstance(vocabulary, list):  # with scores
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{each["content"]: each["id"] for each in fields.get("added_tokens") or ()}}


def named_ends(folder: Path) -> list[tuple[int, str]]:
    """The eos_token_id of generation_config.json or, where there is no such file, of config.json, whose text_config may have it:
    each id, and where it stands. transformers and vLLM choose so.

    Raises:
        ConfigError: values that are not ids.
    """
    path = next((path for path in (folder / GENERATION, folder / "config.json") if path.is_file()), None)
    fields = read_json_object(path) if path is not None else {}
    nested = fields.get("text_config")
    given = [each.get("eos_token_id") for each in (fields, nested) if isinstance(each, dict)]
    eos: Any = next((each for each in given if each is not None), [])
    ids = eos if isinstance(eos, list) else [eos]
    message = f"{path}: eos_token_id = {eos!r}: a token's number, or a list of them, is expected"
    refuse_if(any(type(one) is not int for one in ids), message, remedy=DOWNLOAD)
    return [(one, f"{path}: eos_token_id") for one in ids]


def stop_token_ids(folder: Path, tokenizer_eos: int | None, vocab_size: int) -> tuple[tuple[int, ...], list[str]]:
    """(ids, notes): the tokenizer's end-of-sequence token first, then `named_ends`. Ids without an embedding are left out, with
    a note.

    Raises:
        ConfigError: there is no end token, or the model has no embedding for the first one, which ends supervised answers.
    """
    found = [] if tokenizer_eos is None else [(tokenizer_eos, f"model.path = {folder}: the tokenizer's eos_token")]
    found += named_ends(folder)
    if not found:
        message = f"model.path = {folder}: no end-of-sequence token in its tokenizer, generation_config.json or config.json"
        raise ConfigError(message, remedy="give tokenizer_config.json an eos_token")
    unknown = [(one, where) for one, where in found if not 0 <= one < vocab_size]
    problems = [f"{where} is the token {one}, and the model has embeddings for 0 to {vocab_size - 1}" for one, where in unknown]
    refuse_if(found[0] in unknown, problems[0] if problems else "", remedy="take tokenizer and model of one folder")
    known = dict.fromkeys(one for one, where in found if (one, where) not in unknown)
    return tuple(known), [f"{each}: it cannot end a response and is left out" for each in problems]
