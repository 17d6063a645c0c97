"""What a run says of itself before it starts, by its config, its data and the checkpoint in its folder. No torch is needed."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.resume import model_of
from megasync.checks.banner import banner
from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.rollouts.progress import Progress, save_progress
from tests.support.config_files import cannot_run, write, write_model


def banner_lines(path: Path, *overrides: str, num_ranks: int = 2) -> dict[str, str]:
    """The banner's lines by their names."""
    config = load_config(path, overrides)
    text = banner(config, num_ranks, check_config(config, num_ranks))
    return dict(re.findall(r"^  ([\w ]+): +(.*)$", text, flags=re.MULTILINE))


def write_factors(folder: Path, model: str | Path, *, rank: int, linears: tuple[str, ...]) -> None:
    """The factors of a PEFT adapter, all zeros, of these linears in every layer."""
    factors = {}
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        if name.removesuffix(".weight").rpartition(".")[2] in linears:
            linear = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{linear}.lora_A.weight"] = np.zeros((rank, weight.shape[1]), np.float32)
            factors[f"{linear}.lora_B.weight"] = np.zeros((weight.shape[0], rank), np.float32)
    save_file(factors, folder / "adapter_model.safetensors")


def write_checkpoint(run: Path, step: int, model: dict[str, Any], **more: object) -> Path:
    """As far as a check looks at it."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    shutil.copytree(run.parents[1] / "model", folder / "hf")
    (folder / "index.json").write_text(json.dumps({"format": 2, "model": model, "tensors": {}, "layout": {"ranks": 0}, **more}))
    return folder


def test_layout_rollouts_and_rewards_are_named(runnable: Path) -> None:
    rewards = "rollout.reward={exact_match: 1, token_count: 0.5}"
    lines = banner_lines(runnable, "engine.parallel.tensor=2", "engine.wrap=ddp", rewards, num_ranks=4)
    assert lines["layout"] == "4 ranks (data 2, tensor 2), wrap ddp"
    assert lines["reward"] == "exact_match, 0.5 x token_count"
    assert "1 vLLM replica, in turns with training" in lines["rollouts"]
    assert "at most 1 version behind" in banner_lines(runnable, "rollout.max_staleness=1")["rollouts"]
    sft = banner_lines(runnable, "algorithm.name=sft")
    assert "reward" not in sft and "rollouts" not in sft


def test_episodes_are_named(runnable: Path) -> None:
    name = "examples.calculator:episode"
    lines = banner_lines(runnable, f"rollout.episode={name}", "rollout.episode_max_turns=2", "rollout.reward=exact_match")
    assert f"episodes of {name} a step, up to 2 turns of up to " in lines["rollouts"]
    assert lines["reward"] == "of the episode; where it returns none: exact_match"


def test_what_is_dropped_and_the_first_prompt_are_shown(runnable: Path) -> None:
    lines = [json.dumps({"question": "1" * length, "answer": "2"}) for length in (3, 40, 4)]
    train = write(runnable.parent / "some.jsonl", "\n".join(lines))
    limits = ["rollout.max_model_len=32", "rollout.max_new_tokens=8", "data.batch_size=1", "data.shuffle=false"]
    found = banner_lines(runnable, f"data.train={train}", *limits)
    assert found["data"] == "data.train has 2 examples (1 of 3 dropped: too long)"
    assert found["first prompt"].startswith("'111' (") and found["first prompt"].endswith("; answer '2')")


def test_where_it_goes_on_and_what_it_will_do(runnable: Path) -> None:
    config = load_config(runnable)
    assert banner_lines(runnable)["resumes"] == "nothing: from the weights of model.path"
    write(config.run.folder / "metrics.jsonl", '{"step": 1}\n')
    assert "former run are moved aside" in banner_lines(runnable)["resumes"]
    checkpoint = write_checkpoint(config.run.folder, 3, model_of(config.model.dtype, config.engine.lora))
    found = banner_lines(runnable, "run.steps=5", "checkpoint.every_steps=1")
    assert found["resumes"] == f"from {checkpoint}" and found["folder"] == str(config.run.folder)
    assert found["will do"] == "steps 4 to 5; checkpoint every step, after the last"
    assert banner_lines(runnable, "run.steps=3")["will do"].startswith("nothing but the end of step 3")


def test_newest_weights_without_a_checkpoint_are_no_start(runnable: Path) -> None:
    """The optimizer would be a checkpoint's. Nothing is lost: the log is moved aside."""
    own = ["sync.log=deltas", "checkpoint.resume=newest_weights", "checkpoint.every_steps=50"]
    run = load_config(runnable).run.folder
    for version in (0, 11, 12):
        write(run / "versions" / f"version_{version:08d}.stage_000", "")
    assert banner_lines(runnable, *own)["resumes"] == "nothing: from the weights of model.path"
    write(run / "metrics.jsonl", '{"step": 12}\n')
    needed = "and their log, up to version 12: checkpoint.resume=newest_weights needs a checkpoint"
    aside = "nothing: from the weights of model.path, the results of a former run are moved aside"
    assert banner_lines(runnable, *own)["resumes"] == f"{aside}, {needed}"
    assert banner_lines(runnable, *own[:1])["resumes"] == aside


def test_adapters_go_on_with_their_own_base_alone(runnable: Path) -> None:
    config = load_config(runnable, ["engine.lora.rank=4", "engine.lora.targets=[linear_proj]"])
    checkpoint = write_checkpoint(config.run.folder, 1, model_of(config.model.dtype, config.engine.lora))
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["o_proj"]}
    path, keys = checkpoint / "adapter" / "adapter_config.json", ["engine.lora.rank=4", "engine.lora.targets=[linear_proj]"]
    write(path, json.dumps(adapter | {"base_model_name_or_path": config.model.path}))
    write_factors(path.parent, config.model.path, rank=4, linears=("o_proj",))
    check_config(config, 2)
    write(path, json.dumps(adapter | {"base_model_name_or_path": "models/other"}))
    assert "the adapter was trained on another base model, models/other" in cannot_run(runnable, *keys)


def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_the_start(runnable: Path) -> None:
    config = load_config(runnable)
    run, model = config.run.folder, model_of(config.model.dtype, config.engine.lora)
    write_checkpoint(run, 1, model)
    check_config(config, 2)
    newest = write_checkpoint(run, 2, model | {"dtype": "torch.float64", "lora_rank": 8})
    message = cannot_run(runnable)
    assert f"{newest}: cannot resume with another model: dtype is torch." in message
    assert "lora_rank is 0, the checkpoint has 8" in message
    assert f"model.path={newest}/hf" in message and "checkpoint.resume=never" in message
    check_config(load_config(runnable, ["checkpoint.resume=never"]), 2)
    newest = write_checkpoint(run, 3, model)
    write_model(newest / "hf")
    check_config(config, 2)
    write_model(newest / "hf", num_hidden_layers=3)
    assert f"{newest}: the weights lack " in cannot_run(runnable) and "run.name=NAME for another run" in cannot_run(runnable)
    for name, value in {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}.items():
        write_model(newest / "hf", **{name: value})
        message = cannot_run(runnable)
        assert message.startswith(f"{newest}: model.path = {config.model.path} computes with ") and name in message
    write_model(newest / "hf", model_type="llama")
    assert f"{newest}: holds a llama, and model.path = {config.model.path} is a qwen3" in cannot_run(runnable)
    write_model(newest / "hf")
    (newest / "rollouts.npz").write_bytes(b"PK of another version")
    assert f"{newest / 'rollouts.npz'}: cannot be read: " in cannot_run(runnable)
    for text, words in (("{", "is damaged"), (json.dumps({"format": 1}), "this version reads 2")):
        (newest / "index.json").write_text(text)
        assert words in cannot_run(runnable)
    (newest / "index.json").unlink()
    assert "has no index.json" in cannot_run(runnable)


def test_a_damaged_checkpoint_is_refused_before_the_start(runnable: Path) -> None:
    """Each of its files that is lost, cut off or changed, by its name, and with the checkpoint before it."""
    config = load_config(runnable)
    run, model = config.run.folder, model_of(config.model.dtype, config.engine.lora)
    tensors = {"norm": {"shape": [4], "kinds": ["weight"], "boxes": [[[0], [4], "rank_00000-000.safetensors"]]}}
    for step in (3, 6):
        files = ["rollouts.npz", "hf/config.json"]
        newest = write_checkpoint(run, step, model, tensors=tensors, layout={"ranks": 1}, files=files)
        save_progress(newest, Progress(8, 8))
        save_file({"weight norm 0": np.zeros(4, np.float32)}, newest / "rank_00000-000.safetensors")
        with zipfile.ZipFile(newest / "random_00000.pt", "w") as file:
            file.writestr("data.pkl", bytes(100))
    check_config(config, 2)
    for name in ("rank_00000-000.safetensors", "random_00000.pt", "hf/config.json", "hf/model.safetensors", "rollouts.npz"):
        path = newest / name
        whole = path.read_bytes()
        for left in (None, b"", whole[: len(whole) // 2], b"\1" + whole[1:]):
            path.unlink() if left is None else path.write_bytes(left)
            message = cannot_run(runnable)
            assert str(path) in message, message
            assert f"Move step_00000006 out of {newest.parent} to resume from step_00000003" in message
        path.write_bytes(whole)
    check_config(config, 2)


def test_a_checkpoint_of_another_model_is_refused_before_the_start(runnable: Path) -> None:
    config = load_config(runnable)
    newest = write_checkpoint(config.run.folder, 3, model_of(config.model.dtype, config.engine.lora))
    check_config(config, 2)
    other = runnable.parent / "other"
    shutil.copytree(config.model.path, other)
    write_model(other, num_hidden_layers=5)
    message = cannot_run(runnable, f"model.path={other}")
    assert f"{newest}: the weights lack 11 of the tensors" in message
    assert "the model.path that is in the run's config.yaml" in message
    check_config(load_config(runnable, [f"model.path={other}", "checkpoint.resume=never"]), 2)


@pytest.mark.parametrize("other", ["engine.lora.alpha=16", "engine.lora.rslora=true"])
def test_an_adapter_of_another_scale_is_refused_before_the_start(runnable: Path, other: str) -> None:
    own = ["engine.lora.rank=4", "engine.lora.alpha=6"]
    config = load_config(runnable, own)
    adapter = write_checkpoint(config.run.folder, 3, model_of(config.model.dtype, config.engine.lora)) / "adapter"
    linears = ["q_proj", "k_proj", "v_proj"]
    write(adapter / "adapter_config.json", json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": linears}))
    write_factors(adapter, config.model.path, rank=4, linears=tuple(linears))
    check_config(config, 2)
    message = cannot_run(runnable, *own, other)
    assert f"the one in {adapter} was trained with 1.5" in message
    assert "checkpoint.resume=never" in message
