"""The gated delta net (arXiv:2412.06464): attention that is linear in the number of tokens, over packed sequences.

A head keeps a state S [key dim, value dim], zero at the start of each sequence. With a token's key k, value v, decay a and
strength b:   S = a S + b k (v - a S^T k)^T,   and the result is S^T q. The tokens of a chunk are computed at once, chunk after
chunk, in float32 by plain torch, or on GPUs by kernels that are installed (delta_net_kernels.py). Before it comes a causal
convolution that never reads another sequence. Tensor parallelism splits heads. Leaves out context parallelism, which rules.py
refuses.
Sources: transformers 5.19 models/qwen3_5/modeling_qwen3_5.py; for the order of rows megatron-core 0.16.1 ssm/gated_delta_net.py,
which takes no packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import delta_net_kernels
from engine.batch.packed import PackedSequences
from engine.runtime import device
from engine.runtime.megatron import ColumnParallelLinear, MegatronModule, RowParallelLinear, tensor_parallel

CHUNK = 64
NORM_EPSILON = 1e-6  # of queries' and keys' lengths
MIXED = 3  # the parts of in_proj that go through conv1d, in Hugging Face's model in_proj_qkv; the others are a linear each
PROBE_LENGTHS, PROBE_TOLERANCE = (5, 150, 64), 0.05  # tokens of the sequences that kernels are tried with; relative
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


def attend(
    packed: PackedSequences, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, conv1d: torch.Tensor,
    sizes: Sequence[int], key_dim: int,
) -> torch.Tensor:  # fmt: skip
    """delta_net_kernels.attend in plain torch."""
    groups, inverse = packed.length_groups
    pieces = []
    for index, valid in groups:
        out = of_sequences(mixed[index], log_decay[index], strength[index], conv1d, sizes, key_dim)
        pieces.append(out.flatten(0, 1)[valid])
    return torch.cat(pieces)[inverse]


def of_sequences(
    mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, conv1d: torch.Tensor, sizes: Sequence[int], key_dim: int
) -> torch.Tensor:
    """[n, L, rows] to [n, L, heads, value dim]. A sequence is a row: neither convolution nor state reach another."""
    query, key, value = torch.split(F.silu(_convolve(mixed, conv1d)), list(sizes), -1)
    values = torch.unflatten(value, -1, (log_decay.shape[-1], -1))
    both = (torch.unflatten(x, -1, (-1, key_dim)) for x in (query, key))
    q, k = (x.repeat_interleave(values.shape[2] // x.shape[2], 2) for x in both)
    return rule(q, k, values, log_decay, strength)


def gated_norm(heads: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """delta_net_kernels.gated_norm in plain torch."""
    normed = F.rms_norm(heads.float(), weight.shape, eps=epsilon).to(heads.dtype)
    gated: torch.Tensor = weight * normed * F.silu(gate.float())
    return gated.to(heads.dtype)


def choose_kernels(kernels: str, config: Any) -> str:
    """Use flash-linear-attention in this process with `engine.kernels=fla`, otherwise plain torch.

    Tried with the model's heads, forward and backward, against plain torch. `config`: a TransformerConfig.

    Returns:
        What gated delta nets run on, for the log; empty for a model without such layers.

    Raises:
        ValueError: the kernels are selected and cannot be used.
    """
    delta_net_kernels.enable(False)
    if not config.linear_attention_freq:
        return ""
    if kernels != "fla":
        return "torch"
    if reason := _problem(config):
        raise ValueError(f"engine.kernels = fla: {reason}. Remedy: write engine.kernels=auto")
    delta_net_kernels.enable(True)
    return f"{delta_net_kernels.LIBRARY} {delta_net_kernels.version()}"


def _problem(config: Any) -> str:
    """Why the kernels cannot be used; empty: they compute what plain torch does."""
    if not device.has_cuda():
        return f"{delta_net_kernels.LIBRARY} needs an NVIDIA GPU, and there is none"
    if config.params_dtype is torch.float32:
        return f"{delta_net_kernels.LIBRARY} computes in 16 bits, and model.dtype is float32"
    if not delta_net_kernels.version():
        return f"{delta_net_kernels.LIBRARY} is not installed (pip install fla-core)"
    expected = _probe(config, attend, gated_norm)
    try:
        found = _probe(config, delta_net_kernels.attend, delta_net_kernels.gated_norm)
    except Exception as error:  # noqa: BLE001 - what a kernel raises on a machine that it was not made for
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return difference(found, expected)


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """The relative errors of the probe's tensors, where one is too large or not a number; else an empty string."""
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]
    is_close = all(error < PROBE_TOLERANCE for error in errors)  # not of max(errors), which may pass over NaN
    return "" if is_close else f"relative errors {', '.join(f'{error:.2g}' for error in errors)} to torch"


def _probe(config: Any, function: Callable[..., torch.Tensor], norm: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Values and gradients of random 16-bit tokens in as many heads as a rank has, for which kernels are tuned once."""
    keys, heads = config.linear_key_head_dim, config.linear_num_value_heads // config.tensor_model_parallel_size
    values, where, num_tokens = config.linear_value_head_dim, device.compute_device(), sum(PROBE_LENGTHS)
    sizes = [size // config.tensor_model_parallel_size for size in split_sizes(config)[:MIXED]]
    generator = torch.Generator(where).manual_seed(0)
    shapes = [(num_tokens, sum(sizes)), (num_tokens, heads), (num_tokens, heads), (sum(sizes), 1, config.linear_conv_kernel_dim)]
    shapes += [(num_tokens, heads, values), (values,), (num_tokens, heads, values)]
    drawn = [torch.randn(shape, generator=generator, device=where) for shape in shapes]
    mixed, decay, strength, conv1d, gate, weight, seed = (x.to(config.params_dtype).requires_grad_() for x in drawn)
    packed = PackedSequences.from_lengths(list(PROBE_LENGTHS), where)
    out = function(packed, mixed, F.logsigmoid(decay.float()), strength.sigmoid(), conv1d, sizes, keys)
    out = norm(out, gate, weight, config.layernorm_epsilon)
    gradients = torch.autograd.grad(out, [mixed, decay, strength, conv1d, gate, weight], seed.detach())
    return [x.detach().float() for x in (out, *gradients)]


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


def by_key_heads(whole: torch.Tensor, sizes: Sequence[int], num_key_heads: int) -> list[torch.Tensor]:
    """Whole parts [rows, n], of `sizes`, become in_proj_qkvz and in_proj_ba of Qwen3-Next, whose rows lie by key heads."""
    parts = [part.view(num_key_heads, -1, whole.shape[1]) for part in torch.split(whole, list(sizes))]
    return [torch.cat(each, 1).flatten(0, 1) for each in (parts[: MIXED + 1], parts[MIXED + 1 :])]


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
        """A parameter of this rank's heads, which lie along the first dimension."""
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device.compute_device()))
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise the weights as transformers does."""
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

        function = delta_net_kernels.attend if delta_net_kernels.is_enabled() else attend

        def heads_of(*inputs: torch.Tensor) -> torch.Tensor:
            mixed, log_decay, strength, conv1d = inputs
            sizes, key_dim = self.sizes[:MIXED], self.config.linear_key_head_dim
            return function(packed_seq_params, mixed, log_decay, strength, conv1d, sizes, key_dim)

        inputs = (mixed, log_decay, strength.sigmoid(), self.conv1d)
        heads = tensor_parallel.checkpoint(heads_of, False, *inputs) if self.is_recomputed else heads_of(*inputs)
        output, _bias = self.out_proj(self._gated_norm(heads, gate.view(heads.shape)).flatten(1)[:, None])
        return output, None

    def _gated_norm(self, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Each rank has some of the heads that share the weight: backwards its gradient is summed over ranks."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        norm = delta_net_kernels.gated_norm if delta_net_kernels.is_enabled() else gated_norm
        return norm(heads, gate, weight, self.config.layernorm_epsilon)


def _convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal, each channel by itself. `x`: [n, L, channels]; `weight`: [channels, 1, tokens]."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=weight.shape[0]).transpose(1, 2)
