"""What values of TRL's GRPOConfig, ModelConfig and ScriptArguments mean (trl/trainer/grpo_config.py, July 2026). No torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megasync.tools.import_config.carried import (
    Given,
    NotCarriedError,
    Rule,
    choice,
    loggers,
    lora_targets,
    nothing,
    quotient,
    same,
    tokens,
)

DEFAULTS: dict[str, Any] = {  # that are not ours, or that rules read
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8, "max_completion_length": 512,
    "weight_decay": 0.0, "adam_beta2": 0.999, "lr_scheduler_type": "linear", "epsilon": 0.2, "seed": 42, "save_steps": 500,
    "gradient_checkpointing": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
    "vllm_importance_sampling_correction": True,
}  # fmt: skip
MODES = {"token_truncate": ("tis", "token"), "token_mask": ("mask", "token"), "sequence_truncate": ("tis", "sequence")}
MODES |= {"sequence_mask": ("mask", "sequence")}
MATH = ("accuracy_reward", "trl.rewards.accuracy_reward")
PROCESSES = "num_processes"  # not a key of TRL's, but of accelerate's launch


def generated(given: Given) -> int:
    """Completions of a batch that is generated at once."""
    once = tokens(given["per_device_train_batch_size"]) * tokens(given.get(PROCESSES, 1))
    steps = given.get("steps_per_generation") or given["gradient_accumulation_steps"]
    return tokens(given.get("generation_batch_size") or once * tokens(steps))


def batch(_: Any, given: Given) -> dict[str, Any]:
    """Prompts a batch, and optimizer steps on it."""
    once = tokens(given["per_device_train_batch_size"]) * tokens(given.get(PROCESSES, 1))
    prompts = quotient(generated(given), given["num_generations"], "completions of a batch / num_generations")
    steps = quotient(
        generated(given), once * tokens(given["gradient_accumulation_steps"]), "completions of a batch / of an optimizer step"
    )
    return {"data.batch_size": prompts, "algorithm.num_minibatches": steps}


def per_batch(given: Given) -> int:
    """Optimizer steps, which TRL counts as steps."""
    return int(batch(None, given)["algorithm.num_minibatches"]) * tokens(given.get("num_iterations") or 1)


def batches(key: str) -> Rule:
    """A number of optimizer steps as one of batches."""
    return lambda value, given: {key: math.ceil(tokens(value) / per_batch(given))} if value and value > 0 else {}


def steps(value: Any, given: Given) -> dict[str, Any]:
    return batches("run.steps")(value, given)


def warmup(value: Any, given: Given) -> dict[str, Any]:
    total = given.get("max_steps") or -1
    if value and total <= 0:
        raise NotCarriedError("a share of all steps: set engine.optimizer.warmup_steps once run.steps is known")
    return {"engine.optimizer.warmup_steps": math.ceil(value * total)} if value else {}


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
    """Functions by dotted path are imported from there; a start says of those written for TRL how they become ours."""
    names = given.get("reward_funcs") or []
    names = [names] if isinstance(names, str) else list(names)
    weights = given.get("reward_weights") or [1.0] * len(names)
    if any("/" in str(name) for name in names):
        raise NotCarriedError("a reward is a function, no model: package.module:function, which may ask one itself")
    found = {
        "math_verify" if name in MATH else ":".join(str(name).rpartition(".")[::2]).lstrip(":"): weight
        for name, weight in zip(names, weights, strict=True)
    }
    return {"rollout.reward": {name: float(weight) for name, weight in found.items()}} if found else {}


def scaled(value: Any, _: Given) -> dict[str, Any]:
    if str(value).lower() == "batch":
        raise NotCarriedError("advantages are divided by the deviation of their group, or not at all")
    return {"algorithm.normalize_advantage_by_std": str(value).lower() in ("true", "group")}


def folder(value: Any, given: Given) -> dict[str, Any]:
    path = Path(str(value))
    return {"run.dir": str(path.parent)} | ({} if given.get("run_name") else {"run.name": path.name})


def if_set(key: str, ours: Any) -> Rule:
    return lambda value, _: {key: ours} if value else {}


def optimizer(value: Any, _: Given) -> dict[str, Any]:
    if not str(value).startswith("adamw"):
        raise NotCarriedError("the optimizer is AdamW")
    return {}


def if_lora(key: str, kind: type) -> Rule:
    return lambda value, given: {key: kind(value)} if given.get("use_peft") else {}


RULES: dict[str, Rule] = {
    "learning_rate": same("engine.optimizer.learning_rate"), "weight_decay": same("engine.optimizer.weight_decay"),
    "warmup_steps": same("engine.optimizer.warmup_steps"), "seed": same("run.seed"),
    "temperature": same("rollout.temperature"), "top_p": same("rollout.top_p"),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"), batch),
    "generation_batch_size": batch, PROCESSES: nothing,
    "max_steps": steps, "save_steps": batches("checkpoint.every_steps"), "eval_steps": batches("rollout.evaluate_every_steps"),
    "warmup_ratio": warmup, "epsilon": clip, "epsilon_high": clip, "scale_rewards": scaled,
    "loss_type": choice("algorithm.loss_aggregation", grpo="sequence_mean", dapo="token_mean", dr_grpo="constant_length"),
    **dict.fromkeys(
        (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap", "clip_max", "clip_min")), importance
    ),
    "mask_truncated_completions": if_set("algorithm.truncated", "mask"),
    "bf16": if_set("model.dtype", "bfloat16"), "fp16": if_set("model.dtype", "float16"),
    **dict.fromkeys(
        ("torch_dtype", "dtype"),
        choice("model.dtype", bfloat16="bfloat16", float16="float16", float32="float32", auto=None, none=None)
    ),
    "top_k": lambda value, _: {"rollout.top_k": max(0, value or 0)},
    "min_p": lambda value, _: {"rollout.min_p": value or 0.0},
    "lr_scheduler_type": choice(
        "engine.optimizer.decay", constant="constant", constant_with_warmup="constant", linear="linear", cosine="cosine"
    ),
    "optim": optimizer, "report_to": loggers,
    "gradient_checkpointing": choice("engine.recompute", true="full", false="none"),
    "reward_funcs": rewards, "reward_weights": rewards,
    "vllm_mode": choice("rollout.placement", colocate="colocated", server="separate"),
    "output_dir": folder, "use_peft": nothing, "lora_r": if_lora("engine.lora.rank", int),
    "lora_alpha": if_lora("engine.lora.alpha", float), "lora_dropout": if_lora("engine.lora.dropout", float),
    "lora_target_modules": lambda value, given: lora_targets(value, given) if given.get("use_peft") else {},
    "cast_lm_head_to_fp32": if_set("engine.head_dtype", "float32"),
    "log_completions": nothing,
}  # fmt: skip


def to_do(given: Given, keys: Given) -> list[str]:
    """What no key says."""
    lines = [
        f"counted with {given.get(PROCESSES, 1)} processes of TRL's: write num_processes: N into its file where there were others"
    ]
    lines += ["set data.chat_template: true where prompts are conversations, and data.answer_key to the answers' column"]
    if not given.get("reward_funcs"):
        lines.append("name a reward, such as rollout.reward=math_verify; until then the start is refused")
    return lines + ([] if "run.steps" in keys else ["set run.steps = epochs x examples / data.batch_size"])
