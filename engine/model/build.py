"""A Hugging Face folder becomes megatron-core model chunks, through mbridge, with our local layer spec.

Leaves out wrapping (wrap/) and the way back to Hugging Face tensors (the weight bridge's).
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.attention import context, delta_net, fused, latent, rope, windows
from engine.batch import costs
from engine.runtime import device
from engine.moe import experts, router
from engine.model import exact, head, recompute, stages, vocabulary
from engine.model.load import OwnTensors, load_weights
from engine.model.families import gemma, mxfp4, table as families
from engine.attention.core import CoreAttention, RMSNorm
from engine.batch.plan import Balance
from engine.config import FAMILIES, LATENT_FAMILIES, EngineConfig, ModelConfig, ParallelConfig
from engine.algorithm import AlgorithmConfig
from model_folder.layout import VISION_LANGUAGE, own_fields
from engine.runtime.megatron import get_gpt_decoder_block_spec, get_transformer_layer_offset

from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.llm_bridge import LLMBridge
from transformers import AutoConfig

NOT_USED = {
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _LocalSpec:
    """Mixed in before an mbridge bridge: the local layer spec in place of the TransformerEngine one."""

    config: Any
    hf_config: Any
    has_vp_stage: bool
    recomputes_activation = keeps_inputs_on_host = is_exact = False

    def _get_safetensor_io(self, weights_path: str) -> Any:
        return mxfp4.readable(OwnTensors(Path(weights_path)))

    load_weights = load_weights

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
        spec.layer_norm = RMSNorm
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]  # megatron-core's layers share them
        first = get_transformer_layer_offset(self.config, vp_stage=vp_stage)
        for number, layer in enumerate(spec.layer_specs, first):
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = CoreAttention
            if self.config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
            latent.use_latent_attention(layer)
            experts.use_grouped_experts(layer)
            if self.recomputes_activation:
                recompute.use_recomputed_activation(layer)
            families.use_layers(layer, self.config, self.hf_config, number)
        if self.is_exact:
            exact.use_exact_layers(spec)
        return spec


def _bridge_class(model_type: str) -> type[Bridge]:
    """mbridge's bridge of a family with our spec and its own copy of the name tables.

    mbridge changes the tables of the class when embeddings are tied (qwen2.py:_adjust_mapping_for_shared_weights), which would
    leak into the next model of the process. The local spec keeps the norms apart that TransformerEngine fuses into linears.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model.path: architecture {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    base = _MODEL_REGISTRY[families.BRIDGE_OF.get(model_type, model_type)]
    assert issubclass(base, LLMBridge)
    layer = "model.layers.{layer_number}."
    tables: dict[str, Any] = {
        "_weight_name_mapping_mcore_to_hf": Bridge._weight_name_mapping_mcore_to_hf,  # glm4moe.py's lacks a norm
        "_DIRECT_MAPPING": dict(base._DIRECT_MAPPING),
        "_ATTENTION_MAPPING": dict(base._ATTENTION_MAPPING),
        "_MLP_MAPPING": {**base._MLP_MAPPING, "pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"]},
        "_OTHER_MAPPING": {**base._OTHER_MAPPING, "input_layernorm.weight": [layer + "input_layernorm.weight"]},
    }
    for table, more in families.NAMES.get(model_type, {}).items():
        tables[table] |= more
    if base._adjust_mapping_for_shared_weights is Bridge._adjust_mapping_for_shared_weights:
        tables["_adjust_mapping_for_shared_weights"] = _tie_output_layer  # llama.py and qwen2moe.py leave tied embeddings out
    if model_type in LATENT_FAMILIES:
        latent.complete_tables(tables, layer)
    return type(f"LocalSpec{base.__name__}", (_LocalSpec, base), tables)


def _tie_output_layer(bridge: Any) -> None:
    if bridge.hf_config.tie_word_embeddings:
        bridge._DIRECT_MAPPING["output_layer.weight"] = bridge._DIRECT_MAPPING["embedding.word_embeddings.weight"]


def read_config(path: str) -> Any:
    """transformers' config of a folder's language model, with its family's defaults; one's own."""
    config = AutoConfig.from_pretrained(path)
    if config.model_type in VISION_LANGUAGE:
        return AutoConfig.for_model(**own_fields(config.to_dict()))
    return copy.deepcopy(config.get_text_config())


def build_mbridge(
    model: ModelConfig,
    engine: EngineConfig,
    algorithm: AlgorithmConfig | None = None,
    *,
    adds_gradients: bool = False,
) -> Bridge:
    """mbridge's bridge for the folder, configured for the parallel layout; needs the process groups.

    `algorithm`: for the routers' training. `adds_gradients`: linears add their weights' gradients to the main gradients
    themselves (kernels.py).
    """
    hf_config = read_config(model.path)
    families.complete(hf_config)
    experts.check(hf_config, model, engine.parallel)
    context.check(hf_config, engine.parallel)
    recompute.check(hf_config, engine)
    multiple = vocabulary.padding_multiple(hf_config.vocab_size, engine.parallel.tensor)
    bridge = _bridge_class(hf_config.model_type)(hf_config, dtype=DTYPES[model.dtype], make_vocab_size_divisible_by=multiple)
    bridge.recomputes_activation = engine.recompute == "selective" and "mlp_act" in engine.recompute_modules
    bridge.keeps_inputs_on_host = engine.recompute_inputs == "host"
    bridge.is_exact = model.exact
    use_fused, of_family = fused.is_enabled(engine.fusions), families.config_arguments(hf_config)
    bridge.set_extra_args(
        use_cpu_initialization=not device.has_cuda(),
        gradient_accumulation_fusion=adds_gradients,
        # SwiGLU; there is no bias and no dropout, so bias_dropout_fusion has nothing to do
        bias_activation_fusion=use_fused and "activation_func" not in of_family,
        sequence_parallel=engine.parallel.sequence,
        fp16=model.dtype == "float16",
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        no_rope_freq=rope.left_out(hf_config, by_core_attention=use_fused or model.exact),
        moe_router_bias_update_rate=algorithm.router_bias_update_rate if algorithm is not None else 0.0,
        **NOT_USED,
        **recompute.config_arguments(engine),
        **_pipeline_arguments(bridge, engine.parallel),
        **experts.config_arguments(hf_config, algorithm.load_balancing if algorithm is not None else 0.0),
        **of_family,
        **rope.config_arguments(hf_config),
        **windows.config_arguments(hf_config),
        **latent.config_arguments(hf_config),
    )
    return bridge


def _pipeline_arguments(bridge: Bridge, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig."""
    layers = pipeline_layers(bridge, parallel)
    return {
        # chunks of two stages send both ways between them at once, which batches mix up (p2p_communication.py:_batched_p2p_ops)
        "batch_p2p_comm": parallel.virtual_pipeline == 1,
        "pipeline_model_parallel_layout": stages.layout(layers) if len(set(layers)) > 1 else None,
    }


def pipeline_layers(bridge: Bridge, parallel: ParallelConfig) -> tuple[int, ...]:
    """The number of layers of each chunk of the pipeline, in the model's order."""
    cost = costs.output_cost(bridge.config, bridge.hf_config.vocab_size)
    return stages.chunk_layers(parallel, bridge.config.num_layers, cost)


def balance(engine: EngineConfig, bridge: Bridge) -> Balance:
    """The balance of micro-batches; interleaved chunks take groups of as many as there are stages (schedules.py:957)."""
    parallel, by_cost = engine.parallel, engine.balance == "cost"
    length = costs.attention_length(bridge.config, bridge.hf_config.vocab_size) if by_cost else math.inf
    of_layers = windows.layer_reaches(bridge.hf_config.to_dict(), delta_net.CHUNK) if by_cost else ()
    return Balance(parallel.pipeline if parallel.virtual_pipeline > 1 else 1, length, of_layers)


def build_chunks(bridge: Bridge, path: str | Path | None) -> list[torch.nn.Module]:
    """This rank's model chunks with the folder's weights, not yet wrapped. No path: random weights, drawn on the device.

    Raises:
        ValueError: the folder lacks a tensor that the model needs, or has values that are not finite.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # mbridge prints its parameter count on each rank
        chunks: list[torch.nn.Module] = bridge.get_model(
            bf16=bridge.dtype is torch.bfloat16,
            fp16=bridge.dtype is torch.float16,
            wrap_with_ddp=False,
            data_parallel_random_init=False,
        )
    for chunk in chunks:
        head.replace_output_layer(gpt_model(chunk))
        rope.set_frequencies(gpt_model(chunk), bridge.hf_config)
        gemma.scale_embeddings(gpt_model(chunk), bridge.hf_config)
        router.route_by_sequences(chunk)
        if bridge.keeps_inputs_on_host:
            recompute.keep_inputs_on_host(gpt_model(chunk).decoder)
    if path is None:
        return chunks
    try:
        with torch.no_grad():
            bridge.load_weights(chunks, str(path))
    except KeyError as missing:
        raise ValueError(f"model.path: {path} holds no tensor {missing}, which its config.json asks for") from missing
    check_finite(chunks, path)
    return chunks


def check_finite(chunks: list[torch.nn.Module], path: str | Path) -> None:
    """Raises a ValueError on all ranks: the first parameter with NaN or infinity, its folder, rank and node. Collective."""
    found = [(_not_finite(chunks, path), socket.gethostname())]
    if dist.is_initialized():
        own, found = found[0], found * dist.get_world_size()
        dist.all_gather_object(found, own)
    for rank, (problem, node) in enumerate(found):
        if problem:
            raise ValueError(f"rank {rank} on node {node}: {problem}" if len(found) > 1 else problem)


def _not_finite(chunks: list[torch.nn.Module], path: str | Path) -> str:
    """Describes the first parameter that is not finite; empty if all are."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if bool(torch.isfinite(parameter).all()):
                continue
            name = global_name(chunk, name)
            if parameter.dtype is torch.float16 and not bool(torch.isnan(parameter).any()):
                message = f"model.dtype = float16: {name} of {path} has values that float16 cannot hold"
                return f"{message} (its largest is 65504). Remedy: write model.dtype=bfloat16"
            return f"model.path: {name} of {path} has values that are not finite. Remedy: download the model again"
    return ""


def gpt_model(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside of any number of wrappers."""
    inner: Any = chunk
    while not hasattr(inner, "decoder"):
        inner = inner.module
    return inner


def local_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return re.sub(r"^(module\.)+", "", name)


def global_name(chunk: torch.nn.Module, name: str) -> str:
    """A chunk's parameter name with wrappers' prefixes dropped and the layer counted over the whole model, from 0."""
    head, marker, tail = local_name(name).partition("decoder.layers.")
    if not marker:
        return head
    index, rest = tail.split(".", 1)
    return f"{head}{marker}{gpt_model(chunk).decoder.layers[int(index)].layer_number - 1}.{rest}"


def is_tied_copy(chunk: torch.nn.Module, name: str) -> bool:
    """Whether the parameter is the last pipeline stage's copy of tied embeddings, which the first stage exports."""
    model = gpt_model(chunk)
    return name.endswith("output_layer.weight") and bool(model.share_embeddings_and_output_weights)
