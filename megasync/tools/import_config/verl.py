"""Rules for values of verl's PPO trainer (verl/trainer/config/ppo_trainer.yaml, January 2026). No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasync.tools.import_config.carried import Given, NotCarriedError, Rule, count, quotient, read_with_another, same

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
KL_KINDS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
ADVANTAGES = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gdpo")
OVERLONG, CORRECTION = "reward_model.reward_kwargs.overlong_buffer_cfg.", "algorithm.rollout_correction."
READ_WITH_ANOTHER = (  # rules of other keys read these
    "data.val_max_samples", *(f"{ROLLOUT}val_kwargs.{name}" for name in ("do_sample", "n", "temperature", "top_p", "top_k")),
    f"{ACTOR}use_dynamic_bsz", f"{ACTOR}optim.total_training_steps", f"{ACTOR}megatron.use_distributed_optimizer",
    f"{ACTOR}fsdp_config.strategy", f"{ROLLOUT}response_length", f"{ROLLOUT}prompt_length", "algorithm.norm_adv_by_std_in_grpo",
    f"{CORRECTION}rollout_is_threshold", f"{OVERLONG}len", f"{OVERLONG}penalty_factor", "trainer.nnodes",
)  # fmt: skip
SET = "data.eval.val."  # the evaluation set that val_files becomes
DEFAULTS: dict[str, Any] = {  # verl's defaults that differ from megasync's, or that rules read
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512, "data.prompt_key": "prompt",
    "data.truncation": "error",
    f"{MODEL}enable_gradient_checkpointing": True, f"{MODEL}lora_alpha": 16,
    f"{ACTOR}strategy": "fsdp", f"{ACTOR}ppo_mini_batch_size": 256, f"{ACTOR}clip_ratio": 0.2, f"{ACTOR}clip_ratio_c": 3.0,
    f"{ACTOR}optim.weight_decay": 0.01, f"{ACTOR}optim.betas": [0.9, 0.999],
    f"{ROLLOUT}n": 1, f"{ROLLOUT}gpu_memory_utilization": 0.5, f"{ROLLOUT}tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae", f"{CORRECTION}rollout_is": None, "actor_rollout_ref.hybrid_engine": True,
    "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
}  # fmt: skip


def one_file(value: Any, _: Given) -> dict[str, Any]:
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) != 1:
        raise NotCarriedError("data.train is one file or folder: put the files into a folder, and write data.train=FOLDER")
    return {"data.train": files[0], "data.answer_key": "reward_model.ground_truth", "data.chat_template": True}


def held_out(value: Any, given: Given) -> dict[str, Any]:
    """One evaluation set; verl evaluates with one greedy sample per prompt unless do_sample is set."""
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) != 1:
        raise NotCarriedError("write a set for each: data.eval: {NAME: {path: FILE}, ...}")
    sampling: dict[str, Any] = {}
    if given.get(f"{ROLLOUT}val_kwargs.do_sample"):
        read = {name: given.get(f"{ROLLOUT}val_kwargs.{name}") for name in ("n", "temperature", "top_p", "top_k")}
        sampling = {f"{SET}samples": read["n"], f"{SET}temperature": read["temperature"], f"{SET}top_p": read["top_p"]}
        sampling |= {f"{SET}top_k": max(0, read["top_k"] or 0)}
    limit = given.get("data.val_max_samples") or -1
    sampling |= {f"{SET}limit": limit} if limit > 0 else {}
    return {f"{SET}path": files[0], **{key: number for key, number in sampling.items() if number is not None}}


def too_long(_: Any, given: Given) -> dict[str, Any]:
    if given.get("data.filter_overlong_prompts"):
        return {"data.too_long": "drop"}
    if given["data.truncation"] != "error":
        raise NotCarriedError("prompts are never truncated; data.too_long=drop drops long ones")
    return {"data.too_long": "refuse"}


def longest(value: Any, given: Given) -> dict[str, Any]:
    return {"rollout.max_model_len": count(value) + count(given["data.max_response_length"])}


def microbatch(value: Any, given: Given) -> dict[str, Any]:
    """verl's number of samples per GPU, at full length, as tokens; unless use_dynamic_bsz counts tokens."""
    if given.get(f"{ACTOR}use_dynamic_bsz") or value is None:
        return {}
    return {
        "engine.tokens_per_microbatch": count(value) * longest(given["data.max_prompt_length"], given)["rollout.max_model_len"]
    }


def token_budget(value: Any, given: Given) -> dict[str, Any]:
    """verl's limit is per GPU, megasync's is over all context ranks together."""
    is_megatron = given[f"{ACTOR}strategy"] == "megatron"
    context = given.get(f"{ACTOR}{'megatron.context_parallel_size' if is_megatron else 'ulysses_sequence_parallel_size'}") or 1
    return {"engine.tokens_per_microbatch": count(value) * context} if given.get(f"{ACTOR}use_dynamic_bsz") else {}


def minibatches(value: Any, given: Given) -> dict[str, Any]:
    return {
        "algorithm.num_minibatches": quotient(given["data.train_batch_size"], value, "train_batch_size / ppo_mini_batch_size")
    }


def kl(_: Any, given: Given) -> dict[str, Any]:
    """verl's coefficient has no effect without use_kl_loss."""
    return {
        "algorithm.kl_coefficient": float(given.get(f"{ACTOR}kl_loss_coef", 0.001)) if given.get(f"{ACTOR}use_kl_loss") else 0.0
    }


def kl_kind(value: Any, given: Given) -> dict[str, Any]:
    if not given.get(f"{ACTOR}use_kl_loss"):
        return {}
    if value not in KL_KINDS:
        raise NotCarriedError("the KL in the loss is an estimate k2 or k3: mse or low_var_kl of verl")
    return {"algorithm.kl_estimator": KL_KINDS[value]}


def clip(_: Any, given: Given) -> dict[str, Any]:
    both = given[f"{ACTOR}clip_ratio"]
    return {
        "algorithm.clip_low": given.get(f"{ACTOR}clip_ratio_low", both),
        "algorithm.clip_high": given.get(f"{ACTOR}clip_ratio_high", both),
    }


def estimator(value: Any, given: Given) -> dict[str, Any]:
    if value in ADVANTAGES:
        return {"algorithm.name": "grpo", "algorithm.advantage": value}
    if value not in ("grpo", "rloo"):
        raise NotCarriedError(f"of advantages there are grpo, rloo and {', '.join(ADVANTAGES)}")
    if value == "rloo":
        return {"algorithm.name": "grpo", "algorithm.baseline": "leave_one_out", "algorithm.normalize_advantage_by_std": False}
    return {
        "algorithm.name": "grpo",
        "algorithm.normalize_advantage_by_std": given.get("algorithm.norm_adv_by_std_in_grpo", True),
    }


def loss(value: Any, given: Given) -> dict[str, Any]:
    """gspo is a mean over responses: it reads no loss_agg_mode up to verl 0.8, and where one is given from 0.9 on."""
    is_mean = value == "gspo" and not given.get(f"{ACTOR}loss_agg_mode")
    return same("algorithm.ratio_level", value) | ({"algorithm.loss_aggregation": "sequence_mean"} if is_mean else {})


def dual_clip(value: Any, given: Given) -> dict[str, Any]:
    """gspo has none (verl/trainer/ppo/core_algos.py:compute_policy_loss_gspo)."""
    return {} if given.get(f"{ACTOR}policy_loss.loss_mode") == "gspo" else same("algorithm.dual_clip", value)


def importance(value: Any, given: Given) -> dict[str, Any]:
    if value in (None, "null", False):
        return {"algorithm.importance_correction": "none"}
    cap = given.get(f"{CORRECTION}rollout_is_threshold", 2.0)
    return {"algorithm.importance_correction": "tis", "algorithm.importance_level": value, "algorithm.importance_cap": cap}


def warmup(_: Any, given: Given) -> dict[str, Any]:
    """verl's scheduler steps once per batch, megasync's once per optimizer step."""
    steps, share = given.get(f"{ACTOR}optim.lr_warmup_steps") or -1, given.get(f"{ACTOR}optim.lr_warmup_steps_ratio") or 0.0
    total = given.get("trainer.total_training_steps")
    if steps <= 0 and share and not total:
        raise NotCarriedError("a share of all steps: set engine.optimizer.warmup_steps once run.steps is known")
    batches = steps if steps > 0 else int(share * (total or 0))
    parts = minibatches(given[f"{ACTOR}ppo_mini_batch_size"], given)["algorithm.num_minibatches"]
    return {"engine.optimizer.warmup_steps": batches * parts * (given.get(f"{ACTOR}ppo_epochs") or 1)} if batches else {}


def reward(_: Any, given: Given) -> dict[str, Any]:
    """The function's module and name; a start refuses it, and explains how to adapt it."""
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name", "compute_score")
    return {"rollout.reward": f"{Path(str(path)).stem}:{name}"} if path else {}


def replicas(_: Any, given: Given) -> dict[str, Any]:
    gpus = count(given["trainer.nnodes"]) * count(given["trainer.n_gpus_per_node"])
    return {
        "rollout.replicas": quotient(gpus, given[f"{ROLLOUT}tensor_model_parallel_size"], "GPUs / tensor_model_parallel_size")
    }


def overlong(value: Any, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    if given.get(f"{OVERLONG}penalty_factor", 1.0) != 1.0:
        raise NotCarriedError("the penalty goes up to 1")
    return {"algorithm.truncated": "penalise", "algorithm.overlong_buffer": given.get(f"{OVERLONG}len", 0)}


def folder(value: Any, given: Given) -> dict[str, Any]:
    path = Path(str(value))
    return {"run.dir": str(path.parent if path.name == given.get("trainer.experiment_name") else path)}


def lowest_rate(value: Any, given: Given) -> dict[str, Any]:
    return {"engine.optimizer.min_learning_rate": value * given.get(f"{ACTOR}optim.lr", 1e-6)} if value else {}


def ulysses(value: Any, _: Given) -> dict[str, Any]:
    return {"engine.parallel.context": value, "engine.parallel.context_attention": "ulysses"} if (value or 1) > 1 else {}


def engine_of_rollouts(value: Any, _: Given) -> dict[str, Any]:
    if value != "vllm":
        raise NotCarriedError("rollouts are always vLLM's")
    return {}


def of_megatron(axis: str) -> Rule:
    """A rule for a size that counts only with verl's strategy megatron; sequence parallelism also needs tensor parallelism."""

    def rule(value: Any, given: Given) -> dict[str, Any]:
        is_split = axis != "sequence" or (given.get(f"{ACTOR}megatron.tensor_model_parallel_size") or 1) > 1
        return {f"engine.parallel.{axis}": value} if given[f"{ACTOR}strategy"] == "megatron" and value and is_split else {}

    return rule


RULES: dict[str, Rule] = {
    "data.train_files": one_file, "data.val_files": held_out,
    "data.max_prompt_length": longest, "data.truncation": too_long, "data.filter_overlong_prompts": too_long,
    f"{ACTOR}ppo_mini_batch_size": minibatches, f"{ACTOR}ppo_micro_batch_size_per_gpu": microbatch,
    f"{ACTOR}ppo_max_token_len_per_gpu": token_budget,
    f"{ACTOR}ulysses_sequence_parallel_size": ulysses,
    f"{ACTOR}use_kl_loss": kl, f"{ACTOR}kl_loss_coef": kl, f"{ACTOR}kl_loss_type": kl_kind,
    f"{ACTOR}clip_ratio": clip, f"{ACTOR}clip_ratio_low": clip, f"{ACTOR}clip_ratio_high": clip,
    f"{ACTOR}policy_loss.loss_mode": loss, f"{ACTOR}clip_ratio_c": dual_clip,
    f"{ACTOR}optim.betas": lambda value, _: {"engine.optimizer.beta1": value[0], "engine.optimizer.beta2": value[1]},
    f"{ACTOR}optim.lr_warmup_steps": warmup, f"{ACTOR}optim.lr_warmup_steps_ratio": warmup,
    f"{ACTOR}optim.min_lr_ratio": lowest_rate,
    **{f"{ACTOR}megatron.{name}_model_parallel_size": of_megatron(name) for name in ("tensor", "pipeline", "expert")},
    f"{ACTOR}megatron.context_parallel_size": of_megatron("context"),
    f"{ACTOR}megatron.virtual_pipeline_model_parallel_size": of_megatron("virtual_pipeline"),
    f"{ACTOR}megatron.sequence_parallel": of_megatron("sequence"),
    f"{ROLLOUT}name": engine_of_rollouts, f"{ROLLOUT}dtype": lambda value, _: same("model.dtype", value),
    "algorithm.adv_estimator": estimator, f"{CORRECTION}rollout_is": importance,
    "custom_reward_function.path": reward, "custom_reward_function.name": reward, f"{OVERLONG}enable": overlong,
    "trainer.n_gpus_per_node": replicas, "trainer.default_local_dir": folder,
    **dict.fromkeys(READ_WITH_ANOTHER, read_with_another),
}  # fmt: skip


SECTIONS = ("actor_rollout_ref.", "trainer.", "custom_reward_function.", "critic.", "reward_model.", "global_profiler.")


def is_of(key: str) -> bool:
    """Whether the key of a config is one of verl's."""
    return key in RULES or key in DEFAULTS or key.startswith(SECTIONS)


def to_do(given: Given) -> list[str]:
    """Steps that are left to the user."""
    lines = [f"start it with --nproc {given['trainer.n_gpus_per_node']} on each of the {given['trainer.nnodes']} nodes"]
    ratio, is_alone = given[f"{ACTOR}clip_ratio"], not any(f"{ACTOR}clip_ratio_{end}" in given for end in ("low", "high"))
    if is_alone and ratio != DEFAULTS[f"{ACTOR}clip_ratio"]:
        lines.append(
            f"verl clips by clip_ratio_low and clip_ratio_high, 0.2 unless they are given; clip_low and clip_high are {ratio}"
        )
    if not given.get("custom_reward_function.path"):
        lines.append(
            "verl chooses a reward by data_source: name one, such as rollout.reward=math_verify; until then the start is refused"
        )
    return lines
