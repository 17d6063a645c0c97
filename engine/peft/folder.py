"""The description of a PEFT adapter folder, and whether it fits a config and a base model. No torch in here: configs are checked
without it.

Leaves out what its fields may be (fields.py) and its values (factors.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


from engine.config import TARGET_OF, LoraConfig
from model_folder.files import Entry, read_header, weight_files
from model_folder.layout import LANGUAGE, read_own_fields, read_places
from engine.peft.fields import AdapterError, check_fields

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = ".mlp.experts"
KEY = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
TARGET_OF_EXPERTS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}  # parameters of all experts of a layer
OF_EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PARAMETER_OF = {  # an expert's weight: the parameter of all experts, and which half of its rows
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
DTYPES = ("F32", "BF16", "F16", "F64")
SAMPLE_BYTES = 64 * 2**10


Pairs = dict[str, dict[str, Entry]]  # A and B, by the linear or the parameter of experts


def check_peft_folder(folder: str | Path, lora: LoraConfig, model_path: str | Path) -> None:
    """Whether the adapter in `folder` can be the start of a run with `lora` on the model in `model_path`.

    Raises:
        AdapterError: a file is missing, or method, base model, rank, scale, targets or shapes are others.
    """
    folder, model_path = Path(folder), Path(model_path)
    fields = read_fields(folder)
    factors, metadata = read_header(folder / WEIGHTS_FILE)
    _check_base(folder, fields, metadata.get("base_fingerprint"), model_path)
    pairs = _ranked_pairs(folder, fields, factors)
    for linear, pair in pairs.items():
        target = target_of(linear)
        if target not in lora.targets:
            key, given = pair["A"].key, ", ".join(lora.targets)
            problem = f"{folder}: {key} needs {target} in engine.lora.targets, which is {given}"
            raise AdapterError(problem, f"write engine.lora.targets=[{','.join((*lora.targets, str(target)))}]")
    _check_scale(folder, fields, lora, _needed_rank(folder, fields, pairs))
    _check_on(folder, fields, pairs, model_path)


def check_factors(folder: Path, model_path: Path) -> None:
    """AdapterError where the adapter's tensors are not whole, of its rank and for the linears of the model in `model_path`."""
    fields = read_fields(folder)
    pairs = _ranked_pairs(folder, fields, read_header(folder / WEIGHTS_FILE)[0])
    _check_on(folder, fields, pairs, model_path)


def _check_on(folder: Path, fields: dict[str, Any], pairs: Pairs, model_path: Path) -> None:
    known = base_shapes(model_path) if weight_files(model_path) else {}  # a plan needs none
    if known:
        _check_shapes(folder, fields["r"], pairs, known, model_path)
    _check_targets(folder, fields, pairs, known)


def target_of(linear: str) -> str | None:
    """The value of engine.lora.targets for a linear, or a parameter of experts, of Hugging Face's model."""
    parent, _, last = linear.rpartition(".")
    return (TARGET_OF_EXPERTS if parent.endswith(EXPERTS) else TARGET_OF).get(last)


def adapted_linears(folder: Path, fields: dict[str, Any], keys: list[str]) -> dict[str, tuple[str, str]]:
    """For each key of a folder's tensors its linear, or parameter of experts, by its own name (model_folder/layout.py), and
    whether it is A or B.

    Raises:
        AdapterError: a key is for something else.
    """
    found = {}
    for key in keys:
        match = KEY.fullmatch(key)
        linear = match[1] if match else ""
        if re.search(r"\.experts\.\d+\.", linear):
            remedy = "load it with PEFT on transformers 5 in that rank and save it again"
            raise AdapterError(f"{folder}: {key} is for one expert, as transformers 4 held them", remedy)
        if linear.removesuffix(".base_layer").endswith(EXPERTS):
            linear = _parameter_of_experts(folder, fields, keys, linear)
        if match is None or target_of(linear) is None:
            raise AdapterError(f"{folder}: {key} is no adapter of one of {', '.join(TARGET_OF)}", "train those only")
        found[key] = linear.replace(LANGUAGE, "model."), match[2]
    return found


def _parameter_of_experts(folder: Path, fields: dict[str, Any], keys: list[str], module: str) -> str:
    """The experts' parameter that PEFT's `module` adapts: see experts.py."""
    experts = module.removesuffix(".base_layer")
    if module != experts:
        return f"{experts}.gate_up_proj"
    if f"{PREFIX}{experts}.base_layer.lora_A.weight" in keys:
        return f"{experts}.down_proj"
    given = {name.rpartition(".")[2] for name in fields.get("target_parameters") or ()} & TARGET_OF_EXPERTS.keys()
    if len(given) != 1:
        problem = f"target_parameters in {CONFIG_FILE} does not say which parameter of {experts} its one adapter is for"
        raise AdapterError(f"{folder}: {problem}", "write the adapter again")
    return f"{experts}.{given.pop()}"


def _ranked_pairs(folder: Path, fields: dict[str, Any], factors: list[Entry]) -> Pairs:
    pairs = _pairs(folder, fields, factors)
    _check_ranks(folder, fields["r"], pairs)
    return pairs


def _pairs(folder: Path, fields: dict[str, Any], factors: list[Entry]) -> Pairs:
    by_key, pairs = {each.key: each for each in factors}, Pairs()
    for key, (linear, kind) in adapted_linears(folder, fields, list(by_key)).items():
        if (dtype := by_key[key].dtype) not in DTYPES:
            remedy = f"save the adapter again in one of {', '.join(DTYPES)}"
            raise AdapterError(f"{folder}: {key} is of the dtype {dtype}", remedy)
        pairs.setdefault(linear, {})[kind] = by_key[key]
    if not pairs:
        raise AdapterError(f"{folder}: {WEIGHTS_FILE} holds no adapter", "save it again with PEFT")
    for linear, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise AdapterError(f"{folder}: {linear} has only lora_{next(iter(pair))}", "write the adapter again")
    return pairs


def _needed_rank(folder: Path, fields: dict[str, Any], pairs: Pairs) -> int:
    """The rank of an adapted linear of the engine: that of the adapter, or where fused linears have other A the sum of theirs."""
    fused: dict[tuple[str, str | None], list[Entry]] = {}
    for linear, pair in pairs.items():
        if not linear.rpartition(".")[0].endswith(EXPERTS):
            fused.setdefault((linear.rpartition(".")[0], target_of(linear)), []).append(pair["A"])
    rank: int = fields["r"]
    with (folder / WEIGHTS_FILE).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        different = [members for members in fused.values() if len({data[each.begin : each.end] for each in members}) > 1]
    return rank * max(map(len, different), default=1)


def _check_ranks(folder: Path, rank: int, pairs: Pairs) -> None:
    """Experts' factors hold the ranks of all of them."""
    for linear, pair in pairs.items():
        for entry, size in ((pair["A"], pair["A"].shape[0]), (pair["B"], pair["B"].shape[-1])):
            if size % rank or (size != rank and not linear.rpartition(".")[0].endswith(EXPERTS)):
                problem = f"r = {rank}, and {entry.key} in {WEIGHTS_FILE} is {entry.shape}, of rank {size}"
                raise AdapterError(f"{folder / CONFIG_FILE}: {problem}", "write what the adapter was trained with")


def _check_targets(folder: Path, fields: dict[str, Any], pairs: Pairs, known: Iterable[str]) -> None:
    """Whether the tensors are for the linears that the config names, as far as the base's are `known`.

    Of models with experts attention alone: PEFT changes the other names (transformers_weight_conversion.py).
    """
    linears = {linear for linear in (*pairs, *known) if target_of(linear) is not None}
    has_experts = any(EXPERTS in linear for linear in linears)
    for linear in sorted(linears):
        is_named, has_tensors = names_linear(fields, linear), linear in pairs
        if is_named != has_tensors and not (has_experts and ".mlp." in linear):
            problem = f"does not name {linear}, and {WEIGHTS_FILE} has an adapter for it"
            problem = f"names {linear}, and {WEIGHTS_FILE} has no adapter for it" if is_named else problem
            given = f"target_modules = {fields.get('target_modules')!r:.200}"
            raise AdapterError(f"{folder / CONFIG_FILE}: {given} {problem}", "write the adapter again with PEFT")


def names_linear(fields: dict[str, Any], linear: str) -> bool:
    """Whether an adapter's config names the linear, as peft 0.21.2 reads it (tuners_utils.py:check_target_module_exists); also
    where it lies in a model with vision layers.
    """

    def matches(names: Any) -> bool:
        if isinstance(names, str):
            return any(re.fullmatch(names, each) for each in (linear, linear.replace("model.", LANGUAGE, 1)))
        return any(f".{linear}".endswith(f".{name}") for name in names or ())

    if matches(fields.get("exclude_modules")):
        return False
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or matches(targets)
    parameters = [name.removesuffix(".weight") for name in fields.get("target_parameters") or ()]
    layer = re.match(r"model\.layers\.(\d+)\.", linear)
    is_in_layers = layers in (None, []) or (layer and int(layer[1]) in ([layers] if isinstance(layers, int) else layers))
    return matches(parameters) or (matches(targets) and bool(is_in_layers))


def _check_shapes(folder: Path, rank: int, pairs: Pairs, known: dict[str, tuple[int, int, int]], model_path: Path) -> None:
    for linear, pair in pairs.items():
        if linear not in known:
            problem = f"{folder}: the model in {model_path} has no {linear}"
            raise AdapterError(problem, "set model.path to the adapter's base model")
        count, rows, columns = known[linear]
        expected = [count * rank, columns], [rows, rank * count]
        if (pair["A"].shape, pair["B"].shape) != expected:
            by_model = f"{expected[0]} and {expected[1]} are expected by r = {rank} and {model_path}"
            problem = f"{folder}: {linear} has A {pair['A'].shape} and B {pair['B'].shape}, {by_model}"
            raise AdapterError(problem, "name an undamaged adapter of this base model")


def base_shapes(model_path: Path) -> dict[str, tuple[int, int, int]]:
    """(number of experts or 1, rows, columns) of each linear, or parameter of all experts, by the headers of the weights.

    Layers beyond the model's, which predict further tokens, are left out.
    """
    num_layers = read_own_fields(model_path)["num_hidden_layers"]
    found: dict[str, tuple[int, int, int]] = {}
    for name, (_, place) in read_places(model_path).items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) < num_layers and len(place.shape) == 2:
            linear, expert, half = place_of(name)
            rows = place.shape[0] if half is None else 2 * place.shape[0]
            found[linear] = max(found.get(linear, (1,))[0], (expert or 0) + 1), rows, place.shape[1]
    return found


def place_of(name: str) -> tuple[str, int | None, int | None]:
    """The linear, or parameter of all experts, that a tensor of the base belongs to; the expert; which half of the rows."""
    match = OF_EXPERT.fullmatch(name)
    if match is None or match[3] not in PARAMETER_OF:
        return name.removesuffix(".weight"), None, None
    parameter, half = PARAMETER_OF[match[3]]
    return f"{match[1]}.mlp.experts.{parameter}", int(match[2]), half


def fingerprint(model_path: Path) -> str:
    """Tells one set of base weights from another without reading all of it: sizes, headers, and three parts of each file."""
    digest = hashlib.sha256()
    for path in weight_files(model_path):
        size = path.stat().st_size
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
        digest.update(str(size).encode())
    return digest.hexdigest()


def read_fields(folder: Path) -> dict[str, Any]:
    """Fields of the config of a plain LoRA adapter.

    Raises:
        AdapterError: a file is missing or no JSON object, or the adapter is of another kind.
    """
    path = folder / CONFIG_FILE
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if (folder / name).is_symlink() and not (folder / name).exists():
            problem = f"{folder / name} is a link to {(folder / name).readlink()}, which is not there"
            raise AdapterError(problem, "download it again")
        if not (folder / name).is_file():
            remedy = "name a folder that PEFT's save_pretrained wrote, or leave it empty"
            raise AdapterError(f"{folder} holds no {name}", remedy)
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(f"{path} is no JSON: {error}", "save the adapter again") from error
    if not isinstance(fields, dict):
        problem = f"{path} holds a {type(fields).__name__}, fields by name are expected"
        raise AdapterError(problem, "write the adapter again")
    check_fields(path, fields)
    for name, kinds, expected in (("r", (int,), "a whole number"), ("lora_alpha", (int, float), "a number")):
        value: Any = fields.get(name)
        if type(value) not in kinds or not 0 < value < math.inf:
            remedy = "write what the adapter was trained with"
            raise AdapterError(f"{path}: {name} is {value!r}, {expected} above 0 is expected", remedy)
    return fields


def _check_base(folder: Path, fields: dict[str, Any], written_on: str | None, model_path: Path) -> None:
    """By the fingerprint `written_on` that our own adapters carry; else by the base model's name."""
    base = str(fields.get("base_model_name_or_path") or "")
    if written_on is not None:
        is_same = written_on == fingerprint(model_path)
    else:
        is_same = not base or Path(base).resolve() == model_path.resolve() or Path(base).name == model_path.name
    if not is_same:
        problem = f"{folder}: the adapter was trained on another base model, {base}, not on model.path={model_path}"
        raise AdapterError(problem, "set model.path to its base model")


def scale_of(fields: dict[str, Any]) -> float:
    """The factor of B A."""
    return float(fields["lora_alpha"] / (math.sqrt(fields["r"]) if fields.get("use_rslora") else fields["r"]))


def _check_scale(folder: Path, fields: dict[str, Any], lora: LoraConfig, rank: int) -> None:
    """`rank`: that the engine's linears need."""
    scale = scale_of(fields)
    is_rslora = bool(fields.get("use_rslora"))
    keys = f"engine.lora.alpha={scale * (math.sqrt(rank) if is_rslora else rank):.12g}"
    keys = keys if is_rslora == lora.rslora else f"engine.lora.rslora={str(is_rslora).lower()} {keys}"
    if lora.rank != rank:
        why = f"takes {rank} where linears are fused, because their A differ" if rank != fields["r"] else f"has rank {rank}"
        problem = f"engine.lora.rank={lora.rank}, but the adapter in {folder} {why}"
        raise AdapterError(problem, f"write engine.lora.rank={rank} {keys}")
    if not math.isclose(scale, lora.scale, rel_tol=1e-9):
        ours = f"engine.lora.alpha={lora.alpha:g} scales the adapter by {lora.scale:g}"
        raise AdapterError(f"{ours}, the one in {folder} was trained with {scale:g}", f"write {keys}")
