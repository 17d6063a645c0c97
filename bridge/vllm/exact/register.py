"""Makes the exact layers known to vLLM: out-of-tree classes of its layers, a quantization config that quantises nothing, an
attention backend. Called by the plug-in in every vLLM process of an exact replica; the last alone of a deterministic one on GPUs.

    os.environ[VARIABLE] = "1"      # before vLLM loads its plug-ins
"""

from __future__ import annotations

import os

VARIABLE = "MEGASYNC_EXACT"  # set in a replica's actor, inherited by its engine core and workers
STEADY = "MEGASYNC_STEADY"  # so is this one: attention alone, of a run that is deterministic on GPUs
METHOD = "megasync_exact"  # value of EngineArgs.quantization


# model of layers as they are, one CUDA graph a batch size: compiled ones round at other places
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# on GPUs: kernels that add in one order, and the model runner whose sampler the trainer calls (exact/cuda.py)
GPU_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


# variables that VLLM_BATCH_INVARIANT changes in a worker (model_executor/layers/batch_invariant.py:969), and as they were before
NCCL = tuple(f"NCCL_{name}" for name in ("LAUNCH_MODE", "COLLNET_ENABLE", "NVLS_ENABLE", "P2P_NET_DISABLE", "MIN_NCHANNELS"))
NCCL += tuple(f"NCCL_{name}" for name in ("MAX_NCHANNELS", "PROTO", "ALGO", "NTHREADS", "SOCKET_NTHREADS"))
_nccl: dict[str, str] = {}


def keep_nccl() -> None:
    """Before a worker starts; safe to repeat."""
    for name in NCCL:
        _nccl.setdefault(name, os.environ.get(name, ""))


def restore_nccl() -> None:
    """Before the weights' process group is made: its sides have to choose one protocol, and take all channels that there are."""
    for name, value in _nccl.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


def is_exact() -> bool:
    return os.environ.get(VARIABLE) == "1"


def is_steady() -> bool:
    return os.environ.get(STEADY) == "1"


def register_attention() -> None:
    """On GPUs, where a query's bits would depend on how many others there are of its sequence. Safe to repeat."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, "bridge.vllm.exact.flash.ExactFlashBackend")


def register() -> None:
    """Safe to repeat."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from bridge.vllm.exact import layers

    for name, layer in layers.OUT_OF_TREE.items():
        if name not in op_registry_oot:
            CustomOp.register_oot(layer, name=name)
    register_quantization_config(METHOD)(layers.ExactConfig)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "bridge.vllm.exact.attention.ExactBackend")
    else:
        register_attention()
