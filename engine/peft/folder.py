"""What a PEFT adapter folder says of itself, and whether it fits a config. No torch in here: configs are checked without it.

Leaves out its tensors: see peft.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.config import LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = ".mlp.experts"
KEY = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
TARGET_OF = {  # Hugging Face's linears, by the megatron-core linear that they are fused into
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
TARGET_OF_EXPERTS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}  # parameters of all experts of a layer
MAX_FUSED = 3
SAMPLE_BYTES = 64 * 2**10


def check_peft_folder(folder: str | Path, lora: LoraConfig, model_path: str | Path) -> None:
    """Whether the adapter in `folder` can be the start of a run with `lora` on the model in `model_path`.

    Raises:
        ValueError: a file is missing, or method, base model, rank, scale or targets are others.
    """
    folder = Path(folder)
    fields = read_fields(folder)
    names, metadata = _read_names(folder / WEIGHTS_FILE)
    _check_method(folder, fields)
    _check_base(folder, fields, metadata.get("base_fingerprint"), Path(model_path))
    _check_rank(folder, fields, lora)
    for key, (linear, _) in adapted_linears(folder, fields, names).items():
        target = target_of(linear)
        if target not in lora.targets:
            raise ValueError(f"{folder}: {key} needs {target} in engine.lora.targets, which is {', '.join(lora.targets)}")


def target_of(linear: str) -> str | None:
    """The value of engine.lora.targets for a linear, or a parameter of experts, of Hugging Face's model."""
    parent, _, last = linear.rpartition(".")
    return (TARGET_OF_EXPERTS if parent.endswith(EXPERTS) else TARGET_OF).get(last)


def adapted_linears(folder: Path, fields: dict[str, Any], keys: list[str]) -> dict[str, tuple[str, str]]:
    """By key of a folder's tensors the linear, or the parameter of experts, that it is for, and whether it is A or B.

    Raises:
        ValueError: a key is for something else.
    """
    found = {}
    for key in keys:
        match = KEY.fullmatch(key)
        linear = match[1] if match else ""
        if re.search(r"\.experts\.\d+\.", linear):
            remedy = "load it with PEFT on transformers 5 in that rank and save it again"
            raise ValueError(f"{folder}: {key} is for one expert, as transformers 4 held them; {remedy}")
        if linear.removesuffix(".base_layer").endswith(EXPERTS):
            linear = _parameter_of_experts(folder, fields, keys, linear)
        if match is None or target_of(linear) is None:
            raise ValueError(f"{folder}: {key} is no adapter of one of {', '.join(TARGET_OF)}; train those only")
        found[key] = linear, match[2]
    return found


def _parameter_of_experts(folder: Path, fields: dict[str, Any], keys: list[str], module: str) -> str:
    """Which of them PEFT's `module` adapts: see experts.py."""
    experts = module.removesuffix(".base_layer")
    if module != experts:
        return f"{experts}.gate_up_proj"
    if f"{PREFIX}{experts}.base_layer.lora_A.weight" in keys:
        return f"{experts}.down_proj"
    given = {name.rpartition(".")[2] for name in fields.get("target_parameters") or ()} & TARGET_OF_EXPERTS.keys()
    if len(given) != 1:
        told = f"target_parameters in {CONFIG_FILE} does not tell which parameter of {experts} its one adapter is for"
        raise ValueError(f"{folder}: {told}; write the adapter again")
    return f"{experts}.{given.pop()}"


def _read_names(path: Path) -> tuple[list[str], dict[str, str]]:
    """A safetensors file's tensor names and metadata."""
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"engine.lora.adapter_path: {path} is no safetensors file: {error}") from error


def fingerprint(model_path: Path) -> str:
    """Tells one set of base weights from another without reading all of it: sizes, headers, and three parts of each file.

    Of the files that its index names, or of model.safetensors: others may come and go beside them.
    """
    digest, index = hashlib.sha256(), model_path / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for path in [model_path / name for name in sorted(names)]:
        size = path.stat().st_size
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
        digest.update(str(size).encode())
    return digest.hexdigest()


def read_fields(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            remedy = "name a folder that PEFT's save_pretrained wrote, or leave it empty"
            raise ValueError(f"engine.lora.adapter_path: {folder} holds no {name}; {remedy}")
    try:
        fields: Any = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        told = f"{folder / CONFIG_FILE} holds a {type(fields).__name__}, fields by name are expected"
        raise ValueError(f"{told}; write the adapter again")  # noqa: TRY004 # of a file
    return fields


def _check_method(folder: Path, fields: dict[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type is {fields.get('peft_type')!r}; only LORA adapters can be trained on")
    refused = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out", "layer_replication")
    used = [name for name in refused if fields.get(name)]
    if fields.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise ValueError(f"{folder}: {used[0]}={fields[used[0]]!r} is not supported; start from a plain LoRA adapter")


def _check_base(folder: Path, fields: dict[str, Any], written_on: str | None, model_path: Path) -> None:
    """By the fingerprint `written_on` that our own adapters carry; else by the base model's name."""
    base = str(fields.get("base_model_name_or_path") or "")
    if written_on is not None:
        is_same = written_on == fingerprint(model_path)
    else:
        is_same = not base or Path(base).resolve() == model_path.resolve() or Path(base).name == model_path.name
    if not is_same:
        raise ValueError(
            f"{folder}: the adapter was trained on another base model, {base}, not on model.path={model_path}; "
            "set model.path to its base model"
        )


def _check_rank(folder: Path, fields: dict[str, Any], lora: LoraConfig) -> None:
    for name in ("r", "lora_alpha"):
        if type(fields.get(name)) not in (int, float):
            told = f"{folder / CONFIG_FILE}: {name} is {fields.get(name)!r}, a number is expected"
            raise ValueError(f"{told}; write what the adapter was trained with")
    rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    if lora.rank not in [rank * factor for factor in range(1, MAX_FUSED + 1)]:
        raise ValueError(
            f"engine.lora.rank={lora.rank}, but the adapter in {folder} has rank {rank}; write engine.lora.rank={rank}"
        )
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    if not math.isclose(scale, lora.scale, rel_tol=1e-9):
        fitting = scale * (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        raise ValueError(
            f"engine.lora.alpha={lora.alpha:g} scales the adapter by {lora.scale:g}, the one in {folder} was trained with "
            f"{scale:g}; write engine.lora.alpha={fitting:g}"
        )
