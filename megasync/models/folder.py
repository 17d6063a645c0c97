"""Whether a Hugging Face folder is a complete model that the engine can train, by config.json and safetensors headers.

Leaves out the weights themselves and the tokenizer. No torch in here.

    shape = check_model_folder("models/Qwen2.5-0.5B")     # ConfigError, or the sizes that parallelism must divide
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.layout.manifest import ITEM_BYTES
from engine.attention.windows import DELTA_NET, layer_types
from engine.config import BIASED_ROUTERS, DELTA_NET_FAMILIES, FAMILIES, GEMMA, GPT_OSS, LATENT_FAMILIES, MOE_FAMILIES
from megasync.config.errors import ConfigError, nearest_name, some
from megasync.models.declared import declared_fields
from megasync.models.features import unsupported
from megasync.models.model_shape import LENGTHS, ModelShape, longest_sequence
from megasync.models.tensors import DOWNLOAD, INDEX, check_tensors, read_index
from model_folder.files import read_header
from model_folder.layout import FLAT, FOLDER_LAYOUTS, TEXT_TYPES, VISION_LANGUAGE, own_fields

CHOICES = (*FAMILIES, *VISION_LANGUAGE)  # of `model_type`
LINKED = (".json", ".jinja", ".model", ".safetensors", ".txt")
OUR_FOLDERS = ("models", "runs", "checkpoints", "assets")  # owners of no model on the hub
MODELS_WITHIN = ("hf", "checkpoints/step_*/hf", "snapshots/*")  # of a run or a checkpoint, of a run, of the hub's cache
OPTIONAL_SIZES = (
    *("head_dim", "shared_expert_intermediate_size", "first_k_dense_replace", "q_lora_rank"),
)
DELTA_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
DEFAULT_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "q_lora_rank",
    *DELTA_SIZES,
)  # transformers'
OTHER_TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # of fields that a family's config class does not declare
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "use_sliding_window"), ((bool,), "bool")),
    **dict.fromkeys(("norm_topk_prob", "output_router_logits", "rope_interleave"), ((bool,), "bool")),
    "rope_theta": ((int, float, type(None)), "a number"),
    "rope_scaling": ((dict, type(None)), "an object"),
    "rope_type": ((str, type(None)), "a text"),
    "type": ((str, type(None)), "a text"),
    "partial_rotary_factor": ((int, float), "a number"),
    "original_max_position_embeddings": ((int, type(None)), "a whole number"),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), ((int, float, type(None)), "a number")),
    **dict.fromkeys(("mscale", "mscale_all_dim"), ((int, float, type(None)), "a number")),
}
OF_ROPES = ("partial_rotary_factor", "rope_type", "type")  # beside a family's own fields their types are not checked
MIN_VALUES = {"rms_norm_eps": 0, "max_position_embeddings": 1, "original_max_position_embeddings": 1, "rope_theta": 1}
REFUSED_FAMILIES = {  # mbridge knows them, and the engine would compute them wrongly
    **dict.fromkeys(("glm4v", "glm4v_moe", "internvl_chat"), "vision layers"),
    "qwen3_vl_moe": "experts whose tensors are transposed",
    "mimo": "multi-token prediction (num_nextn_predict_layers)",
}
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERT_SIZES = ("num_experts", "moe_intermediate_size", "num_experts_per_tok")


def check_model_folder(folder: str | Path) -> ModelShape:
    """ConfigError names the folder or file, the fault and the remedy."""
    shape = check_model_config(Path(folder))
    check_weights(Path(folder))
    check_tensors(Path(folder), shape, model_fields(folder))
    return shape


def check_model_config(folder: Path) -> ModelShape:
    """The same, without its weights."""
    if not folder.is_dir():
        problem = "is a file, a Hugging Face folder is expected" if folder.exists() else "there is no such folder"
        is_ours = folder.parts[0] in OUR_FOLDERS or folder.name == "model"
        is_hub_name = len(folder.parts) == 2 and not (is_ours or folder.is_absolute() or folder.parent.exists())
        download = f"download it first: hf download {folder} --local-dir FOLDER, then model.path=FOLDER"
        remedy = download if is_hub_name else "write model.path=FOLDER, a Hugging Face folder on this machine"
        raise ConfigError(f"model.path = {folder}: {problem}", looked_at=os.path.realpath(folder), remedy=remedy)
    check_links(folder)
    path = folder / "config.json"
    shape, fields = model_shape(folder), model_fields(folder)
    _check_types(path, shape.model_type, fields)
    if (whole := read_json_object(path)) != fields:  # of a model with vision layers
        _check_types(path, whole["model_type"], whole)
    if found := unsupported(shape, fields):
        raise ConfigError(f"{path}: {found.field} = {found.value!r}: {found.why}", remedy=found.remedy)
    if (quantised := folder / "hf_quant_config.json").is_file():
        remedy = "convert the weights to bfloat16 and remove this file"
        raise ConfigError(f"{quantised}: vLLM takes the weights for quantised by it", remedy=remedy)
    return shape


def most_parameters(folder: Path) -> int:
    """An upper limit of a model folder's parameters, from its files' sizes, with two bytes a number or more."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


def model_shape(folder: str | Path) -> ModelShape:
    """ConfigError where config.json is missing or of an architecture that the engine does not know."""
    return _read_shape(Path(folder) / "config.json", model_fields(folder))


def num_embeddings(folder: Path) -> int:
    """Rows of the embeddings of a model of any family; 0 if config.json does not have the number."""
    try:
        return model_shape(folder).vocab_size
    except ConfigError:
        fields = read_json_object(folder / "config.json")
    text = fields.get("text_config")
    size = (text if isinstance(text, dict) else fields).get("vocab_size")
    return size if type(size) is int else 0


def is_vision_language(folder: str | Path) -> bool:
    """Whether it is a model's folder, and has vision layers."""
    path = Path(folder) / "config.json"
    return path.is_file() and read_json_object(path).get("model_type") in VISION_LANGUAGE


def model_fields(folder: str | Path) -> dict[str, Any]:
    """The language model's fields of config.json (model_folder/layout.py). ConfigError where it, or one for them, is missing."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        message = f"model.path = {path.parent}: the folder holds no config.json"
        raise ConfigError(message, holds=_holds(path.parent), remedy=_folder_remedy(path.parent))
    fields = read_json_object(path)
    if fields.get("model_type") not in VISION_LANGUAGE:
        return fields
    _check_nested(path, fields)
    own = own_fields(fields)
    if own["model_type"] != GEMMA:
        return own
    declared = declared_fields(GEMMA)  # published text_configs leave defaults out
    return {**{name: declared[name].default for name in ModelShape.__dataclass_fields__ if name in declared}, **own}


def _check_nested(path: Path, fields: dict[str, Any]) -> None:
    """ConfigError where a vision-language model's config.json lacks a part, or the parts do not fit."""
    model_type, tied = fields["model_type"], "tie_word_embeddings"
    family = TEXT_TYPES.get(model_type, FOLDER_LAYOUTS[model_type][0].family)
    is_flat = model_type == FLAT and "text_config" not in fields
    for name in ("vision_config",) if is_flat else ("text_config", "vision_config"):
        if not isinstance(fields.get(name), dict):
            message = f"{path}: {name} = {fields.get(name)!r}: an object is expected of a {fields['model_type']}"
            raise ConfigError(message, remedy=DOWNLOAD)
    text = {} if is_flat else fields["text_config"]
    if text.get("model_type", family) != family:
        message = f"{path}: text_config.model_type = {text['model_type']!r}: {family} is expected"
        raise ConfigError(message, remedy=DOWNLOAD)
    for name in ("sliding_window", "use_sliding_window") if family == "qwen3_vl_text" else ():
        if text.get(name):
            message = f"{path}: text_config.{name} = {text[name]!r}: only vLLM reads it for this family"
            raise ConfigError(message, remedy="take a model without it")
    declared = declared_fields(model_type)
    whole = fields.get(tied, declared[tied].default if tied in declared else text.get(tied))
    if text.get(tied, whole) != whole:
        message = f"{path}: {tied} = {whole}{'' if tied in fields else ' (the default)'}: text_config has {text[tied]}"
        raise ConfigError(message, remedy=f"write the one that the model was trained with into both: {DOWNLOAD}")


def _folder_remedy(folder: Path) -> str:
    """Names the model folder that is meant by a run, a checkpoint, a folder of the hub's cache or an adapter."""
    inner = (sorted(folder.glob(f"{pattern}/config.json")) for pattern in MODELS_WITHIN)
    if found := next((files[-1].parent for files in inner if files), None):
        return f"write model.path={found}"
    if (folder / "adapter_config.json").is_file():
        return f"write engine.lora.adapter_path={folder}, and model.path=FOLDER of its base model"
    return "name a folder in the Hugging Face format, with config.json, *.safetensors and a tokenizer"


def read_json_object(path: Path, remedy: str = DOWNLOAD) -> dict[str, Any]:
    """ConfigError where the model's file holds anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", remedy=remedy) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: holds no JSON object", remedy=remedy)
    return fields


def _read_shape(path: Path, fields: dict[str, Any]) -> ModelShape:
    family = fields.get("model_type")
    if family not in FAMILIES:
        feature = REFUSED_FAMILIES.get(str(family))
        raise ConfigError(
            f"{path}: model_type = {family!r}: the engine has no {feature or 'such architecture'}",
            choices=", ".join(CHOICES),
            nearest="" if feature else nearest_name(str(family), CHOICES),
            remedy="set model.path to a model of one of these",
        )
    sizes, lengths = _given_sizes(family, fields), _lengths(fields)
    for name, size in (sizes | lengths).items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{path}: {name} = {size!r}: a whole number of at least 1 is expected", remedy=DOWNLOAD)
    sizes["max_position_embeddings"] = longest_sequence(fields | lengths)[1]
    if sizes.get("num_experts_per_tok", 0) > sizes.get("num_experts", 0):
        message = f"{path}: num_experts_per_tok = {sizes['num_experts_per_tok']}: more than num_experts = {sizes['num_experts']}"
        raise ConfigError(message, remedy=DOWNLOAD)
    if family in DELTA_NET_FAMILIES:
        sizes["num_delta_net_layers"] = layer_types(fields | sizes).count(DELTA_NET)
    return ModelShape(model_type=family, **sizes)


def _lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields from which vLLM computes the longest sequence; transformers' default where config.json has none."""
    default = declared_fields(fields["model_type"]).get(LENGTHS[0])
    own = {LENGTHS[0]: default.default if default else None, **fields}
    return {name: own[name] for name in LENGTHS if own.get(name) is not None}


def longest_by(folder: str | Path) -> str:
    """The field of config.json that limits the length of a sequence, with its factor: see `longest_sequence`."""
    fields = model_fields(folder)
    return longest_sequence(fields | _lengths(fields))[0]


def _given_sizes(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelShape that this family has, by ModelShape's names; transformers' defaults where config.json has none."""
    declared, is_latent = declared_fields(family), family in LATENT_FAMILIES
    others = {"num_key_value_heads": "num_attention_heads", "num_experts": "num_local_experts"}  # as transformers 5 writes it
    others |= {"moe_intermediate_size": "intermediate_size"} if family in ("mixtral", GPT_OSS) else {}
    others |= {"num_experts": "n_routed_experts"} if family in BIASED_ROUTERS else {}
    others |= {"intermediate_size": "moe_intermediate_size"} if family == "qwen3_5_moe_text" else {}
    defaults = {name: declared[name].default for name in DEFAULT_SIZES if name in declared}
    defaults |= {"num_key_value_heads": None} if is_latent else {}  # as many as there are heads
    defaults |= {} if family in BIASED_ROUTERS else {"num_experts_per_tok": None}
    given = {name: fields.get(other) for name, other in others.items()}
    given |= {name: value for name, value in defaults.items() if value is not None} | fields
    given["first_k_dense_replace"] = given.get("first_k_dense_replace") or None if family in BIASED_ROUTERS else None
    unused = {"model_type", "max_position_embeddings", "num_delta_net_layers"}
    unused |= {name for name in OPTIONAL_SIZES if given.get(name) is None}
    unused |= set() if family in MOE_FAMILIES else set(EXPERT_SIZES)
    unused |= set() if is_latent else {"q_lora_rank", *LATENT_SIZES}
    unused |= set() if family in DELTA_NET_FAMILIES else set(DELTA_SIZES)
    return {name: given.get(name) for name in ModelShape.__dataclass_fields__ if name not in unused}


def _check_types(path: Path, family: str, fields: dict[str, Any]) -> None:
    """ConfigError where transformers would refuse a field's value, on each rank and in vLLM."""
    ropes = [value for key in ("rope_parameters", "rope_scaling") if isinstance(value := fields.get(key), dict)]
    ropes += [value for each in ropes for value in each.values() if isinstance(value, dict)]  # by layer type
    given = [item for item in fields.items() if item[0] not in OF_ROPES]
    given += [item for each in ropes for item in each.items()]
    declared = declared_fields(family)
    for name, value in given:
        expected = ""
        if name in declared and not declared[name].takes(value):
            expected = declared[name].annotation
        elif name in OTHER_TYPES and name not in declared and type(value) not in OTHER_TYPES[name][0]:
            expected = OTHER_TYPES[name][1]
        elif name in MIN_VALUES and value is not None and not value >= MIN_VALUES[name]:
            expected = f"at least {MIN_VALUES[name]}"
        elif name in ("dtype", "torch_dtype") and value is not None and str(value) not in ITEM_BYTES:
            expected = f"one of {', '.join(ITEM_BYTES)}"
        if expected:
            raise ConfigError(f"{path}: {name} = {value!r}: {expected} is expected", remedy=f"correct it, or {DOWNLOAD}")


def check_weights(folder: Path, remedy: str = DOWNLOAD) -> None:
    """Every safetensors file is whole, and holds what the index says of it, if there is one. `remedy`: for a broken file."""
    check_links(folder)
    index, files = read_index(folder), sorted(folder.glob("*.safetensors"))
    missing = sorted(set(index.values()) - {file.name for file in files})
    if missing:
        message = f"{folder / INDEX}: names {len(missing)} files that are not in the folder"
        raise ConfigError(message, missing=some(missing, 12), remedy=remedy)
    if not files:
        message = f"model.path = {folder}: the folder holds no *.safetensors file"
        raise ConfigError(message, holds=_holds(folder), remedy="convert the weights to safetensors")
    held = {file.name: _tensor_names(file, remedy) for file in files}
    _check_places(folder, index, held)


def check_links(folder: Path) -> None:
    """ConfigError for the first link of a model's or tokenizer's file whose target is gone, such as a blob of the hub's cache."""
    for path in sorted(folder.iterdir()):
        if path.suffix in LINKED and path.is_symlink() and not path.exists():
            message = f"{path}: is a link to {path.readlink()}, which is not there"
            remedy = "download the model again, or copy the folder where its targets are: cp -rL FOLDER COPY"
            raise ConfigError(message, looked_at=os.path.realpath(path), remedy=remedy)


def _check_places(folder: Path, index: dict[str, str], held: dict[str, set[str]]) -> None:
    """The index is right, and names each file that somebody reads.

    The engine reads each tensor where the index says, vLLM all of those files; transformers model.safetensors, if there is one.
    """
    remedy = f"take weights and index of one download: {DOWNLOAD}"
    if wrong := [name for name, file in index.items() if name not in held[file]]:
        first = wrong[0]
        where = next((file for file, names in held.items() if first in names), "no file")
        message = f"{folder / INDEX}: names {index[first]} for {first}, which is in {where}"
        raise ConfigError(message, wrong=some(wrong), remedy=remedy)
    whole = "model.safetensors"
    if index and whole in held and whole not in index.values():
        message = (
            f"{folder}: holds {whole} and the index of other files: transformers reads the one, vLLM and the engine the others"
        )
        raise ConfigError(message, remedy=f"move the one that is not meant: {whole}, or {INDEX} with its files")
    places: dict[str, str] = {}
    for file in sorted(set(index.values())):
        if twice := sorted(name for name in held[file] if name in places):
            message = f"{folder}: {file} and {places[twice[0]]} both hold {twice[0]}, and vLLM reads both"
            raise ConfigError(message, twice=some(twice), remedy="move the file that is not meant out of the folder")
        places |= dict.fromkeys(held[file], file)


def _tensor_names(path: Path, remedy: str) -> set[str]:
    """By header and size: safetensors' own reader maps a file that is whole, and no other."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            pull = "run `git lfs pull` in the model's repository"
            raise ConfigError(f"{path}: a Git LFS pointer, not the weights", remedy=pull)
    try:
        return {each.key for each in read_header(path)[0]}
    except ValueError as error:
        message = f"{path}: cut off, or not a safetensors file: {error.__cause__}"
        raise ConfigError(message, actual=f"{num_bytes} bytes", remedy=remedy) from error


def _holds(folder: Path) -> str:
    return some(sorted(path.name for path in folder.iterdir()), 12) or "nothing"
