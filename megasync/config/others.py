"""Keys of other projects: the key here with the same meaning, or advice if there is none. No torch in here.

A name matches the end of a path, and the longest match counts: `val_kwargs.n` before `n`. A name that ends with a dot is a
section whose keys must not match by their last part: `critic.optim.lr` is not engine.optimizer.learning_rate. Leaves out the
conversion of values (megasync/tools/import_config).

    key, advice = meaning("actor_rollout_ref.rollout.n")      # "rollout.group_size", ""
    key, advice = meaning("critic.optim.lr")                  # "", "there are no critics: ..."
"""

from __future__ import annotations

import re

from engine.algorithm import PRESETS

SAME = {  # key: its names in verl, TRL, slime, OpenRLHF, NeMo RL, AReaL, prime-rl, SkyRL, axolotl, and common abbreviations
    "algorithm.baseline": "use_leave_one_out_baseline rloo_baseline",
    "algorithm.clip_high": "ratio_clip_max clip_ratio_high eps_clip_high epsilon_high",
    "algorithm.clip_low": "eps_clip_low ratio_clip_min clip_ratio clip_ratio_low eps_clip epsilon epsilon_low",
    "algorithm.dual_clip": "ratio_clip_c clip_ratio_c delta eps_clip_c",
    "algorithm.entropy_coefficient": "entropy_coef entropy_coeff",
    "algorithm.filter_factor": "filter_groups.max_num_gen_batches",
    "algorithm.filter_groups": "dynamic_filtering dynamic_sampling dynamic_sampling_filter_path filter_groups.enable",
    "algorithm.importance_cap": "behav_imp_weight_cap rollout_is_threshold tis_clip tis_imp_ratio_cap "
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "algorithm.importance_correction": "enable_vllm_is_correction use_importance_sampling_correction rollout_is use_tis "
    "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "algorithm.importance_floor": "vllm_importance_sampling_clip_min",
    "algorithm.kl_coefficient": "init_kl_coef kl_ctl reference_policy_kl_penalty beta kl_coef kl_loss_coef use_kl_loss",
    "algorithm.kl_estimator": "kl_loss_type",
    "algorithm.load_balancing": "moe_aux_loss_coeff router_aux_loss_coef",
    "algorithm.loss_aggregation": "token_level_loss calculate_per_token_loss loss_agg_mode loss_type",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.normalize_advantage_by_std": "grpo_std_normalization norm_adv_by_std_in_grpo normalize_advantages scale_rewards",
    "algorithm.num_minibatches": "policy_mini_batch_size ppo_n_minibatches num_steps_per_rollout ppo_mini_batch_size",
    "algorithm.num_passes": "num_iterations ppo_epochs",
    "algorithm.overlong_buffer": "overlong_buffer_cfg.len overlong_buffer_len",
    "algorithm.ratio_level": "ratio_type importance_sampling_level loss_mode",
    "algorithm.router_replay": "enable_rollout_routing_replay router_replay.mode use_rollout_routing_replay use_routing_replay",
    "algorithm.sapo_temperature_negative": "sapo_temperature_neg tau_neg",
    "algorithm.sapo_temperature_positive": "sapo_temperature_pos tau_pos",
    "algorithm.truncated": "mask_truncated_completions overlong_buffer_cfg.enable overlong_filtering",
    "checkpoint.asynchronous": "async_save",
    "checkpoint.every_steps": "ckpt.interval save_period saver.freq_steps save_freq save_interval save_steps",
    "checkpoint.keep": "keep_top_k max_actor_ckpt_to_keep save_total_limit",
    "checkpoint.resume": "resume_from resume_from_checkpoint resume_mode",
    "data.answer_key": "ground_truth label_key",
    "data.batch_size": "num_prompts_per_step batch bs gen_batch_size generation_batch_size rollout_batch_size "
    "steps_per_generation train_batch_size",
    "data.chat_template": "data.template apply_chat_template",
    "data.chat_template_arguments": "apply_chat_template_kwargs chat_template_kwargs",
    "data.eval": "eval_dataset eval_prompt_data val_files",
    "data.eval.NAME.samples": "eval_n_samples_per_prompt n_samples_per_eval_prompt num_generations_eval val_kwargs.n",
    "data.eval.NAME.temperature": "eval_temperature val_kwargs.temperature",
    "data.eval.NAME.top_k": "eval_top_k val_kwargs.top_k",
    "data.eval.NAME.top_p": "eval_top_p val_kwargs.top_p",
    "data.eval.NAME.limit": "val_max_samples",
    "data.prompt_key": "input_key",
    "data.shuffle": "rollout_shuffle shuffle_dataset",
    "data.split": "dataset_train_split",
    "data.too_long": "filter_overlong_prompts truncation",
    "data.train": "data.path datasets train_dataset.path dataset dataset_name prompt_data train_dataset train_files",
    "engine.logits_chunk_tokens": "log_probs_chunk_size",
    "engine.lora.adapter_path": "lora_adapter_path",
    "engine.lora.alpha": "lora_alpha",
    "engine.lora.dropout": "lora_dropout",
    "engine.lora.rank": "lora_r lora_rank",
    "engine.lora.rslora": "use_rslora",
    "engine.lora.targets": "lora_target lora_target_linear lora_target_modules target_modules",
    "engine.head_dtype": "cast_lm_head_to_fp32",
    "engine.optimizer.beta1": "adam_beta1 betas",
    "engine.optimizer.beta2": "adam_beta2",
    "engine.optimizer.clip_grad_norm": "clip_grad grad_clip max_grad_norm",
    "engine.optimizer.decay": "lr_decay_style lr_scheduler_type warmup_style",
    "engine.optimizer.decay_steps": "lr_decay_iters lr_decay_steps",
    "engine.optimizer.epsilon": "adam_epsilon",
    "engine.optimizer.learning_rate": "actor_learning_rate learning_rate lr",
    "engine.optimizer.min_learning_rate": "min_lr min_lr_ratio",
    "engine.optimizer.name": "optim optimizer optimizer_impl optimizer_type",
    "engine.optimizer.offload": "adam_offload optimizer_cpu_offload optimizer_offload",
    "engine.optimizer.warmup_steps": "lr_warmup_ratio lr_warmup_iters lr_warmup_steps lr_warmup_steps_ratio warmup_ratio "
    "warmup_steps",
    "engine.optimizer.weight_decay": "weight_decay",
    "engine.overrides": "override_ddp_config",
    "engine.parallel.context": "context_parallel_size cp ulysses_sequence_parallel_size",
    "engine.parallel.expert": "ep expert_model_parallel_size",
    "engine.parallel.pipeline": "pipeline_model_parallel_size pp",
    "engine.parallel.sequence": "sequence_parallel sp",
    "engine.parallel.tensor": "dtensor_cfg.tensor_parallel_size tensor_model_parallel_size tp",
    "engine.parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size vpp",
    "engine.recompute": "enable_gradient_checkpointing gradient_checkpointing recompute_granularity",
    "engine.tokens_per_microbatch": "max_tokens_per_gpu max_tokens_per_mb micro_batch_size micro_rollout_batch_size "
    "micro_train_batch_size train_micro_batch_size per_device_train_batch_size ppo_max_token_len_per_gpu "
    "ppo_micro_batch_size_per_gpu",
    "engine.wrap": "fsdp strategy use_distributed_optimizer use_megatron_fsdp",
    "model.dtype": "bf16 fp16 precision torch_dtype",
    "model.path": "actor.path base_model policy.model.path pretrain actor_rollout_ref.model.path hf_checkpoint model.name "
    "model_name model_name_or_path",
    "rollout.engine_arguments": "engine_kwargs.vllm",
    "rollout.engine_arguments.enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "rollout.engine_arguments.enable_prefix_caching": "rollout.enable_prefix_caching",
    "rollout.engine_arguments.max_num_batched_tokens": "max_num_batched_tokens",
    "rollout.enforce_eager": "disable_cuda_graph",
    "rollout.evaluate_at_start": "eval_on_start skip_eval_before_train val_before_train",
    "rollout.evaluate_every_steps": "evaluator.freq_steps val_period eval_interval eval_steps test_freq",
    "rollout.episode_max_turns": "max_assistant_turns max_rollout_turns max_turns multi_turn.max_assistant_turns "
    "multi_turn.max_turns",
    "rollout.gpu_memory_utilization": "generator.gpu_memory_utilization sglang_mem_fraction_static vllm_gpu_memory_utilization",
    "rollout.group_size": "gconfig.n_samples num_generations_per_prompt num_return_sequences_in_group rollouts_per_example "
    "n rollout_n n_samples_per_prompt num_generations num_samples",
    "rollout.max_model_len": "cutoff_len max_len max_total_sequence_length seq_len sequence_len max_length max_seq_len "
    "max_seq_length rollout_max_context_len vllm_max_model_length",
    "rollout.max_new_tokens": "generate_max_len max_generate_length max_completion_length max_response_length max_tokens "
    "response_length rollout_max_response_len",
    "rollout.max_staleness": "async_generation_ratio async_train max_async_level max_head_offpolicyness staleness_threshold",
    "rollout.placement": "colocate_all_models colocate hybrid_engine vllm_mode",
    "rollout.replicas": "num_inference_engines vllm_num_engines num_replicas",
    "rollout.reward": "custom_reward_function custom_reward_function.name custom_reward_function.path custom_rm_path "
    "reward_funcs reward_function reward_weights rm_type",
    "rollout.speculation.method": "speculative_algorithm speculative_config speculative_method",
    "rollout.speculation.num_tokens": "num_speculative_tokens speculative_num_draft_tokens speculative_num_steps",
    "rollout.speculation.path": "speculation.model speculative_config.model speculative_draft_model_path speculative_model",
    "rollout.speculation.prompt_lookup_max": "ngram_prompt_lookup_max",
    "rollout.speculation.prompt_lookup_min": "ngram_prompt_lookup_min",
    "rollout.stop": "rollout_stop stop_strings",
    "rollout.min_p": "min_p",
    "rollout.temperature": "rollout_temperature temp temperature",
    "rollout.tensor_parallel": "rollout.tensor_model_parallel_size rollout.tp "
    "rollout_num_gpus_per_engine vllm_tensor_parallel_size",
    "rollout.top_k": "rollout_top_k top_k",
    "rollout.top_p": "rollout_top_p top_p",
    "run.deterministic": "full_determinism",
    "run.dir": "checkpoint_dir ckpt_path save_path default_local_dir output_dir save",
    "run.loggers": "wandb_enabled logger report_to tensorboard trackio use_wandb wandb",
    "run.log_samples": "log_completions log_val_generations num_completions_to_print",
    "run.name": "trial_name exp_name experiment_name run_name wandb_group",
    "run.seed": "data.seed data_seed rollout_seed seed",
    "run.steps": "max_num_steps max_steps num_rollout num_steps total_training_steps",
    "sync.bucket_bytes": "update_weights_bucket_megabytes",
    "sync.transport": "vllm_sync_backend",
    "teacher.path": "teacher.model",
}
INSTEAD = {  # names without a key here: advice
    "gpus_per_node num_nodes rollout_num_gpus actor_num_gpus_per_node actor_num_nodes n_gpus_per_node nnodes num_gpus "
    "num_processes world_size": (
        "the number of ranks is an option: megasync train --nproc N, megasync submit --num-ranks N"
    ),
    "rollout.pipeline_model_parallel_size rollout.data_parallel_size rollout.expert_parallel_size": (
        "a replica has rollout.tensor_parallel workers; rollout.replicas adds engines"
    ),
    "critic_learning_rate lambd critic. cliprange_value critic critic_warmup gamma lam value_model": (
        "there is no critic: advantages are computed within a group of samples"
    ),
    "reward_model. reward_manager. reward_manager remote_rm_url": (
        "a reward is a function, rollout.reward=package.module:function, or a model of `judges`, rollout.reward=judge:NAME"
    ),
    "reward_fn_key": 'a reward reads the column itself: extra["data_source"] of its RewardInput',
    "kl_ctrl. use_kl_in_reward kl_penalty": (
        "algorithm.kl_in=reward takes algorithm.kl_coefficient x the KL, by algorithm.kl_estimator, from rewards"
    ),
    "ref. ref_load": "the reference model is sharded and packed as the policy is, and has no keys of its own",
    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_update_interval": (
        "the reference is always the initial model; to change it, start another run with model.path=FOLDER of an export"
    ),
    "loss_scale_factor": "algorithm.loss_aggregation=constant_length divides by rollout.max_new_tokens",
    "record_file replay_file": "algorithm.router_replay=rollout replays vLLM's expert choices, without files",
    "quantization quantization_config_file": "rollout.dtype=fp8 quantises the replicas' weights; the trainer's have model.dtype",
    "custom_chat_template template": "the chat template is read from the model folder: put it there as chat_template.jinja",
    "val_batch_size": "the whole evaluation set is generated at once",
    "prometheus. trace. transfer_queue. pf_ppo. mtp. fused_kernel_options. tiled_mlp. weight_decay_incr_style lora.type "
    "lora.dtype checkpoint_engine.engine_kwargs rollout_correction.loss_type": "there is no counterpart here",
    "grad_offload offload_policy param_offload": (
        "with rollout.placement=colocated, rollout.offload_trainer selects the state that is moved to host memory"
    ),
    "deepspeed zero zero_stage fsdp_size fsdp_config ds3_gather_for_generation": (
        "engine.wrap=megatron_fsdp shards weights and optimizer state"
    ),
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target top_entropy_quantile": (
        "the entropy term has a constant factor, algorithm.entropy_coefficient"
    ),
    "epochs num_epoch num_epochs num_episodes num_train_epochs total_epochs total_train_epochs": "set the number of steps: "
    "run.steps = epochs x examples / data.batch_size",
    "global_batch_size gradient_accumulation_steps train_global_batch_size": (
        "a step's data.batch_size x rollout.group_size samples are packed into micro-batches of engine.tokens_per_microbatch; "
        "algorithm.num_minibatches is the number of optimizer steps on them"
    ),
    "logprob_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu "
    "log_prob_use_dynamic_bsz": (
        "all forward passes of the trainer use micro-batches of engine.tokens_per_microbatch"
    ),
    "use_dynamic_bsz use_remove_padding balance_batch packing packing_samples sample_packing sequence_packing.": "samples "
    "are always packed without padding and balanced over ranks",
    "max_input_seq_length max_prompt_len max_prompt_length prompt_max_len rollout_max_prompt_len prompt_length": (
        "the limit is rollout.max_model_len - rollout.max_new_tokens; data.too_long drops or refuses longer prompts"
    ),
    "rollout.name use_vllm": "vLLM always generates the rollouts",
    "rollout.mode": "rollouts are always asynchronous requests to vLLM; rollout.max_staleness=0 waits for each batch",
    "free_cache_engine vllm_enable_sleep_mode": (
        "with rollout.placement=colocated vLLM always frees its memory while the trainer works"
    ),
    "load_format": "vLLM gets its weights from the trainer in the first sync",
    "calculate_log_probs do_sample ignore_eos": "vLLM always returns log-probs, and a response ends at its end token",
    "repetition_penalty generation_kwargs": (
        "rollouts sample from the unmodified policy, so that log-probs of trainer and vLLM agree"
    ),
    "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port": (
        "the run itself starts rollout.replicas engines; rollout.ray_address selects a cluster"
    ),
    "multi_turn. agent. agent multi_turn tool_config_path max_tool_calling_iterations": (
        "an episode implements turns and tools: rollout.episode=package.module:name (docs/agents.md)"
    ),
    "project_name wandb_project": "set WANDB_PROJECT in the environment; the run's folder is run.dir/run.name",
    "logging_steps logging_first_step logging_strategy": "every step is logged to metrics.jsonl and to run.loggers",
    "profiler. global_profiler. profiler timeline_json_file": ("each run writes timeline.json, a Chrome trace of its steps"),
    "trust_remote_code": "code from a model's folder is never run",
    "override_transformer_config. override_config override_mcore_model_config": (
        "the model is built from the folder's config.json"
    ),
    "off_policy_mask_threshold rollout_rs rollout_rs_threshold": (
        "algorithm.importance_correction=mask excludes tokens from the loss, or, with importance_level, responses"
    ),
    "finetuning_type peft_config train_type tuner_type use_peft": "engine.lora.rank above 0 trains adapters",
    "image_key video_key": "images and videos are not supported",
    "custom_cls. sampler. datagen.": "data is read from the files of data.train; write the rows you want into them",
    "max_epochs": "algorithm.num_passes is the number of passes over a batch; run.steps is the number of batches",
    "eps_clip_low_high": "write algorithm.clip_low and algorithm.clip_high",
    "rlhf_type stage": "algorithm.name is grpo or sft, and algorithm.preset names variants of grpo",
    "val_set_size val_split_fraction": "held-out data is a file, a split or a folder of its own: data.eval",
    "eval_strategy save_strategy": "rollout.evaluate_every_steps and checkpoint.every_steps are numbers of steps; 0 is off",
    "lr_scheduler_kwargs optim_args": "engine.optimizer has a key for each",
}
VALUES = {  # (key, value of another project): advice, for values that are not misspelt choices
    **{("algorithm.name", name): f"write algorithm.preset={name}" for name in PRESETS if name != "grpo"},
    ("algorithm.name", "drgrpo"): "write algorithm.preset=dr_grpo",
    ("algorithm.name", "gspo_token"): "write algorithm.preset=gspo",
    ("algorithm.name", "reinforce_baseline"): "write algorithm.preset=reinforce_plus_plus_baseline",
    ("algorithm.name", "group_norm"): "write algorithm.name=grpo",
    ("algorithm.name", "ppo"): "there is no critic; algorithm.name=grpo clips ratios as PPO does",
    ("algorithm.name", "gae"): "there is no critic; algorithm.name=grpo computes advantages within a group of samples",
    **{
        ("algorithm.name", name): "this loss is not implemented; docs/how_a_step_works.md lists the available ones"
        for name in ("dpo", "reinforce", "opo", "gpg", "vapo", "kto", "orpo", "simpo")
    },
    ("algorithm.name", "remax"): "write algorithm.advantage=remax",
}


def advice_on_value(key: str, value: str) -> str:
    """The advice on a value of another project in any spelling: Dr.GRPO, REINFORCE++, dr-grpo; empty if there is none."""
    return VALUES.get((key, re.sub(r"\W+", "_", value.lower().replace("++", "_plus_plus"))), "")


KEYS = {name: key for key, names in SAME.items() for name in names.split()}
ADVICE = {name: text for names, text in INSTEAD.items() for name in names.split()}


def meaning(path: str) -> tuple[str, str]:
    """(key, advice): the key with the same meaning, or advice if there is none; both empty for an unknown name."""
    parts = path.split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]
    sections = [f"{part}." for part in parts[:-1]]
    for name in [*endings[:-1], *sections, endings[-1]]:
        if name in KEYS or name in ADVICE:
            return KEYS.get(name, ""), ADVICE.get(name, "")
    return "", ""
