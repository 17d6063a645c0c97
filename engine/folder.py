"""Where the language model lies in a Hugging Face folder: in which part of config.json, in which tensors. No torch in here.

A vision-language model's folder holds the fields in `text_config` and the tensors under a prefix, beside vision layers; experts
of a layer may be one tensor. Everywhere else the language model's tensors have the names of a text folder ("own names").
Other tensors stay unchanged: every written folder holds them, and nobody computes with them.
Leaves out whether config.json and tensors fit (megasync/models/), and vLLM, which has such a table of its own.

    own_fields(fields)["hidden_size"]
    places(shapes, "qwen3_5")["model.norm.weight"]      # Place("model.language_model.norm.weight", (64,))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Inside(NamedTuple):
    """The language model's place in folders of a model_type."""

    family: str  # the language model's model_type
    prefix: str = "model."  # of its tensors but the output layer, in place of this
    others: tuple[str, ...] = ()  # prefixes of other tensors
    has_stacks: bool = False  # a tensor of all experts of a layer is its own, and is not split into each expert's


VISION, PREDICTOR = "model.visual.", "mtp."  # vision layers; a layer that predicts further tokens
INSIDE = {
    "qwen3_5_text": Inside("qwen3_5_text", others=(PREDICTOR,)),
    "qwen3_5_moe_text": Inside("qwen3_5_moe_text", others=(PREDICTOR,)),
    "qwen3_next": Inside("qwen3_next", others=(PREDICTOR,)),
    "gpt_oss": Inside("gpt_oss", has_stacks=True),
    "qwen3_5": Inside("qwen3_5_text", "model.language_model.", (VISION, PREDICTOR)),
    "qwen3_5_moe": Inside("qwen3_5_moe_text", "model.language_model.", (VISION, PREDICTOR)),
}
VISION_LANGUAGE = tuple(name for name, inside in INSIDE.items() if VISION in inside.others)
OF_ALL_MODELS = ("quantization_config", "compression_config")  # fields beside text_config that speak of it, too
GENERATES = ("ForConditionalGeneration", "ForCausalLM")  # how names of classes end, and of the language model's
FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")  # of all experts: [experts, rows, columns]
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of their rows


class Place(NamedTuple):
    """Where a tensor of the language model is: all of `key`, or some rows of one expert's."""

    key: str
    shape: tuple[int, ...]  # the tensor's own
    expert: int | None = None
    first_row: int = 0

    def read(self, file: Any) -> Any:
        """Read it from a file that safetensors has opened."""
        return file.get_tensor(self.key) if self.expert is None else self.of(file.get_slice(self.key))

    def of(self, tensor: Any) -> Any:
        """Its part of the tensor `key`."""
        return tensor if self.expert is None else tensor[self.expert, self.first_row : self.first_row + self.shape[0]]


def inside(model_type: str) -> Inside:
    """`model_type`: of the folder."""
    return INSIDE.get(model_type, Inside(model_type))


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as that of a folder with the language model alone. `fields`: of config.json."""
    if fields.get("model_type") not in VISION_LANGUAGE:
        return dict(fields)
    shared = {name: fields[name] for name in OF_ALL_MODELS if name in fields}
    if "architectures" in fields:
        shared["architectures"] = [name.replace(*GENERATES) for name in fields["architectures"]]
    return {**fields["text_config"], **shared, "model_type": INSIDE[fields["model_type"]].family}


def read_own_fields(folder: Path) -> dict[str, Any]:
    """Those of its config.json."""
    return own_fields(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_model_type(folder: Path) -> str:
    """The folder's; empty where its config.json has none."""
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", ""))


def own_name(key: str, model_type: str) -> str | None:
    """The own name of a folder's tensor; None: it is not the language model's."""
    of_type = inside(model_type)
    if key.startswith(of_type.others):
        return None
    return f"model.{key.removeprefix(of_type.prefix)}" if key.startswith(of_type.prefix) else key


def key_of(name: str, model_type: str) -> str:
    """The name of a tensor of the language model in a written folder. `name`: its own."""
    return inside(model_type).prefix + name.removeprefix("model.") if name.startswith("model.") else name


def fused_part(key: str, model_type: str) -> re.Match[str] | None:
    """(path of the experts, part) of a tensor of all experts that is split into each expert's."""
    return None if inside(model_type).has_stacks else FUSED.fullmatch(own_name(key, model_type) or "")


def places(shapes: Mapping[str, Iterable[int]], model_type: str) -> dict[str, Place]:
    """By own name each tensor of the language model. `shapes`: of the folder's tensors."""
    found: dict[str, Place] = {}
    for key, dims in shapes.items():
        name, shape = own_name(key, model_type), tuple(dims)
        fused = fused_part(key, model_type)
        if fused and len(shape) == 3:
            found |= _of_experts(key, fused[1], PARTS[fused[2]], shape)
        elif name is not None:
            found[name] = Place(key, shape)
    return found


def _of_experts(key: str, path: str, parts: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Place]:
    rows = shape[1] // len(parts)
    return {
        f"{path}.{expert}.{part}.weight": Place(key, (rows, shape[2]), expert, number * rows)
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    }


def weight_files(folder: Path) -> list[Path]:
    """The files of its index, or model.safetensors, ignoring others; empty where there are none."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return list(folder.glob("model.safetensors"))
    names: Iterable[str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
