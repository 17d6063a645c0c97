"""vLLM's fused all-reduce and norm needs NVLink multicast, which not every host offers.

vLLM 0.26 and 0.32 turn the fusion on for several workers on Hopper and Blackwell wherever flashinfer is installed
(vllm/config/vllm.py:enable_allreduce_rms_fusion), without a look at the host: there its kernels fail in cublasCreate, and the
replica does not start. Depends on the vLLM version as api.py does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from bridge.notes import note
from bridge.vllm.serving.patches import run_in_fork

MULTICAST_SUPPORTED = 132  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
FUSION = "fuse_allreduce_rms"
SWITCHED_OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}  # what an administrator sets


def is_available() -> bool:
    """Whether the first GPU supports multicast and no variable of SWITCHED_OFF forbids it. Asks the driver in a fork."""
    if any(os.environ.get(name) == value for name, value in SWITCHED_OFF.items()):
        return False
    return bool(run_in_fork(_ask_driver))


def _ask_driver() -> bool:
    """Reads the device's attribute; makes no CUDA context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, supported = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return False
    return not cuda.cuDeviceGetAttribute(ctypes.byref(supported), MULTICAST_SUPPORTED, device) and bool(supported.value)


def without_fusion(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineArgs with the fusion off, unless they set it themselves."""
    compilation = dict(arguments.get("compilation_config") or {})
    passes = dict(compilation.get("pass_config") or {})
    if FUSION not in passes:
        note(f"vLLM's {FUSION} is off: NVLink multicast is not available on this host")
    return {**arguments, "compilation_config": {**compilation, "pass_config": {FUSION: False, **passes}}}
