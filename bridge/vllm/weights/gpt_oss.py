"""vLLM's gpt-oss: names of its own, sinks in the attention layer itself, and experts that Hugging Face holds as one tensor.

Read in vllm 0.26.0 and 0.32.0, model_executor/models/gpt_oss.py. Its loader transposes experts: a load plan leaves them to it. A
folder in MXFP4 is loaded in the replica's dtype, by a subclass that decodes NAME_blocks and NAME_scales. Leaves out layers that
are as in other models, and packed experts (experts.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bridge.layout.manifest import Manifest, TensorSpec

MODEL = "GptOssForCausalLM"
BLOCKS, SCALES = "_blocks", "_scales"  # of a tensor in MXFP4: two numbers a byte, and a scale for each block of them
ATTENTION, EXPERTS = "OAIAttention", ("GptOssRoutedExperts", "RoutedExperts")  # in 0.26 the latter, as in other models
PARTS = {"w13_weight": "gate_up_proj", "w13_bias": "gate_up_proj_bias", "w2_weight": "down_proj", "w2_bias": "down_proj_bias"}
NAMES = {".attn.": ".self_attn.", "model.embedding": "model.embed_tokens"}  # of its modules: Hugging Face's

Slice = tuple[str, tuple[int, ...], torch.Tensor]  # HF name, offsets in the full tensor, this worker's part


def is_quantised(model_path: str) -> bool:
    """Whether the folder is in MXFP4, which the trainer reads into another dtype."""
    path = Path(model_path) / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return fields.get("model_type") == "gpt_oss" and bool(fields.get("quantization_config"))


def without_quantisation(hf_config: Any, fields: Mapping[str, Any]) -> Any:
    """EngineArgs.hf_overrides for such a folder, with other `fields`; vLLM's loader tests whether quantization_config exists."""
    hf_config.update(fields)
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    return hf_config


def register() -> None:
    """Have vLLM take the class from here."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(MODEL, f"{__name__}:{MODEL}")


class _OfPackedFolder:
    """Mixed in before vLLM's class: takes tensors in MXFP4, too."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return super().load_weights(unpacked(weights))  # type: ignore[misc]


class _LoadsStacks(_OfPackedFolder):
    """With vLLM 0.26, whose loader copies stacks of experts into parameters without their weight loaders (:1021-1070).

    They get weight loaders here, which a reload can wrap. Leaves out expert parallelism in vLLM.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        for path, layer in self.named_modules():  # type: ignore[attr-defined]
            if path.endswith(".routed_experts"):
                for name in PARTS:
                    vars(getattr(layer, name))["weight_loader"] = _stack_loader(layer, name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = set[str]()
        return super().load_weights(self._load_stacks(weights, loaded)) | loaded

    def _load_stacks(
        self, weights: Iterable[tuple[str, torch.Tensor]], loaded: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The other tensors; names of the parameters that were loaded come into `loaded`."""
        names = {theirs: ours for ours, theirs in PARTS.items()}
        for name, tensor in unpacked(weights):
            path, _, last = name.rpartition(".")
            if not path.endswith(".mlp.experts"):
                yield name, tensor
                continue
            loaded.add(f"{path}.routed_experts.{names[last]}")
            parameter = self.get_parameter(f"{path}.routed_experts.{names[last]}")  # type: ignore[attr-defined]
            parameter.weight_loader(parameter, tensor)


def _stack_loader(layer: Any, name: str) -> Callable[[torch.nn.Parameter, torch.Tensor], None]:
    """For parameter `name` of a layer's experts: takes Hugging Face's tensor of all experts, copies this worker's part."""

    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        size, rank = layer.intermediate_size_per_partition, layer.moe_config.tp_rank
        if name == "w2_bias":
            part = loaded_weight if rank == 0 else torch.zeros_like(loaded_weight)  # it is added once
        elif name == "w2_weight":
            part = loaded_weight.narrow(1, rank * size, size)
        else:
            part = loaded_weight.narrow(-1, 2 * rank * size, 2 * size)
        param.data.copy_(part if part.ndim < 3 else part.transpose(1, 2))

    return load


def loads_by_expert(model: torch.nn.Module) -> bool:
    """Whether it is a gpt-oss model whose weight loaders take one expert's tensor at a time."""
    return is_model(model) and not isinstance(model, _LoadsStacks)


def unpacked(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in MXFP4 as bfloat16 [experts, in, out], the others as they are."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    waiting: dict[str, torch.Tensor] = {}  # of a pair the one that came first
    for name, tensor in weights:
        if not name.endswith((BLOCKS, SCALES)):
            yield name, tensor
            continue
        whole = name.removesuffix(BLOCKS).removesuffix(SCALES)
        waiting[name] = tensor
        if {whole + BLOCKS, whole + SCALES} <= waiting.keys():
            yield whole, convert_moe_packed_tensors(waiting.pop(whole + BLOCKS), waiting.pop(whole + SCALES))


def unpacked_manifest(held: Manifest) -> Manifest:
    """A folder's manifest with the tensors that `unpacked` makes."""
    return Manifest(tuple(_whole(spec) for spec in held.tensors if not _is_packed(spec, SCALES)))


def _whole(spec: TensorSpec) -> TensorSpec:
    if not _is_packed(spec, BLOCKS):
        return spec
    experts, rows, count, size = spec.shape
    return TensorSpec(spec.name.removesuffix(BLOCKS), "bfloat16", (experts, 2 * size * count, rows))


def _is_packed(spec: TensorSpec, part: str) -> bool:
    return spec.dtype == "uint8" and spec.name.endswith(part)


def hf_path(path: str) -> str:
    """Hugging Face's name of the module at `path` of a gpt-oss model."""
    for ours, theirs in NAMES.items():
        path = path.replace(ours, theirs)
    return path


def is_model(model: torch.nn.Module) -> bool:
    return type(model).__name__ == MODEL


def by_expert(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one expert of a stack at a time: only in that form does the loader call vLLM's weight loaders, which a reload counts.

    It copies tensors of all experts into parameters itself (:1202-1240), which are meta tensors while a layer is reloaded.
    """
    for name, tensor in weights:
        prefix, marker, last = name.partition(".mlp.experts.")
        if not marker:
            yield name, tensor
        for expert, each in enumerate(tensor if marker else ()):
            yield f"{prefix}{marker}{expert}.{last}", each


def sinks(path: str, layer: Any) -> Iterator[Slice]:
    """The sinks of an attention layer, for this worker's heads; nothing for other layers."""
    if type(layer).__name__ == ATTENTION:
        number = layer.num_local_attention_heads
        rank = layer.qkv_proj.tp_rank
        yield f"{hf_path(f'{path}.')}sinks", (rank * number,), layer.sinks.detach()


def is_stack(layer: Any) -> bool:
    return type(layer).__name__ in EXPERTS and hasattr(layer, "w13_bias")


def stack_name(path: str, name: str) -> str:
    """The tensor that parameter `name` of the experts at `path` is a part of."""
    return f"{path.removesuffix('.routed_experts')}.{PARTS[name]}"


def stack_slice(path: str, layer: Any, name: str, weight: torch.Tensor) -> Slice:
    """The part that this worker has in parameter `name`, whose value is `weight` [experts, out, in] or [experts, out].

    Biases of the second linear are the first worker's, zeros on the others.
    """
    size, rank, hidden = layer.intermediate_size_per_partition, layer.moe_config.tp_rank, layer.hidden_size
    whole = stack_name(path, name)
    if name == "w2_bias":
        is_none = rank > 0 and not bool(weight.any())
        return whole, (0, 0), weight[:0] if is_none else weight[:, :hidden]
    if name == "w13_bias":
        return whole, (0, 2 * size * rank), weight[:, : 2 * size]
    if name == "w13_weight":
        return whole, (0, 0, 2 * size * rank), weight[:, : 2 * size, :hidden].transpose(1, 2)
    return whole, (0, size * rank, 0), weight[:, :hidden, :size].transpose(1, 2)


def __getattr__(name: str) -> Any:
    if name != MODEL:
        raise AttributeError(name)
    from vllm.model_executor.models import gpt_oss

    base = _OfPackedFolder if hasattr(gpt_oss, EXPERTS[0]) else _LoadsStacks
    return type(MODEL, (base, gpt_oss.GptOssForCausalLM), {})
