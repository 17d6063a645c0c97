"""Gemma 3's text models (model_type gemma3_text) in the local layer spec: the parts that other families lack.

Norms after attention and MLP besides those before, all of them with weights around 0; GELU in the gated MLP; a scale of the
embeddings; layers with a sliding window (windows.py) that have other rotary frequencies (rope.py). Everything else is Qwen 3's,
whose bridge mbridge 0.15.1 builds it with: its own gemma3 is the model with vision layers, and needs TransformerEngine.
Leaves out soft caps. Source: transformers 5.19 models/gemma3/modeling_gemma3.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.core import CoreAttention, RMSNorm
from engine.config import GEMMA
from engine.runtime.megatron import MLP, SelfAttention
from engine.model.recompute import RecomputingMLP

LAYER = "model.layers.{layer_number}."
NAMES = {  # mbridge's tables: megatron-core's names to Hugging Face's
    "_ATTENTION_MAPPING": {"self_attention.post_layernorm.weight": [LAYER + "post_attention_layernorm.weight"]},
    "_MLP_MAPPING": {
        "pre_mlp_layernorm.weight": [LAYER + "pre_feedforward_layernorm.weight"],
        "mlp.post_layernorm.weight": [LAYER + "post_feedforward_layernorm.weight"],
    },
}


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args."""
    return {
        "layernorm_zero_centered_gamma": True,
        "activation_func": partial(F.gelu, approximate="tanh"),
        "softmax_scale": hf_config.query_pre_attn_scalar**-0.5,
    }


def use_layers(layer: Any, _config: Any, _number: int) -> None:
    """Put this family's attention and MLP into megatron-core's spec of a transformer layer."""
    parts = layer.submodules
    for part in (parts.self_attention, parts.mlp):
        part.module = WITH_NORM.get(part.module, part.module)
    parts.self_attention.submodules.core_attention = RotatedByKind


def scale_embeddings(model: Any, hf_config: Any) -> None:
    """Scale a GPTModel's embeddings, where the stage has them, by a factor rounded to their dtype, as in transformers."""
    if hf_config.model_type != GEMMA or not hasattr(model, "embedding"):
        return
    factor = math.sqrt(hf_config.hidden_size)
    model.embedding.register_forward_hook(lambda _module, _inputs, output: output * output.new_full((), factor))


def _of_kind(angles: torch.Tensor, core_attention: CoreAttention) -> torch.Tensor:
    """One half of the last dimension: of layers with a window the first, of the others the second (rope.py)."""
    return angles.chunk(2, -1)[0 if core_attention.window else 1]


class RotatedByKind(CoreAttention):
    """With fusions it rotates by the tables of its kind of layer."""

    def _tables(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = both
        return _of_kind(cos, self), _of_kind(sin, self)


class _NormAfter:
    """Mixin that normalises a module's output; the module returns no bias."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg] # of the module that it is mixed in before
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        output, bias = super().forward(*args, **kwargs)  # type: ignore[misc]
        assert bias is None
        return self.post_layernorm(output), None


class NormedAttention(_NormAfter, SelfAttention):  # type: ignore[misc]
    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """`rotary_pos_emb`: angles of both kinds of layers, [tokens, 1, 1, 2 * dim], whose two halves are equal."""
        if rotary_pos_emb is not None:
            half = _of_kind(rotary_pos_emb.chunk(2, -1)[0], self.core_attention)
            rotary_pos_emb = torch.cat((half, half), -1)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class NormedMLP(_NormAfter, MLP):  # type: ignore[misc]
    pass


class RecomputingNormedMLP(_NormAfter, RecomputingMLP):
    pass


WITH_NORM = {SelfAttention: NormedAttention, MLP: NormedMLP, RecomputingMLP: RecomputingNormedMLP}
