"""Planned memory beside that of real ranks on CPUs, and of a large model on 128 GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import run_ranks

from engine.attention.core import CoreAttention
from engine.batch.packed import PackedSequences, Routing
from engine.config import DTYPE_BYTES, EngineConfig, ModelConfig
from engine.model import build, lora
from engine.objective import logits
from megasync.models.model_shape import SHAPES
from megasync.tools.plan.meta import activations
from megasync.tools.plan.meta.activations import trace
from megasync.tools.plan.meta.stand_ins import attend_grouped
from megasync.tools.plan.memory import sharded_passes, state_bytes
from megasync.tools.plan.meta.ranks import build_rank, world
from megasync.tools.plan.meta.tracker import Tracker
from megasync.tools.plan.layout import Grid

ROOT = Path(__file__).resolve().parents[4]
CASES: list[Any] = [
    ("tiny", {"wrap": "ddp"}),
    pytest.param("tiny", {"wrap": "megatron_fsdp"}, marks=pytest.mark.long),
    ("tiny", {"wrap": "megatron_fsdp", "gradient_dtype": "bfloat16"}),
    pytest.param("tiny", {"wrap": "ddp", "dtype": "float32"}, marks=pytest.mark.long),
    ("tiny", {"wrap": "ddp", "parallel": {"tensor": 2, "sequence": True}}),
    ("tiny", {"wrap": "ddp", "parallel": {"pipeline": 2}}),
    ("tiny", {"wrap": "megatron_fsdp", "lora": {"rank": 8}}),
    ("tiny-moe", {"wrap": "ddp", "parallel": {"expert": 2}}),
]
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def attention_on_cpus(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Which meta tensors do not choose; plain products where values are smaller than keys."""
    if value.shape[-1] != query.shape[-1]:
        return REAL_ATTENTION(query, key, value, attn_mask=attn_mask, **options)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, bool(options.get("is_causal")), attn_mask=attn_mask, scale=options.get("scale"))[0]


REAL_ATTENTION = F.scaled_dot_product_attention
CPU_KERNELS = [(CoreAttention, "_packed", attend_grouped), (F, "scaled_dot_product_attention", attention_on_cpus)]


def write_model(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize(("model", "keys"), CASES)
def test_counts_and_state_are_those_of_real_ranks(model: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Within 1 %: the wraps pad their buffers."""
    folder = write_model(tmp_path / model, SHAPES[model].hf_config(64))
    keys = {**keys, "fusions": "none"}
    dtype = keys.pop("dtype", "bfloat16")
    engine = EngineConfig.model_validate(keys)
    arguments = {"model": {"path": str(folder), "dtype": dtype}, "keys": keys}
    for real in run_ranks(2, "tests.megasync.tools.plan.plan_ranks:state", arguments):
        grid = Grid(2, *(getattr(engine.parallel, name) for name in GRID))
        with world(2, grid.stage_rank(real["stage"]), engine.parallel):
            rank = build_rank(ModelConfig.model_validate(arguments["model"]), engine)
        assert rank.counts == real["counts"]
        planned, kinds = state_bytes(rank.counts, engine, dtype, grid), real["state"]
        stays = keys["wrap"] == "megatron_fsdp"  # so small a model stays gathered
        gathered = DTYPE_BYTES[dtype] * rank.counts.whole if stays else 0
        assert sum(planned.values()) + gathered == pytest.approx(sum(kinds.values()), rel=0.01), (planned, kinds)
        assert planned["gradients"] == pytest.approx(kinds["gradients"], rel=0.01)


GRID = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")


@pytest.mark.parametrize("unit", [150_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_passes_of_real_ranks_under_megatron_fsdp_take_what_is_planned(unit: int, tmp_path: Path) -> None:
    """Gradients wait for their reduction, those of embeddings and output layer as long as the backward pass takes."""
    fields = SHAPES["tiny"].hf_config(512) | {"num_hidden_layers": 12, "vocab_size": 4096, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "model", fields)
    keys = {
        "wrap": "megatron_fsdp",
        "fusions": "none",
        "recompute": "full",
        "tokens_per_microbatch": 512,
        "logits_chunk_tokens": 64,
        "overrides": {"suggested_communication_unit_size": unit},
    }
    model, engine = {"path": str(folder), "dtype": "bfloat16"}, EngineConfig.model_validate(keys)
    real = run_ranks(2, "tests.megasync.tools.plan.plan_ranks:passes", {"model": model, "keys": keys})[0]
    with world(2, 0, engine.parallel):
        rank = build_rank(ModelConfig.model_validate(model), engine)
        found = trace(rank, engine, (128,) * 4, kernels=CPU_KERNELS)
    planned = sharded_passes(rank.counts, found, engine, "bfloat16")
    del planned["layers, gathered"]  # views of parameters, which are not counted in the real ranks
    assert sum(planned.values()) == pytest.approx(real, rel=0.05), planned


@pytest.mark.long
def test_a_large_model_on_128_gpus(tmp_path: Path) -> None:
    """Through the command, with no weights and little host memory; every parameter is on some rank."""
    model = write_model(tmp_path / "model", QWEN3_235B)
    keys = [
        f"model.path={model}",
        "engine.wrap=megatron_fsdp",
        "engine.recompute=full",
        "engine.parallel={tensor: 4, expert: 8, pipeline: 4, sequence: true, pipeline_layers: [23, 24, 24, 23]}",
        "rollout={placement: colocated, tensor_parallel: 8, replicas: 16, max_new_tokens: 4096, max_model_len: 8192}",
        f"run.dir={tmp_path}",
    ]
    (tmp_path / "config.yaml").write_text("data: {batch_size: 128}\n")
    program = (
        "import resource, sys; from megasync.tools.plan.command import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024); sys.exit(code)"
    )
    flags = ["--gpus", "128", "--gpu", "h200", "--json", str(tmp_path / "plan.json")]
    command = [sys.executable, "-c", program, str(tmp_path / "config.yaml"), *keys, *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) < 4 * 2**30
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["parameters"] == pytest.approx(235.09e9, rel=0.002) and len(plan["trainer"]) == 4
    state = sum(stage["parts"][kind] for stage in plan["trainer"] for kind in ("weights", "gradients", "optimizer"))
    assert state * 32 == pytest.approx(18 * 235.09e9, rel=0.01), "a stage's 32 ranks share its 18 bytes a parameter"


@pytest.mark.parametrize(("shapes", "dtype", "keys"), [
    ("tiny", "float32", {}),
    ("tiny", "bfloat16", {"recompute": "full"}),
    ("tiny", "float32", {"recompute": "selective"}),
    ("tiny", "bfloat16", {"lora": {"rank": 8}}),
    ("tiny-moe", "bfloat16", {}),
    ("tiny-moe", "bfloat16", {"recompute": "selective"}),
])  # fmt: skip
def test_what_is_traced_for_a_cpu_is_what_a_cpu_holds(shapes: str, dtype: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """The same micro-batch through a model with memory, whose storages are counted in the same way."""
    folder = write_model(tmp_path / "model", SHAPES[shapes].hf_config(64))
    engine = EngineConfig.model_validate({**keys, "wrap": "ddp", "fusions": "none"})
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype})
    with world(1, 0, engine.parallel):
        found = trace(build_rank(model, engine), engine, (24, 24, 24), kernels=CPU_KERNELS)
        held, peak = measure_on_cpu(model, engine, (24, 24, 24))
    assert found.held == pytest.approx(held, rel=0.01) and found.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(("length", "kernels", "keys"), [
    (8, None, {}),
    (8, CPU_KERNELS, {"recompute": "full"}),
    (256, None, {"recompute": "selective"}),
    (256, None, {"lora": {"rank": 8}}),
])  # fmt: skip
def test_a_few_layers_say_what_all_take(
    length: int, kernels: list[Any] | None, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few tokens the peak of few layers is where large, tied embeddings get their gradient; of many layers it is not."""
    fields = SHAPES["tiny"].hf_config(8192) | {"num_hidden_layers": 24, "tie_word_embeddings": True}
    engine = EngineConfig.model_validate({**keys, "wrap": "ddp", "fusions": "none"})
    model, found = ModelConfig(path=str(write_model(tmp_path / "model", fields)), dtype="float32"), []
    for few in (activations.FEW_LAYERS, (24, 24)):
        monkeypatch.setattr(activations, "FEW_LAYERS", few)
        with world(1, 0, engine.parallel):
            found.append(trace(build_rank(model, engine), engine, (length, length), kernels=kernels))
    some, whole = found
    assert (some.held, some.head_end) == (whole.held, whole.head_end)
    assert astuple(some) == pytest.approx(astuple(whole), rel=0.001)


def measure_on_cpu(model: ModelConfig, engine: EngineConfig, lengths: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that wait for the backward pass, and the most of all."""
    bridge = build.build_mbridge(model, engine)
    (chunk,) = build.build_chunks(bridge, None)
    if engine.lora.rank:
        lora.add_adapters([chunk], engine.lora, 0)
    for parameter in filter(lambda each: each.requires_grad, chunk.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    tokens, sequences = torch.arange(sum(lengths))[None], PackedSequences.from_lengths(list(lengths), torch.device("cpu"))
    if bridge.config.num_moe_experts:
        sequences.routing = Routing(torch.ones(sum(lengths), dtype=torch.bool), 1.0)
    tracker, read = Tracker(), logits.LogProbs(1.0, use_fused=False)
    tracker.leave_out([*chunk.parameters(), *chunk.buffers(), tokens, *sequences.length_groups[0][0], sequences.length_groups[1]])
    with tracker.counting_resizes(), tracker:
        loss = read(chunk(tokens, tokens, None, packed_seq_params=sequences), tokens)[0].sum()
        held = tracker.bytes_now
        loss.backward()
    return held, tracker.peak_bytes


def test_experts_in_float32_are_traced_as_those_in_bfloat16(tmp_path: Path) -> None:
    """torch has grouped products of meta tensors in bfloat16 alone."""
    folder, engine = write_model(tmp_path / "model", SHAPES["tiny-moe"].hf_config(64)), EngineConfig(wrap="ddp", fusions="none")
    held = {}
    for dtype in ("bfloat16", "float32"):
        with world(1, 0, engine.parallel):
            held[dtype] = trace(build_rank(ModelConfig(path=str(folder), dtype=dtype), engine), engine, (32, 32)).held
    assert held["bfloat16"] < held["float32"] < 2.05 * held["bfloat16"]
