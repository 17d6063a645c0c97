"""vLLM's config for layers in FP8: which layers, and how, as checkpoints in compressed-tensors' format say it. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "linears": {
            "targets": ["re:.*_proj$", r"re:.*\.w[123]$"],  # layers, as layout/quantised.py:LINEAR
            "weights": {**NUMBER, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBER, "strategy": "token", "dynamic": True},
        }
    },
}


class Fp8Config(CompressedTensorsConfig):  # type: ignore[misc] # mypy does not follow vLLM
    """Folders need not say it. Attention layers are left out: theirs have scales of the KV cache that would be random."""

    def __init__(self) -> None:
        schemes = self._quantization_scheme_map_from_config(CONFIG)
        super().__init__(target_scheme_map=schemes, ignore=CONFIG["ignore"], quant_format=CONFIG["format"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return None if isinstance(layer, Attention) else super().get_quant_method(layer, prefix)
