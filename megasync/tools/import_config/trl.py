"""Rules for values of TRL's GRPOConfig, ModelConfig and ScriptArguments (trl/trainer/grpo_config.py, July 2026)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasync.config.others import meaning
from megasync.tools.import_config.carried import Given, NotCarriedError, Rule, count, quotient, read_with_another, same

DEFAULTS: dict[str, Any] = {  # TRL's defaults that differ from megasync's, or that rules read
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8, "max_completion_length": 512,
    "weight_decay": 0.0, "adam_beta2": 0.999, "lr_scheduler_type": "linear", "epsilon": 0.2, "seed": 42, "save_steps": 500,
    "gradient_checkpointing": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
    "vllm_importance_sampling_correction": True,
}  # fmt: skip
MODES = {"token_truncate": ("tis", "token"), "token_mask": ("mask", "token"), "sequence_truncate": ("tis", "sequence")}
MODES |= {"sequence_mask": ("mask", "sequence")}
MATH = ("accuracy_reward", "trl.rewards.accuracy_reward")
PEFTS_OWN = "without lora_target_modules PEFT adapts few linears, of most models those of q and v: engine.lora.targets has all"
PROCESSES = "num_processes"  # not a key of TRL's, but of accelerate's launch


def batch(_: Any, given: Given) -> dict[str, Any]:
    """Prompts per generated batch, and optimizer steps on it."""
    once = count(given["per_device_train_batch_size"]) * count(given.get(PROCESSES, 1))
    steps = given.get("steps_per_generation") or given["gradient_accumulation_steps"]
    completions = count(given.get("generation_batch_size") or once * count(steps))
    of_step = once * count(given["gradient_accumulation_steps"])
    return {
        "data.batch_size": quotient(completions, given["num_generations"], "completions of a batch / num_generations"),
        "algorithm.num_minibatches": quotient(completions, of_step, "completions of a batch / of an optimizer step"),
    }


def share(value: Any, given: Given, key: str) -> int:
    """A share of all optimizer steps as a number of them."""
    total = given.get("max_steps") or -1
    if total <= 0:
        raise NotCarriedError(f"a share of all steps: set {key} once run.steps is known")
    number: int = math.ceil(value * count(total))
    return number


def steps(value: Any, given: Given, key: str) -> int:
    """A number of optimizer steps, which transformers takes for a share of all below 1 (trainer_callback.py:compute_steps)."""
    return share(value, given, key) if 0 < value < 1 else count(value)


def batches(key: str) -> Rule:
    """A rule that converts a number of optimizer steps, TRL's steps, into a number of batches."""

    def rule(value: Any, given: Given) -> dict[str, Any]:
        per_batch = int(batch(None, given)["algorithm.num_minibatches"]) * count(given.get("num_iterations") or 1)
        return {key: math.ceil(steps(value, given, key) / per_batch)} if value and value > 0 else {}

    return rule


def warmup(convert: Callable[[Any, Given, str], int]) -> Rule:
    key = "engine.optimizer.warmup_steps"
    return lambda value, given: {key: convert(value, given, key)} if value else {}


def clip(_: Any, given: Given) -> dict[str, Any]:
    high = given.get("epsilon_high")
    return {"algorithm.clip_low": given["epsilon"], "algorithm.clip_high": given["epsilon"] if high is None else high}


def importance(_: Any, given: Given) -> dict[str, Any]:
    if not given["vllm_importance_sampling_correction"]:
        return {"algorithm.importance_correction": "none"}
    mode = given.get("vllm_importance_sampling_mode", "sequence_mask")
    if mode not in MODES:
        raise NotCarriedError(f"there is no such mode; there are {', '.join(MODES)}")
    kind, level = MODES[mode]
    cap = given.get("vllm_importance_sampling_clip_max") or given.get("vllm_importance_sampling_cap") or 3.0
    floor = given.get("vllm_importance_sampling_clip_min")
    if kind == "tis" and floor:
        raise NotCarriedError("weights are truncated from above alone")
    keys = {"algorithm.importance_correction": kind, "algorithm.importance_level": level, "algorithm.importance_cap": float(cap)}
    return keys | ({"algorithm.importance_floor": float(floor or 0.0)} if kind == "mask" else {})


def rewards(_: Any, given: Given) -> dict[str, Any]:
    """Functions by dotted path keep their path; a start refuses functions written for TRL, and explains how to adapt them."""
    names = given.get("reward_funcs") or []
    names = [names] if isinstance(names, str) else list(names)
    weights = given.get("reward_weights") or [1.0] * len(names)
    if any("/" in str(name) for name in names):
        raise NotCarriedError("a reward is a function, no model: package.module:function, which may ask one itself")
    if len(weights) != len(names):
        raise NotCarriedError(f"there are {len(names)} reward_funcs for {len(weights)} reward_weights")
    found = {
        "math_verify" if name in MATH else ":".join(str(name).rpartition(".")[::2]).lstrip(":"): weight
        for name, weight in zip(names, weights, strict=True)
    }
    return {"rollout.reward": {name: float(weight) for name, weight in found.items()}} if found else {}


def adapter(_: Any, given: Given) -> dict[str, Any]:
    """With TRL's own rank, alpha and dropout where they are not given (trl/trainer/model_config.py)."""
    if not given.get("use_peft"):
        return {}
    keys = {"rank": ("lora_r", 16), "alpha": ("lora_alpha", 32), "dropout": ("lora_dropout", 0.05)}
    found = {f"engine.lora.{key}": given.get(name, default) for key, (name, default) in keys.items()}
    return {**found, "engine.lora.rank": count(found["engine.lora.rank"])}


def folder(value: Any, given: Given) -> dict[str, Any]:
    path = Path(str(value))
    return {"run.dir": str(path.parent)} | ({} if given.get("run_name") else {"run.name": path.name})


def dtype(name: str) -> Rule:
    return lambda value, _: {"model.dtype": name} if value else {}


RULES: dict[str, Rule] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"), batch),
    "generation_batch_size": batch, PROCESSES: read_with_another,
    "max_steps": batches("run.steps"), "save_steps": batches("checkpoint.every_steps"),
    "eval_steps": batches("rollout.evaluate_every_steps"),
    "warmup_ratio": warmup(share), "warmup_steps": warmup(steps), "epsilon": clip, "epsilon_high": clip,
    **dict.fromkeys(
        (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap", "clip_max", "clip_min")), importance
    ),
    "bf16": dtype("bfloat16"), "fp16": dtype("float16"),
    "dtype": lambda value, _: same("model.dtype", value),
    "reward_funcs": rewards, "reward_weights": rewards,
    "output_dir": folder, "log_completions": read_with_another,
    **dict.fromkeys(("use_peft", "lora_r", "lora_alpha", "lora_dropout"), adapter),
}  # fmt: skip


def is_of(key: str) -> bool:
    """Whether the key of a config is one of TRL's."""
    return key in RULES or key in DEFAULTS or ("." not in key and any(meaning(key)))


def to_do(given: Given) -> list[str]:
    """Steps that are left to the user."""
    of_reward = "name a reward, such as rollout.reward=math_verify; until then the start is refused"
    return [
        f"counted with {given.get(PROCESSES, 1)} processes of TRL's: write num_processes: N into its file if there were others",
        "set data.chat_template: true where prompts are conversations, and data.answer_key to the answers' column",
        *([] if given.get("reward_funcs") else [of_reward]),
        *([PEFTS_OWN] if given.get("use_peft") and not given.get("lora_target_modules") else []),
    ]
