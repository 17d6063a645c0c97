"""Whole runs: what the model's folder, the data, the ranks and the run's folder must be like. Real files throughout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megasync.config.check import check_config
from megasync.config.load import load_config
from megasync.config.errors import ConfigError, main_errors
from tests.config_files import ROOT, cannot_run, write, write_model, write_runnable


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


def test_a_good_config_can_run_and_leaves_no_probe(runnable: Path) -> None:
    config = load_config(
        runnable, ["engine.parallel.tensor=2", "engine.parallel.sequence=true", f"data.eval={runnable}"]
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    check_config(config, 2)
    check_config(config, 8)
    assert list(config.run.folder.iterdir()) == []


def test_overrides_are_fields_of_megatron_core(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.overrides.bukcet_size=5")
    assert "engine.overrides.bukcet_size = 5" in message
    assert "remedy:  write engine.overrides.bucket_size" in message
    assert "overlap_grad_reduce" in message
    check_config(load_config(runnable, ["engine.overrides.bucket_size=5"]), 2)


def test_tensor_parallel_must_divide_the_model(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=4", world_size=4)
    assert "engine.parallel.tensor = 4" in message
    assert "num_key_value_heads = 2" in message
    assert "choices: 1, 2" in message
    assert "write engine.parallel.tensor=2" in message
    assert "num_attention_heads = 4" in cannot_run(runnable, "engine.parallel.tensor=3", world_size=3)


def test_lora_must_fit_the_model(runnable: Path, tmp_path: Path) -> None:
    check_config(load_config(runnable, ["engine.lora.rank=64"]), 2)
    message = cannot_run(runnable, "engine.lora.rank=65")
    assert "larger than the model's smallest dimension, 64" in message
    assert "there is no adapter that engine.lora.alpha" in cannot_run(runnable, "engine.lora.alpha=8")
    message = cannot_run(runnable, "engine.lora.rank=8", f"engine.lora.adapter_path={tmp_path}")
    assert "holds no adapter_config.json" in message


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 127), ("intermediate_size", 255)])
def test_tensor_parallel_must_divide_sizes(runnable: Path, name: str, value: int) -> None:
    write_model(runnable.parent / "model", **{name: value})
    assert f"{name} = {value}" in cannot_run(runnable, "engine.parallel.tensor=2")


def test_parallel_sizes_must_divide_the_ranks(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=2", "engine.parallel.pipeline=2", world_size=6)
    assert "2 x 2 x 1: 4 does not divide 6 ranks" in message
    assert "1, 2, 3, 6" in message
    assert "multiple of 4" in message
    assert "0 ranks" in cannot_run(runnable, world_size=0)


def test_pipeline_must_divide_the_layers(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.pipeline=3", world_size=3)
    assert "num_hidden_layers = 4" in message


@pytest.mark.parametrize("name", ["context", "expert"])
def test_unsupported_parallelism(runnable: Path, name: str) -> None:
    message = cannot_run(runnable, f"engine.parallel.{name}=2")
    assert f"engine.parallel.{name} = 2: not supported yet" in message
    assert f"write engine.parallel.{name}=1" in message


def test_other_impossible_combinations(runnable: Path) -> None:
    assert "engine.parallel.tensor above 1" in cannot_run(runnable, "engine.parallel.sequence=true")
    assert "rollout.max_staleness = 2: not supported yet" in cannot_run(runnable, "rollout.max_staleness=2")
    assert "rollout.tensor_parallel = 3" in cannot_run(runnable, "rollout.tensor_parallel=3")
    assert "leaves no room" in cannot_run(runnable, "rollout.max_model_len=8", "rollout.max_new_tokens=8")
    message = cannot_run(runnable, "algorithm.num_minibatches=33")
    assert "data.batch_size x rollout.group_size = 32" in message
    assert "num_minibatches = 5" in cannot_run(runnable, "algorithm.name=sft", "algorithm.num_minibatches=5")
    check_config(load_config(runnable, ["algorithm.num_minibatches=32", "rollout.tensor_parallel=4"]), 2)


def test_transports_that_cannot_be(runnable: Path) -> None:
    check_config(load_config(runnable, ["sync.transport=nccl"]), 2)
    with pytest.raises(ConfigError, match=r"sync.transport = 'rdma'[\s\S]*auto, shm, nccl, ipc"):
        load_config(runnable, ["sync.transport=rdma"])
    message = cannot_run(runnable, "sync.transport=ipc")
    assert "sync.transport = ipc: trainer and replicas have GPUs of their own" in message and "sync.transport=auto" in message


def test_placements_that_cannot_be(runnable: Path) -> None:
    colocated = "rollout.placement=colocated"
    good = [colocated, "sync.transport=ipc", "rollout.replicas=2", "rollout.offload_trainer=[optimizer]"]
    check_config(load_config(runnable, good), 2)
    for override, words in {
        "sync.transport=nccl": "sync.transport = nccl: trainer and replicas share GPUs",
        "rollout.max_staleness=1": "write rollout.max_staleness=0",
        "rollout.replicas=3": "write rollout.replicas=2 or start 3 ranks",
    }.items():
        assert words in cannot_run(runnable, colocated, override)
    with pytest.raises(ConfigError, match=r"rollout.offload_trainer[\s\S]*parameters, gradients, optimizer"):
        load_config(runnable, ["rollout.offload_trainer=[weights]"])


def test_rollout_keys_are_unused_for_sft(runnable: Path) -> None:
    overrides = [
        "algorithm.name=sft",
        "rollout.max_staleness=5",
        "rollout.reward=nonsense",
        "rollout.tensor_parallel=3",
    ]
    check_config(load_config(runnable, overrides), 2)


def test_reward_names(runnable: Path) -> None:
    message = cannot_run(runnable, "rollout.reward=exact_mach")
    assert "rollout.reward = 'exact_mach'" in message
    assert "nearest: exact_match" in message
    assert "no such reward" in cannot_run(runnable, "rollout.reward=my.module:1st")
    check_config(load_config(runnable, ["rollout.reward=my_package.my_module:fun"]), 2)


# -------------------------------------------------------------------------------------------------------- data, folder


def test_data_errors_name_key_file_and_line(runnable: Path, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.jsonl", '{"question": "a", "answer": "b"}\n{"question": \n')
    assert "data.train is not set" in cannot_run(runnable, "data.train=")
    for key in ("train", "eval"):
        assert f"data.{key}: {broken}:2: not JSON" in cannot_run(runnable, f"data.{key}={broken}")
        assert f"data.{key}: {tmp_path}/no.jsonl: there is no" in cannot_run(
            runnable, f"data.{key}={tmp_path}/no.jsonl"
        )
    message = cannot_run(runnable, "data.prompt_key=quesion")
    assert "train.jsonl:1: has no key 'quesion'" in message
    assert "keys:    question, answer" in message
    assert "data.prompt_key=question" in message
    assert "data.answer_key=answer" in cannot_run(runnable, "data.answer_key=answers")


def test_run_folder_that_cannot_be_written(runnable: Path) -> None:
    message = cannot_run(runnable, f"run.dir={runnable}")  # a file
    assert "cannot be written" in message
    assert "run.dir" in message
    assert "cannot be written" in cannot_run(runnable, "run.dir=/proc/none")
    for name in ("''", "..", "a/b"):
        assert "run.name = " in cannot_run(runnable, f"run.name={name}")


# -------------------------------------------------------------------------------------------------------- commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_check_command(runnable: Path) -> None:
    good = command("-m", "megasync.config.check", str(runnable), "--num-ranks", "2", "engine.parallel.tensor=2")
    assert (good.returncode, good.stderr) == (0, "")
    bad = command("-m", "megasync.config.check", str(runnable), "engine.wrap=fsdp2")
    assert bad.returncode == 2
    assert bad.stderr.startswith("engine.wrap = 'fsdp2'")
    assert "Traceback" not in bad.stderr


def test_main_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, main_errors():
        raise ConfigError("run.steps = 0: out of range")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "run.steps = 0: out of range\n"
    with pytest.raises(KeyError), main_errors():
        raise KeyError("a mistake of ours")


def test_no_torch_is_imported() -> None:
    names = ["config.check", "reporting.log", "config.model_folder", "report", "rollouts.reward", "train"]
    code = f"import sys, {', '.join('megasync.' + name for name in names)}; assert 'torch' not in sys.modules"
    done = command("-c", code)
    assert done.returncode == 0, done.stderr
