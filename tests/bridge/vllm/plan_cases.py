"""What test_plan_vllm.py runs on one or two ranks: vLLM's models as they are on CUDA, weights left as they were loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bridge.vllm.weights import experts, fp8, latent, reload
from bridge.receive.bake import bake
from bridge.export.fp8 import QuantisedSource
from bridge.export.source import whole_tensors
from bridge.layout.bucket import SyncPlan
from bridge.layout.manifest import TensorSpec, read_folder_manifest
from bridge.layout.plan import LoadPlan
from bridge.layout.quantised import quantised_manifest
from bridge.receive.unpack import Unpacker
from bridge.layout.digest import as_bytes, digest_value
from bridge.vllm.weights.readback import digest_whole, hf_slices, in_dtypes, tensor_group
from bridge.processes import MEMORY_FOLDER
from tests.support.sources import DictSource

STARTS_PROCESSES = True  # see ranks.py
BUCKET_BYTES = 100_000


def build_model(folder: str, tensor_parallel: int, *, is_fp8: bool = False, **fields: Any) -> tuple[Any, torch.nn.Module]:
    """vLLM's config and its model with the folder's weights; what CPUs do to them after loading is left out.

    `is_fp8`: of random weights in FP8.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, get_model

    arguments = {
        "model": folder, "dtype": "float32", "max_model_len": 64, "tensor_parallel_size": tensor_parallel, "enforce_eager": True,
        "skip_tokenizer_init": True, "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        **latent.engine_arguments(folder, {}), **fields,
    }  # fmt: skip
    if is_fp8:
        fp8.register()
        arguments |= fp8.ENGINE_ARGUMENTS | {"moe_backend": "auto"}  # CPUs do not have ours
    config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            os.environ["VLLM_DIST_IDENT"] = os.environ["MASTER_PORT"]  # a worker process gets it from its executor
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            parallel_state.init_distributed_environment(size, rank, "env://", rank, "gloo")
            parallel_state.initialize_model_parallel(tensor_parallel)
        no_packing = mock.patch.object(base_loader, "process_weights_after_loading")
        with no_packing, mock.patch.object(torch.accelerator, "empty_cache"):  # which asks for a GPU
            return config, get_model(vllm_config=config)


def derive(model: torch.nn.Module) -> None:
    """What vLLM's multi-latent attention makes after loading: views, and in the first layer memory of its own."""
    for index, layer in enumerate(layer for layer in model.modules() if latent.is_derived(layer)):
        layer.process_weights_after_loading(torch.float32)  # type: ignore[operator]
        for name in latent.PARTS if index == 0 else ():
            getattr(layer, name).data = getattr(layer, name).data.clone()


def scatter_all(plan: LoadPlan, tensors: dict[str, torch.Tensor]) -> None:
    """What a sync does with a plan."""
    buffers = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
    sync_plan = SyncPlan(plan.manifest, (len(plan.manifest.tensors),), BUCKET_BYTES)
    unpacker, stage = Unpacker(sync_plan, plan, torch.device("cpu")), sync_plan.stages[0]
    for bucket in stage.buckets:
        data = buffers[bucket.index % 2]
        for piece in bucket.pieces:
            raw = tensors[plan.manifest.tensors[piece.tensor].name].view(-1).view(torch.uint8)
            data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = raw[
                piece.tensor_offset : piece.tensor_offset + piece.num_bytes
            ]
        unpacker.scatter(stage, bucket, data[: bucket.num_bytes])


def read_slices(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    """What the receiver reads back."""
    specs = (TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items())
    return in_dtypes(hf_slices(model, lambda _: True), {spec.name: spec for spec in specs})


def misread(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of which this worker's read-back is not the part that it says, or not there at all."""
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}
    right = set()
    for name, offsets, part in read_slices(model, tensors):
        where = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        if name in tensors and torch.equal(part, tensors[name][where]):
            right.add(name)
    return sorted(tensors.keys() - right)


def misdigested(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Tensors whose digest, put together of all workers' parts, differs from the whole tensor's; reported by the first worker."""
    digests = digest_whole(read_slices(model, tensors), tensor_group())
    if not digests:
        return ["all of them"] * (dist.get_rank() == 0)
    return [name for name, tensor in tensors.items() if digests.get(name) != digest_value(tensor)]


def stale(model: torch.nn.Module) -> str:
    """What the first worker says of layers that are not renewed yet."""
    try:
        digest_whole(hf_slices(model, lambda _: True), tensor_group())
    except ValueError as error:
        return str(error)
    return ""


def disagreement(model: torch.nn.Module) -> str:
    """What the first worker says of a last norm that is another on the other one."""
    norm = dict(model.named_parameters())["model.norm.weight"].data
    norm += dist.get_rank()
    try:
        digest_whole(hf_slices(model, lambda _: True), tensor_group())
    except ValueError as error:
        return str(error)
    finally:
        norm -= dist.get_rank()
    return ""


def windows(model: torch.nn.Module) -> tuple[int, ...]:
    """Of each layer how many tokens it attends to; 0: all, or there is no attention of heads."""
    layers: Any = model.get_submodule("model.layers")
    found = (getattr(getattr(layer, "self_attn", None) or getattr(layer, "attn", None), "attn", None) for layer in layers)
    return tuple(0 if attention is None else max(0, attention.impl.sliding_window) for attention in found)


def planned_models(families: dict[str, list[str]], tensor_parallel: int, dtype: str = "float32") -> dict[str, dict[str, Any]]:
    """For each family, from two folders of one shape: what is not planned, what is loaded otherwise, what is misread."""
    results = {}
    for family, (before, after) in families.items():
        config, model = build_model(before, tensor_parallel, dtype=dtype)
        derive(model)
        manifest = read_folder_manifest(before)
        with reload.config_scope(config):
            plan = bake(manifest, model, model.load_weights, reload.transformation(model), latent.is_derived)
        tensors = load_file(Path(after) / "model.safetensors")
        scatter_all(plan, tensors)
        unplanned = [spec.name for index, spec in enumerate(manifest.tensors) if plan.copies[index] is None]
        if unplanned:  # what vLLM's own loader gets, which may write to it
            reload.load_stream(model, [(name, tensors[name].clone()) for name in unplanned])
        said = stale(model)
        latent.renew(model)
        fresh = build_model(after, tensor_parallel, dtype=dtype)[1]
        derive(fresh)
        loaded = dict(fresh.named_parameters())
        results[family] = {
            "stale": said,
            "problem": latent.problem(model),
            "fallback": plan.loader_fallback,
            "unplanned": unplanned,
            "differing": [name for name, p in model.named_parameters() if not torch.equal(p, loaded[name])],
            "num_parameters": len(loaded),
            "kept_in_float32": [name for name, p in model.named_parameters() if p.dtype is torch.float32],
            "windows": windows(model),
            "read_back": misread(model, tensors),
            "digests": misdigested(model, tensors),
            "disagreement": disagreement(model),
        }
    remove_shared_memory()
    return results


def quantised_models(families: dict[str, list[str]], tensor_parallel: int) -> dict[str, dict[str, Any]]:
    """As `planned_models`, in FP8: what a source quantises reaches a model of random weights as vLLM loads it from a folder."""
    results = {}
    for family, (before, after) in families.items():
        config, model = build_model(before, tensor_parallel, is_fp8=True, dtype="bfloat16")
        process(model)
        with reload.config_scope(config), fp8.original_parameters(model):
            manifest = quantised_manifest(read_folder_manifest(before))
            plan = bake(manifest, model, model.load_weights, reload.transformation(model), latent.is_derived)
        source = QuantisedSource(DictSource(load_file(Path(after) / "model.safetensors")))
        tensors = {name: tensor.clone() for name, tensor in whole_tensors(source)}
        scatter_all(plan, tensors)
        unplanned = [spec.name for index, spec in enumerate(manifest.tensors) if plan.copies[index] is None]
        reload.load_stream(model, [(name, tensors[name].clone()) for name in unplanned])
        quantised = Path(f"{after}-fp8")
        if dist.get_rank() == 0:
            write_quantised(Path(after), quantised, tensors)
        dist.barrier()
        fresh = build_model(str(quantised), tensor_parallel, dtype="bfloat16")[1]
        process(fresh)
        loaded = dict(fresh.named_parameters())
        results[family] = {
            "fallback": plan.loader_fallback,
            "quantised": sum(fp8.is_quantised(layer) for layer in model.modules()),
            "differing": [name for name, p in model.named_parameters() if not torch.equal(as_bytes(p), as_bytes(loaded[name]))],
            "read_back": misread(model, tensors),
            "digests": misdigested(model, tensors),
        }
    remove_shared_memory()
    return results


def process(model: torch.nn.Module) -> None:
    """What vLLM does to layers in FP8 after loading; for experts, which it has on GPUs alone, ours there is taken."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    for layer in model.modules():
        if experts.is_fused_experts(layer):
            layer.quant_method.fp8_backend = Fp8MoeBackend.TRITON  # type: ignore[union-attr]
        elif fp8.is_quantised(layer):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def write_quantised(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The folder with other tensors, which config.json describes."""
    from bridge.vllm.weights.fp8_config import CONFIG

    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": CONFIG}))


def remove_shared_memory() -> None:
    """In which vLLM's CPU workers add up; of a replica the actor removes it."""
    for path in MEMORY_FOLDER.glob(f"{os.environ.get('VLLM_DIST_IDENT', '-')}-*-cpushm_*"):
        path.unlink(missing_ok=True)
