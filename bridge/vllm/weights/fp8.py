"""vLLM's layers in FP8: weights per output channel, activations per token, loaded from quantised tensors (export/fp8.py).

vLLM has random weights until the first sync. After loading it transposes a linear's weight in place, and its loaders do not know
the new parameters; some kernels pack weights. Depends on the vLLM version as serving/api.py does, 0.26 and 0.32:
model_executor/layers/quantization/compressed_tensors/. Leaves out which layers these are (fp8_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

METHOD = "megasync_fp8"  # value of EngineArgs.quantization
VARIABLE = "MEGASYNC_FP8"  # set in a replica's actor, inherited by its engine core and workers
LINEAR, EXPERTS = "CompressedTensorsLinearMethod", "CompressedTensorsW8A8Fp8MoEMethod"
AS_LOADED = (  # kernels: of linears on GPUs and on CPUs, of experts (fused_moe/oracle/fp8.py)
    *("CutlassFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel", "TRITON", "BATCHED_TRITON"),
)
ENGINE_ARGUMENTS = {
    "quantization": METHOD,
    "load_format": "dummy",
    "moe_backend": "triton",  # a worker that sleeps loses what CUTLASS's has beside the weights: experts/cutlass_moe.py:289
}


def register() -> None:
    """Safe to repeat."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from bridge.vllm.weights.fp8_config import Fp8Config

    register_quantization_config(METHOD)(Fp8Config)


def is_quantised(layer: Any) -> bool:
    return type(getattr(layer, "quant_method", None)).__name__ in (LINEAR, EXPERTS)


def transformation(layer: Any) -> str | None:
    """Why the weights of a quantised layer are not where and as they were loaded; None where they are."""
    if type(layer.quant_method).__name__ == EXPERTS:
        kind = layer.quant_method.fp8_backend.name
    else:
        kind = type(getattr(layer.scheme, "fp8_linear", layer.scheme)).__name__
    if kind not in AS_LOADED:
        return f"{kind} puts its weights in FP8 in another order after loading"
    for name, recorded in _recorded(layer).items():
        held = layer._parameters[name]
        if as_loaded(held).shape != recorded.shape or not as_loaded(held).is_contiguous() or held.dtype != recorded.dtype:
            return f"{kind} changes {name} after loading"
    return None


def as_loaded(parameter: torch.Tensor) -> torch.Tensor:
    """The weight of a quantised layer as it is loaded, [out, in]; the layer computes with it as [in, out], in the same memory."""
    tensor = parameter.detach()
    return tensor if tensor.is_contiguous() or tensor.ndim != 2 else tensor.t()


@contextmanager
def original_parameters(model: torch.nn.Module) -> Iterator[None]:
    """The parameters of quantised layers, in their memory, are of the classes and have the loaders that they had at first."""
    replaced: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for layer in model.modules():
            if is_quantised(layer) and transformation(layer) is None:
                replaced.append((layer, dict(layer._parameters)))
                layer._parameters.update({name: _view(layer, name, meta) for name, meta in _recorded(layer).items()})
        yield
    finally:
        for layer, parameters in replaced:
            layer._parameters.update(parameters)


def _view(layer: torch.nn.Module, name: str, recorded: torch.Tensor) -> Any:
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    held = layer._parameters[name]
    assert held is not None
    tensor = as_loaded(held)
    tensor.__class__ = recorded.__class__  # as vLLM's reload does it: model_loader/reload/meta.py:materialize_meta_tensor
    tensor.__dict__ = recorded.__dict__.copy()
    return restore_layer_refs(tensor, layer)


def _recorded(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The layer's weights and scales as they were created, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters = get_layerwise_info(layer).restore_metadata[0]
    return {name: tensor for name, tensor in parameters.items() if name.endswith(("weight", "weight_scale"))}
