"""A vLLM worker's weights in Hugging Face names and coordinates: fused layers split, shards placed.

Depends on the vLLM version as vllm/serving/api.py does; notes are relative to vllm 0.32.0's package. Leaves out how parts become
full tensors (shards.py) and fused experts (experts.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from bridge.layout.digest import as_bytes, digest_value
from bridge.layout.manifest import TIED_HEAD, TensorSpec
from bridge.layout.shards import Part, assemble_one
from bridge.vllm.weights import delta_net, experts, fp8, gpt_oss, latent

IDENTITY_ROWS = 1024
MAX_PROBLEMS = 5

Slice = tuple[str, tuple[int, ...], torch.Tensor]  # HF name, offsets in the full tensor, this worker's part


def unpacked_weight(layer: Any) -> torch.Tensor:
    """A linear layer's weight [out, in] as it computes with it.

    CPU kernels drop `weight` and keep a packed copy in a closure (model_executor/layers/utils.py:470-600). An identity
    sent through the layer, some rows at a time, gives it back bit for bit, but for -0.0, which comes as 0.0.
    """
    if fp8.is_quantised(layer):
        return _quantised_weight(layer)
    if not hasattr(layer, "cpu_linear") or latent.stays_as_loaded(layer):
        return layer.weight.detach()  # type: ignore[no-any-return]
    widths = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    width = next(width for width in widths if width is not None)
    dtype = layer.weight.dtype
    columns = []
    for start in range(0, width, IDENTITY_ROWS):
        rows = min(IDENTITY_ROWS, width - start)
        identity = torch.zeros(rows, width, dtype=dtype)
        identity[torch.arange(rows), torch.arange(start, start + rows)] = 1
        columns.append(layer.cpu_linear(identity, layer.weight, None))
    return torch.cat(columns).t().contiguous()


def _quantised_weight(layer: Any) -> torch.Tensor:
    if (reason := fp8.transformation(layer)) is not None:
        raise ValueError(f"read-back: {reason}; set sync.verify to digest")
    return fp8.as_loaded(layer.weight)


def hf_slices(model: torch.nn.Module, wanted: Callable[[str], bool]) -> Iterator[Slice]:
    """All parameters of this worker in HF names for which `wanted` holds. A tied head comes as lm_head.weight too.

    Raises:
        ValueError: a layer of a kind that is not known here.
    """
    is_gpt_oss = gpt_oss.is_model(model)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        if delta_net.is_delta_net(module):
            yield from (part for part in delta_net.slices(path, module) if wanted(part[0]))
        yield from (part for part in gpt_oss.sinks(path, module) if wanted(part[0]))
        if not names or path.endswith(("attn", f"linear_attn.{delta_net.CONVOLUTION}")):
            continue
        if experts.is_fused_experts(module):
            for name in names:
                yield from _expert_slices(path, module, name, wanted)
            continue
        parent, _, last = (gpt_oss.hf_path(path) if is_gpt_oss else path).rpartition(".")
        hf_paths = [f"{parent}.{part}".removeprefix(".") for part in packed.get(last) or [last]]
        for name in names:
            full_names = [f"{hf_path}.{name}" for hf_path in hf_paths]
            if any(wanted(full_name) for full_name in full_names):
                yield from _layer_slices(module, name, full_names)

    yield from (part for part in latent.slices(model) if wanted(part[0]))
    head = getattr(model, "lm_head", None)
    if type(head).__name__ == "VocabParallelEmbedding" and wanted(TIED_HEAD):
        yield _vocabulary_rows(head, TIED_HEAD, unpacked_weight(head))  # in 0.26 a tied head is the embedding itself


def _expert_slices(path: str, layer: Any, name: str, wanted: Callable[[str], bool]) -> Iterator[Slice]:
    """Slices of parameter `name` of the fused experts at `path`."""
    if gpt_oss.is_stack(layer):
        if wanted(gpt_oss.stack_name(path, name)):
            yield gpt_oss.stack_slice(path, layer, name, experts.loaded(path, layer, name))
    elif any(wanted(hf_name) for hf_name in experts.hf_names(path, layer, name)):
        yield from experts.slices(path, layer, name)


def _layer_slices(layer: Any, name: str, hf_names: list[str]) -> Iterator[Slice]:
    kind = type(layer).__name__
    if "MoE" in kind or kind == "RoutedExperts":
        raise ValueError(f"read-back does not know {kind} layers ({hf_names[0]}); set sync.verify to digest")
    if kind == "VocabParallelEmbedding":
        yield _vocabulary_rows(layer, hf_names[0], layer.weight.detach())
    elif kind == "ParallelLMHead":
        yield _vocabulary_rows(layer, hf_names[0], unpacked_weight(layer))
    elif not hasattr(layer, "input_size"):
        tensor = getattr(layer, name).detach()
        yield hf_names[0], (0,) * tensor.ndim, tensor
    else:
        tensor = unpacked_weight(layer) if name == "weight" else getattr(layer, name).detach()
        yield from _linear_slices(layer, name, hf_names, tensor)


def _vocabulary_rows(layer: Any, hf_name: str, weight: torch.Tensor) -> Slice:
    """Rows of the original vocabulary, without padding (model_executor/layers/vocab_parallel_embedding.py:498)."""
    start = layer.shard_indices.org_vocab_start_index
    return hf_name, (start, 0), weight[: layer.shard_indices.org_vocab_end_index - start]


def _linear_slices(layer: Any, name: str, hf_names: list[str], tensor: torch.Tensor) -> Iterator[Slice]:
    rank, other_dims = layer.tp_rank, (0,) * (tensor.ndim - 1)
    kind = type(layer).__name__
    if kind == "GateLinear":  # a router's: model_executor/layers/fused_moe/router/gate_linear.py:21
        kind = "ReplicatedLinear"
    if kind == "DeepSeekV2FusedQkvAProjLinear":  # model_executor/models/deepseek_v2.py:953, whole on each worker
        kind = "MergedColumnParallelLinear"
    if kind == "RowParallelLinear":
        offsets = (0, rank * layer.input_size_per_partition) if name == "weight" else (0, *other_dims)
        yield hf_names[0], offsets, tensor
        return
    if kind == "QKVParallelLinear":  # model_executor/layers/linear.py:1052-1105; KV heads are copied when ranks exceed them
        kv_rank = rank // layer.num_kv_head_replicas
        sizes = [layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size]
        sizes.append(layer.num_kv_heads * layer.v_head_size)
        ranks = [rank, kv_rank, kv_rank]
    elif kind == "MergedColumnParallelLinear":
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        ranks = [rank] * len(sizes)
    elif kind in {"ColumnParallelLinear", "ReplicatedLinear"}:
        sizes = [tensor.shape[0]]
        ranks = [rank if kind == "ColumnParallelLinear" else 0]
    else:
        raise ValueError(f"read-back does not know {kind} layers ({hf_names[0]}); set sync.verify to digest")
    parts = torch.split(tensor, sizes)
    if len(sizes) > len(hf_names):
        for (linear, start), part in zip(delta_net.projection_rows(layer, sizes), parts, strict=True):
            yield hf_names[linear], (start, *other_dims), part
        return
    for hf_name, part, part_rank, size in zip(hf_names, parts, ranks, sizes, strict=True):
        yield hf_name, (part_rank * size, *other_dims), part


def in_dtypes(slices: Iterable[Slice], sent: Mapping[str, TensorSpec]) -> Iterator[Slice]:
    """Cast to the dtypes in which they were sent, where a layer has its own: routers of glm4_moe are float32 in vLLM.

    Values that the sent dtype does not have come as NaN, which differs from anything that was sent.
    """
    for name, offsets, held in slices:
        tensor = held.to(getattr(torch, sent[name].dtype)) if name in sent else held
        if tensor.dtype != held.dtype:
            tensor = tensor.where(tensor.to(held.dtype) == held, torch.nan)
        yield name, offsets, tensor


def tensor_group() -> Any:
    """vLLM's tensor-parallel workers."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def digest_whole(slices: Iterable[Slice], group: Any) -> dict[str, int]:
    """digest_value of every full tensor, put together of what the workers of `group` hold; {} except on rank 0.

    Collective: all workers have slices of the same tensors in the same order. Tensors stay on their device.

    Args:
        slices: this worker's.
        group: a GroupCoordinator of vLLM's (distributed/parallel_state.py).

    Raises:
        ValueError: after all of it, workers or layers that ought to hold the same do not, or nobody holds a part.
    """
    digests: dict[str, int] = {}
    problems: list[str] = []
    for name, of_name in itertools.groupby(slices, itemgetter(0)):  # a worker may hold several parts of one
        parts = [part for _, offsets, tensor in of_name for part in _from_all_workers(group, offsets, tensor)]
        if group.rank_in_group > 0:
            continue
        try:
            digest = digest_value(assemble_one(name, parts))
        except ValueError as error:  # the other workers continue with the next tensor
            problems.append(str(error))
            continue
        if digests.setdefault(name, digest) != digest:
            problems.append(f"vLLM holds different values of {name} in layers that share it")
    if problems:
        raise ValueError("; ".join(problems[:MAX_PROBLEMS]))
    return digests


def _from_all_workers(group: Any, offsets: tuple[int, ...], tensor: torch.Tensor) -> list[Part]:
    """Each worker's part of a tensor."""
    if group.world_size == 1:
        return [(offsets, tensor)]
    own = torch.tensor([*offsets, *tensor.shape])
    places = [torch.empty_like(own) for _ in group.ranks]
    dist.all_gather(places, own, group=group.cpu_group)
    parts: list[Part] = []
    for index, (rank, place) in enumerate(zip(group.ranks, places, strict=True)):
        begin, shape = place[: tensor.ndim].tolist(), place[tensor.ndim :].tolist()
        part = tensor.contiguous() if index == group.rank_in_group else tensor.new_empty(shape)
        dist.broadcast(as_bytes(part), src=rank, group=group.device_group)
        parts.append((tuple(begin), part))
    return parts
