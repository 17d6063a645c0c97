"""Faults on either side are found at their module, with real vLLM and megatron-core: one replica serves all.

python -m pytest tests/runs/test_bisect.py
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.generation import GenerationRequest
from megasync.tools.bisect.choose import choose
from megasync.tools.bisect.command import for_one_replica
from megasync.tools.bisect.compare import Passes, trace_replica
from megasync.tools.bisect.response import Response
from megasync.config.load import load_config, save_config
from megasync.tools.export.command import export
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config
from tests.megasync.test_export_cli import adapter_run
from tests.runs.bisect_pool import FaultyPool
from tests.support.config_files import write_runnable
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu, pytest.mark.timeout(400)]
RESPONSE = Response(tuple(3 + 7 * n % 100 for n in range(40)), tuple(3 + 11 * n % 100 for n in range(20)), "given")
BLOCK, NORM = 32, "model.layers.1.input_layernorm"
LINEARS = ["q_proj", "v_proj", "o_proj", "down_proj"]
OF_TRAINER = {  # the module with each fault
    "transposed head": "model.layers.1.self_attn.q_proj",
    "reordered head": "model.layers.2.self_attn.q_proj",
    "eps": "model.layers.2.input_layernorm",
    "rope theta": "model.layers.0.self_attn.rotary_emb.q",
    "missing q-norm": "model.layers.1.self_attn.q_norm",
    "stale layer": "model.layers.3.input_layernorm",
    "one element": "model.layers.0.self_attn.o_proj",
    "bf16 softmax": "model.layers.2.self_attn.attn",
    "temperature": "log_probs",
    "window": "model.layers.1.self_attn.attn",
    "gate and up": "model.layers.2.mlp.gate_proj",
    "LoRA scale": "model.layers.1.mlp.down_proj",
}
OF_REPLICA = {
    "stale KV": "model.layers.0.self_attn.attn",
    "eps": NORM,
    "rope theta": "model.layers.0.self_attn.rotary_emb.q",
    "one element": NORM,
    "temperature": "log_probs",
    "skipped layer": "model.layers.2.input_layernorm:in",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose checkpoint is the other run's adapter merged into its base model."""
    root = tmp_path_factory.mktemp("bisect")
    lora_run = adapter_run(root / "lora", "qwen3", "float32", target_modules=LINEARS)
    named = ["run.name=rl", "model.dtype=float32", "rollout.temperature=0.7"]
    export(lora_run, root / "merged", merge=True)
    config = load_config(write_runnable(root), [*named, f"model.path={root / 'merged'}"])
    run = config.run.folder
    shutil.copytree(root / "merged", run / "checkpoints" / "step_00000010" / "hf")
    save_config(config, run / "config.yaml")
    return run, lora_run


@pytest.fixture(scope="module")
def passes(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Passes]:
    """Traces of a replica: sound, and with a fault each."""
    scratch = tmp_path_factory.mktemp("traces")
    arguments = {"worker_extension_cls": "tests.runs.bisect_worker.FaultyWorkerExtension", "block_size": BLOCK}
    config = for_one_replica(choose(runs[0], scratch, None, ["rollout.max_model_len=128"]).served)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine_arguments": arguments})})
    stop_ray = start_ray("local")
    pool = FaultyPool.start(replica_config(config), 1)
    try:
        return all_passes(pool, scratch)
    finally:
        pool.close()
        assert stop_ray is not None
        stop_ray()


def all_passes(pool: FaultyPool, scratch: Path) -> dict[str, Passes]:
    def trace(name: str) -> None:
        (scratch / name).mkdir()
        found[name] = trace_replica(pool, RESPONSE, 0.7, scratch / name)
        pool.forget_prefixes()

    found: dict[str, Passes] = {}
    trace("sound")
    former = pool.call("tests_set", NORM, "variance_epsilon", 1e-5)
    trace("eps")
    pool.call("tests_set", NORM, "variance_epsilon", former)
    pool.call("tests_scale", f"{NORM}.weight", 2.0, 9)
    trace("one element")
    pool.call("tests_scale", f"{NORM}.weight", 0.5, 9)
    pool.call("tests_forget_temperature", True)
    trace("temperature")
    pool.call("tests_forget_temperature", False)
    pool.call("tests_turn", 20000.0)
    trace("rope theta")
    pool.call("tests_turn", 10000.0)
    pool.call("tests_skip", 2, True)
    trace("skipped layer")
    pool.call("tests_skip", 2, False)
    keys = "model.layers.0.self_attn.k_norm.weight"
    pool.call("tests_scale", keys, 2.0)  # the weights before an update, with which a prompt is read
    pool.generate([GenerationRequest(RESPONSE.prompt_ids, max_new_tokens=1)]).result()
    pool.call("tests_scale", keys, 0.5)
    trace("stale KV")
    trace("sound again")
    return found


@pytest.fixture(scope="module")
def of_trainer(runs: tuple[Path, Path], passes: dict[str, Passes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = {"run": runs[0], "lora_run": runs[1], "passes": passes["sound"], "response": RESPONSE}
    (found,) = run_ranks(1, "tests.runs.bisect_cases:trainer_faults", {**arguments, "scratch": tmp_path_factory.mktemp("a")})
    return dict(found)


@pytest.fixture(scope="module")
def of_replica(runs: tuple[Path, Path], passes: dict[str, Passes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = {"run": runs[0], "passes": passes, "response": RESPONSE, "scratch": tmp_path_factory.mktemp("b")}
    (found,) = run_ranks(1, "tests.runs.bisect_cases:replica_faults", arguments)
    return dict(found)


def test_sound_sides_differ_by_rounding_alone(of_trainer: dict[str, Any], of_replica: dict[str, Any]) -> None:
    sound = [of_trainer["none"], of_trainer["sound again"], of_trainer["adapter"], of_replica["sound"], of_replica["sound again"]]
    assert all(each["culprit"] is None and each["worst"] < 0.7 and each["gap"] < 1e-5 for each in sound), sound
    text = "\n".join(of_trainer["text"]["lines"])
    assert "nothing but rounding" in text
    assert re.search(r"with mlp.act_fn \(4 modules\) in float64", text)


@pytest.mark.parametrize("fault", OF_TRAINER)
def test_a_fault_of_the_trainer_is_found(of_trainer: dict[str, Any], fault: str) -> None:
    culprit = of_trainer[fault]["culprit"]
    assert (culprit.site, culprit.side) == (OF_TRAINER[fault], "trainer"), of_trainer[fault]


@pytest.mark.parametrize("fault", OF_REPLICA)
def test_a_fault_of_the_replica_is_found(of_replica: dict[str, Any], fault: str) -> None:
    culprit = of_replica[fault]["culprit"]
    assert (culprit.site, culprit.side) == (OF_REPLICA[fault], "replica"), of_replica[fault]
    assert of_replica[fault]["stale"] == (fault == "stale KV")


def test_the_extent_of_a_fault_is_found(of_trainer: dict[str, Any], of_replica: dict[str, Any]) -> None:
    tokens = len(RESPONSE.ids) - 1
    assert of_replica["skipped layer"]["culprit"].num_uncalled == tokens
    assert of_trainer["one element"]["culprit"].element == (5,) and of_trainer["one element"]["culprit"].wrong_elements == 1
    assert of_replica["one element"]["culprit"].element == (9,)
    assert of_trainer["transposed head"]["culprit"].element[0] == 2, "the head"
    window = of_trainer["window"]["culprit"]
    assert (window.wrong_tokens, window.first_wrong) == (tokens - 16, 16), "where the first token leaves the window"
    assert {f"model.layers.3.{name}_layernorm" for name in ("input", "post_attention")} <= set(of_trainer["stale layer"]["wrong"])


def test_computing_the_culprit_in_float64_closes_the_gap(of_trainer: dict[str, Any]) -> None:
    found = of_trainer["missing q-norm"]
    assert found["gap"] > 100 * found["swapped"]


def test_the_text_and_the_object_of_a_fault(of_trainer: dict[str, Any]) -> None:
    found, where = of_trainer["missing q-norm"], "model.layers.1.self_attn.q_norm"
    text = "\n".join(found["lines"])
    assert f"first wrong module: {where} of the trainer (RMSNorm)\n  worst at:    token " in text
    assert re.search(rf"with {where} \(1 modules\) in float64 in the trainer: .* a share of (99|100)%", text)
    as_object = json.loads(found["json"])
    assert (as_object["culprit"]["site"], as_object["culprit"]["operation"]) == (where, "RMSNorm")
    growth = {each["site"]: each["relative"] for each in as_object["growth"]}
    assert growth["model.layers.0.mlp.down_proj"] < 1e-5 and growth["lm_head"] > 1e-2 and len(growth) == 4 * 17 + 5
