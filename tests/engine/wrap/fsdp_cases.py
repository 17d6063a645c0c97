"""What tests run on their ranks to see Megatron-FSDP's gradients, its faults without our work-arounds, and those of torch."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import einops
import torch
import torch.distributed as dist

from engine.runtime import gloo, parallel, workarounds
from engine.wrap import table
from engine.config import EngineConfig, ParallelConfig
from engine.runtime.megatron import parallel_state as mpu
from bench.equivalence.measure import leave_groups
from tests.engine.engine_cases import engine, random_samples

UNCLIPPED = {"clip_grad_norm": 0.0}


def gradient_norms(cases: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Losses and unclipped gradient norms of each case, and its least number of micro-batches in a step on this rank."""
    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), name="sft", optimizer=UNCLIPPED, **case) as built:
            history, num_microbatches = [], []
            for step in range(num_steps):
                minibatches = built.prepare(random_samples(24, seed=step))
                num_microbatches += [len(minibatch.microbatches) for minibatch in minibatches]
                metrics = built.update(minibatches)
                history.append((metrics["loss/sft"], metrics["grad_norm"]))
        results.append({"history": history, "num_microbatches": min(num_microbatches)})
    return results


def pipeline_without_work_arounds(path: str) -> dict[str, str]:
    """What upstream's own mesh and gradients' reduction say under two stages."""
    adapter = as_upstream("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    finalize = as_upstream("megatron.core.distributed.finalize_model_grads")
    said = {"mesh": "", "gradients": ""}
    with engine(path, wrap="megatron_fsdp", pipeline=2, name="sft") as built:
        try:
            adapter._get_dp_tp_mesh(mpu.get_data_parallel_group(), mpu.get_tensor_model_parallel_group())
        except einops.EinopsError as error:
            said["mesh"] = str(error)
        built.model_config.finalize_model_grads_func = finalize.finalize_model_grads
        try:
            built.update(built.prepare(random_samples(8, seed=0)))
        except AttributeError as error:
            said["gradients"] = str(error)
    return said


def as_upstream(name: str) -> Any:
    """A second copy of a module, without what our code has changed in the first."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Layers(torch.nn.Module):
    """A dense layer and one that Megatron takes for experts of this rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in ("dense", "experts")})
        self.mlp["experts"].weight.allreduce = False  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp["experts"](torch.tanh(self.mlp["dense"](inputs)))
        return out


def gradients_of_experts(num_microbatches: int) -> dict[str, dict[str, float]]:
    """Two ranks, each with its own experts: norms of Megatron-FSDP's gradients over torch's, with our work-around and without."""
    parallel.initialize(ParallelConfig(expert=2), seed=0)
    ours = _gradient_ratios(num_microbatches)
    with mock.patch.object(workarounds, "scale_gradients_once"):
        theirs = _gradient_ratios(num_microbatches)
    leave_groups()
    return {"ours": ours, "upstream": theirs}


def _gradient_ratios(num_microbatches: int) -> dict[str, float]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    overrides = {"suggested_communication_unit_size": 1000}  # upstream works it out of the number of transformer layers
    settings = EngineConfig(wrap="megatron_fsdp", overrides=overrides)
    module = table.FsdpChunk(config, table.ddp_config(settings), Layers()).module
    plain = Layers()
    generator = torch.Generator().manual_seed(dist.get_rank())
    module.zero_grad_buffer()
    for number in range(num_microbatches):
        inputs = torch.randn(4, 8, generator=generator)
        with nullcontext() if number == num_microbatches - 1 else module.no_sync():
            module(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
    module.finish_grad_sync()
    dense, experts = (parameter.grad / 2 for parameter in plain.parameters())  # means over two ranks
    dist.all_reduce(dense)
    named = module.param_and_grad_buffer.optimizer_named_parameters
    shards = {name.split(".")[-2]: parameter.grad.to_local() for name, parameter in named}
    squared = shards["dense"].square().sum()
    dist.all_reduce(squared)
    return {"dense": float(squared.sqrt() / dense.norm()), "experts": float(shards["experts"].norm() / experts.norm())}


def threads_of_gloo(num_groups: int) -> tuple[int, int, int]:
    """How many there are, with so many more groups of torch's own, and with as many that share a device."""

    def count() -> int:
        return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in Path("/proc/self/task").iterdir())

    dist.init_process_group("gloo")
    counts, groups = [count()], []
    for share in (lambda: None, gloo.share_device):
        share()
        groups += [dist.new_group(backend="gloo") for _ in range(num_groups)]
        counts.append(count())
    first, own, shared = counts
    return first, own, shared
