"""An adapter merged into its base model: a Hugging Face folder with W + scale B A, in float32 and rounded once, file by file.

As a run's own merges are (bridge/export/merge.py), so that the folder is what its replicas served. Leaves out checkpoints
(megasync/tools/export/command.py). torch is imported when it is done.

    merge_adapter(Path("checkpoints/step_00000010/adapter"), Path("models/base"), "bfloat16", Path("models/merged"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.layout.manifest import ALWAYS_FLOAT32
from engine.peft.folder import WEIGHTS_FILE, adapted_linears, check_factors, fingerprint, place_of, read_fields, scale_of
from megasync.config.errors import ConfigError, refuse_if
from megasync.models.folder import model_fields, model_shape
from megasync.models.tensors import TIED_HEAD, expected_tensors, is_tied
from model_folder.files import read_header, weight_files
from model_folder.layout import key_of, places, read_folder_layout, written_fields

Factors = tuple[Any, Any]  # A [rank, columns] and B [rows, rank]; of experts [experts * rank, columns] and [rows, rank * experts]


def merge_adapter(adapter: Path, base: Path, dtype: str, target: Path) -> None:
    """Write the merged model to `target`, an empty folder, in `dtype`; of a base in MXFP4, too.

    Like exports of a run, without layers after the model's, and without a head beside tied embeddings.

    Raises:
        ConfigError: the adapter is of another base model, or adapts what the base has not.
    """
    import torch
    from safetensors.torch import load_file

    from bridge.export.merge import merge_into
    from engine.checkpoint.hf_folder import finish_folder
    from engine.model.families import mxfp4
    from engine.runtime.tensor_file import save_tensors

    _check_base(adapter, base)
    try:
        check_factors(adapter, base)
    except ValueError as error:
        raise ConfigError(str(error), remedy="take another checkpoint with --step, or its base model") from error
    fields, factors, layout = read_fields(adapter), factors_of(adapter), read_folder_layout(base)
    rank, used, scale = fields["r"], set[str](), scale_of(fields)
    model, shape = written_fields(model_fields(base)), model_shape(base)
    own = expected_tensors(shape, model).keys() - ({TIED_HEAD} if is_tied(shape, model) else set())
    files, waiting = weight_files(base), dict[str, Any]()
    for number, file in enumerate(files, start=1):
        held, tensors = mxfp4.unpacked(load_file(file), waiting), {}
        found = places({key: tensor.shape for key, tensor in held.items()}, layout)
        for name, place in ((name, place) for name, place in found.items() if name in own):
            tensor = place.of(held[place.key])
            own_dtype = torch.float32 if name.endswith(ALWAYS_FLOAT32) else getattr(torch, dtype)
            weight = tensor.to(own_dtype) if tensor.is_floating_point() else tensor
            linear, expert, half = place_of(name)
            if linear in factors:
                a, b = factors[linear] if expert is None else _of_expert(*factors[linear], rank, expert, half)
                weight = merge_into(torch.empty_like(weight), weight, a, b, scale)
                used.add(linear)
            tensors[key_of(name, layout)] = weight
        if tensors:
            save_tensors(tensors, target / f"model-{number:05d}-of-{len(files):05d}.safetensors", {"format": "pt"})
    missing = sorted(factors.keys() - used)
    message = f"{adapter}: adapts {', '.join(missing[:3])}, which {base} does not have as a tensor of its own"
    refuse_if(missing, message, remedy="merge it with PEFT: PeftModel.from_pretrained(...).merge_and_unload()")
    finish_folder(target, base)


def _check_base(adapter: Path, base: Path) -> None:
    then = read_header(adapter / WEIGHTS_FILE)[1].get("base_fingerprint")
    message = f"{adapter}: was trained on other weights than those in {base}"
    refuse_if(then is not None and then != fingerprint(base), message, remedy="put its base model there")


def factors_of(adapter: Path) -> dict[str, Factors]:
    """By the linear, or the parameter of all experts, in Hugging Face's names."""
    from safetensors.torch import load_file

    tensors = load_file(adapter / WEIGHTS_FILE)
    halves: dict[str, dict[str, Any]] = {}
    for key, (linear, kind) in adapted_linears(adapter, read_fields(adapter), list(tensors)).items():
        halves.setdefault(linear, {})[kind] = tensors[key]
    if not halves:
        raise ConfigError(f"{adapter}: holds no adapter", remedy="take another checkpoint with --step")
    return {linear: (pair["A"], pair["B"]) for linear, pair in halves.items()}


def _of_expert(a: Any, b: Any, rank: int, expert: int, half: int | None) -> Factors:
    """One expert's part of PEFT's stacked factors, in whose B the expert counts fastest (engine/peft/experts.py)."""
    num_experts = a.shape[0] // rank
    own_b = b.view(b.shape[0], rank, num_experts)[:, :, expert]
    return a.view(num_experts, rank, -1)[expert], own_b if half is None else own_b.chunk(2)[half]
