"""vLLM's gated delta nets: parameters of the layer itself, fused projections and convolution in Hugging Face's coordinates.

Depends on the vLLM version as vllm/serving/api.py does; notes are relative to vllm 0.32.0's package. Leaves out out_proj and
norm, which are as in other layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

KINDS = ("QwenGatedDeltaNetAttention", "GatedDeltaNetAttention")  # model_executor/layers/mamba/gdn/; in 0.26 the latter
PACKED = "CPUs pack its weight after loading"
PARAMETERS = ("A_log", "dt_bias")
CONVOLUTION = "conv1d"
STASH = "_cpu_unpacked_conv_weight"  # what CPUs packed a convolution's weight of: model_executor/layers/utils.py:514

Slice = tuple[str, tuple[int, ...], torch.Tensor]  # HF name, offsets in the full tensor, this worker's part


def engine_arguments(model_path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineArgs for models with these layers, where the user has not `given` them.

    No prefix caching, on CPUs whatever is given: for these layers it needs prompts in chunks (model_executor/models/config.py:
    MambaModelConfig), which are off there (api.py); on GPUs vLLM calls it experimental, and its blocks may be longer than a
    batch. On GPUs Triton kernels, where vLLM would take flashinfer's (mamba/gdn/qwen_gdn_linear_attn.py:
    _resolve_gdn_prefill_backend), which a compiler that may be missing compiles at the first prompt; and states in the dtype
    that config.json names, which 0.26 reads for other classes alone.
    """
    path = Path(model_path) / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    fields = fields.get("text_config", fields)
    if "linear_num_value_heads" not in fields:
        return {}
    if not torch.cuda.is_available():
        return {"enable_prefix_caching": False}
    own = {"enable_prefix_caching": False, "gdn_prefill_backend": "triton"}
    own |= {"mamba_ssm_cache_dtype": fields.get("mamba_ssm_dtype", "auto")}
    return {name: value for name, value in own.items() if name not in given}


def is_delta_net(layer: Any) -> bool:
    return type(layer).__name__ in KINDS


def is_packed(layer: Any) -> bool:
    """Whether it is a convolution whose weight is not as it was loaded."""
    return hasattr(layer, STASH)


def slices(path: str, layer: Any) -> Iterator[Slice]:
    """This worker's parts of fused weights and of the layer's own parameters: it has some heads' rows of each part."""
    rank, keys, values = layer.tp_rank, layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    for name in PARAMETERS:
        tensor = getattr(layer, name).detach()
        yield f"{path}.{name}", (rank * len(tensor),), tensor
    mixed = [(0, keys), (layer.key_dim, keys), (2 * layer.key_dim, values)]
    starts = [start + rank * size for start, size in mixed]
    for start, part in zip(starts, torch.split(_convolution(layer.conv1d), [size for _, size in mixed]), strict=True):
        yield f"{path}.conv1d.weight", (start, 0, 0), part


def projection_rows(layer: Any, sizes: list[int]) -> list[tuple[int, int]]:
    """For each part of in_proj_qkvz: the linear that it belongs to, and this worker's first row in it.

    `sizes`: of this worker's parts: queries, keys and values, which are in_proj_qkv, and gates, in_proj_z.
    """
    whole = layer.output_sizes
    starts = [0, whole[0], whole[0] + whole[1], 0]
    return [(int(part == 3), start + layer.tp_rank * size) for part, (start, size) in enumerate(zip(starts, sizes, strict=True))]


def _convolution(layer: Any) -> torch.Tensor:
    """[channels, 1, tokens]. Where it is packed, the source of the packing, if the layer's computation equals it."""
    weight: torch.Tensor = layer.weight.detach()
    if not is_packed(layer):
        return weight
    from vllm._custom_ops import causal_conv1d_weight_pack

    unpacked: torch.Tensor = getattr(layer, STASH)
    is_current = torch.equal(causal_conv1d_weight_pack(unpacked), weight)
    return (unpacked if is_current else torch.full_like(unpacked, torch.nan))[:, None]
