"""Rollouts of a run: placements, transports, vLLM's own arguments, rewards and Ray's address. Real files throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.vllm.serving import arguments as vllm_arguments
from megasync.checks.check import check_config
from megasync.checks.settings import check_layout
from megasync.config.load import load_config, save_config
from megasync.config.errors import ConfigError
from megasync.models.folder import model_shape
from megasync.checks.data import ask_vllm
from megasync.rewards.resolve import require_packages
from tests.support.gpus import pretend_gpus
from tests.support.tiny_models import DELTA_SERVED, write_tiny_model
from tests.support.config_files import cannot_run, command, refusal, refused, write, write_model, write_runnable


def test_transports_that_cannot_be(runnable: Path) -> None:
    check_config(load_config(runnable, ["sync.transport=nccl"]), 2)
    with pytest.raises(ConfigError, match=r"sync.transport = 'rdma'[\s\S]*auto, shm, nccl, ipc"):
        load_config(runnable, ["sync.transport=rdma"])
    error = refusal(runnable, "sync.transport=ipc")
    assert (error.key, error.value, error.remedy) == ("sync.transport", "ipc", "write sync.transport=auto")


def test_placements_that_cannot_be(runnable: Path) -> None:
    colocated = "rollout.placement=colocated"
    good = [colocated, "sync.transport=ipc", "rollout.replicas=2", "rollout.offload_trainer=[optimizer]"]
    check_config(load_config(runnable, good), 2)
    for override, remedy in {
        "sync.transport=nccl": "write sync.transport=auto",
        "sync.transport=delta": "write sync.transport=auto",
        "rollout.max_staleness=1": "write rollout.max_staleness=0",
        "rollout.replicas=3": "write rollout.replicas=2 or start 3 ranks",
    }.items():
        error = refusal(runnable, colocated, override)
        assert (error.key, error.remedy) == (override.partition("=")[0], remedy)
    with pytest.raises(ConfigError, match=r"rollout.offload_trainer[\s\S]*parameters, gradients, optimizer"):
        load_config(runnable, ["rollout.offload_trainer=[weights]"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("max_num_batched_token=64", "write rollout.engine_arguments.max_num_batched_tokens"),
        ("max_num_seqs=4", "write rollout.max_num_seqs instead"),
        ("model=x", "write model.path instead"),
        ("worker_extension_cls=a.B", "leave"),
        ("logprobs_mode=raw_logprobs", "leave"),
        ("pipeline_parallel_size=2", "leave"),
        ("disable_sliding_window=true", "leave"),
        ("quantization=fp8", "write rollout.dtype instead"),
        ("max_num_batched_tokens=many", "write a value of that kind"),
        ("async_scheduling=1", "write a value of that kind"),
        ("stream_interval=true", "write a value of that kind"),
        ("_api_process_count=2", "leave"),
        ("kv_sharing_fast_prefill=true", "leave rollout.engine_arguments.kv_sharing_fast_prefill out, or write sync.canary_"),
    ],
)
def test_arguments_of_vllm_that_cannot_be(runnable: Path, override: str, remedy: str) -> None:
    error = refusal(runnable, f"rollout.engine_arguments.{override}")
    assert error.key == f"rollout.engine_arguments.{override.partition('=')[0]}" and error.remedy.startswith(remedy)


def test_vllm_itself_is_asked_before_a_check_says_that_it_can_run(runnable: Path) -> None:
    ask_vllm(load_config(runnable, ["rollout.max_model_len=1280", "rollout.engine_arguments.max_num_batched_tokens=4096"]))
    config = load_config(runnable, ["rollout.max_model_len=1280", "rollout.engine_arguments.max_num_batched_tokens=8"])
    check_config(config, 2)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens\): vLLM refuses them\n  vllm says: [\s\S]*1280"):
        ask_vllm(config)


@pytest.mark.parametrize("layers", [["model.exact=true"], ["rollout.dtype=fp8", "model.dtype=bfloat16"]])
def test_vllm_is_asked_about_layers_of_ours(runnable: Path, layers: list[str]) -> None:
    arguments = ["rollout.max_model_len=1280", "rollout.engine_arguments.max_num_batched_tokens=4096"]
    ask_vllm(load_config(runnable, [*layers, *arguments]))


def test_arguments_of_vllm(runnable: Path) -> None:
    given = {"max_num_batched_tokens": 64, "async_scheduling": None, "kv_cache_dtype": "auto", "attention_config": {}}
    overrides = [f"rollout.engine_arguments={json.dumps(given)}"]
    check_config(load_config(runnable, overrides), 2)
    assert load_config(runnable, overrides).rollout.engine_arguments == given
    check_config(load_config(runnable, ["algorithm.name=sft", "rollout.engine_arguments.model=x"]), 2)


def test_arguments_of_vllm_where_there_is_no_vllm_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that only submits: what a key of ours sets is refused there too."""
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda _: None)
    vllm_arguments.fields.cache_clear()
    try:
        assert vllm_arguments.refusal("max_num_batched_token", 64) is None
        assert vllm_arguments.refusal("max_num_seqs", 64) == "rollout.max_num_seqs sets it"
    finally:
        vllm_arguments.fields.cache_clear()


def test_heads_that_vllm_has_no_attention_for_on_cpus(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first token its engine core would die, and each that is started in its place."""
    folder = write_model(Path(load_config(runnable, []).model.path), head_dim=16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = refusal(runnable)
    assert (error.key, error.value) == ("head_dim", "16") and "algorithm.name=sft" in error.remedy
    pretend_gpus(monkeypatch, runnable.parent, 4)
    check_layout(load_config(runnable, []), model_shape(folder), 2)


def test_what_vllm_lacks_on_gpus(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ["engine.lora.rank=4", "engine.lora.sync=adapter", "model.dtype=float32"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_config(load_config(runnable, adapter), 2)
    pretend_gpus(monkeypatch, runnable.parent, 4)
    error = refusal(runnable, *adapter)
    assert (error.key, error.value) == ("model.dtype", "float32") and "engine.lora.sync=merged" in error.remedy
    check_config(load_config(runnable, [*adapter, "model.dtype=bfloat16"]), 2)
    check_config(load_config(runnable, [*adapter, "engine.lora.sync=merged"]), 2)


@pytest.mark.parametrize(("nope", "value", "served"), [(128, 128, True), (192, 256, True), (24, 20, False)])
def test_latent_attention_that_vllm_lacks_on_gpus(tmp_path: Path, nope: int, value: int, served: bool) -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": value}
    folder = write_tiny_model(tmp_path / "latent", "deepseek_v3", tied=False, **sizes)
    runnable = write_runnable(tmp_path)
    config = load_config(runnable, [f"model.path={folder}", "rollout.max_new_tokens=16"])
    check_layout(config, model_shape(folder), 2, on_gpus=False)
    if served:
        check_layout(config, model_shape(folder), 2, on_gpus=True)
        return
    with pytest.raises(ConfigError, match=rf"v_head_dim = \({nope}, 64, {value}\)[\s\S]*\(192, 64, 256\)"):
        check_layout(config, model_shape(folder), 2, on_gpus=True)


def test_kernels_of_gated_delta_nets_are_chosen_where_they_can_run(tmp_path: Path) -> None:
    runnable, delta = write_runnable(tmp_path), write_tiny_model(tmp_path / "delta", "qwen3_5_text", **DELTA_SERVED)
    plain = load_config(runnable, ["engine.kernels=fla"])
    with pytest.raises(ConfigError, match=r"engine.kernels = fla[\s\S]*engine.kernels=auto"):
        check_layout(plain, model_shape(plain.model.path), 2, on_gpus=True)
    given = [f"model.path={delta}", "rollout.max_new_tokens=16", "engine.kernels=fla", "engine.wrap=ddp"]
    check_layout(load_config(runnable, [*given, "model.dtype=bfloat16"]), model_shape(delta), 2, on_gpus=True)
    with pytest.raises(ConfigError, match=r"engine.kernels = fla"):
        check_layout(load_config(runnable, [*given, "model.dtype=bfloat16"]), model_shape(delta), 2, on_gpus=False)
    with pytest.raises(ConfigError, match=r"engine.kernels = fla"):
        check_layout(load_config(runnable, [*given, "model.dtype=float32"]), model_shape(delta), 2, on_gpus=True)


def test_a_cache_larger_than_the_memory_of_a_host_without_gpus(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says so once it has started; the memory of GPUs is vLLM's to judge."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = refusal(runnable, "rollout.kv_cache_bytes=900TiB")
    assert (error.key, error.value) == ("rollout.kv_cache_bytes", "989560464998400")
    pretend_gpus(monkeypatch, runnable.parent, 4)
    check_config(load_config(runnable, ["rollout.kv_cache_bytes=900TiB"]), 2)


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
    wrong = {"no.such:thing": "No module named 'no'", "json:Decoder": "is not in", "json:dump": "with one argument"}
    for path, words in wrong.items():
        message = cannot_run(runnable, f"rollout.reward={path}")
        assert f"rollout.reward = '{path}'" in message and words in message
    check_config(load_config(runnable, ["rollout.reward=math:sqrt"]), 2)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("", None, "start in the folder of the module, or set PYTHONPATH"),
        (".py", "", "write {module}:f, without the file's .py"),
        ("", "import nothing_of_this_name", "until `python -c 'import {module}'` works"),
        ("", "def f(sample) return 1", "until `python -c 'import {module}'` works"),
    ],
)
def test_a_module_that_is_there_is_not_looked_for_elsewhere(
    runnable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, remedy: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = "its_rewards_" + tmp_path.name.rpartition("_")[2][-8:]
    if content is not None:
        write(tmp_path / f"{module}.py", content)
    assert remedy.format(module=module) in cannot_run(runnable, f"rollout.reward={module}{name}:f")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.reward={}", "a name, or a mapping of names to weights, is expected"),
        ("rollout.reward=[exact_match]", "a name, or a mapping of names to weights, is expected"),
        ("rollout.reward=null", "a name, or a mapping of names to weights, is expected"),
        ("rollout.reward={exact_match: .nan}", "the weight of exact_match is nan, a finite number is expected"),
        ("rollout.reward={exact_match: 1, token_count: -.inf}", "the weight of token_count is -inf, a finite number is expected"),
        ("rollout.reward={exact_match: high}", "the weight of exact_match is 'high', a finite number is expected"),
        ("rollout.reward={exact_match: true}", "the weight of exact_match is True, a finite number is expected"),
        ("rollout.reward={exact_match: 0, token_count: 0.0}", "all weights are 0"),
        ("rollout.reward_timeout_seconds=0", "out of range"),
        ("rollout.reward_timeout_seconds=.inf", "out of range"),
        ("rollout.reward_processes=0", "out of range"),
        ("rollout.reward_concurrency=0", "out of range"),
        ("rollout.reward_on_failure=skip", "stop, zero"),
    ],
)
def test_reward_keys_that_cannot_be(runnable: Path, override: str, words: str) -> None:
    message = refused(runnable, override)
    assert message.startswith(f"{override.partition('=')[0]} = ") and words in message and "remedy:" in message


def test_several_rewards(runnable: Path, tmp_path: Path) -> None:
    for text in ("{exact_match: 1, math:sqrt: -0.5}", "{exact_match: 1.0, token_count: 0}"):
        config = load_config(runnable, [f"rollout.reward={text}"])
        check_config(config, 2)
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml").rollout.reward == config.rollout.reward
    message = cannot_run(runnable, "rollout.reward={exact_match: 1, tokn_count: 1}")
    assert message.startswith("rollout.reward = 'tokn_count': there is no such reward") and "nearest: token_count" in message
    assert "dump cannot be called with one argument" in cannot_run(runnable, "rollout.reward={json:dump: 1}")
    done = command("-m", "megasync.train", "--check", str(runnable), "rollout.reward={json:dmp: 1}")
    assert done.returncode == 2 and "dmp is not in" in done.stderr and "nearest: dump" in done.stderr


def test_packages_of_our_rewards_are_looked_for(runnable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM starts: the first call of a reward comes minutes later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    message = cannot_run(runnable, "rollout.reward={exact_match: 1, reasoning_gym: 1}")
    assert message.startswith("rollout.reward = reasoning_gym: pip cannot install") and "PIP_FIND_LINKS=FOLDER" in message
    with pytest.raises(ConfigError, match=r"math_verify: needs the package math_verify[\s\S]*pip install math-verify"):
        require_packages("math_verify", lambda name: None)
    require_packages({"exact_match": 1.0, "math_verify": 0.5})


@pytest.mark.parametrize("address", ["10.0.0.1", "node:port", "http://node:8265", "node:70000", "ray://", "", "a b:1"])
def test_malformed_ray_address(runnable: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.ray_address = [\s\S]*local, auto, HOST:PORT, ray://HOST:PORT"):
        load_config(runnable, [f"rollout.ray_address='{address}'"])


def test_ray_addresses(runnable: Path) -> None:
    for address in ("local", "auto", "node-1:6379", "10.0.0.1:6379", "ray://head.cluster:10001", "[::1]:6379"):
        assert load_config(runnable, [f"rollout.ray_address='{address}'"]).rollout.ray_address == address
