"""vLLM's fused experts: whether their weights are as loaded, how CPUs pack them, and which Hugging Face tensor is where.

A layer has w13_weight [experts, gate then up, in] and w2_weight [experts, out, in], each expert a tensor-parallel shard, and in
FP8 scales of rows: w13_weight_scale [experts, gate then up, 1] and w2_weight_scale [experts, out, 1]. Depends
on the vLLM version as serving/api.py does; notes are relative to model_executor/layers/fused_moe of vllm(-cpu) 0.32. Leaves out
expert parallelism in vLLM, where a worker holds some experts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bridge.vllm.weights import fp8

METHOD = "UnquantizedFusedMoEMethod"
AS_LOADED = ("TRITON", "BATCHED_TRITON")  # oracle/unquantized.py:416; Hopper's default in 0.26 and 0.32
VIEWED_BY_VLLM = ".experts."  # until a layer is complete, vLLM keeps views of such tensors: routed_experts.py:1060
PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
MIXTRAL_PARTS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}  # model_executor/models/mixtral.py:131
ROUTER_BIAS = "e_score_correction_bias"  # the layer has it as well as its router, which is a layer of its own
DIGIT = 256  # all below it are exact in every dtype of weights


def is_fused_experts(layer: Any) -> bool:
    return type(getattr(layer, "quant_method", None)).__name__ in (METHOD, fp8.EXPERTS)


def transformation(layer: Any) -> str | None:
    """Why the layer's experts are not as they were loaded; None where they are."""
    if fp8.is_quantised(layer):
        return fp8.transformation(layer)
    method = layer.quant_method
    backend = method.unquantized_backend.name
    if backend in AS_LOADED:
        return None
    if backend == "CPU":
        is_packed = method.moe_kernel is not None or hasattr(method, "cpu_fused_moe")  # 0.26 has the latter alone
        return "the CPU backend packs its experts after loading" if is_packed else None
    return f"the {backend} backend puts its experts in another order after loading"


def forget_kernel(layer: Any) -> None:
    """Drop the experts' kernel on CPUs, so that loading packs them again.

    0.32 packs them where it makes their kernel, once (unquantized_fused_moe_method.py:184-218): a reload would leave them as
    loaded, for a kernel that takes them for packed.
    """
    if type(getattr(layer, "quant_method", None)).__name__ == METHOD and layer.quant_method.unquantized_backend.name == "CPU":
        layer.quant_method.moe_kernel = None


def parameter_names(loaded: set[str]) -> set[str]:
    """The parameter names that a loader returns, with those of experts in full: 0.26 leaves a part out."""
    return loaded | {name.replace(".experts.w", ".experts.routed_experts.w") for name in loaded}


def hf_names(path: str, layer: Any, name: str) -> list[str]:
    """The tensors that parameter `name` of the layer at `path` is made of, expert by expert."""
    if name == ROUTER_BIAS:
        return []
    prefix = path.removesuffix(".routed_experts")
    fused, _, kind = name.partition("_")  # w13 or w2, weight or weight_scale
    parts = (MIXTRAL_PARTS if ".block_sparse_moe." in path else PARTS)[f"{fused}_weight"]
    return [f"{prefix}.{e}.{part}.{kind}" for e in range(layer.local_num_experts) for part in parts]


def slices(path: str, layer: Any, name: str) -> Iterator[tuple[str, tuple[int, int], torch.Tensor]]:
    """(HF name, offsets in the full tensor, this worker's part) for parameter `name` of the layer at `path`.

    Raises:
        ValueError: the experts lie in an order that is not known here, or some are on other workers.
    """
    names, weight = hf_names(path, layer, name), loaded(path, layer, name)
    size, rank = layer.intermediate_size_per_partition, layer.moe_config.tp_rank
    parts = iter(names)
    for expert in weight:
        if name.startswith("w13"):
            for half in expert.chunk(2):  # CPUs may have padded each
                yield next(parts), (rank * size, 0), half[:size]
        elif name == "w2_weight":
            yield next(parts), (0, rank * size), expert[:, :size]
        else:  # scales of whole rows, on each worker
            yield next(parts), (0, 0), expert


def loaded(path: str, layer: Any, name: str) -> torch.Tensor:
    """Parameter `name` of the layer at `path` as it was loaded.

    Raises:
        ValueError: the experts lie in an order that is not known here, or some are on other workers.
    """
    problem = transformation(layer) if not _unpacks(layer) else None
    if layer.local_num_experts != layer.global_num_experts:
        problem = "this worker holds some of the experts only"
    if problem is not None:
        raise ValueError(f"read-back of {path}.{name}: {problem}; set sync.verify to digest")
    weight: torch.Tensor = getattr(layer, name).detach()
    if name.endswith("weight") and _unpacks(layer):
        return _unpacked(weight, layer.quant_method.moe_kernel.fused_experts.isa)
    return weight


def _unpacks(layer: Any) -> bool:
    """Whether the layer is packed in a way that is known here: experts/cpu_moe.py:CPUUnquantizedExperts."""
    experts = getattr(layer.quant_method.moe_kernel, "fused_experts", None)
    return hasattr(experts, "isa") and not getattr(experts, "_use_zentorch", False)


def _unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Undoes cpu_prepack_moe_weight, which permutes the elements of each expert.

    Which one is found by packing the elements' places, digit by digit.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    shape = packed[:1].shape
    places, order = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    scale = 1
    while scale < places.numel():
        digits = (places // scale % DIGIT).to(packed.dtype).view(shape)
        order += cpu_prepack_moe_weight(digits, isa).view(-1).long() * scale
        scale *= DIGIT
    weight = torch.empty_like(packed)
    weight.view(len(packed), -1)[:, order] = packed.view(len(packed), -1)
    return weight
