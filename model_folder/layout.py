"""Where the language model lies in a Hugging Face folder: in which part of config.json, in which tensors. No torch in here.

A vision-language model's folder holds the fields in `text_config` and the tensors under a prefix, beside vision layers; experts
of a layer may be one tensor. Everywhere else the language model's tensors have the names of a text folder ("own names").
Other tensors stay unchanged: every written folder holds them, and nobody computes with them.
Leaves out whether config.json and tensors fit (megasync/models/), and vLLM's classes (bridge/vllm/serving/text_alone.py).

    own_fields(fields)["hidden_size"]
    places(shapes, read_folder_layout(folder))["model.norm.weight"]      # Place("model.language_model.norm.weight", (64,))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model_folder.files import read_header, weight_files


class FolderLayout(NamedTuple):
    """The language model's place in folders of a model_type."""

    family: str  # the language model's model_type
    prefix: str = "model."  # replaces `model.` in the names of all its tensors but the output layer's
    others: tuple[str, ...] = ()  # prefixes of other tensors
    head: str = "lm_head."  # of the output layer
    has_stacks: bool = False  # stacked tensors of experts are kept, not split by expert
    modules: str = "model."  # of the modules of transformers' class, whose names adapters have


VISION, PREDICTOR, LANGUAGE = "model.visual.", "mtp.", "model.language_model."  # PREDICTOR: a layer that predicts further tokens
GEMMAS_VISION = ("vision_tower.", "multi_modal_projector.")
FOLDER_LAYOUTS: dict[str, tuple[FolderLayout, ...]] = {  # by model_type; of several the folder's tensors choose, or the first
    "qwen3_5_text": (FolderLayout("qwen3_5_text", others=(PREDICTOR,)),),
    "qwen3_5_moe_text": (FolderLayout("qwen3_5_moe_text", others=(PREDICTOR,)),),
    "qwen3_next": (FolderLayout("qwen3_next", others=(PREDICTOR,)),),
    "gpt_oss": (FolderLayout("gpt_oss", has_stacks=True),),
    "qwen3_5": (FolderLayout("qwen3_5_text", LANGUAGE, (VISION, PREDICTOR)),),
    "qwen3_5_moe": (FolderLayout("qwen3_5_moe_text", LANGUAGE, (VISION, PREDICTOR)),),
    "qwen3_vl": (FolderLayout("qwen3", LANGUAGE, (VISION,), modules=LANGUAGE),),
    "qwen2_5_vl": (
        FolderLayout("qwen2", "model.", ("visual.",), modules=LANGUAGE),
        FolderLayout("qwen2", LANGUAGE, (VISION,), modules=LANGUAGE),
    ),
    "gemma3": (
        FolderLayout("gemma3_text", "language_model.model.", GEMMAS_VISION, "language_model.lm_head.", modules=LANGUAGE),
        FolderLayout("gemma3_text", LANGUAGE, tuple(f"model.{each}" for each in GEMMAS_VISION), modules=LANGUAGE),
    ),
}
TEXT_TYPES = {"qwen3_vl": "qwen3_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}  # text_config's model_type, where no family
LAYOUTS = tuple(layout for several in FOLDER_LAYOUTS.values() for layout in several)
VISION_LANGUAGE = tuple(name for name, (first, *_) in FOLDER_LAYOUTS.items() if first.others not in ((), (PREDICTOR,)))
FLAT = "qwen2_5_vl"  # published with the text_config's fields beside vision_config
ROPES, OF_IMAGES = ("rope_parameters", "rope_scaling"), ("mrope_section", "mrope_interleaved")
OF_ALL_MODELS = ("quantization_config", "compression_config", "tie_word_embeddings")  # beside text_config, and of it
GENERATES = ("ForConditionalGeneration", "ForCausalLM")  # how names of classes end whose language model may be taken
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


def read_folder_layout(folder: Path) -> FolderLayout:
    """By a folder's config.json and tensors."""
    model_type = read_model_type(folder)
    first, *more = FOLDER_LAYOUTS.get(model_type, (FolderLayout(model_type),))
    keys = [each.key for path in weight_files(folder) for each in read_header(path)[0]] if more else []
    return next((layout for layout in more if any(key.startswith(layout.prefix) for key in keys)), first)


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as that of a folder with the language model alone. `fields`: of config.json.

    Rotary embeddings of images are left out: a text's positions are the same in each of their sections.
    """
    model_type = fields.get("model_type")
    if model_type not in VISION_LANGUAGE:
        return dict(fields)
    given = fields.get("text_config") or fields
    text = {name: value for name, value in given.items() if name not in ("vision_config", "architectures")}
    shared = {name: fields[name] for name in OF_ALL_MODELS if name in fields}
    classes = fields.get("architectures") or ()
    if classes and not any(str(name).endswith(GENERATES) for name in classes):
        shared["architectures"] = classes
    ropes = {name: _of_text(text[name]) for name in ROPES if isinstance(text.get(name), dict)}
    return {**text, **shared, **ropes, "model_type": FOLDER_LAYOUTS[model_type][0].family}


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if name not in OF_IMAGES}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def written_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as that of weights which a run has written: gpt-oss's are no longer in MXFP4."""
    is_packed = fields.get("model_type") == "gpt_oss"
    return {name: value for name, value in fields.items() if not (is_packed and name == "quantization_config")}


def read_own_fields(folder: Path) -> dict[str, Any]:
    """`own_fields` of the folder's config.json."""
    return own_fields(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_model_type(folder: Path) -> str:
    """The folder's; empty where its config.json has none."""
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", ""))


def own_name(key: str, layout: FolderLayout) -> str | None:
    """The own name of a folder's tensor; None: it is not the language model's."""
    if key.startswith(layout.others):
        return None
    for there, own in ((layout.prefix, "model."), (layout.head, "lm_head.")):
        if key.startswith(there):
            return own + key.removeprefix(there)
    return key


def own_name_in_any(key: str) -> str | None:
    """`own_name` in whichever of LAYOUTS the folder has: a name that one of them changes is in no other."""
    names = [own_name(key, layout) for layout in LAYOUTS]
    return None if None in names else next((name for name in names if name != key), key)


def key_of(name: str, layout: FolderLayout) -> str:
    """The name of a tensor of the language model in a written folder. `name`: its own."""
    for there, own in ((layout.prefix, "model."), (layout.head, "lm_head.")):
        if name.startswith(own):
            return there + name.removeprefix(own)
    return name


def fused_part(key: str, layout: FolderLayout) -> re.Match[str] | None:
    """(path of the experts, part) of a tensor of all experts that is split into each expert's."""
    return None if layout.has_stacks else FUSED.fullmatch(own_name(key, layout) or "")


def places(shapes: Mapping[str, Iterable[int]], layout: FolderLayout) -> dict[str, Place]:
    """By own name each tensor of the language model. `shapes`: of the folder's tensors."""
    found: dict[str, Place] = {}
    for key, dims in shapes.items():
        name, shape = own_name(key, layout), tuple(dims)
        fused = fused_part(key, layout)
        if fused and len(shape) == 3:
            found |= _of_experts(key, fused[1], PARTS[fused[2]], shape)
        elif name is not None:
            found[name] = Place(key, shape)
    return found


def read_places(folder: Path) -> dict[str, tuple[Path, Place]]:
    """`places` of a folder's weights, each with its file."""
    layout = read_folder_layout(folder)
    found: dict[str, tuple[Path, Place]] = {}
    for path in weight_files(folder):
        own = places({each.key: each.shape for each in read_header(path)[0]}, layout)
        found |= {name: (path, place) for name, place in own.items()}
    return found


def _of_experts(key: str, path: str, parts: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Place]:
    rows = shape[1] // len(parts)
    return {
        f"{path}.{expert}.{part}.weight": Place(key, (rows, shape[2]), expert, number * rows)
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    }
