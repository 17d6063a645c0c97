"""Is a Hugging Face folder a whole model that the engine can train? Reads config.json and safetensors headers only.

Leaves out the weights themselves and the tokenizer. No torch in here.

    shape = check_model_folder("models/Qwen2.5-0.5B")     # ConfigError, or the sizes that parallelism must divide
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.config import BIASED_ROUTERS, FAMILIES, GEMMA, LATENT_FAMILIES, MOE_FAMILIES
from megasync.config.errors import ConfigError, nearest_name, some
from megasync.hf.features import (
    QUERY_RANK,
    REFUSED_FAMILIES,
    REMEDIES,
    ROUTER_DEFAULTS,
    check_types,
    refused_gemma,
    refused_latent,
    refused_rope,
    refused_router,
    refused_windows,
)
from megasync.hf.model_shape import ModelShape
from megasync.hf.tensors import DOWNLOAD, INDEX, check_tensors, read_index

DOWNLOAD_REMEDY = DOWNLOAD
LINKED = (".json", ".jinja", ".model", ".safetensors", ".txt")
MODELS_WITHIN = ("hf", "checkpoints/step_*/hf", "snapshots/*")  # of a run or a checkpoint, of a run, of the hub's cache
UNSUPPORTED_REMEDY = "take a model without it"

OPTIONAL_SIZES = (
    *("max_position_embeddings", "head_dim", "shared_expert_intermediate_size", "first_k_dense_replace", "q_lora_rank"),
)
DEFAULT_SIZES = {  # where config.json says nothing: transformers 5.19, their config classes; of others it follows from the heads
    GEMMA: {"num_key_value_heads": 4, "head_dim": 256},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
}
WHOLE_HEADS = ("llama", GEMMA)  # of which transformers 5.19 wants them in hidden_size, also beside a head_dim
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIZES_OF_EXPERTS = ("num_experts", "moe_intermediate_size", "num_experts_per_tok")


def check_model_folder(folder: str | Path) -> ModelShape:
    """ConfigError names the folder or file, what is wrong and the remedy."""
    shape = check_model_config(Path(folder))
    check_weights(Path(folder))
    check_tensors(Path(folder), shape, _read_model_config(Path(folder) / "config.json"))
    return shape


def check_model_config(folder: Path) -> ModelShape:
    """The same, without its weights."""
    if not folder.is_dir():
        problem = "is a file, a Hugging Face folder is expected" if folder.exists() else "there is no such folder"
        is_hub_name = len(folder.parts) == 2 and not (folder.is_absolute() or folder.parent.exists())
        download = f"download it first: hf download {folder} --local-dir FOLDER, then model.path=FOLDER"
        remedy = download if is_hub_name else "write model.path=FOLDER, a Hugging Face folder on this machine"
        raise ConfigError(f"model.path = {folder}: {problem}", looked_at=str(folder.resolve()), remedy=remedy)
    check_links(folder)
    shape, fields = model_shape(folder), _read_model_config(folder / "config.json")
    check_types(folder / "config.json", fields)
    _refuse_unsupported(folder / "config.json", shape, fields)
    return shape


def most_parameters(folder: Path) -> int:
    """Of a model folder, by the sizes of its files, which have two bytes a number or more."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


def model_shape(folder: str | Path) -> ModelShape:
    """ConfigError where config.json is missing or of an architecture that the engine does not know."""
    path = Path(folder) / "config.json"
    return _read_shape(path, _read_model_config(path))


def _read_model_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        message = f"model.path = {path.parent}: the folder holds no config.json"
        raise ConfigError(message, holds=_holds(path.parent), remedy=_folder_remedy(path.parent))
    return read_json_object(path)


def _folder_remedy(folder: Path) -> str:
    """Of a run, a checkpoint, a folder of the hub's cache or an adapter what of it is meant."""
    inner = (sorted(folder.glob(f"{pattern}/config.json")) for pattern in MODELS_WITHIN)
    if found := next((files[-1].parent for files in inner if files), None):
        return f"write model.path={found}"
    if (folder / "adapter_config.json").is_file():
        return f"write engine.lora.adapter_path={folder}, and model.path=FOLDER of its base model"
    return "name a folder in the Hugging Face format, with config.json, *.safetensors and a tokenizer"


def read_json_object(path: Path, remedy: str = DOWNLOAD_REMEDY) -> dict[str, Any]:
    """ConfigError where the model's file holds anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", remedy=remedy) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: holds no JSON object", remedy=remedy)
    return fields


def _read_shape(path: Path, fields: dict[str, Any]) -> ModelShape:
    family = fields.get("model_type")
    if feature := REFUSED_FAMILIES.get(str(family)):
        message = f"{path}: model_type = {family!r}: the engine has no {feature}"
        raise ConfigError(message, choices=", ".join(FAMILIES), remedy="set model.path to a model of one of these")
    if family not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type = {family!r}: the engine does not know this architecture",
            choices=", ".join(FAMILIES),
            nearest=nearest_name(str(family), FAMILIES),
            remedy="set model.path to a model of one of these",
        )
    defaults = {"num_key_value_heads": "num_attention_heads", "num_experts": "num_local_experts"}  # as transformers 5 writes it
    if family == "mixtral":
        defaults["moe_intermediate_size"] = "intermediate_size"
    if family in BIASED_ROUTERS:
        defaults["num_experts"] = "n_routed_experts"
    known = {**DEFAULT_SIZES.get(family, {}), **ROUTER_DEFAULTS.get(family, {})}
    fields = {name: fields.get(other) for name, other in defaults.items()} | known | fields
    fields["first_k_dense_replace"] = fields["first_k_dense_replace"] or None if family in BIASED_ROUTERS else None
    fields["q_lora_rank"] = fields.get("q_lora_rank", QUERY_RANK) if family in LATENT_FAMILIES else None
    unused = {"model_type", *(name for name in OPTIONAL_SIZES if fields.get(name) is None)}
    unused |= set() if family in MOE_FAMILIES else set(SIZES_OF_EXPERTS)
    unused |= set() if family in LATENT_FAMILIES else set(LATENT_SIZES)
    sizes: dict[str, int] = {}
    for name in [name for name in ModelShape.__dataclass_fields__ if name not in unused]:
        size = fields.get(name)
        if type(size) is not int or size < 1:
            raise ConfigError(f"{path}: {name} = {size!r}: a whole number of at least 1 is expected", remedy=DOWNLOAD_REMEDY)
        sizes[name] = size
    if sizes.get("num_experts_per_tok", 0) > sizes.get("num_experts", 0):
        message = f"{path}: num_experts_per_tok = {sizes['num_experts_per_tok']}: more than num_experts = {sizes['num_experts']}"
        raise ConfigError(message, remedy=DOWNLOAD_REMEDY)
    return ModelShape(model_type=family, **sizes)


def _refuse_unsupported(path: Path, shape: ModelShape, fields: dict[str, Any]) -> None:
    """What the engine's layers would compute wrongly is refused."""
    family = shape.model_type
    named = fields.get("architectures")
    generates = isinstance(named, list) and any(str(name).endswith("ForCausalLM") for name in named)
    refused = {
        f"architectures = {named!r}, of which vLLM knows none that generates,": "architectures" in fields and not generates,
        **_refused_heads(shape),
        **refused_rope(family, fields),
        **refused_router(family, fields),
        **refused_windows(family, fields),
        **refused_gemma(family, fields),
        **refused_latent(family, fields),
        f"attention_bias = true on {family}": bool(fields.get("attention_bias")) and family not in ("qwen2", "glm4_moe"),
        f"mlp_bias = true on {family}": bool(fields.get("mlp_bias")),
        f"head_dim = {fields.get('head_dim')} on {family}, where vLLM takes hidden_size / num_attention_heads,": _has_other_heads(
            family, fields
        ),
        f"hidden_act = {fields.get('hidden_act')!r} (silu is)": fields.get("hidden_act", "silu") != "silu",
        **{f"a quantised checkpoint ({name})": bool(fields.get(name)) for name in ("quantization_config", "compression_config")},
        "a quantised checkpoint (hf_quant_config.json), which vLLM heeds,": (path.parent / "hf_quant_config.json").is_file(),
    }
    if family in MOE_FAMILIES:
        step, shared = fields.get("decoder_sparse_step", 1), fields.get("shared_expert_intermediate_size")
        refused |= {
            "a router that chooses one expert (num_experts_per_tok = 1)": fields.get("num_experts_per_tok") == 1,
            "layers without experts (mlp_only_layers)": bool(fields.get("mlp_only_layers")),
            f"layers without experts (decoder_sparse_step = {step!r}, 1 is)": step != 1,
            f"a shared expert on {family} (shared_expert_intermediate_size)": bool(shared) and family != "qwen2_moe",
            f"{family} without a shared expert (shared_expert_intermediate_size)": not shared and family == "qwen2_moe",
            "attention without biases (qkv_bias = false)": family == "qwen2_moe" and not fields.get("qkv_bias", True),
            "a load-balancing loss (output_router_logits = true)": bool(fields.get("output_router_logits")),
            "noise on the router's inputs (router_jitter_noise)": bool(fields.get("router_jitter_noise")),
        }
    for feature, present in refused.items():
        if present:
            remedy = next((text for begin, text in REMEDIES.items() if feature.startswith(begin)), UNSUPPORTED_REMEDY)
            raise ConfigError(f"{path}: {feature} is not supported", remedy=remedy)


def _refused_heads(shape: ModelShape) -> dict[str, bool]:
    """Whether it is there, by the feature: heads that do not divide what they are to divide."""
    hidden, heads, groups = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    size, has_plain = shape.head_dim or hidden // heads, not shape.kv_lora_rank
    needs_whole = shape.model_type in WHOLE_HEADS or (has_plain and not shape.head_dim)
    return {
        f"num_attention_heads = {heads}, no multiple of num_key_value_heads = {groups},": has_plain and heads % groups > 0,
        f"hidden_size = {hidden}, no multiple of num_attention_heads = {heads},": needs_whole and hidden % heads > 0,
        f"head_dim = {size}, an odd number,": has_plain and size % 2 == 1,
    }


def _has_other_heads(family: str, fields: dict[str, Any]) -> bool:
    """vLLM's qwen2.py:150 and qwen2_moe.py:225 read no head_dim, which transformers does."""
    size, heads, hidden = (fields.get(name) for name in ("head_dim", "num_attention_heads", "hidden_size"))
    return family in ("qwen2", "qwen2_moe") and size is not None and size * (heads or 0) != hidden


def check_weights(folder: Path) -> None:
    """Every safetensors file is whole, and holds what the index says of it, if there is one."""
    check_links(folder)
    index, files = read_index(folder), sorted(folder.glob("*.safetensors"))
    missing = sorted(set(index.values()) - {file.name for file in files})
    if missing:
        message = f"{folder / INDEX}: names {len(missing)} files that are not in the folder"
        raise ConfigError(message, missing=some(missing, 12), remedy=DOWNLOAD_REMEDY)
    if not files:
        message = f"model.path = {folder}: the folder holds no *.safetensors file"
        raise ConfigError(message, holds=_holds(folder), remedy="convert the weights to safetensors")
    held = {file.name: _tensor_names(file) for file in files}
    _check_places(folder, index, held)


def check_links(folder: Path) -> None:
    """ConfigError for the first link of a model's or tokenizer's file whose target is gone, such as a blob of the hub's cache."""
    for path in sorted(folder.iterdir()):
        if path.suffix in LINKED and path.is_symlink() and not path.exists():
            message = f"{path}: is a link to {path.readlink()}, which is not there"
            remedy = "download the model again, or copy the folder where its targets are: cp -rL FOLDER COPY"
            raise ConfigError(message, looked_at=str(path.resolve()), remedy=remedy)


def _check_places(folder: Path, index: dict[str, str], held: dict[str, set[str]]) -> None:
    """The index is right, and names each file that somebody reads.

    The engine reads each tensor where the index says, vLLM all of those files; transformers model.safetensors, if there is one.
    """
    remedy = f"take weights and index of one download: {DOWNLOAD_REMEDY}"
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


def _tensor_names(path: Path) -> set[str]:
    """By header and size: safetensors' own reader maps a file that is whole, and no other."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            remedy = "run `git lfs pull` in the model's repository"
            raise ConfigError(f"{path}: a Git LFS pointer, not the weights", remedy=remedy)
    try:
        with safe_open(path, framework="np") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        message = f"{path}: cut off, or not a safetensors file: {error}"
        raise ConfigError(message, actual=f"{num_bytes} bytes", remedy=DOWNLOAD_REMEDY) from error


def _holds(folder: Path) -> str:
    return some(sorted(path.name for path in folder.iterdir()), 12) or "nothing"
