"""What tests/engine/moe/test_experts.py runs: grouped experts against megatron-core's sequential ones, and experts over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bridge.export.source import whole_tensors
from engine.moe import experts
from engine.runtime import parallel
from engine.config import ParallelConfig
from engine.engine import Engine
from bench.equivalence.measure import leave_groups
from tests.engine.engine_cases import engine, exporter, log_probs, random_samples

# a step of AdamW that subtracts the gradient g from a weight, but for a factor 1 / (1 + |g| / epsilon)
GRADIENT_STEP = {
    "learning_rate": 1e4,
    "epsilon": 1e4,
    "beta1": 0.0,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "clip_grad_norm": 0.0,
}


def against_sequential(device: str, dtype: str, tokens_per_expert: list[int]) -> dict[str, float]:
    """Largest differences of outputs and gradients to megatron-core's SequentialMLP, each over the largest value."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel.initialize(ParallelConfig(), seed=0)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_moe_experts=len(tokens_per_expert), moe_ffn_hidden_size=32,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, params_dtype=getattr(torch, dtype),
        bf16=dtype == "bfloat16", use_cpu_initialization=device == "cpu", gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )  # fmt: skip
    groups = get_default_pg_collection()
    spec = get_moe_module_spec(use_te=False, num_experts=len(tokens_per_expert)).submodules.experts
    sequential = SequentialMLP(len(tokens_per_expert), config, spec.submodules, pg_collection=groups).to(device)
    grouped = experts.GroupedExperts(len(tokens_per_expert), config, pg_collection=groups)
    state, counts = grouped.state_dict(), torch.tensor(tokens_per_expert)
    for index, expert in enumerate(sequential.local_experts):
        for name in ("linear_fc1", "linear_fc2"):
            state[f"{name}.weight{index}"].copy_(getattr(expert, name).weight.detach())
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(int(counts.sum()), 64, generator=generator).to(device, getattr(torch, dtype))
    probs = torch.rand(int(counts.sum()), generator=generator).to(device)
    results = []
    for module in (sequential, grouped):
        tokens, weights = given.clone().requires_grad_(), probs.clone().requires_grad_()
        output, _ = module(tokens, counts, weights)
        output.float().square().sum().backward()
        results.append({"output": output, "tokens": tokens.grad, "probs": weights.grad})
    for name in ("linear_fc1", "linear_fc2"):
        results[0][name] = torch.cat([getattr(expert, name).weight.grad for expert in sequential.local_experts])
        results[1][name] = getattr(grouped, name).weight.grad
    leave_groups()
    worst = {name: _worst(results[1][name], results[0][name]) for name in results[0]}
    empty = [index for index, count in enumerate(tokens_per_expert) if not count]
    gradients = grouped.linear_fc1.weight.grad.view(len(tokens_per_expert), -1)
    return {**worst, "empty": float(gradients[empty].abs().sum())}


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return float(found.shape != expected.shape)
    return float((found - expected).detach().abs().max()) / (float(expected.detach().abs().max()) or 1.0)


def gradients(built: Engine, num_samples: int) -> tuple[dict[str, torch.Tensor], int, float]:
    """Of one step of GRADIENT_STEP: gradients by Hugging Face's names, on the sender; micro-batches; the gradient norm."""
    source = exporter(built)
    before = {name: tensor.clone() for name, tensor in whole_tensors(source)}
    minibatches = built.prepare(random_samples(num_samples, seed=3))
    norm = built.update(minibatches)["grad_norm"]
    found = {name: before[name] - tensor for name, tensor in whole_tensors(source)}
    return found, len(minibatches[0].microbatches), norm


def exports_everywhere(path: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    """Of each case the tensors that this rank, whether a sender or not, would send with other values than on disk."""
    disk, results = load_file(Path(path) / "model.safetensors"), []
    for case in cases:
        with engine(path, name="sft", **case) as built:
            tensors = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built, on_all_ranks=True))}
        results.append(sorted(name for name in disk if name not in tensors or not torch.equal(tensors[name], disk[name])))
    return results


def mbridge_exports(path: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    """Of each case the tensors that mbridge's own export, which the bench compares with ours, gives with other values."""
    from bench.sync.methods import mbridge_export

    results = []
    for case in cases:
        with engine(path, name="sft", **case) as built:
            ours = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built, on_all_ranks=True))}
            theirs = {name: tensor.detach().clone() for name, tensor in mbridge_export(built)}
        differing = [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
        results.append(sorted([*differing, *(ours.keys() ^ theirs.keys())]))
    return results


def gradients_against_folder(path: str, folder: str, cases: list[dict[str, Any]], num_samples: int) -> list[dict[str, Any]]:
    """The gradients of each case: written to the folder where it is empty, else compared with what is in it."""
    results = []
    for case in cases:
        file = Path(folder) / f"gradients{'_lora' * ('lora' in case)}.safetensors"
        with engine(path, name="sft", optimizer=GRADIENT_STEP, **case) as built:
            found, num_microbatches, norm = gradients(built, num_samples)
            values = log_probs(built, random_samples(6, seed=9))
            shards = [p for chunk in built.chunks for name, p in chunk.named_parameters() if "experts.linear_fc1" in name]
            num_local = shards[0].shape[0] * built.layout.tensor_size // (2 * built.model_config.moe_ffn_hidden_size)
        worst = {}
        if not file.exists():
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)
        elif found:
            expected = load_file(file)
            worst = {name: float((tensor - expected[name]).abs().max()) for name, tensor in found.items()}
        reported = {"worst": worst, "norm": norm, "num_microbatches": num_microbatches, "num_local_experts": num_local}
        results.append({**reported, "log_probs": [value.tolist() for value in values]})
    return results
