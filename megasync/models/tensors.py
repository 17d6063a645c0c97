"""The tensors of a model by its config.json, with names and shapes as transformers 5.19 saves them, against those of a folder.

Leaves out what config.json may say (folder.py, features.py) and whether the files are whole. No torch in here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bridge.layout.manifest import TensorSpec, read_folder_manifest
from engine.attention.windows import DELTA_NET, layer_types
from engine.config import BIASED_ROUTERS, DELTA_NET_FAMILIES, GEMMA, GPT_OSS, OLMO3, SMOLLM3
from megasync.config.errors import ConfigError, some
from megasync.models.model_shape import ModelShape
from model_folder.files import Entry, read_header, weight_files
from model_folder.layout import VISION_LANGUAGE, FolderLayout, fused_part, key_of, places, read_folder_layout, read_model_type

Shapes = dict[str, tuple[int, ...]]
DTYPES = ("bfloat16", "float16", "float32", "float64")  # of weights that are no other numbers than they seem
EMBEDDINGS, TIED_HEAD, FREQUENCIES = "model.embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq"
WITH_BIASES, WITH_QK_NORMS = ("qwen2", "qwen2_moe", "seed_oss", GPT_OSS), ("qwen3", "qwen3_moe", GEMMA, *DELTA_NET_FAMILIES)
PACKED = ("_blocks", "_scales")  # of MXFP4: 4-bit numbers, one scale for each BLOCK of them
BLOCK = 32
INDEX = "model.safetensors.index.json"
READ_BYTES = 2**20
DOWNLOAD = "download the model again: hf download NAME --local-dir FOLDER"
OTHER_CONFIG = "take config.json and weights of one model: hf download NAME --local-dir FOLDER"


def check_tensors(folder: Path, shape: ModelShape, fields: Mapping[str, Any]) -> None:
    """The folder holds what its config.json asks for, in these shapes, and nothing that the model would leave out.

    A head beside tied embeddings and frequencies of rotary embeddings may be there, and so may layers after the model's, which
    predict further tokens.
    """
    keys, index = _held(folder), read_index(folder)
    layout = read_folder_layout(folder)
    _check_fused(folder, keys, shape, layout)
    found = [places({key: spec.shape}, layout) for key, spec in keys.items()]
    own, counts = {name: place for each in found for name, place in each.items()}, Counter(itertools.chain(*found))
    if twice := [name for name, count in counts.items() if count > 1]:
        message = f"{folder}: {len(twice)} tensors are in the weights twice, under different names"
        raise ConfigError(message, twice=some(twice), remedy=f"take out one of the two, or {DOWNLOAD}")
    shapes = {name: place.shape for name, place in own.items()}
    check_held(folder, shapes, shape, fields, key_of=lambda name: own[name].key if name in own else key_of(name, layout))
    if is_tied(shape, fields) and TIED_HEAD in own:
        _check_head(folder, own[EMBEDDINGS].key, own[TIED_HEAD].key)
    expected = [name for name in expected_tensors(shape, fields) if name in own]
    needed = [own[name].key for name in expected if not (name == TIED_HEAD and is_tied(shape, fields))]
    if index and (unnamed := [key for key in needed if key not in index]):
        message = f"{folder / INDEX}: leaves out {len(unnamed)} tensors that its files hold"
        raise ConfigError(message, left_out=some(unnamed), remedy=f"take weights and index of one download: {DOWNLOAD}")
    kinds = {own[name].key: name for name in expected}
    if wrong := [f"{key} ({keys[key].dtype})" for key, name in kinds.items() if not _is_trained(name, keys[key].dtype)]:
        message = f"{folder}: {len(wrong)} tensors are not of a dtype that can be trained"
        remedy = "take a folder whose weights are not quantised, or convert them, with their scales, to bfloat16"
        raise ConfigError(message, tensors=some(wrong, 3), choices=", ".join(DTYPES), remedy=remedy)
    if read_model_type(folder) in VISION_LANGUAGE and not any(key.startswith(layout.others[0]) for key in keys):
        message = f"{folder}: the weights hold no tensor {layout.others[0]}*, and config.json has a vision_config"
        raise ConfigError(message, remedy=OTHER_CONFIG)


def _check_head(folder: Path, embeddings: str, head: str) -> None:
    """ConfigError where a head beside tied embeddings has other bytes or another dtype: transformers 5.19 takes the head where it
    differs once both are converted (modeling_utils.py:2569).
    """
    found = {each.key: (path, each) for path in weight_files(folder) for each in read_header(path)[0]}
    places = [found[key] for key in (embeddings, head)]
    dtypes = [place[1].dtype for place in places]
    if dtypes[0] != dtypes[1] or not _are_equal(places):
        what = f"differs from {embeddings}" if dtypes[0] == dtypes[1] else f"is in {dtypes[1]}, {embeddings} in {dtypes[0]}"
        message = f"{folder / 'config.json'}: tie_word_embeddings = true: {head} {what}"
        engine = "it and vLLM take the embeddings, transformers takes a head that differs after conversion"
        remedy = "take the head out of the weights, or write false if the model was trained with a head of its own"
        raise ConfigError(message, engine=engine, remedy=remedy)


def _are_equal(places: Sequence[tuple[Path, Entry]]) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes."""
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path, _ in places]
        for file, (_, entry) in zip(files, places, strict=True):
            file.seek(entry.begin)
        left = places[0][1].end - places[0][1].begin
        while left > 0 and len({file.read(min(left, READ_BYTES)) for file in files}) == 1:
            left -= READ_BYTES
    return left <= 0


def _is_trained(name: str, dtype: str) -> bool:
    """Whether the tensor's numbers can be trained, or stand for such."""
    return dtype in (("uint8",) if name.endswith(PACKED) else DTYPES)


def _check_fused(folder: Path, keys: Mapping[str, TensorSpec], shape: ModelShape, layout: FolderLayout) -> None:
    """Check fused tensors, of all experts of a layer."""
    experts, size, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
    sizes = {"gate_up_proj": (experts, 2 * size, hidden), "down_proj": (experts, hidden, size)}
    for key, spec in keys.items():
        fused = fused_part(key, layout)
        if fused and experts and spec.shape != sizes[fused[2]]:
            message = f"{folder}: {key} has the shape {list(spec.shape)}, and by config.json {list(sizes[fused[2]])}"
            raise ConfigError(message, remedy=OTHER_CONFIG)


def check_held(
    place: Path | str,
    held: Shapes,
    shape: ModelShape,
    fields: Mapping[str, Any],
    remedy: str = OTHER_CONFIG,
    *,
    key_of: Callable[[str], str] = str,
) -> None:
    """The same of tensors by their own names (model_folder/layout.py) and shapes, from `place`; `key_of`: names there."""
    expected = expected_tensors(shape, fields)
    tied = is_tied(shape, fields)
    if missing := [name for name in expected if name not in held and not (tied and name == TIED_HEAD)]:
        message = f"{place}: the weights lack {len(missing)} of the tensors that config.json asks for"
        raise ConfigError(message, missing=some(map(key_of, missing)), remedy=remedy)
    for name, size in expected.items():
        if held.get(name, size) != size:
            message = f"{place}: {key_of(name)} has the shape {list(held[name])}, and by config.json {list(size)}"
            raise ConfigError(message, remedy=remedy)
    own = (name for name in held if not name.endswith(FREQUENCIES) and not _is_after(name, shape.num_hidden_layers, fields))
    if unknown := [key_of(name) for name in own if name not in expected]:
        message = f"{place}: the weights hold {len(unknown)} tensors that {shape.model_type} with this config.json does not have"
        raise ConfigError(message, tensors=some(unknown), remedy=remedy)


def is_tied(shape: ModelShape, fields: Mapping[str, Any]) -> bool:
    """Whether the output layer is the embeddings; of Gemma and SmolLM3 it is where config.json says nothing."""
    return bool(fields.get("tie_word_embeddings", shape.model_type in (GEMMA, SMOLLM3)))


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor; {} where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        files: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if files and all(isinstance(name, str) for name in files.values()):
            return files
        problem = "weight_map holds something else than names of files" if files else "weight_map is empty"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise ConfigError(f"{path}: not an index of safetensors files: {problem}", remedy=DOWNLOAD)


def num_parameters(folder: Path) -> int:
    """The language model's, by the headers of the weights. ValueError as `read_folder_manifest`."""
    return sum(math.prod(shape) for shape in own_shapes(folder).values())


def own_shapes(folder: Path) -> Shapes:
    """Shapes of the language model's tensors, by their own names. ValueError as `read_folder_manifest`."""
    shapes = {spec.name: spec.shape for spec in read_folder_manifest(folder).tensors}
    return {name: place.shape for name, place in places(shapes, read_folder_layout(folder)).items()}


def _held(folder: Path) -> dict[str, TensorSpec]:
    """Tensors of the files that the index names, or of model.safetensors: other files beside them are not read."""
    try:
        return {spec.name: spec for spec in read_folder_manifest(folder).tensors}
    except ValueError as problem:
        remedy = f"take a folder whose weights are in {', '.join(DTYPES)}"
        if not weight_files(folder):
            remedy = f"name the file model.safetensors, or write an index: {folder / INDEX}"
        raise ConfigError(str(problem), remedy=remedy) from problem


def expected_tensors(shape: ModelShape, fields: Mapping[str, Any]) -> Shapes:
    """Name and shape of each, the output layer's too where it is the embeddings'. Pure.

    `fields`: of config.json.
    """
    hidden, layers = shape.hidden_size, range(shape.num_hidden_layers)
    found: Shapes = {EMBEDDINGS: (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    found[TIED_HEAD] = (shape.vocab_size, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if shape.model_type == GEMMA else []
    norms = ["post_attention_layernorm", "post_feedforward_layernorm"] if shape.model_type == OLMO3 else norms
    attention = _latent_attention(shape) if shape.kv_lora_rank else _attention(shape, fields)
    dense, experts = _feed_forward("mlp.", shape.intermediate_size, hidden), _experts(shape, fields)
    has_delta_net = [kind == DELTA_NET for kind in layer_types(fields)] if shape.num_delta_net_layers else [False] * len(layers)
    for layer in layers:
        has_experts = shape.num_experts and layer >= shape.first_k_dense_replace
        of_layer: Shapes = {f"{name}.weight": (hidden,) for name in norms}
        of_layer |= _delta_net(shape) if has_delta_net[layer] else attention
        of_layer |= experts if has_experts else dense
        found |= {f"model.layers.{layer}.{name}": size for name, size in of_layer.items()}
    return found


def _attention(shape: ModelShape, fields: Mapping[str, Any]) -> Shapes:
    hidden, family = shape.hidden_size, shape.model_type
    size = shape.head_dim or hidden // shape.num_attention_heads
    width = shape.num_attention_heads * size
    of_groups = shape.num_key_value_heads * size
    rows = {"q": 2 * width if shape.num_delta_net_layers else width, "k": of_groups, "v": of_groups}
    found: Shapes = {f"self_attn.{name}_proj.weight": (number, hidden) for name, number in rows.items()}
    found["self_attn.o_proj.weight"] = (hidden, width)
    if family in WITH_BIASES or (family == "glm4_moe" and fields.get("attention_bias")):
        found |= {f"self_attn.{name}_proj.bias": (number,) for name, number in rows.items()}
    if family in WITH_QK_NORMS or (family == "glm4_moe" and fields.get("use_qk_norm")):
        found |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    if family == OLMO3:
        found |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (of_groups,)}
    if family == GPT_OSS:
        found |= {"self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (shape.num_attention_heads,)}
    return found


def _delta_net(shape: ModelShape) -> Shapes:
    hidden, heads = shape.hidden_size, shape.linear_num_value_heads
    keys, values = shape.linear_num_key_heads * shape.linear_key_head_dim, heads * shape.linear_value_head_dim
    mixed = 2 * keys + values
    inputs = {"qkv": mixed, "z": values, "b": heads, "a": heads}
    inputs = {"qkvz": mixed + values, "ba": 2 * heads} if shape.model_type == "qwen3_next" else inputs
    found: Shapes = {f"in_proj_{part}.weight": (rows, hidden) for part, rows in inputs.items()}
    found["out_proj.weight"] = (hidden, values)
    found |= {"conv1d.weight": (mixed, 1, shape.linear_conv_kernel_dim), "norm.weight": (shape.linear_value_head_dim,)}
    return {f"linear_attn.{name}": size for name, size in (found | {"A_log": (heads,), "dt_bias": (heads,)}).items()}


def _latent_attention(shape: ModelShape) -> Shapes:
    hidden, heads, rank = shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank
    of_queries = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    found: Shapes = {
        "kv_a_proj_with_mqa.weight": (rank + shape.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (shape.qk_nope_head_dim + shape.v_head_dim), rank),
        "o_proj.weight": (hidden, heads * shape.v_head_dim),
    }
    if low := shape.q_lora_rank:
        found |= {"q_a_proj.weight": (low, hidden), "q_a_layernorm.weight": (low,), "q_b_proj.weight": (of_queries, low)}
    else:
        found["q_proj.weight"] = (of_queries, hidden)
    return {f"self_attn.{name}": size for name, size in found.items()}


def _feed_forward(prefix: str, size: int, hidden: int) -> Shapes:
    into, out = (size, hidden), (hidden, size)
    return {f"{prefix}gate_proj.weight": into, f"{prefix}up_proj.weight": into, f"{prefix}down_proj.weight": out}


def _experts(shape: ModelShape, fields: Mapping[str, Any]) -> Shapes:
    """Shapes of the experts of one layer; nothing where the model has none."""
    hidden, size, family = shape.hidden_size, shape.moe_intermediate_size, shape.model_type
    experts = range(shape.num_experts)
    if family == "mixtral":
        sizes = {"w1": (size, hidden), "w2": (hidden, size), "w3": (size, hidden)}
        found: Shapes = {f"experts.{one}.{name}.weight": each for one in experts for name, each in sizes.items()}
        return {f"block_sparse_moe.{name}": each for name, each in ({"gate.weight": (shape.num_experts, hidden)} | found).items()}
    if family == GPT_OSS:
        return _stacked_experts(shape, is_packed=bool(fields.get("quantization_config")))
    found = {"mlp.gate.weight": (shape.num_experts, hidden)}
    for one in experts:
        found |= _feed_forward(f"mlp.experts.{one}.", size, hidden)
    if shape.shared_expert_intermediate_size:
        found |= _feed_forward("mlp.shared_expert.", shape.shared_expert_intermediate_size, hidden)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    if family in BIASED_ROUTERS:
        found["mlp.gate.e_score_correction_bias"] = (shape.num_experts,)
        if number := fields.get("n_shared_experts", 1):
            found |= _feed_forward("mlp.shared_experts.", size * number, hidden)
    return found


def _stacked_experts(shape: ModelShape, *, is_packed: bool) -> Shapes:
    """Shapes of gpt-oss's experts; `is_packed`: in MXFP4 (engine/model/families/mxfp4.py)."""
    number, hidden, size = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    found: Shapes = {"mlp.router.weight": (number, hidden), "mlp.router.bias": (number,)}
    for name, (into, out) in {"gate_up_proj": (hidden, 2 * size), "down_proj": (size, hidden)}.items():
        found[f"mlp.experts.{name}_bias"] = (number, out)
        if is_packed:
            found[f"mlp.experts.{name}_blocks"] = (number, out, into // BLOCK, BLOCK // 2)
            found[f"mlp.experts.{name}_scales"] = (number, out, into // BLOCK)
        else:
            found[f"mlp.experts.{name}"] = (number, into, out)
    return found


def _is_after(name: str, num_layers: int, fields: Mapping[str, Any]) -> bool:
    """Whether it is of a layer that predicts further tokens (multi-token prediction)."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    predicts = any(fields.get(key) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    return predicts and layer is not None and int(layer[1]) >= num_layers
