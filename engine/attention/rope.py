"""Rotary frequencies of models whose config.json scales them (`rope_type`), as transformers computes them.

megatron-core 0.16.1 knows the scaling of Llama 3 with the constants of 3.1 alone (rotary_pos_embedding.py:_apply_scaling), and
YaRN as an embedding of its own. Both only change the frequencies of the plain one, which the fused tables (fused.py) are made of,
too; YaRN also multiplies cosine and sine, and so the attention's logits by the square of that. Where layers differ by their type,
the embedding has the frequencies of both types, one after the other; each layer takes its own (model/families/gemma.py), and
YaRN's factor that of layers without a window alone (olmo3.py).
Leaves out types whose frequencies depend on the length of the sequence (dynamic, longrope): see ROPE_TYPES in config.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.config import LATENT_FAMILIES, OLMO3, ROPE_BY_LAYER_TYPE, ROPE_TYPES, SMOLLM3
from engine.runtime.megatron import RotaryEmbedding
from engine.attention.windows import FULL, SLIDING

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BY_MEGATRON_CORE, BY_CORE_ATTENTION, BY_NOBODY = 0, 1, 2  # who rotates a layer: megatron-core leaves out those that are not 0


def left_out(hf_config: Any, *, by_core_attention: bool) -> list[int] | None:
    """TransformerConfig's `no_rope_freq` (attention.py:917), one of the numbers above for each layer; None: all are 0."""
    number, turned = hf_config.num_hidden_layers, BY_CORE_ATTENTION if by_core_attention else BY_MEGATRON_CORE
    if hf_config.model_type == SMOLLM3:
        return [turned if has_rope else BY_NOBODY for has_rope in hf_config.no_rope_layers[:number]]
    return [turned] * number if by_core_attention else None


def scaling(hf_config: Any) -> tuple[torch.Tensor, float] | None:
    """Frequencies, float32 [turned elements of a head / 2], and a factor of cosine and sine; None where nothing is scaled."""
    rope_type = (hf_config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type = {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope_type == "default":
        return None
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    return frequencies, factor


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args.

    Raises:
        ValueError: for a `rope_type` out of ROPE_TYPES, or one that scales logits of which rotary embedding makes a part only;
            megasync/models/folder.py says the same before anything starts.
    """
    if hf_config.model_type in LATENT_FAMILIES:
        return {}
    scaled = _of_layer_type(hf_config, FULL) if SLIDING in (hf_config.rope_parameters or {}) else scaling(hf_config)
    if scaled is None or scaled[1] == 1.0:
        return {}
    if 2 * len(scaled[0]) != hf_config.head_dim:
        raise ValueError("rope scaling that multiplies cosine and sine is not supported with partial_rotary_factor")
    return {"softmax_scale": scaled[1] ** 2 / math.sqrt(hf_config.head_dim)}


class RotaryTable(RotaryEmbedding):  # type: ignore[misc]
    """megatron-core's, with one table of angles for all lengths up to a power of two.

    Upstream keeps 32, one for each length of a longest sequence (rotary_pos_embedding.py:forward), which every micro-batch of
    packed sequences may have another of.
    """

    table: torch.Tensor | None = None

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """Angles, float32 [max_seq_len, 1, 1, dim]."""
        assert packed_seq
        assert not offset
        table = self.table
        if table is None or len(table) < max_seq_len:
            whole: torch.Tensor = self.get_emb(1 << (max_seq_len - 1).bit_length())
            self.table = table = whole
        return table[:max_seq_len]


def set_frequencies(model: Any, hf_config: Any) -> None:
    """Set the frequencies of a GPTModel that has not yet run. Multi-latent attention has its own (latent.py)."""
    if hf_config.model_type in LATENT_FAMILIES:
        return
    embedding = model.rotary_pos_emb
    embedding.__class__ = RotaryTable
    if SLIDING in (hf_config.rope_parameters or {}):
        of_types = [_of_layer_type(hf_config, kind)[0] for kind in (SLIDING, FULL)]
        embedding.inv_freq = torch.cat(of_types).to(embedding.inv_freq)
    elif (scaled := scaling(hf_config)) is not None:
        embedding.inv_freq = scaled[0].to(embedding.inv_freq)
        embedding.seq_len_interpolation_factor = None  # mbridge's way of linear scaling (llama.py:_get_gptmodel_args)


def _of_layer_type(hf_config: Any, kind: str) -> tuple[torch.Tensor, float]:
    """The same of one layer type's rope_parameters, also where nothing is scaled."""
    size, given = hf_config.head_dim, hf_config.rope_parameters[kind]
    rope_type = given["rope_type"]
    known = ROPE_TYPES if hf_config.model_type == OLMO3 and kind == FULL else ROPE_BY_LAYER_TYPE
    if rope_type not in known:
        raise ValueError(f"rope_type = {rope_type!r} of {kind} is not supported; supported: {', '.join(known)}")
    if rope_type == "default":
        return 1.0 / given["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), layer_type=kind)
    return frequencies, factor
