"""Gated delta nets on a GPU: the kernels of flash-linear-attention against plain torch, and how they are chosen.

    python -m pytest tests/engine/attention/test_delta_net_kernels.py -m gpu
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.attention import delta_net, delta_net_kernels
from engine.batch.packed import PackedSequences

SIZES, KEY_DIM, HEADS = [256, 256, 512], 128, 4  # two heads of keys, four of values
CONFIG = SimpleNamespace(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, layernorm_epsilon=1e-6, params_dtype=torch.bfloat16,
    linear_attention_freq=[1], tensor_model_parallel_size=1,
)  # fmt: skip

on_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and delta_net_kernels.version()), reason="needs a GPU and fla-core")


def test_the_kernels_are_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.device.has_cuda", lambda: False)
    assert delta_net.choose_kernels("auto", CONFIG) == "torch" and not delta_net_kernels.is_enabled()
    assert delta_net.choose_kernels("fla", SimpleNamespace(linear_attention_freq=None)) == ""
    with pytest.raises(ValueError, match=r"engine.kernels = fla.*GPU.*engine.kernels=auto"):
        delta_net.choose_kernels("fla", CONFIG)
    assert not delta_net_kernels.is_enabled()


def test_a_gradient_that_is_not_a_number_is_found() -> None:
    expected = [torch.ones(3), torch.ones(2)]
    assert delta_net.difference([torch.ones(3), torch.ones(2) + 1e-4], expected) == ""
    assert delta_net.difference([torch.ones(3), torch.tensor([1.0, torch.nan])], expected)


@pytest.mark.gpu
@on_gpu
def test_the_kernels_are_chosen() -> None:
    assert delta_net.choose_kernels("fla", CONFIG) == f"flash-linear-attention {delta_net_kernels.version()}"
    assert delta_net_kernels.is_enabled()
    assert delta_net.choose_kernels("auto", CONFIG) == "torch"
    assert not delta_net_kernels.is_enabled()


def drawn(num_tokens: int) -> list[torch.Tensor]:
    """In bfloat16: mixed rows, decays, strengths, convolution."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    shapes = [(num_tokens, sum(SIZES)), (num_tokens, HEADS), (num_tokens, HEADS), (sum(SIZES), 1, 4)]
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for shape in shapes]


def computed(attend, lengths: list[int], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values and gradients."""
    mixed, decay, strength, conv1d = inputs
    packed = PackedSequences.from_lengths(lengths, torch.device("cuda"))
    log_decay = torch.nn.functional.logsigmoid(decay.float() + 2)
    out = attend(packed, mixed, log_decay, strength.sigmoid(), conv1d, SIZES, KEY_DIM)
    seed = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    return [out.detach(), *torch.autograd.grad(out, inputs, seed)]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("lengths", [[1], [64], [65, 1, 3], [700, 63, 128, 5], [4096]])
def test_values_and_gradients_are_those_of_plain_torch(lengths: list[int]) -> None:
    inputs = drawn(sum(lengths))
    pair = (computed(attend, lengths, inputs) for attend in (delta_net_kernels.attend, delta_net.attend))
    for one, other in zip(*pair, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-6)) < 0.02


@pytest.mark.gpu
@on_gpu
def test_sequences_have_the_bits_that_each_has_alone() -> None:
    lengths = [130, 7, 64, 300]
    inputs = drawn(sum(lengths))
    parts = zip(*(each.split(lengths) for each in inputs[:3]), strict=True)
    alone = [computed(delta_net_kernels.attend, [len(part[0])], [*part, inputs[3]])[0] for part in parts]
    assert torch.equal(computed(delta_net_kernels.attend, lengths, inputs)[0], torch.cat(alone))


@pytest.mark.gpu
@on_gpu
def test_the_gated_norm_is_that_of_plain_torch() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(37, HEADS, 128), (37, HEADS, 128), (128,), (37, HEADS, 128)]
    *inputs, seed = (torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    for norm in (delta_net_kernels.gated_norm, delta_net.gated_norm):
        out = norm(*inputs, 1e-6)
        found = [out.detach(), *torch.autograd.grad(out, inputs, seed.detach())]
        if norm is delta_net_kernels.gated_norm:
            of_kernels = found
    for one, other in zip(of_kernels, found, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.01
