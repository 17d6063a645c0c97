"""vLLM's own way to load weights into a running model, layer by layer, and which layers need it.

Depends on the vLLM version as serving/api.py does, 0.26 and 0.32; notes are relative to the package of vllm(-cpu) 0.32.0. vLLM is
imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from bridge.vllm.weights import delta_net, experts, fp8, gpt_oss, latent

# the first two on CUDA, the others everywhere leave weights alone
AS_LOADED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "ExactLinearMethod", "ExactEmbeddingMethod")


def config_scope(vllm_config: Any) -> AbstractContextManager[Any]:
    """vLLM's current config, which layers read while they are loaded; 0.26 does not set it around weight updates
    (v1/worker/gpu_worker.py:1338).
    """
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)  # type: ignore[no-any-return]


def is_tied(model: torch.nn.Module) -> bool:
    """Whether the head computes with the embedding's weights."""
    head, config = getattr(model, "lm_head", None), getattr(model, "config", None)
    return head is not None and bool(getattr(config, "tie_word_embeddings", False))


def transformation(model: torch.nn.Module) -> Callable[[torch.nn.Module], str | None]:
    """A function of a layer: why vLLM does not compute with its weights as they were loaded; None if it does.

    The embedding looks rows up in its weight; the copy that CPUs pack of it (vocab_parallel_embedding.py:67) is not used. A
    tied head's is, and is renewed after every sync (repack_tied_head).
    """
    tied_head = model.lm_head if is_tied(model) else None

    def reason(layer: Any) -> str | None:
        method = getattr(layer, "quant_method", None)
        if layer is tied_head or type(layer).__name__ == "VocabParallelEmbedding":
            return None if type(method).__name__ in AS_LOADED else f"{type(method).__name__} changes weights after loading"
        if hasattr(layer, "cpu_linear") and not latent.stays_as_loaded(layer):
            return "oneDNN packs its weight after loading"
        if experts.is_fused_experts(layer) or delta_net.is_packed(layer):
            return experts.transformation(layer) if experts.is_fused_experts(layer) else delta_net.PACKED
        if method is not None and type(method).__name__ not in AS_LOADED:
            other = f"{type(method).__name__} changes weights after loading"
            return fp8.transformation(layer) if fp8.is_quantised(layer) else other
        if method is None and hasattr(layer, "process_weights_after_loading"):
            return f"{type(layer).__name__} changes weights after loading"
        return None

    return reason


def begin_reload(layers: Iterable[torch.nn.Module]) -> None:
    """Raw `load_weights` on live layers fails on CPUs, where weights are packed away after loading.

    From here on the old weights are gone in part: there is no way back but a new replica. On CPUs the packed ones are
    given up at once, so that old and new never fill memory together.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    for layer in layers:
        for part in layer.modules():
            vars(part).pop("cpu_linear", None)  # the packed copy of the old weight; loading packs the new one
            experts.forget_kernel(part)
        initialize_layerwise_reload(layer)


def finish_reload(layers: Iterable[torch.nn.Module], model: torch.nn.Module, model_config: Any) -> None:
    """Process deferred layers and renew derived ones; on CPUs also repack the tied head.

    A CPU head keeps a packed copy of its weight (model_executor/layers/vocab_parallel_embedding.py:67), which the
    reload of the embedding it is tied to does not renew (reload/layerwise.py:245): it would keep the old weights.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    for layer in layers:
        finalize_layerwise_reload(layer, model_config)
        head: Any
        for head in (part for part in layer.modules() if type(part).__name__ == "ParallelLMHead"):
            if head.weight.device.type == "cpu" and not hasattr(head, "cpu_linear"):
                head.quant_method.process_weights_after_loading(head)  # rows that pad the vocabulary, to which nothing was loaded
    latent.renew(model)
    repack_tied_head(model)


def repack_tied_head(model: torch.nn.Module) -> None:
    """Repack a tied head on CPUs, after the embedding that it is tied to has changed."""
    if is_tied(model):
        head: Any = model.lm_head
        if head.weight.device.type == "cpu":
            vars(head).pop("cpu_linear", None)
            head.quant_method.process_weights_after_loading(head)


def unloaded_layers(model: torch.nn.Module) -> list[str]:
    """Layers with parameters that have not got all of them, before `finish_reload`, with elements got and due.

    Finalising would silently keep their old weights or process them in part (reload/layerwise.py:258-281). Rows that
    only pad the vocabulary are never loaded.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    tied_head = model.lm_head if is_tied(model) else None
    reasons = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or layer is tied_head or not any(p is not None for p in layer._parameters.values()):
            continue
        due = info.load_numel_total
        if (indices := getattr(layer, "shard_indices", None)) is not None:
            due -= indices.num_org_vocab_padding * layer.embedding_dim
        if info.load_numel < due:
            reasons.append(f"{name} got {info.load_numel} of {due} elements")
    return reasons


def load_stream(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
    """One pass of the model's own loader; the names of the parameters it loaded, None where the model does not say."""
    weights = gpt_oss.by_expert(weights) if gpt_oss.loads_by_expert(model) else weights
    loaded: set[str] | None = model.load_weights(weights)  # type: ignore[operator]
    return None if loaded is None else experts.parameter_names(loaded)
