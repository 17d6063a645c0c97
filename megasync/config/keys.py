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
    "algorithm.dual_clip": "clip_ratio_c delta eps_clip_c",
    "algorithm.filter_groups": "dynamic_sampling dynamic_sampling_filter_path",
    "algorithm.importance_cap": "rollout_is_threshold tis_clip tis_imp_ratio_cap vllm_importance_sampling_cap",
    "algorithm.importance_correction": "rollout_is use_tis vllm_importance_sampling_correction",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef use_kl_loss",
    "algorithm.load_balancing": "moe_aux_loss_coeff router_aux_loss_coef",
    "algorithm.loss_aggregation": "calculate_per_token_loss loss_agg_mode loss_type",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.normalize_advantage_by_std": "grpo_std_normalization norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.num_minibatches": "num_iterations num_steps_per_rollout ppo_epochs ppo_mini_batch_size",
    "algorithm.overlong_buffer": "overlong_buffer_len",
    "algorithm.ratio_level": "importance_sampling_level",
    "algorithm.router_replay": "use_rollout_routing_replay use_routing_replay",
    "algorithm.truncated": "mask_truncated_completions overlong_filtering",
    "checkpoint.every_steps": "save_freq save_interval save_steps",
    "checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint resume_mode",
    "data.answer_key": "ground_truth label_key",
    "data.batch_size": "batch bs generation_batch_size rollout_batch_size train_batch_size",
    "data.chat_template": "apply_chat_template",
    "data.chat_template_arguments": "apply_chat_template_kwargs chat_template_kwargs",
    "data.eval": "eval_dataset eval_prompt_data val_files",
    "data.prompt_key": "input_key",
    "data.shuffle": "rollout_shuffle shuffle_dataset",
    "data.too_long": "filter_overlong_prompts truncation",
    "data.train": "dataset dataset_name prompt_data train_dataset train_files",
    "engine.logits_chunk_tokens": "log_probs_chunk_size",
    "engine.lora.adapter_path": "lora_adapter_path",
    "engine.lora.alpha": "lora_alpha",
    "engine.lora.rank": "lora_r lora_rank",
    "engine.lora.targets": "lora_target_modules target_modules",
    "engine.optimizer.beta1": "adam_beta1",
    "engine.optimizer.beta2": "adam_beta2",
    "engine.optimizer.clip_grad_norm": "clip_grad grad_clip max_grad_norm",
    "engine.optimizer.decay": "lr_decay_style lr_scheduler_type",
    "engine.optimizer.decay_steps": "lr_decay_iters",
    "engine.optimizer.learning_rate": "lr",
    "engine.optimizer.min_learning_rate": "min_lr",
    "engine.optimizer.offload": "optimizer_cpu_offload optimizer_offload",
    "engine.optimizer.warmup_steps": "lr_warmup_iters lr_warmup_steps",
    "engine.parallel.context": "context_parallel_size cp",
    "engine.parallel.expert": "ep expert_model_parallel_size",
    "engine.parallel.pipeline": "pipeline_model_parallel_size pp",
    "engine.parallel.sequence": "sequence_parallel sp",
    "engine.parallel.tensor": "tensor_model_parallel_size tp",
    "engine.parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size vpp",
    "engine.recompute": "enable_gradient_checkpointing gradient_checkpointing recompute_granularity",
    "engine.tokens_per_microbatch": "max_tokens_per_gpu micro_batch_size "
    "per_device_train_batch_size ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu",
    "engine.wrap": "fsdp strategy use_distributed_optimizer use_megatron_fsdp",
    "model.dtype": "bf16 fp16 precision torch_dtype",
    "model.path": "hf_checkpoint model.name model_name model_name_or_path",
    "rollout.enforce_eager": "disable_cuda_graph",
    "rollout.evaluate_at_start": "eval_on_start skip_eval_before_train val_before_train",
    "rollout.evaluate_every_steps": "eval_interval eval_steps test_freq",
    "rollout.gpu_memory_utilization": "sglang_mem_fraction_static vllm_gpu_memory_utilization",
    "rollout.group_size": "n n_samples_per_prompt num_generations num_samples",
    "rollout.max_model_len": "rollout_max_context_len vllm_max_model_length",
    "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens rollout_max_response_len",
    "rollout.max_staleness": "staleness_threshold",
    "rollout.placement": "colocate vllm_mode",
    "rollout.replicas": "num_replicas",
    "rollout.reward": "custom_reward_function custom_rm_path reward_function reward_funcs reward_weights rm_type",
    "rollout.stop": "rollout_stop stop_strings",
    "rollout.temperature": "rollout_temperature temp",
    "rollout.tensor_parallel": "rollout.tensor_model_parallel_size rollout.tp "
    "rollout_num_gpus_per_engine vllm_tensor_parallel_size",
    "rollout.top_k": "rollout_top_k",
    "rollout.top_p": "rollout_top_p",
    "run.dir": "default_local_dir output_dir save",
    "run.loggers": "logger report_to tensorboard trackio use_wandb wandb",
    "run.log_samples": "log_completions log_val_generations num_completions_to_print",
    "run.name": "exp_name experiment_name run_name wandb_group",
    "run.seed": "data_seed rollout_seed",
    "run.steps": "max_steps num_rollout num_steps total_training_steps",
}
WITHOUT_KEY = {  # what has no key of ours: their names, and what to do
    "actor_num_gpus_per_node actor_num_nodes n_gpus_per_node nnodes num_gpus num_processes world_size": (
        "the launcher counts ranks: megasync train --nproc N, megasync submit --num-ranks N"
    ),
    "cliprange_value critic lam value_model": "there are no critics: advantages are those of a group of samples",
    "deepspeed zero": "weights and optimizer are sharded by engine.wrap=megatron_fsdp",
    "entropy_coef entropy_coeff": "the loss has no entropy term; a higher algorithm.clip_high keeps entropy up",
    "epochs num_epoch num_train_epochs total_epochs": "count steps: run.steps = epochs x examples / data.batch_size",
    "global_batch_size gradient_accumulation_steps": (
        "a step's data.batch_size x rollout.group_size samples are packed into micro-batches of engine.tokens_per_microbatch; "
        "algorithm.num_minibatches optimizer steps are taken on them"
    ),
    "max_prompt_len max_prompt_length rollout_max_prompt_len": (
        "a prompt may have rollout.max_model_len less rollout.max_new_tokens; data.too_long says what happens to longer ones"
    ),
    "max_length max_seq_len max_seq_length": "write rollout.max_model_len, a prompt with its response",
    "use_vllm": "rollouts are always vLLM's",
}
SHORT = 3  # letters of a word that is near to some word of any section, as `foo` to `floor`
ALIASES = {name: key for key, names in OTHERS_NAMES.items() for name in names.split()}
ADVICE = {name: text for names, text in WITHOUT_KEY.items() for name in names.split()}
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


def item_of(field: FieldInfo) -> type:
    """What a list should hold: int or str."""
    kinds: list[Any] = [field.annotation]
    while kinds:
        kind = kinds.pop()
        if kind is int:
            return int
        kinds += [] if get_origin(kind) is Literal else get_args(kind)
    return str


def nearest_key(keys: Iterable[str], unknown: str) -> str:
    """The key that was probably meant; empty when none is near.

    In this order: a key with the same last part, another project's name for a key, a sibling, one that is near in its last part.
    """
    above, _, name = unknown.rpartition(".")
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(keys))}
    siblings = {key.rpartition(".")[2]: key for key in below(keys, above)}
    if name in ADVICE and name not in by_last:
        return ""
    parts = unknown.split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]  # actor_rollout_ref.rollout.n, rollout.n, n
    if name in by_last and not any(ending in ALIASES for ending in endings[:-1] or endings):
        return nearest_name(unknown, [key for key in keys if key.endswith(f".{name}")]) or by_last[name]
    if alias := next((ALIASES[ending] for ending in endings if ending in ALIASES), ""):
        return alias if alias in keys else ""
    if near := nearest_name(name, siblings):
        return siblings[near]
    return by_last.get(nearest_name(name, by_last), "") if len(name) > SHORT else ""
