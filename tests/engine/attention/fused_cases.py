"""What test_fused.py runs on its ranks (see ranks.py): each fused function beside the plain one, values and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.runtime import device, parallel, workarounds
from engine.objective import entropy, loss
from engine.attention import fused
from engine.batch.packed import PackedSequences
from engine.config import ParallelConfig

from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import clip_grads, optimizer

Function = Callable[..., tuple[torch.Tensor, ...]]


def differences(lengths: list[int]) -> dict[str, float]:
    """Largest difference of each fused function from the plain one in float32, over the largest value of the latter."""
    parallel.initialize(ParallelConfig(tensor=int(os.environ["WORLD_SIZE"])), seed=0)
    worst = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, (plain, one_kernel, inputs) in _pairs(lengths, dtype).items():
            worst[f"{name} {dtype}"] = _difference(plain, one_kernel, inputs)
        worst[f"entropy {dtype}"] = _entropy_difference(sum(lengths), dtype)
    worst |= _clipping()
    parallel.shutdown()
    return worst


def _pairs(lengths: list[int], dtype: torch.dtype) -> dict[str, tuple[Function, Function, list[torch.Tensor]]]:
    """Name -> (plain, fused, inputs with gradients); the same numbers on every rank, but for its part of the logits."""
    where, total = device.compute_device(), sum(lengths)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(where, dtype)

    packed = PackedSequences.from_lengths(lengths, where)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(where)
    embedding = RotaryEmbedding(32, 1.0, use_cpu_initialization=not device.has_cuda())
    tables = fused.rotary_tables(embedding, positions, max(lengths))
    qkv = random(total, 8, 32)
    labels = torch.randint(0, 96, (1, total), generator=generator).to(where)
    logits = 4 * random(1, total, 96)
    own = logits.chunk(mpu.get_tensor_model_parallel_world_size(), -1)[mpu.get_tensor_model_parallel_rank()].contiguous()

    def plain_rotation(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = embedding(max(lengths), packed_seq=True)
        group = mpu.get_context_parallel_group()
        parts = (x[:, :4], x[:, 4:6])
        return tuple(_apply_rotary_pos_emb_thd(part, packed.cu_seqlens_q, angles, cp_group=group) for part in parts)

    def plain_swiglu(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) * up,)

    return {
        "rotary": (plain_rotation, lambda x: fused.rotate(x[:, :4], x[:, 4:6], tables), [qkv]),
        "swiglu": (plain_swiglu, lambda x: (bias_swiglu_impl(x, None),), [random(total, 1, 64)]),
        "log-probs": (
            lambda x: (loss.token_log_probs(x, labels, 0.7),),
            lambda x: (loss.token_log_probs(x, labels, 0.7, use_fused=True),),
            [own],
        ),
    }


def _difference(plain: Function, one_kernel: Function, inputs: list[torch.Tensor]) -> float:
    def run(function: Function, dtype: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        seeds = [torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(inputs[0].dtype) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=True)])
        return [x.detach().float() for x in (*outputs, *gradients)]

    pairs = zip(run(one_kernel, None), run(plain, torch.float32), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _entropy_difference(total: int, dtype: torch.dtype) -> float:
    """Of both ways from the sum over the whole vocabulary in float64; the plain one in chunks of a few rows."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    logits = (4 * torch.randn(1, total, 96, generator=torch.Generator().manual_seed(4))).to(device.compute_device(), dtype)
    own, probs = logits.chunk(size, -1)[rank].contiguous(), torch.softmax(logits[0].double() / 0.7, -1)
    before, expected, rows = own.clone(), -(probs * probs.log()).sum(-1), entropy.CHUNK_ELEMENTS
    entropy.CHUNK_ELEMENTS = 4 * own.shape[-1]
    found = [entropy.token_entropy(own, 0.7, use_fused) for use_fused in (False, True)]
    entropy.CHUNK_ELEMENTS = rows
    assert torch.equal(own, before)
    return max(float((values.double() - expected).abs().max() / expected.max()) for values in found)


def _clipping() -> dict[str, float]:
    where = device.compute_device()
    gradients = [torch.full(shape, 0.5, device=where) for shape in ((3, 5), (0,), (7,))]
    parameter = torch.nn.Parameter(torch.zeros(7, device=where))
    parameter.grad = gradients[2]
    workarounds.use_foreach_clipping()
    workarounds.use_gradient_norm_in_float64()
    used = optimizer.get_grad_norm_fp32, clip_grads.multi_tensor_scale_impl
    assert {function.__module__ for function in used} == {"engine.runtime.workarounds"}
    group = mpu.get_data_parallel_group()
    norm = optimizer.get_grad_norm_fp32(gradients, grad_stats_parallel_group=group)
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
    expected = 0.5 * 22**0.5
    return {"norm": abs(norm - expected), "clipped": float((parameter.grad - 0.5 / expected).abs().max())}
