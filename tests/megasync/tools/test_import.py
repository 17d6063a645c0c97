"""`megasync import`: what configs of verl and TRL become, and that no key of theirs is dropped without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.tools.import_config import trl
from megasync.tools.import_config.carried import Carried
from megasync.tools.import_config.command import PROJECTS, convert, main, read
from tests.megasync.config.test_others import TRL, VERL

SCRIPT = """set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=$SOME_DATA/gsm8k/train.parquet data.val_files=/x/test.parquet data.train_batch_size=1024 \\
    data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.ppo_epochs=2 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0.01 \\
    +actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.max_num_batched_tokens=16384 \\
    actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 custom_reward_function.path=/x/mine.py \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_training_steps=100 trainer.save_freq=-1 $@
"""
GRPO = {
    "model_name_or_path": "a/b", "output_dir": "out/grpo", "learning_rate": 1e-5, "per_device_train_batch_size": 8,
    "num_processes": 4,
    "gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_generations": 16, "num_iterations": 2, "beta": 0.01,
    "max_completion_length": 1024, "epsilon": 0.2, "loss_type": "dr_grpo", "scale_rewards": False, "max_steps": 80,
    "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "bf16": True, "save_steps": 40, "report_to": ["wandb"],
    "sync_ref_model": True,
    "reward_funcs": ["accuracy_reward", "lib.rewards.brevity"], "reward_weights": [1.0, 0.1], "vllm_mode": "server",
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.5, "mask_truncated_completions": True,
    "use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "push_to_hub": True,
}  # fmt: skip


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_DATA", "/data")
    script, path = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(SCRIPT)
    assert main([str(script), "--from", "verl", "--to", str(path)]) == 0
    config, reported = load_config(path), capsys.readouterr().err
    own, rollout, data = config.algorithm, config.rollout, config.data
    assert (data.train, data.batch_size, data.prompt_key, data.answer_key, data.too_long, data.chat_template) == (
        "/data/gsm8k/train.parquet", 1024, "prompt", "reward_model.ground_truth", "drop", True,
    )  # fmt: skip
    (held_out,) = data.eval_sets.values()
    assert (held_out.path, held_out.samples, held_out.temperature) == ("/x/test.parquet", 4, 0.6)
    assert (rollout.group_size, rollout.max_new_tokens, rollout.max_model_len, rollout.replicas) == (5, 1024, 1536, 4)
    assert (rollout.reward, rollout.placement, rollout.engine_arguments) == (
        "mine:compute_score", "colocated", {"max_num_batched_tokens": 16384},
    )  # fmt: skip
    assert (own.num_minibatches, own.num_passes, own.kl_coefficient, own.clip_low, own.clip_high, own.dual_clip) == (
        4, 2, 0.001, 0.2, 0.2, 3.0,
    )  # fmt: skip
    assert (own.loss_aggregation, own.importance_correction) == ("sequence_mean", "none")
    assert (config.engine.tokens_per_microbatch, config.engine.optimizer.beta2, config.engine.optimizer.weight_decay) == (
        6144,
        0.999,
        0.01,
    )
    assert (config.run.steps, config.run.loggers, config.checkpoint.every_steps) == (100, ("wandb",), 0)
    assert config.algorithm.entropy_coefficient == 0.01 and "hf download Qwen/Qwen2-7B-Instruct" in reported
    assert reported.splitlines()[-1] == f"next: megasync train {path} --check"


def test_a_config_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(GRPO))
    assert main([str(tmp_path / "grpo.yaml"), "--from", "trl", "--to", str(tmp_path / "ours.yaml")]) == 0
    config, reported = load_config(tmp_path / "ours.yaml"), capsys.readouterr().err
    own, optimizer = config.algorithm, config.engine.optimizer
    assert (config.data.batch_size, own.num_minibatches, own.num_passes) == (16, 4, 2)  # 8 x 4 x 8 completions, of 16 each
    assert (config.run.steps, config.checkpoint.every_steps, optimizer.warmup_steps) == (10, 5, 8)
    assert (own.clip_low, own.clip_high, own.kl_coefficient, own.loss_aggregation) == (0.2, 0.2, 0.01, "constant_length")
    assert (own.importance_correction, own.importance_level, own.importance_cap, own.truncated) == ("tis", "token", 2.5, "mask")
    assert not own.normalize_advantage_by_std and config.rollout.reward == {"math_verify": 1.0, "lib.rewards:brevity": 0.1}
    assert (config.rollout.placement, config.rollout.max_new_tokens, config.model.dtype) == ("separate", 1024, "bfloat16")
    assert (optimizer.decay, optimizer.weight_decay, optimizer.beta2, config.run.seed) == ("cosine", 0.0, 0.999, 42)
    assert (config.run.dir, config.run.name, config.engine.lora.rank) == ("out", "grpo", 8)
    assert config.engine.lora.targets == ("linear_qkv", "linear_proj")
    assert "sync_ref_model=True: the reference" in reported and "push_to_hub=True: nothing here" in reported


@pytest.mark.parametrize(("project", "names"), [("verl", VERL), ("trl", TRL)])
@pytest.mark.parametrize("value", [7, "something", True, ["a", "b"]])
def test_no_key_is_dropped_without_a_word(project: str, names: dict[str, str], value: object) -> None:
    """Each alone, of any value: it is carried over, or named with the reason."""
    for name in [*names, "never.heard.of", "x_1"]:
        found = convert({name: value}, project)
        without = convert({}, project)
        said = [one for one in [*found.left, *found.off] if one.startswith(f"{name}={value}")]
        is_default = value == PROJECTS[project].DEFAULTS.get(name, "")
        assert said or is_default or found.keys != without.keys or _has(found, value), (name, found)


def _has(found: Carried, value: object) -> bool:
    return any(one == value for one in found.keys.values())


@pytest.mark.parametrize(
    ("project", "given", "reason"),
    [
        ("verl", {"data.train_files": ["a", "b"]}, "one file or folder"),
        ("verl", {"actor_rollout_ref.actor.ppo_mini_batch_size": 300}, "1024 / 300 is no whole number"),
        ("verl", {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}, "no such value"),
        ("verl", {"trainer.logger": ["swanlab"]}, "no logger swanlab"),
        ("verl", {"data.truncation": "left"}, "data.too_long=drop"),
        ("verl", {"actor_rollout_ref.rollout.name": "sglang"}, "vLLM"),
        ("trl", {"loss_type": "cispo"}, "no such value"), ("trl", {"scale_rewards": "batch"}, "no such value"),
        ("trl", {"warmup_ratio": 0.1}, "once run.steps is known"), ("trl", {"optim": "lion_8bit"}, "AdamW"),
        ("trl", {"save_steps": 0.1}, "set checkpoint.every_steps once run.steps is known"),
        ("trl", {"warmup_steps": 0.1}, "once run.steps is known"), ("trl", {"save_steps": 12.5}, "no whole number"),
        ("verl", {"trainer.save_freq": 0.5}, "no whole number"),
        ("trl", {"use_peft": True, "lora_target_modules": ["q_proj"]}, "q_proj"),
        ("trl", {"reward_funcs": "org/reward-model"}, "no model"),
        ("trl", {"reward_funcs": "lib.right", "reward_weights": [1.0, 0.1]}, "1 reward_funcs"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_named_with_the_reason(project: str, given: dict[str, Any], reason: str) -> None:
    found = convert(given, project)
    assert any(name.startswith(f"{list(given)[-1]}=") and reason in text for name, text in found.left.items()), found.left


def test_numbers_of_steps_below_1_are_shares_of_all() -> None:
    """As transformers reads save_steps, eval_steps and warmup_steps; cut off they would be 0, which switches off."""
    of_batch = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 100}
    found = convert({**of_batch, "save_steps": 0.1, "eval_steps": 0.05, "warmup_steps": 0.03}, "trl").keys
    names = ("run.steps", "checkpoint.every_steps", "rollout.evaluate_every_steps", "engine.optimizer.warmup_steps")
    assert [found[name] for name in names] == [50, 5, 3, 3]
    assert convert({"warmup_steps": 10.0}, "trl").keys["engine.optimizer.warmup_steps"] == 10


def test_an_adapter_of_trl_has_its_defaults() -> None:
    """`use_peft` alone is one of rank 16, not a run that trains all weights."""
    found = convert({"use_peft": True}, "trl")
    own = {name: value for name, value in found.keys.items() if "lora" in name}
    assert own == {"engine.lora.rank": 16, "engine.lora.alpha": 32, "engine.lora.dropout": 0.05}
    assert any("engine.lora.targets" in line for line in found.to_do) and not found.left
    for without in ({"use_peft": False}, {"lora_r": 8, "lora_alpha": 16}):
        assert not any("lora" in name for name in convert(without, "trl").keys)


def test_the_loss_of_gspo_is_a_mean_over_responses_without_a_dual_clip() -> None:
    """verl's defaults of these keys are others."""
    actor, names = "actor_rollout_ref.actor.", [f"algorithm.{name}" for name in ("ratio_level", "loss_aggregation", "dual_clip")]
    for given, mean in (({}, "sequence_mean"), ({f"{actor}loss_agg_mode": "token-mean"}, "token_mean")):
        found = convert({f"{actor}policy_loss.loss_mode": "gspo", **given}, "verl").keys
        assert [found.get(name) for name in names] == ["sequence", mean, None]
    found = convert({f"{actor}policy_loss.loss_mode": "vanilla", f"{actor}loss_agg_mode": "token-mean"}, "verl").keys
    assert [found.get(name) for name in names] == [None, "token_mean", 3.0]


def test_a_clip_ratio_that_verl_does_not_clip_by_is_named() -> None:
    """Its file of defaults has clip_ratio_low and clip_ratio_high, which come first."""
    for given, is_named in (({"clip_ratio": 0.1}, True), ({"clip_ratio": 0.1, "clip_ratio_low": 0.1}, False), ({}, False)):
        found = convert({f"actor_rollout_ref.actor.{name}": value for name, value in given.items()}, "verl")
        assert any("clip_ratio_low" in line for line in found.to_do) is is_named


def test_an_adapter_of_verl_has_its_default_alpha() -> None:
    found = convert({"actor_rollout_ref.model.lora_rank": 32}, "verl").keys
    assert (found["engine.lora.rank"], found["engine.lora.alpha"]) == (32, 16)
    assert "engine.lora.alpha" not in convert({}, "verl").keys


@pytest.mark.parametrize(
    ("strategy", "key"), [("megatron", "megatron.context_parallel_size"), ("fsdp", "ulysses_sequence_parallel_size")]
)
def test_verls_tokens_of_a_gpu_are_those_of_all_context_ranks(strategy: str, key: str) -> None:
    given = {"strategy": strategy, key: 4, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8192}
    found = convert({f"actor_rollout_ref.actor.{name}": value for name, value in given.items()}, "verl").keys
    assert (found["engine.parallel.context"], found["engine.tokens_per_microbatch"]) == (4, 4 * 8192)


def test_a_yaml_of_verl_with_interpolations_and_one_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: {max_response_length: 9, train_files: ['x']}\nactor_rollout_ref:\n  _target_: a.B\n  rollout:\n"
                    "    n: ${oc.select:data.n,3}\n    name: ???\n"
        "    response_length: ${data.max_response_length}\n")  # fmt: skip
    assert read(path) == {
        "data.max_response_length": 9, "data.train_files": ["x"], "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.rollout.response_length": 9,
    }  # fmt: skip
    path.write_text("python train.py --lr 1")
    with pytest.raises(ValueError, match="neither a YAML mapping nor overrides"):
        read(path)
    assert trl.batch(None, {**trl.DEFAULTS})["data.batch_size"] == 1


def test_a_comment_of_a_script_begins_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "## it's mine\npython3 -m verl.trainer.main_ppo trainer.experiment_name=${MODEL##*/} trainer.save_freq=20 \\\n"
        "data.seed=3 \\\n  trainer.project_name='a#b' trainer.nnodes=2 # trainer.nnodes=3\n"
    )
    assert read(path) == {
        "trainer.experiment_name": "${MODEL##*/}", "trainer.save_freq": 20, "data.seed": 3, "trainer.project_name": "a#b",
        "trainer.nnodes": 2,
    }  # fmt: skip


def test_what_a_shell_would_fill_in_is_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "3")
    monkeypatch.delenv("POLICY", raising=False)
    path = tmp_path / "run.sh"
    path.write_text('main_ppo trainer.experiment_name="a_$(date +%F)" trainer.save_freq=2 data.seed=$SEED model.path=$POLICY\n')
    given = {"trainer.experiment_name": "a_$(date +%F)", "trainer.save_freq": 2, "data.seed": 3, "model.path": "$POLICY"}
    assert read(path) == given
    path.write_text("main_ppo trainer.experiment_name=a_$(date +%F) actor_rollout_ref.model.path=$POLICY trainer.save_freq=2")
    to_do = [line for line in convert(read(path), "verl").to_do if "shell" in line]
    assert [line.partition(":")[0] for line in to_do] == ["run.name = a_$(date +%F)", "model.path = $POLICY"]


@pytest.mark.parametrize("content", ["a: \u00e9".encode("latin-1"), b"x='unclosed data.train_batch_size=1"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "verl.sh"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.headline.startswith(f"{path}: ") and caught.value.remedy


@pytest.mark.parametrize(
    ("content", "project", "right"),
    [
        ({"model_name_or_path": "a/b", "num_generations": 8}, "verl", "--from trl"),
        ({"actor_rollout_ref": {"rollout": {"n": 5}}, "trainer": {"nnodes": 1}}, "trl", "--from verl"),
        ({"grpo": {"num_prompts_per_step": 32}, "policy": {"model_name": "a/b"}}, "verl", ""),
        ({"grpo": {"num_prompts_per_step": 32}, "policy": {"model_name": "a/b"}}, "trl", ""),
        ({"foo": 1}, "trl", ""),
    ],
)
def test_a_config_of_another_project_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any], project: str, right: str
) -> None:
    """The defaults of the one named would be most of what is written."""
    path, to = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as caught:
        main([str(path), "--from", project, "--to", str(to)])
    assert caught.value.code == 2 and not to.exists()
    assert (f"write {right}" if right else "give a config of verl or trl") in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "# nothing", "reward_model: {enable: true}", "critic: {strategy: fsdp}"])
def test_a_file_of_overrides_is_one_of_verl_with_few_keys_or_none(tmp_path: Path, content: str) -> None:
    path, to = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(content)
    assert main([str(path), "--from", "verl", "--to", str(to)]) == 0
    assert load_config(to).data.batch_size == convert({}, "verl").keys["data.batch_size"]
