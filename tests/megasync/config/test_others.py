"""The most common keys of verl, TRL and vLLM: each maps to the key with the same meaning, or to advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.algorithm import PRESETS, AlgorithmConfig
from megasync.config import others
from megasync.config.keys import nearest_key
from megasync.config.load import load_config
from megasync.config.schema import Config
from tests.support.config_files import KEYS, refused, write

# keys that verl's examples/ and tests/ set most often; a text with a space, or without a dot, is a part of the advice
VERL = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "data.batch_size",
    "data.max_prompt_length": "rollout.max_model_len - rollout.max_new_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.filter_overlong_prompts": "data.too_long",
    "data.truncation": "data.too_long",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "engine.recompute",
    "actor_rollout_ref.model.use_remove_padding": "always packed without padding",
    "actor_rollout_ref.actor.optim.lr": "engine.optimizer.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.num_minibatches",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "engine.tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "engine.tokens_per_microbatch",
    "actor_rollout_ref.actor.use_dynamic_bsz": "always packed without padding",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coefficient",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.num_passes",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "placement=colocated, rollout.offload_trainer",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "engine.optimizer.offload",
    "actor_rollout_ref.actor.strategy": "engine.wrap",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.name": "vLLM",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "micro-batches of engine.tokens_per_microbatch",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.engine_arguments.max_num_batched_tokens",
    "actor_rollout_ref.rollout.val_kwargs.n": "data.eval.NAME.samples",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference model",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_advantage_by_std",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward takes",
    "custom_reward_function.path": "rollout.reward",
    "custom_reward_function.name": "rollout.reward",
    "trainer.total_epochs": "run.steps =",
    "trainer.total_training_steps": "run.steps",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.test_freq": "rollout.evaluate_every_steps",
    "trainer.val_before_train": "rollout.evaluate_at_start",
    "trainer.n_gpus_per_node": "--nproc N",
    "trainer.nnodes": "--num-ranks N",
    "trainer.project_name": "WANDB_PROJECT in",
    "trainer.experiment_name": "run.name",
    "trainer.logger": "run.loggers",
    "trainer.default_local_dir": "run.dir",
    "trainer.critic_warmup": "no critic",
}
TRL = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "learning_rate": "engine.optimizer.learning_rate",
    "lr_scheduler_type": "engine.optimizer.decay",
    "warmup_ratio": "engine.optimizer.warmup_steps",
    "weight_decay": "engine.optimizer.weight_decay",
    "max_grad_norm": "engine.optimizer.clip_grad_norm",
    "adam_beta1": "engine.optimizer.beta1",
    "adam_beta2": "engine.optimizer.beta2",
    "adam_epsilon": "engine.optimizer.epsilon",
    "per_device_train_batch_size": "engine.tokens_per_microbatch",
    "gradient_accumulation_steps": "packed into micro-batches",
    "steps_per_generation": "data.batch_size",
    "generation_batch_size": "data.batch_size",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.num_passes",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_model_len -",
    "beta": "algorithm.kl_coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "loss_type": "algorithm.loss_aggregation",
    "importance_sampling_level": "algorithm.ratio_level",
    "scale_rewards": "algorithm.normalize_advantage_by_std",
    "mask_truncated_completions": "algorithm.truncated",
    "sync_ref_model": "initial model",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "repetition_penalty": "unmodified policy",
    "use_vllm": "vLLM",
    "vllm_mode": "rollout.placement",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "vllm_importance_sampling_cap": "algorithm.importance_cap",
    "reward_funcs": "rollout.reward",
    "reward_weights": "rollout.reward",
    "max_steps": "run.steps",
    "num_train_epochs": "run.steps =",
    "bf16": "model.dtype",
    "gradient_checkpointing": "engine.recompute",
    "logging_steps": "to run.loggers",
    "log_completions": "run.log_samples",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "rollout.evaluate_every_steps",
    "report_to": "run.loggers",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
    "shuffle_dataset": "data.shuffle",
    "chat_template_kwargs": "data.chat_template_arguments",
    "lora_r": "engine.lora.rank",
    "lora_target_modules": "engine.lora.targets",
    "use_peft": "engine.lora.rank above 0",
}


VLLM = {  # of its speculative_config
    "rollout.speculation.model": "rollout.speculation.path",
    "rollout.speculation.num_speculative_tokens": "rollout.speculation.num_tokens",
    "rollout.speculative_config.method": "rollout.speculation.method",
    "rollout.speculative_config.model": "rollout.speculation.path",
    "rollout.speculative_config.prompt_lookup_max": "rollout.speculation.prompt_lookup_max",
}


MORE = {  # of OpenRLHF, NeMo RL, AReaL, prime-rl, SkyRL, ROLL, axolotl and LLaMA-Factory
    "pretrain": "model.path",
    "max_len": "rollout.max_model_len",
    "micro_train_batch_size": "engine.tokens_per_microbatch",
    "init_kl_coef": "algorithm.kl_coefficient",
    "actor_learning_rate": "engine.optimizer.learning_rate",
    "critic_learning_rate": "no critic",
    "lambd": "no critic",
    "generate_max_len": "rollout.max_new_tokens",
    "prompt_max_len": "rollout.max_model_len -",
    "num_episodes": "run.steps =",
    "max_epochs": "algorithm.num_passes is",
    "vllm_num_engines": "rollout.replicas",
    "colocate_all_models": "rollout.placement",
    "dynamic_filtering": "algorithm.filter_groups",
    "packing_samples": "always packed without padding",
    "remote_rm_url": "a reward is a function",
    "grpo.num_prompts_per_step": "data.batch_size",
    "grpo.num_generations_per_prompt": "rollout.group_size",
    "grpo.max_num_steps": "run.steps",
    "grpo.val_period": "rollout.evaluate_every_steps",
    "loss_fn.ratio_clip_max": "algorithm.clip_high",
    "loss_fn.reference_policy_kl_penalty": "algorithm.kl_coefficient",
    "policy.train_global_batch_size": "packed into micro-batches",
    "policy.max_total_sequence_length": "rollout.max_model_len",
    "policy.dtensor_cfg.tensor_parallel_size": "engine.parallel.tensor",
    "policy.generation.vllm_cfg.tensor_parallel_size": "rollout.tensor_parallel",
    "checkpointing.checkpoint_dir": "run.dir",
    "checkpointing.save_period": "checkpoint.every_steps",
    "cluster.num_nodes": "--nproc N",
    "gconfig.n_samples": "rollout.group_size",
    "gconfig.max_new_tokens": "rollout.max_new_tokens",
    "actor.kl_ctl": "algorithm.kl_coefficient",
    "actor.ppo_n_minibatches": "algorithm.num_minibatches",
    "actor.mb_spec.max_tokens_per_mb": "engine.tokens_per_microbatch",
    "rollout.max_head_offpolicyness": "rollout.max_staleness",
    "orchestrator.rollouts_per_example": "rollout.group_size",
    "orchestrator.seq_len": "rollout.max_model_len",
    "max_async_level": "rollout.max_staleness",
    "trainer.policy.model.path": "model.path",
    "generator.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "generator.sampling_params.max_generate_length": "rollout.max_new_tokens",
    "num_return_sequences_in_group": "rollout.group_size",
    "base_model": "model.path",
    "sequence_len": "rollout.max_model_len",
    "sample_packing": "always packed without padding",
    "finetuning_type": "engine.lora.rank above 0",
    "template": "put it there as chat_template.jinja",
    "rlhf_type": "algorithm.name is",
    "max_turns": "rollout.episode_max_turns",
    "rollout.max_turns": "rollout.episode_max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.episode_max_turns",
    "data.template": "data.chat_template",
    "resume_from": "checkpoint.resume",
}


@pytest.mark.parametrize("given", ["engine__wrap", "engine/wrap", "rollout__engine_arguments", "data:eval:NAME:path"])
def test_sections_with_other_separators(given: str) -> None:
    assert nearest_key(KEYS, given) == (given.replace("__", ".").replace("/", ".").replace(":", "."), "")


FAR = ["normalize_reward", "prompt_maximum", "kl_estimate_of_all", "critic_rate", "trainer.lambda_x", "engine.model"]


@pytest.mark.parametrize("name", FAR)
def test_no_key_of_another_section_is_guessed_where_the_names_are_far_apart(name: str) -> None:
    assert nearest_key(KEYS, name) == ("", "")


@pytest.mark.parametrize(("theirs", "right"), [*VERL.items(), *TRL.items(), *VLLM.items(), *MORE.items()])
def test_common_keys_of_other_projects(theirs: str, right: str) -> None:
    key, advice = nearest_key(KEYS, theirs)
    assert key == right if " " not in right and "." in right else not key and right in advice, (key, advice)


@pytest.mark.parametrize("key", others.SAME)
def test_every_key_of_the_table_is_a_key_of_ours(key: str) -> None:
    assert key in KEYS or key.rpartition(".")[0] == "rollout.engine_arguments"


def test_every_name_of_the_table_is_there_once() -> None:
    names = [name for names in [*others.SAME.values(), *others.INSTEAD] for name in names.split()]
    assert len(names) == len(set(names)) == len(others.KEYS) + len(others.ADVICE)
    assert {key for key, _ in others.VALUES} <= set(KEYS)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *(("gspo", "preset=gspo"), ("DAPO", "preset=dapo"), ("cispo", "preset=cispo"), ("remax", "advantage=remax")),
        *(("Dr.GRPO", "preset=dr_grpo"), ("dr-grpo", "preset=dr_grpo"), ("GSPO-token", "preset=gspo")),
        *(("REINFORCE++", "preset=reinforce_plus_plus"), ("reinforce++-baseline", "preset=reinforce_plus_plus_baseline")),
        *(("dpo", "how_a_step_works.md"), ("ppo", "no critic")),
    ],
)
def test_an_algorithm_of_another_project(tmp_path: Path, name: str, remedy: str) -> None:
    message = refused(write(tmp_path / "a.yaml", ""), f"algorithm.name={name}")
    assert "nearest" not in message and remedy in message


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_keys_that_it_names(tmp_path: Path, preset: str) -> None:
    config = load_config(write(tmp_path / "a.yaml", f"algorithm: {{preset: {preset}}}"))
    expected = AlgorithmConfig(preset=preset, **PRESETS[preset])
    assert config.algorithm == expected != AlgorithmConfig(preset=preset)


def test_given_keys_override_a_preset(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "algorithm: {clip_high: 0.3, kl_coefficient: 0.01}")
    path = write(tmp_path / "a.yaml", f"base: {base.name}\nalgorithm: {{preset: dapo}}")
    config = load_config(path, ["algorithm.preset=gspo", "algorithm.num_minibatches=2"])
    own = config.algorithm
    assert (own.clip_high, own.kl_coefficient, own.num_minibatches, own.clip_low) == (0.3, 0.01, 2, 3e-4)
    assert own.filter_groups is Config().algorithm.filter_groups
