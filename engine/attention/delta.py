"""The gated delta net (arXiv:2412.06464): attention that is linear in the number of tokens, over packed sequences.

A head keeps a state S [key dim, value dim], zero at the start of each sequence. With a token's key k, value v, decay a and
strength b:   S = a S + b k (v - a S^T k)^T,   and the result is S^T q. The tokens of a chunk are computed at once, chunk after
chunk, in float32 by plain torch, on GPUs too: `rule` is where kernels would go. Before it comes a causal convolution that
never reads another sequence. Tensor parallelism splits heads. Leaves out context parallelism, which rules.py refuses.
Sources: transformers 5.19 models/qwen3_5/modeling_qwen3_5.py; for the order of rows megatron-core 0.16.1 ssm/gated_delta_net.py,
which takes no packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch.packed import PackedSequences
from engine.runtime import device
from engine.runtime.megatron import ColumnParallelLinear, MegatronModule, RowParallelLinear, tensor_parallel

CHUNK = 64
NORM_EPSILON = 1e-6  # of queries' and keys' lengths
MIXED = 3  # the parts of in_proj that go through conv1d, in Hugging Face's model in_proj_qkv; the others are a linear each
MOST_DECAY = 16.0  # of a token, at the start: exp(A_log) is drawn up to here


def rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule of n sequences of L tokens; later tokens never reach earlier ones, so right padding does no harm.

    Args:
        query, key: [n, L, heads, key dim]; here they are brought to length 1, queries then scaled by key dim ** -0.5.
        value: [n, L, heads, value dim].
        log_decay: float32 [n, L, heads], at most 0.
        strength: [n, L, heads], between 0 and 1.

    Returns:
        [n, L, heads, value dim], in the dtype of `value`.
    """
    length, size = query.shape[1], query.shape[-1]
    chunk = min(CHUNK, length)
    query, key = _normalised(query) * size**-0.5, _normalised(key)
    q, k, v = (_chunks(x, chunk) for x in (query, key, value))  # [n, heads, chunks, chunk, dim]
    log_decay, strength = (_chunks(x[..., None], chunk) for x in (log_decay, strength))
    total = log_decay.cumsum(-2)  # from the start of the chunk
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(later, -math.inf).exp()  # from each token to each, 0 for later ones
    # each token's change of the state, (v - S^T k) b, depends on the changes before it in the chunk: a triangular system
    system = (k * strength) @ k.mT * between
    right = torch.cat((v * strength, k * strength * total.exp()), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    changes, reads = solved.split([v.shape[-1], size], -1)
    within, q = q @ k.mT * between, q * total.exp()
    k = k * (total[..., -1:, :] - total).exp()
    state, results = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    for index in range(q.shape[2]):
        change = changes[:, :, index] - reads[:, :, index] @ state
        results.append(q[:, :, index] @ state + within[:, :, index] @ change)
        state = state * total[:, :, index, -1:].exp() + k[:, :, index].mT @ change
    return torch.cat(results, 2)[:, :, :length].transpose(1, 2).to(value.dtype)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[n, L, heads, dim] to float32 [n, heads, chunks, chunk, dim], padded with zeros."""
    padded = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return padded.view(*padded.shape[:2], -1, chunk, padded.shape[-1])


def split_sizes(config: Any) -> list[int]:
    """Rows of in_proj's parts, of all heads: queries, keys, values, output gates, strengths, decays."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return [keys, keys, values, values, config.linear_num_value_heads, config.linear_num_value_heads]


def merge_ranks(shards: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Tensor-parallel ranks' rows of each part, of `sizes` over all ranks, become whole parts, one after another."""
    split = [torch.split(shard, [size // len(shards) for size in sizes]) for shard in shards]
    return torch.cat([rows for part in zip(*split, strict=True) for rows in part])


def split_ranks(whole: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> list[torch.Tensor]:
    """The inverse of merge_ranks."""
    parts = [part.chunk(num_ranks) for part in torch.split(whole, list(sizes))]
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """In place of a layer's self-attention. A tensor-parallel rank has its heads' rows of each of in_proj's parts."""

    def __init__(self, config: Any, layer_number: int, *, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.sizes = [size // self.tp_group.size() for size in split_sizes(config)]
        self.is_recomputed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sum(split_sizes(config)), init_method=config.init_method, gather_output=False, **options
        )
        self.out_proj = RowParallelLinear(
            split_sizes(config)[3], config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, **options,
        )  # fmt: skip
        self.conv1d = self._parameter(sum(self.sizes[:MIXED]), 1, config.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = self._parameter(self.sizes[4]), self._parameter(self.sizes[5])
        ones = torch.ones(config.linear_value_head_dim, dtype=config.params_dtype, device=device.compute_device())
        self.norm = torch.nn.Parameter(ones)
        if config.perform_initialization:
            self._initialise()

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        """Of this rank's heads, which lie along the first dimension."""
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device.compute_device()))
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    @torch.no_grad()
    def _initialise(self) -> None:
        """As transformers does."""
        with tensor_parallel.get_cuda_rng_tracker().fork():
            self.conv1d.uniform_(-1, 1).mul_(self.conv1d.shape[-1] ** -0.5)
            self.A_log.uniform_(0.01, MOST_DECAY).log_()
        self.dt_bias.fill_(1.0)

    def forward(self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any) -> tuple[Any, None]:
        """[own tokens, 1, hidden] to the same, and no bias. Attention masks and rotary embeddings are not used."""
        projected, _bias = self.in_proj(hidden_states)
        mixed, gate, strength, decay = projected[:, 0].split([sum(self.sizes[:MIXED]), *self.sizes[MIXED:]], -1)
        # in float32, whatever the dtype of the model
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias.float())

        def attend(*inputs: torch.Tensor) -> torch.Tensor:
            return self._attend(packed_seq_params, *inputs)

        inputs = (mixed, log_decay, strength.sigmoid(), self.conv1d)
        heads = tensor_parallel.checkpoint(attend, False, *inputs) if self.is_recomputed else attend(*inputs)
        output, _bias = self.out_proj(self._gated_norm(heads, gate.view(heads.shape)).flatten(1)[:, None])
        return output, None

    def _attend(
        self, packed: PackedSequences, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, conv1d: torch.Tensor
    ) -> torch.Tensor:
        """Of T packed tokens, [T, heads, value dim]."""
        groups, inverse = packed.length_groups
        pieces = []
        for index, valid in groups:
            out = self.of_sequences(mixed[index], log_decay[index], strength[index], conv1d)
            pieces.append(out.flatten(0, 1)[valid])
        return torch.cat(pieces)[inverse]

    def of_sequences(
        self, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, conv1d: torch.Tensor
    ) -> torch.Tensor:
        """[n, L, rows] to [n, L, heads, value dim]. A sequence is a row: neither convolution nor state reach another."""
        query, key, value = torch.split(F.silu(_convolve(mixed, conv1d)), self.sizes[:MIXED], -1)
        values = torch.unflatten(value, -1, (-1, self.config.linear_value_head_dim))
        both = (torch.unflatten(x, -1, (-1, self.config.linear_key_head_dim)) for x in (query, key))
        q, k = (x.repeat_interleave(values.shape[2] // x.shape[2], 2) for x in both)
        return rule(q, k, values, log_decay, strength)

    def _gated_norm(self, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Each rank has some of the heads that share the weight: backwards its gradient is summed over ranks."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        normed = F.rms_norm(heads.float(), self.norm.shape, eps=self.config.layernorm_epsilon).to(heads.dtype)
        gated: torch.Tensor = weight * normed * F.silu(gate.float())
        return gated.to(heads.dtype)


def _convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal, each channel by itself. `x`: [n, L, channels]; `weight`: [channels, 1, tokens]."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=weight.shape[0]).transpose(1, 2)
