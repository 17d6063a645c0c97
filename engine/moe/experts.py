"""Mixture of experts in the local layer spec: a layer's experts in grouped matrix products, and a router as Hugging Face has it.

The experts of this rank are one parameter a linear, [experts * rows, columns]: what `torch.nn.functional.grouped_mm` reads is a
view of it, and its gradient is written at once. In `state_dict` they are one tensor an expert, by mbridge's names (qwen2moe.py);
wrap/items.py hands them out one by one. Expert-parallel ranks exchange tokens by megatron-core's all-to-all dispatcher; with
tensor parallelism every expert is split as a dense layer is, over the same ranks. Leaves out router.py.
Sources: megatron-core 0.16.1 transformer/moe; transformers 5.19, models/qwen3_moe/modeling_qwen3_moe.py:Qwen3MoeTopKRouter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.runtime import device, workarounds
from engine import rules
from engine.config import MOE_FAMILIES, ModelConfig, ParallelConfig
from engine.runtime.megatron import (
    MoEAlltoAllTokenDispatcher,
    MoELayer,
    MoESubmodules,
    tensor_parallel,
    weighted_bias_swiglu_impl,
)
from engine.moe.router import Router


class Permutation(NamedTuple):
    """The positions of the copies of T tokens, k of each, sorted by expert and then by token. All int64."""

    choices: torch.Tensor  # [T * k]: which of all choices, token by token, a copy is for
    rows: torch.Tensor  # [T * k]: the token of a copy
    of_token: torch.Tensor  # [T, k]: the copies of a token

    @classmethod
    def sort(cls, experts: torch.Tensor) -> Permutation:
        """`experts`: int64 [T, k], the experts of each token, ascending."""
        choices = experts.flatten().argsort(stable=True)
        of_token = torch.empty_like(choices)
        of_token[choices] = torch.arange(len(choices), device=choices.device)
        return cls(choices, choices // experts.shape[1], of_token.view(experts.shape))


def permute(tokens: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """[T, n] to [T * k, n]."""
    return _Permute.apply(tokens, permutation.rows, permutation.of_token)  # type: ignore[no-any-return, no-untyped-call]


def unpermute(copies: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """[T * k, n] to [T, n], the sum of each token's copies."""
    return _Unpermute.apply(copies, permutation.rows, permutation.of_token)  # type: ignore[no-any-return, no-untyped-call]


def _sum_copies(copies: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
    return copies.index_select(0, of_token.flatten()).view(*of_token.shape, copies.shape[1]).sum(1)


class _Permute(torch.autograd.Function):
    """The gradient is gathered, too: no atomic additions, and the same bits every time."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(of_token)
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_token,) = ctx.saved_tensors
        return _sum_copies(gradients[0], of_token), None, None


class _Unpermute(torch.autograd.Function):
    """_Permute's transpose."""

    @staticmethod
    def forward(ctx: Any, copies: torch.Tensor, rows: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _sum_copies(copies, of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return gradients[0].index_select(0, rows), None, None


class TokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """megatron-core's, with its permutations of this rank's own tokens (moe_utils.py:permute, :unpermute) by gathers.

    Where no token leaves the rank, nothing waits for the device and nothing is sorted a second time.
    """

    @property
    def is_local(self) -> bool:
        return bool(self.tp_size * self.ep_size == 1)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens and their weights, once for each expert that `routing_map` [T, experts] chooses."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        if self.is_local:
            self.tokens_per_expert = routing_map.sum(0)
        else:
            counts = self.preprocess(routing_map)
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        experts = routing_map.to(torch.uint8).topk(self.config.moe_router_topk).indices.sort().values
        self.permutation = Permutation.sort(experts)
        tokens = permute(hidden_states.view(-1, hidden_states.shape[-1]), self.permutation)
        return tokens, probs.gather(1, experts).flatten()[self.permutation.choices]

    def dispatch_postprocess(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (tokens, self.tokens_per_expert, probs) if self.is_local else super().dispatch_postprocess(tokens, probs)

    def combine_preprocess(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.is_local else super().combine_preprocess(tokens)

    def combine_postprocess(self, tokens: torch.Tensor) -> torch.Tensor:
        return unpermute(tokens, self.permutation).view(self.hidden_shape)


class ExpertLayer(MoELayer):  # type: ignore[misc]
    """megatron-core's layer with the dispatcher above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.token_dispatcher.__class__ = TokenDispatcher
        self.is_recomputed = self.config.recompute_granularity == "selective" and "moe" in self.config.recompute_modules
        self.moe_layer_recompute = False

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """The backward pass recomputes the layer, where configured, with the routing of this pass."""
        routing = self.router.token_routing

        def run(hidden: torch.Tensor) -> Any:
            self.router.token_routing = routing
            return super(ExpertLayer, self).forward(hidden)

        result: tuple[torch.Tensor, None] = (
            tensor_parallel.checkpoint(run, False, hidden_states) if self.is_recomputed else run(hidden_states)
        )
        return result


class ExpertLinear(torch.nn.Module):
    """The same linear, without bias, of all experts of this rank.

    `weight`: [experts * rows, columns], one expert after the other, so that Megatron-FSDP may cut it between any two rows.
    """

    def __init__(self, num_experts: int, rows: int, columns: int, shard_dim: int, config: Any) -> None:
        """`shard_dim`: the dimension of an expert's [rows, columns] that tensor parallelism shards."""
        super().__init__()
        self.num_experts, shape = num_experts, (num_experts * rows, columns)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device.compute_device()))
        weight: Any = self.weight
        tensor_parallel.set_tensor_model_parallel_attributes(weight, True, shard_dim, 1)
        weight.allreduce = config.expert_model_parallel_size == 1  # else gradients are reduced over the expert-data group
        weight.num_local_experts, weight.expert_parallel_size = num_experts, config.expert_model_parallel_size

    def forward(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_linear(inputs, self.weight, ends)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        del keep_vars  # the views are for mbridge, which writes through them
        for index, weight in enumerate(split_experts(self.weight, self.num_experts)):
            destination[f"{prefix}weight{index}"] = weight


def grouped_linear(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[T, columns] to [T, rows], by `weight` [experts * rows, columns]; an expert's inputs end at `ends`, int32 [experts]."""
    weights = weight.view(len(ends), -1, weight.shape[1])
    return F.grouped_mm(inputs, weights.transpose(1, 2), offs=ends)


class GroupedExperts(torch.nn.Module):
    """SwiGLU experts in place of megatron-core's SequentialMLP. Experts without tokens have gradients of zeros."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        super().__init__()
        self.config = config
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.linear_fc1 = ExpertLinear(num_local_experts, 2 * width, config.hidden_size, 0, config)
        self.linear_fc2 = ExpertLinear(num_local_experts, config.hidden_size, width, 1, config)
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork(tensor_parallel.get_expert_parallel_rng_tracker_name()):
                config.init_method(self.linear_fc1.weight)
                config.output_layer_init_method(self.linear_fc2.weight)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """`tokens`: [T, hidden], sorted by expert; `probs`: [T], the factors of the experts' results."""
        if not len(tokens):  # the products need a row, and other ranks wait for gradients: one that counts nowhere
            row, zero = tokens.new_zeros(1, tokens.shape[1]), probs.new_zeros(1)
            output, _ = self(torch.cat([tokens, row]), _one_row(tokens_per_expert), torch.cat([probs, zero]))
            return output[:0], None
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0).to(torch.int32)
        return self._project(self.linear_fc1(tokens, ends), probs[:, None], ends), None

    def _project(self, gate_and_up: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The second half: activation and second linear."""
        return self.linear_fc2(self._activation(gate_and_up, probs), ends)  # type: ignore[no-any-return]

    def _activation(self, gate_and_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """SwiGLU times `probs` [T, 1], as megatron-core's MLP has it (mlp.py:forward)."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(gate_and_up, None, probs, False)  # type: ignore[no-any-return]
        gate, up = gate_and_up.chunk(2, -1)
        return (F.silu(gate) * up * probs).to(gate_and_up.dtype)


def _one_row(tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """For the last expert."""
    counts = torch.zeros_like(tokens_per_expert)
    counts[-1] = 1
    return counts


def split_experts(weight: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    """Views [rows, columns] of an ExpertLinear's weight."""
    return list(weight.detach().view(num_experts, -1, weight.shape[1]).unbind())


def use_grouped_experts(layer: Any) -> None:
    """Put our layer into megatron-core's spec of a transformer layer, where that has experts."""
    mlp = layer.submodules.mlp
    if mlp.module is MoELayer:
        mlp.module, mlp.submodules = ExpertLayer, MoESubmodules(GroupedExperts, mlp.submodules.shared_experts, Router)


def config_arguments(hf_config: Any, load_balancing: float = 0.0) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args; none for a dense model.

    `load_balancing`: the coefficient of the loss, see AlgorithmConfig.
    Softmax over all experts, then the best of them, normalised (norm_topk_prob), is softmax over the best of them.
    """
    if hf_config.model_type not in MOE_FAMILIES:
        return {}
    workarounds.use_torch_in_router()
    return {
        "moe_grouped_gemm": False,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if load_balancing else "none",
        "moe_aux_loss_coeff": load_balancing,
        **_shared_expert(hf_config),
    }


def _shared_expert(hf_config: Any) -> dict[str, Any]:
    """The experts that every token goes through: with a gate as in qwen2_moe, or without as in deepseek_v3."""
    gated = getattr(hf_config, "shared_expert_intermediate_size", None) or 0
    size = gated or (getattr(hf_config, "n_shared_experts", None) or 0) * getattr(hf_config, "moe_intermediate_size", 0)
    if not size:
        return {}
    return {
        "moe_shared_expert_intermediate_size": size,
        "moe_shared_expert_gate": bool(gated),
        "moe_shared_expert_overlap": False,  # its own CUDA stream
    }


def check(hf_config: Any, model: ModelConfig, parallel: ParallelConfig) -> None:
    """ValueError for what does not go with experts."""
    num_experts = hf_config.num_experts if hf_config.model_type in MOE_FAMILIES else 0
    if found := rules.experts_problem(hf_config, num_experts, model.dtype, parallel):
        raise ValueError(str(found))
