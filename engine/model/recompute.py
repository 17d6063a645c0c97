"""Selective recompute: which parts of a layer keep no activations and are computed again in the backward pass.

megatron-core has them by `recompute_modules`; `mlp_act`, the activation between the two linears of an MLP or of the experts, is
ours: the second linear's input is freed after it, and computed again from the first one's output.
Source: megatron-core 0.16.1 tensor_parallel/random.py:CheckpointWithoutOutput. Leaves out full recompute of whole layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine import rules
from engine.runtime import workarounds
from engine.config import EngineConfig
from engine.moe.experts import ExpertLayer, GroupedExperts
from engine.runtime.megatron import MLP, bias_swiglu_impl, tensor_parallel


def config_arguments(config: EngineConfig) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig."""
    if config.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.recompute == "none":
        return {}
    workarounds.use_checkpoints_without_fp8()
    modules = [name for name in config.recompute_modules if name != "mlp_act"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def check(hf_config: Any, config: EngineConfig) -> None:
    """ValueError for what does not go with the family."""
    if found := rules.recompute_problem(hf_config.model_type, config):
        raise ValueError(str(found))


def use_recomputed_activation(layer: Any) -> None:
    """Put MLPs that give the activation's result up into megatron-core's spec of a transformer layer."""
    mlp = layer.submodules.mlp
    if mlp.module is MLP:
        mlp.module = RecomputingMLP
    elif mlp.module is ExpertLayer:
        mlp.submodules = dataclasses.replace(mlp.submodules, experts=_RecomputingExperts)


def keep_inputs_on_host(decoder: torch.nn.Module) -> None:
    """With full recompute, keep the inputs of a decoder's layers in host memory until the backward pass.

    The copies are in order with what the device computes, which nothing has to wait for. Parameters, and what wants no
    gradient, such as the rotary embedding that all layers share, stay where they are.
    """
    inner = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device):
            return inner(*args, **kwargs)

    decoder.forward = forward


def _to_host(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.device]:
    if not tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True), tensor.device


def _to_device(kept: torch.Tensor | tuple[torch.Tensor, torch.device]) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept[0].to(kept[1], non_blocking=True)


class RecomputingMLP(MLP):  # type: ignore[misc]
    """megatron-core's, without what lies between its linears in memory."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_and_up, _bias = self.linear_fc1(hidden_states)
        kept = tensor_parallel.CheckpointWithoutOutput()
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_fc2(kept.checkpoint(self._activate, gate_and_up))
        kept.discard_output_and_register_recompute(output[0])
        return output

    def _activate(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """A gated linear unit, as mlp.py:forward has it; the fused one is SwiGLU."""
        if self.config.bias_activation_fusion:
            return bias_swiglu_impl(gate_and_up, None)  # type: ignore[no-any-return]
        gate, up = gate_and_up.chunk(2, -1)
        return self.config.activation_func(gate) * up  # type: ignore[no-any-return]


class _RecomputingExperts(GroupedExperts):
    def _project(self, gate_and_up: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        kept = tensor_parallel.CheckpointWithoutOutput()
        output = self.linear_fc2(kept.checkpoint(self._activation, gate_and_up, probs), ends)
        kept.discard_output_and_register_recompute(output)
        return output  # type: ignore[no-any-return]
