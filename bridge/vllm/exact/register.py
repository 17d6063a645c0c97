"""Makes the exact layers known to vLLM: out-of-tree classes of its layers, a quantization config that quantises nothing, an
attention backend. Called by the plug-in in every vLLM process of an exact replica.

    os.environ[VARIABLE] = "1"      # before vLLM loads its plug-ins
"""

from __future__ import annotations

import os

VARIABLE = "MEGASYNC_EXACT"  # set in a replica's actor, inherited by its engine core and workers
METHOD = "megasync_exact"  # value of EngineArgs.quantization


def is_exact() -> bool:
    return os.environ.get(VARIABLE) == "1"


def register() -> None:
    """Safe to repeat."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from bridge.vllm.exact import layers

    for name, layer in layers.OUT_OF_TREE.items():
        if name not in op_registry_oot:
            CustomOp.register_oot(layer, name=name)
    register_quantization_config(METHOD)(layers.ExactConfig)
    register_backend(AttentionBackendEnum.CPU_ATTN, "bridge.vllm.exact.attention.ExactBackend")
