"""The tokenizer of a model's folder, and what of it cannot be used. No torch in here.

Leaves out prompts and what is made of them (prompts.py).

    tokenizer = load_tokenizer(Path("Qwen3-0.6B"))
    stop_token_ids(Path("Qwen3-0.6B"), tokenizer.eos_token_id, vocab_size=151936)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasync.config.errors import ConfigError, nearest_name, refuse_if
from megasync.hf.folder import DOWNLOAD_REMEDY, read_json_object

OF_TEMPLATES = ("namespace", "range", "dict", "raise_exception", "strftime_now", "lipsum", "cycler", "joiner")  # functions
TEMPLATE_REMEDY = "download the tokenizer again, or write data.chat_template=false"


def load_tokenizer(folder: Path) -> Any:
    """From tokenizer.json alone: AutoTokenizer imports torch, and makes up an empty tokenizer where there is none.

    Raises:
        ConfigError: a file is missing or broken.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        remedy = "put it there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise ConfigError(f"model.path = {folder}: the folder holds no tokenizer.json", remedy=remedy)
    path = folder / "tokenizer_config.json"
    length = read_json_object(path).get("model_max_length") if path.is_file() else None
    message = f"{path}: model_max_length = {length!r}: a number of tokens of at least 1 is expected"
    refuse_if(length is not None and not (type(length) in (int, float) and length >= 1), message, remedy=DOWNLOAD_REMEDY)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the tokenizers package raises plain ones
        message = f"model.path = {folder}: its tokenizer cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(message, remedy=DOWNLOAD_REMEDY) from error


def check_template(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """ConfigError for a template that is broken, and for arguments that it does not read: it would pass over those."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = tokenizer.get_chat_template()
        variables = meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))
    except Exception as error:  # of a template that is no text, of several without a default, of its grammar
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data.chat_template = true: the model's template is broken: {told}", remedy=TEMPLATE_REMEDY) from error
    usable = sorted(variables - {"messages", "add_generation_prompt", *tokenizer.special_tokens_map, *OF_TEMPLATES})
    for name in arguments:
        if name not in usable:
            near, key = nearest_name(name, usable), f"data.chat_template_arguments.{name}"
            problem = f"{key} = {arguments[name]!r}: the model's chat template reads no such variable"
            remedy = f"write data.chat_template_arguments.{near}" if near else f"take {key} out"
            raise ConfigError(problem, choices=", ".join(usable) or "none", nearest=near, remedy=remedy)


def stop_token_ids(folder: Path, tokenizer_eos: int | None, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's end of sequence first, then those of generation_config.json.

    Raises:
        ConfigError: there is none, or the model has no embedding for the first, with which supervised answers end.
    """
    found = [] if tokenizer_eos is None else [(tokenizer_eos, f"model.path = {folder}: the tokenizer's eos_token")]
    path = folder / "generation_config.json"
    if path.is_file():
        eos = read_json_object(path).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        message = f"{path}: eos_token_id = {eos!r}: a token's number, or a list of them, is expected"
        refuse_if(any(type(one) is not int for one in ids), message, remedy=DOWNLOAD_REMEDY)
        found += [(one, f"{path}: eos_token_id") for one in ids]
    if not found:
        message = f"model.path = {folder}: names no end-of-sequence token, in its tokenizer or generation_config.json"
        raise ConfigError(message, remedy="give tokenizer_config.json an eos_token")
    first, where = found[0]
    message = f"{where} is the token {first}, and the model has embeddings for 0 to {vocab_size - 1}"
    refuse_if(not 0 <= first < vocab_size, message, remedy="take tokenizer and model of one folder")
    return tuple(dict.fromkeys(one for one, _ in found))
