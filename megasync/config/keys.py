"""What the pydantic models say of a key: full name, choices, bounds; and which key is nearest to a misspelt one. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasync.config.errors import nearest_name

OTHERS_NAMES = {  # our key: what verl, TRL, slime and common speech have for it
    "algorithm.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
    "algorithm.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon epsilon_low",
    "algorithm.dual_clip": "clip_ratio_c eps_clip_c",
    "algorithm.importance_cap": "rollout_is_threshold tis_clip tis_imp_ratio_cap vllm_importance_sampling_cap",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef use_kl_loss",
    "algorithm.load_balancing": "moe_aux_loss_coeff router_aux_loss_coef",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.normalize_advantage_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.num_minibatches": "num_iterations num_steps_per_rollout ppo_epochs ppo_mini_batch_size",
    "algorithm.router_replay": "use_rollout_routing_replay",
    "algorithm.truncated": "mask_truncated_completions overlong_filtering",
    "checkpoint.every_steps": "save_freq save_interval save_steps",
    "checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit",
    "data.batch_size": "batch bs rollout_batch_size train_batch_size",
    "data.eval": "val_files eval_prompt_data",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "data.train": "dataset_name prompt_data train_files",
    "engine.optimizer.clip_grad_norm": "clip_grad grad_clip max_grad_norm",
    "engine.optimizer.decay": "lr_decay_style lr_scheduler_type",
    "engine.optimizer.learning_rate": "lr",
    "engine.optimizer.warmup_steps": "lr_warmup_iters lr_warmup_steps",
    "engine.lora.rank": "lora_rank",
    "engine.lora.targets": "target_modules",
    "engine.parallel.context": "context_parallel_size cp",
    "engine.parallel.expert": "ep expert_model_parallel_size",
    "engine.parallel.pipeline": "pipeline_model_parallel_size pp",
    "engine.parallel.sequence": "sequence_parallel sp",
    "engine.parallel.tensor": "tensor_model_parallel_size tp",
    "engine.parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size vpp",
    "engine.recompute": "enable_gradient_checkpointing gradient_checkpointing recompute_granularity",
    "engine.tokens_per_microbatch": "max_tokens_per_gpu micro_batch_size ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu",
    "model.path": "hf_checkpoint model.name model_name_or_path",
    "rollout.evaluate_every_steps": "eval_interval eval_steps test_freq",
    "rollout.group_size": "n n_samples_per_prompt num_generations",
    "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens rollout_max_response_len",
    "rollout.placement": "colocate vllm_mode",
    "rollout.replicas": "num_replicas",
    "rollout.reward": "reward_funcs rm_type",
    "rollout.temperature": "rollout_temperature temp",
    "rollout.tensor_parallel": "rollout.tensor_model_parallel_size rollout.tp rollout_num_gpus_per_engine",
    "run.dir": "default_local_dir output_dir",
    "run.name": "experiment_name run_name",
    "run.steps": "max_steps num_rollout num_steps total_training_steps",
}
ALIASES = {name: key for key, names in OTHERS_NAMES.items() for name in names.split()}
ANY_NAME = "NAME"  # stands for a name that the config gives, in keys below a mapping of such names
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # attributes of annotated_types' constraints


def all_keys(root: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key by its full name, in order; a section before what is in it."""
    keys: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        keys[prefix + name] = field
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                full = prefix + name if part is field.annotation else f"{prefix}{name}.{ANY_NAME}"
                keys |= {full: keys.get(full) or FieldInfo.from_annotation(part), **all_keys(part, f"{full}.")}
    return keys


def with_any_name(keys: Iterable[str], path: Sequence[str]) -> list[str]:
    """The path with ANY_NAME in the place of a name that the config gives."""
    generic: list[str] = []
    for part in path:
        named = ".".join([*generic, ANY_NAME])
        generic.append(ANY_NAME if any(key.startswith(f"{named}.") for key in keys) else part)
    return generic


def below(keys: Iterable[str], section: str) -> list[str]:
    """Full names of the keys right below a section, or at the top for an empty name."""
    return [key for key in keys if key.rpartition(".")[0] == section]


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def choices(field: FieldInfo) -> list[str]:
    """The texts that a value may be; empty where it is free."""
    return list(dict.fromkeys(part for part in _parts(field.annotation) if isinstance(part, str)))


def bounds(field: FieldInfo) -> str:
    """The range of a number in words, such as `at least 0 and below 1`."""
    constraints = list(field.metadata)
    for part in _parts(field.annotation):
        if get_origin(part) is Annotated:
            constraints += [each for one in part.__metadata__ for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
    found = [(name, getattr(one, name)) for one in constraints for name in BOUNDS if hasattr(one, name)]
    if kind_of(field) is int:
        found = [("ge", number + 1) if name == "gt" else (name, number) for name, number in found]
    return " and ".join(f"{BOUNDS[name]} {number}" for name, number in found)


def kind_of(field: FieldInfo) -> type:
    """What YAML should hold: bool, int, float, str, dict or list; of an optional value what it is when it is there."""
    kind: Any = field.annotation
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    return {Literal: str, tuple: list}.get(origin) or (origin if origin in (bool, int, float, str) else dict)


def nearest_key(keys: Iterable[str], unknown: str) -> str:
    """The key that was probably meant; empty when none is near.

    In this order: a key with the same last part, another project's name for a key, a sibling, one that is near in its last part.
    """
    above, _, name = unknown.rpartition(".")
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(keys))}
    siblings = {key.rpartition(".")[2]: key for key in below(keys, above)}
    if name in by_last and unknown not in ALIASES:
        return nearest_name(unknown, [key for key in keys if key.endswith(f".{name}")]) or by_last[name]
    if alias := ALIASES.get(unknown) or ALIASES.get(name):
        return alias if alias in keys else ""
    if near := nearest_name(name, siblings):
        return siblings[near]
    return by_last.get(nearest_name(name, by_last), "")
