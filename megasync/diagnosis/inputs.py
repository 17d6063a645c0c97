"""What a config names: itself, the model's folder, data files, the reward; most of it is what `train --check` looks at, too.

Leaves out the weights' values. transformers is imported for the tokenizer; torch is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megasync.checks.check import check_config
from megasync.config.errors import ConfigError, some
from megasync.config.schema import Config
from megasync.data.load import load_data, read_files
from megasync.data.prompts import Prompts
from megasync.data.tokenizer import GENERATION, generation_ends
from megasync.diagnosis.finding import Finding, error, ok, warning
from megasync.hf.folder import check_model_config, check_weights, model_shape, read_json_object
from megasync.hf.model_shape import ModelShape
from megasync.hf.tensors import check_tensors
from megasync.rewards.resolve import require_packages, resolve_rewards

LFS = b"version https://git-lfs"
POINTER_BYTES = 1024
DOWNLOAD = "download the model again: hf download NAME --local-dir FOLDER"


def refused(check: str, problem: ValueError, fallback: str = "see the message") -> list[Finding]:
    """A ConfigError's lines: its remedy apart, the others joined."""
    first, *rest = str(problem).splitlines()
    lines = dict(line.strip().partition(":")[::2] for line in rest)
    remedy = lines.pop("remedy", "").strip() or fallback
    told = "; ".join(f"{name}: {text.strip()}" for name, text in lines.items())
    return error(check, f"{first}{f' ({told})' if told else ''}", remedy)


def check_whole_config(config: Config, num_ranks: int) -> list[Finding]:
    """All that the start of a run would refuse, its data aside."""
    try:
        check_config(config, num_ranks, needs_data=False)
    except ValueError as problem:
        return refused("config", problem)
    return ok("config", f"can run on {num_ranks} ranks")


def check_model(path: str) -> list[Finding]:
    """config.json, and every file of weights that its index names."""
    if not path:
        return error("model", "model.path is not set", "set model.path to a Hugging Face folder")
    folder = Path(path)
    try:
        shape = check_model_config(folder)
    except ValueError as problem:
        return [*refused("model", problem), *(_check_pointers(folder) if folder.is_dir() else [])]
    found = ok("model", f"{shape.model_type}, {shape.num_hidden_layers} layers, in {path}")
    return found + (_check_pointers(folder) or _check_shards(folder, shape))


def _check_pointers(folder: Path) -> list[Finding]:
    """Files of a clone without Git LFS, also where they are no weights: tokenizer.json often is one."""
    small = [file for file in sorted(folder.iterdir()) if file.is_file() and file.stat().st_size < POINTER_BYTES]
    pointers = [file.name for file in small if file.read_bytes().startswith(LFS)]
    if not pointers:
        return []
    seen = f"Git LFS pointers in the place of files: {some(pointers)}"
    return error("weights", seen, f"git -C {folder} lfs pull")


def _check_shards(folder: Path, shape: ModelShape) -> list[Finding]:
    """Whole by their headers, with the tensors that the index says of them, and those that config.json asks for."""
    if partial := [str(file.relative_to(folder)) for file in folder.rglob("*.incomplete")]:
        return error("weights", f"a download that was broken off: {some(partial, 2)}", DOWNLOAD)
    try:
        check_weights(folder)
        where, listed = _tensors(folder)
    except (ValueError, SafetensorError) as problem:
        return refused("weights", ConfigError(str(problem)), DOWNLOAD)
    if astray := [name for name, file in listed.items() if (name, file) not in where]:
        seen = f"{len(astray)} tensors are not where the index says: {some(astray, 2)}"
        return error("weights", seen, "the files are of several downloads: download all of them again")
    try:
        check_tensors(folder, shape, read_json_object(folder / "config.json"))
    except ConfigError as problem:
        return refused("weights", problem, DOWNLOAD)
    return ok("weights", f"{len(where)} tensors in {len({file for _, file in where})} files, whole")


def _tensors(folder: Path) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """Tensors with their files, and the file of each as the index says."""
    where: set[tuple[str, str]] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            where |= {(name, file.name) for name in opened.keys()}  # noqa: SIM118
    index = folder / "model.safetensors.index.json"
    return where, json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}


def check_tokenizer(config: Config) -> tuple[list[Finding], Prompts | None]:
    """Tokenizer, chat template and where responses end; the tokenizer, where it can be used."""
    if not find_spec("transformers"):
        return [], None
    try:
        prompts = Prompts(config.model.path, config.data)
    except ConfigError as problem:
        name = "chat template" if "template" in str(problem).splitlines()[0] else "tokenizer"
        return refused(name, problem), None
    found = [*_check_vocabulary(config.model.path, prompts.tokenizer), *_check_template(config, prompts)]
    found += [finding for note in prompts.notes for finding in ok("tokenizer", note)]
    return [*found, *_check_generation(Path(config.model.path), prompts)], prompts


def _check_vocabulary(path: str, tokenizer: Any) -> list[Finding]:
    size, rows = len(tokenizer), model_shape(path).vocab_size
    if size > rows:
        remedy = "take the tokenizer of this model; tokens that were added need rows of the embeddings, too"
        return error("tokenizer", f"{size} tokens, and the model's embeddings have {rows} rows", remedy)
    return ok("tokenizer", f"{size} tokens of the model's {rows}")


def _check_template(config: Config, prompts: Prompts) -> list[Finding]:
    has_one = bool(prompts.tokenizer.chat_template)
    if config.data.chat_template:
        return ok("chat template", "there is one, and data.chat_template uses it")
    if has_one and "base" not in Path(config.model.path).name.lower():
        seen = "the tokenizer has one, and data.chat_template = false: prompts go to the model as bare text"
        return warning("chat template", seen, "write data.chat_template=true for a model that was tuned on turns")
    return ok("chat template", "not used")


def _check_generation(folder: Path, prompts: Prompts) -> list[Finding]:
    """Where responses end: the tokenizer's end of sequence, and those of generation_config.json."""
    ends = [f"{token} ({prompts.tokenizer.convert_ids_to_tokens(token)})" for token in prompts.stop_token_ids]
    path, size = folder / GENERATION, len(prompts.tokenizer)
    if unknown := [token for token in (*prompts.stop_token_ids, *generation_ends(folder)) if not 0 <= token < size]:
        seen = f"eos_token_id {unknown[0]} is no token of the tokenizer's {size}: it ends no response"
        return warning("generation config", seen, f"correct {path}")
    if not path.is_file():
        if not prompts.data.chat_template:
            return ok("generation config", f"none; responses end with {some(ends)}")
        seen = f"no generation_config.json: responses end with {some(ends)} alone"
        return warning("generation config", seen, "copy it from the model's page: turns may end with another token")
    ignored = sorted(read_json_object(path).keys() & {"temperature", "top_p", "top_k", "repetition_penalty"})
    other = f"; its {some(ignored)} are not used: sampling is what rollout says" if ignored else ""
    return ok("generation config", f"responses end with {some(ends)}{other}")


def check_data(config: Config, prompts: Prompts | None) -> list[Finding]:
    """Each file is read, and with a usable tokenizer tokenised."""
    try:
        if prompts is None:
            examples = read_files(config)
            return ok("data", ", ".join(f"{key}: {len(rows)} examples" for key, rows in examples.items()))
        data = load_data(config)
    except ValueError as problem:
        return refused("data", problem)
    counts = {"data.train": len(data.train), "data.eval": len(data.held_out)}
    counts |= {f"data.eval.{name}": len(rows) for name, rows in data.eval_sets.items()}
    told = ", ".join(f"{key}: {number} examples" for key, number in counts.items() if number)
    if dropped := [note for note in data.notes if note not in data.prompts.notes]:
        return warning("data", f"{told}; {'; '.join(dropped)}", "shorten them, or raise the limit that is named")
    return ok("data", told)


def check_reward(config: Config, has_module: Callable[[str], object] = find_spec) -> list[Finding]:
    """Each function of rollout.reward is imported; of ours, what they import when they are called."""
    if config.algorithm.name != "grpo":
        return []
    try:
        rewards = resolve_rewards(config.rollout.reward)
        require_packages(config.rollout.reward, has_module)
    except ValueError as problem:
        return refused("reward", problem)
    return ok("reward", some([reward.name for reward in rewards]))
