"""gpt-oss (model_type gpt_oss), a family that mbridge 0.15.1 lacks: experts with biases, attention with sinks and biases.

Hugging Face's tensors hold all experts of a layer, [experts, in, out], gates and ups interleaved. They are kept so here:
a rank's experts are one parameter a linear; tensor parallelism splits its `in` or `out`. Sinks (attention/core.py) go by
megatron-core's softmax_type. Folders in MXFP4 are read into the model's dtype (mxfp4.py). megatron-core 0.19 has the same fields.
Refused are adapters of experts and the recomputing of mlp_act. Source: transformers 5.19 models/gpt_oss/modeling_gpt_oss.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from engine.moe.experts import ExpertLayer, GroupedExperts
from engine.runtime import device
from engine.runtime.megatron import tensor_parallel

from mbridge.core.bridge import register_model
from mbridge.core.llm_bridge import LLMBridge

LAYER = "model.layers.{layer_number}."
STACKS = {  # of a layer's experts: this rank's parameter, and Hugging Face's
    "linear_fc1_stack": "gate_up_proj",
    "linear_fc1_biases": "gate_up_proj_bias",
    "linear_fc2_stack": "down_proj",
    "linear_fc2_biases": "down_proj_bias",
}


def use_layers(layer: Any, _config: Any, _number: int) -> None:
    """Put our experts into megatron-core's spec of a transformer layer."""
    mlp = layer.submodules.mlp
    assert mlp.module is ExpertLayer
    mlp.submodules = dataclasses.replace(mlp.submodules, experts=BiasedExperts)


class _Stack(torch.nn.Module):
    """A parameter of all experts of this rank, which is exported as one (wrap/items.py) and loaded as one."""

    weight: torch.nn.Parameter

    def _mark(self, config: Any, num_experts: int, shard_dim: int | None) -> None:
        weight: Any = self.weight
        if shard_dim is not None:
            tensor_parallel.set_tensor_model_parallel_attributes(weight, True, shard_dim, 1)
        weight.allreduce = config.expert_model_parallel_size == 1  # else gradients are reduced over the expert-data group
        weight.num_local_experts, weight.expert_parallel_size = num_experts, config.expert_model_parallel_size
        weight.is_stack = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        del keep_vars  # mbridge writes through it, and expects names that end in an expert number
        destination[f"{prefix}weight0"] = self.weight.detach()


class StackedLinear(_Stack):
    """The same linear of all experts of this rank, [experts * in, out], as Hugging Face has it."""

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int, shard_dim: int, config: Any) -> None:
        """`shard_dim`: of an expert's [in, out] the dimension that tensor parallelism shards."""
        super().__init__()
        shape = (num_experts * num_inputs, num_outputs)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device.compute_device()))
        self._mark(config, num_experts, shard_dim)

    def forward(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]; an expert's inputs end at `ends`, int32 [experts]."""
        return stacked_linear(inputs, self.weight, ends)


def stacked_linear(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(inputs, weight.view(len(ends), -1, weight.shape[1]), offs=ends)


class StackedBias(_Stack):
    """The biases of all experts of this rank, [experts * out]."""

    def __init__(self, num_experts: int, size: int, config: Any, *, is_sharded: bool) -> None:
        super().__init__()
        empty = torch.zeros(num_experts * size, dtype=config.params_dtype, device=device.compute_device())
        self.weight = torch.nn.Parameter(empty)
        self._mark(config, num_experts, 0 if is_sharded else None)

    def forward(self, num_tokens: int, ends: torch.Tensor) -> torch.Tensor:
        """[T, out], of each token its expert's."""
        tokens = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
        return self.weight.view(len(ends), -1)[torch.searchsorted(ends, tokens, right=True)]


class BiasedExperts(GroupedExperts):
    """SwiGLU with bounds, (up + 1) gate sigmoid(alpha gate), in experts with biases."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.tensor_size = config, pg_collection.expt_tp.size()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size // self.tensor_size
        self.linear_fc1_stack = StackedLinear(num_local_experts, hidden, 2 * width, 1, config)
        self.linear_fc1_biases = StackedBias(num_local_experts, 2 * width, config, is_sharded=True)
        self.linear_fc2_stack = StackedLinear(num_local_experts, width, hidden, 0, config)
        self.linear_fc2_biases = StackedBias(num_local_experts, hidden, config, is_sharded=False)
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork(tensor_parallel.get_expert_parallel_rng_tracker_name()):
                config.init_method(self.linear_fc1_stack.weight)
                config.output_layer_init_method(self.linear_fc2_stack.weight)

    def linear_fc1(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear_fc1_stack(tokens, ends) + self.linear_fc1_biases(len(tokens), ends)  # type: ignore[no-any-return]

    def _project(self, gate_and_up: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        output = self.linear_fc2_stack(self._activation(gate_and_up, probs), ends)
        bias = self.linear_fc2_biases(len(output), ends)
        # the results of tensor-parallel ranks are added up; each has the bias's whole gradient
        bias = bias.detach() / self.tensor_size + (bias - bias.detach())
        return (output + bias * probs).to(output.dtype)  # type: ignore[no-any-return]

    def _activation(self, gate_and_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        gate, up = gate_and_up[..., 0::2], gate_and_up[..., 1::2]
        limit, alpha = self.config.activation_func_clamp_value, self.config.swiglu_alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        result = (up + 1) * gate * torch.sigmoid(alpha * gate) * probs
        return result.to(gate_and_up.dtype)


@register_model("gpt_oss")
class GptOssBridge(LLMBridge):  # type: ignore[misc]
    _ATTENTION_MAPPING: ClassVar = {
        **LLMBridge._ATTENTION_MAPPING,
        "self_attention.linear_proj.bias": [f"{LAYER}self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": [f"{LAYER}self_attn.sinks"],
    }
    _MLP_MAPPING: ClassVar = {
        "mlp.router.weight": [f"{LAYER}mlp.router.weight"],
        "mlp.router.bias": [f"{LAYER}mlp.router.bias"],
        **{f"mlp.experts.{ours}.": [f"{LAYER}mlp.experts.{theirs}"] for ours, theirs in STACKS.items()},
    }

    def _build_config(self) -> Any:
        config = self._build_base_config(
            softmax_type="learnable",
            add_qkv_bias=True,
            activation_func_clamp_value=getattr(self.hf_config, "swiglu_limit", 7.0),  # no fields of transformers 5.17
            moe_ffn_hidden_size=self.hf_config.intermediate_size,
            moe_router_topk=self.hf_config.num_experts_per_tok,
            num_moe_experts=self.hf_config.num_local_experts,
            moe_router_score_function="softmax",
        )
        config.add_bias_linear = True  # not above: transformer_config.py:1588 refuses it under tensor parallelism
        config.swiglu_alpha = getattr(self.hf_config, "swiglu_alpha", 1.702)
        return config

    def _weight_to_hf_format(self, name: str, weight: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        if not _is_stack(name):
            return super()._weight_to_hf_format(name, weight)  # type: ignore[no-any-return]
        return self._weight_name_mapping_mcore_to_hf(name), [self._by_expert(weight, self.config.num_moe_experts)]

    def _weight_to_mcore_format(self, name: str, weights: list[torch.Tensor]) -> torch.Tensor:
        """For a stack: this expert-parallel rank's experts alone."""
        if not _is_stack(name):
            return super()._weight_to_mcore_format(name, weights)  # type: ignore[no-any-return]
        count = self.config.num_moe_experts // self.mpu.ep_size
        first = self.mpu.ep_rank * count
        return weights[0][first : first + count].to(self.dtype).flatten(0, 1)

    def _weight_merge_across_tp(self, name: str, weights: list[torch.Tensor], param: Any) -> torch.Tensor:
        if not _is_stack(name):
            return super()._weight_merge_across_tp(name, weights, param)  # type: ignore[no-any-return]
        if param.partition_dim is None:  # the same on each
            return weights[0]
        return torch.cat([self._by_expert(weight) for weight in weights], param.partition_dim + 1).flatten(0, 1)

    def _weight_split_across_tp(
        self, name: str, weights: torch.Tensor, param: torch.Tensor, tp_split_size: int
    ) -> Iterable[torch.Tensor]:
        if not _is_stack(name) or weights.shape == param.shape:
            return super()._weight_split_across_tp(name, weights, param, tp_split_size)  # type: ignore[no-any-return]
        dim = next(dim for dim, size in enumerate(weights.shape) if size != param.shape[dim])
        return [part.flatten(0, 1) for part in self._by_expert(weights).chunk(tp_split_size, dim + 1)]

    def _by_expert(self, stack: torch.Tensor, count: int = 0) -> torch.Tensor:
        """[experts * n, ...] to [experts, n, ...]. `count`: of experts; 0: of a rank's."""
        return torch.unflatten(stack, 0, (count or self.config.num_moe_experts // self.mpu.ep_size, -1))


def _is_stack(name: str) -> bool:
    return "mlp.experts." in name
