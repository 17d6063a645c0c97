"""The libraries whose kernels train, by `engine.kernels`: torch's own, and others where they are installed. None is required.

`auto` takes what was faster on an H200 (docs/benchmarks.md): FlashAttention 3 (flash.py), and under DDP the matrix product of
apex or TransformerEngine that adds a weight's gradient to the main gradient at once. For RMSNorm, linears, experts, Adam and
the gradients' norm torch's kernels were as fast or faster. Each is tried before it is used. Sources: megatron-core 0.16.1
tensor_parallel/layers.py, TransformerEngine 2.11.0 pytorch/cpp_extensions/gemm.py, apex csrc/megatron.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from engine.runtime import device, workarounds
from engine.config import EngineConfig
from engine.wrap.table import WRAPS

Library = Literal["torch", "apex", "TransformerEngine"]
Setting = Literal["auto", "torch", "te", "fla"]
APEX: Library = "apex"
TRANSFORMER_ENGINE: Library = "TransformerEngine"


@dataclass(frozen=True)
class Kernels:
    """The libraries that were chosen; attention's are in flash.py and delta_net.py, since they depend on the model."""

    setting: Setting  # engine.kernels, or torch where torch's algorithms have to be deterministic
    weight_gradients: Library = "torch"
    adam: Library = "torch"
    left_out: tuple[str, ...] = ()  # why libraries that were looked for are not used

    def describe(self, attention: str, delta_nets: str) -> str:
        """One line for the log. `attention`: of flash.choose; `delta_nets`: of delta_net.choose_kernels."""
        why = f" ({'; '.join(self.left_out)})" if self.left_out else ""
        attention += f"; gated delta nets {delta_nets}" if delta_nets else ""
        used = f"attention {attention}; weight gradients {self.weight_gradients}{why}; Adam {self.adam}"
        return f"engine.kernels={self.setting}: {used}"


_in_use: list[weakref.ref[Kernels]] = []  # of the engines of this process, which share megatron-core's globals


def choose(config: EngineConfig, dtype: str) -> Kernels:
    """Select kernels by `engine.kernels` for a model of this `model.dtype`, and set megatron-core's globals accordingly.

    The caller keeps the result for as long as it computes with megatron-core.

    Raises:
        ValueError: TransformerEngine is selected and cannot be used, or another engine of this process has other kernels.
    """
    setting: Setting = "torch" if torch.are_deterministic_algorithms_enabled() else config.kernels
    if any(other.setting != setting for other in _alive()):
        gc.collect()  # an engine that nobody uses may wait for it
    for other in _alive():
        if other.setting != setting:
            message = f"engine.kernels = {setting}: another engine of this process has engine.kernels={other.setting}"
            raise ValueError(f"{message}, and megatron-core keeps both in globals. Remedy: start each in a process of its own")
    chosen = _choose(setting, config, dtype)
    _in_use[:] = [*map(weakref.ref, _alive()), weakref.ref(chosen)]
    workarounds.use_adam(chosen.adam)
    return chosen


def _alive() -> list[Kernels]:
    return [found for each in _in_use if (found := each()) is not None]


def _choose(setting: Setting, config: EngineConfig, dtype: str) -> Kernels:
    adds = WRAPS[config.wrap].accumulates_gradients and dtype == "bfloat16"
    main_dtype = torch.float32 if config.gradient_dtype == "float32" else torch.bfloat16
    if setting == "te":
        if problem := _problem(TRANSFORMER_ENGINE, main_dtype):
            raise ValueError(f"engine.kernels = te: {problem}. Remedy: install it for this machine, or write engine.kernels=auto")
        return Kernels(setting, TRANSFORMER_ENGINE if adds else "torch", TRANSFORMER_ENGINE)
    left_out: list[str] = []
    for library in (APEX, TRANSFORMER_ENGINE) if setting in ("auto", "fla") and adds else ():
        problem = _problem(library, main_dtype)
        if not problem:
            return Kernels(setting, library, left_out=tuple(left_out))
        left_out.append(problem)
    return Kernels(setting, left_out=tuple(left_out))


def _problem(library: Library, main_dtype: torch.dtype) -> str:
    """Why the library's product of weight gradients cannot be used here, or "". Tries it in megatron-core's linears."""
    package = {APEX: "fused_weight_gradient_mlp_cuda", TRANSFORMER_ENGINE: "transformer_engine"}[library]
    if not device.has_cuda():
        return f"{library} needs an NVIDIA GPU, and there is none"
    if find_spec(package) is None:
        return f"{library} is not installed"
    try:
        workarounds.use_weight_gradient_product(library)
        return "" if _accumulates(main_dtype) else f"{library} computes wrong weight gradients on this device"
    except Exception as error:  # noqa: BLE001 - what an extension raises that was built for other versions
        return f"{library} is installed and fails: {type(error).__name__}: {error}".splitlines()[0]


def _accumulates(main_dtype: torch.dtype) -> bool:
    """Whether the product that megatron-core's linears call adds bf16 matrices' product to a main gradient of this dtype."""
    generator = torch.Generator(device.compute_device()).manual_seed(0)
    options: Any = {"device": device.compute_device(), "generator": generator}
    inputs, gradient = (torch.randn(32, size, dtype=torch.bfloat16, **options) for size in (16, 64))
    main = torch.randn(64, 16, dtype=main_dtype, **options)
    expected = main.float() + gradient.float().t() @ inputs.float()
    workarounds.weight_gradient_product(main_dtype)(inputs, gradient, main)
    tolerance = 1e-3 if main_dtype is torch.float32 else 0.2  # of sums up to about 20
    return bool(torch.allclose(main.float(), expected, rtol=1e-4, atol=tolerance))
