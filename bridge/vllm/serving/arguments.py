"""The fields of vLLM's EngineArgs that a config may set. Their names are read from vLLM's source, which is not imported.

Leaves out building the engine (api.py).

    refusal("max_num_batched_tokens", 4096)    # None: it may be set
    refusal("max_num_seqs", 8)                 # why not
"""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OWN_KEYS = {  # fields that a key of a run's config sets
    "data_parallel_size": "rollout.replicas",
    "dtype": "model.dtype",
    "aux_output_config": "algorithm.router_replay",
    "enable_lora": "engine.lora.sync",
    "enable_return_routed_experts": "algorithm.router_replay",
    "enable_sleep_mode": "rollout.placement",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "max_logprobs": "algorithm.support_replay",
    "max_lora_rank": "engine.lora.rank",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "model": "model.path",
    "quantization": "rollout.dtype",
    "quantization_config": "rollout.dtype",
    "seed": "run.seed",
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens", "speculative_config"), "rollout.speculation"),
    "tensor_parallel_size": "rollout.tensor_parallel",
    "tokenizer": "model.path",
}

_ADAPTER = "it is for adapters, whose slots are made for engine.lora"
_BLOCKS = "blocks of its cache would outlive the weights that made them"
_CHUNKS = "on CPUs vLLM draws other random numbers with it; on GPUs it is on"
_MODEL = "the replicas would compute with another model than the trainer"
_OFFLOAD = "weights have to stay where a sync writes them"
_WORKERS = "a replica is rollout.tensor_parallel workers of one host, which the sync counts on"
REFUSED = {
    **dict.fromkeys(("default_mm_loras", "fully_sharded_loras", "lora_dtype", "lora_target_modules", "max_loras"), _ADAPTER),
    **dict.fromkeys(("kv_offloading_backend", "kv_offloading_size", "kv_transfer_config"), _BLOCKS),
    **dict.fromkeys(("hf_config_path", "hf_overrides", "model_class_overrides", "model_weights"), _MODEL),
    **dict.fromkeys(("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"), _OFFLOAD),
    **dict.fromkeys(("offload_num_in_group", "offload_params", "offload_prefetch_step"), _OFFLOAD),
    "allow_deprecated_quantization": "rollout.dtype has one quantisation, which is not deprecated",
    **dict.fromkeys(("data_parallel_address", "data_parallel_backend", "data_parallel_external_lb"), _WORKERS),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_rank", "data_parallel_rpc_port"), _WORKERS),
    **dict.fromkeys(("data_parallel_multi_port_external_lb", "data_parallel_size_local"), _WORKERS),
    **dict.fromkeys(("data_parallel_start_rank", "decode_context_parallel_size", "device_ids"), _WORKERS),
    **dict.fromkeys(("distributed_executor_backend", "enable_elastic_ep", "enable_eplb", "enable_expert_parallel"), _WORKERS),
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank", "pipeline_parallel_size"), _WORKERS),
    "convert": "replicas generate",
    "disable_sliding_window": "sequences would end at the window",
    "enable_chunked_prefill": _CHUNKS,
    "generation_config": "the keys of rollout set the sampling",
    "load_format": "adapters are served on the weights of model.path",
    "logprobs_mode": "importance ratios need the log-probs at the temperature that was sampled at",
    "prefill_context_parallel_size": _WORKERS,
    "runner": "replicas generate",
    "skip_tokenizer_init": "replicas look for stop texts with a tokenizer of their own",
    "scheduler_cls": "replicas have one that keeps tokens until their request ends",
    "weight_transfer_config": "syncs set it",
    "worker_cls": "syncs set it",
    "worker_extension_cls": "syncs set it",
}
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "dict": (dict,), "float": (float, int), "int": (int,), "list": (list,), "None": (type(None),), "str": (str,),
}  # fmt: skip


@lru_cache(maxsize=1)
def fields() -> dict[str, str]:
    """The installed vLLM's names with their annotations, as its source has them; empty where there is no vLLM."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        line.target.id: ast.unparse(line.annotation)
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for line in one.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_")
    }


def settable() -> list[str]:
    """Fields that a config may set."""
    return sorted(fields().keys() - OWN_KEYS.keys() - REFUSED.keys())


def refusal(name: str, value: Any) -> str | None:
    """Why a config may not set this field to this value; None where it may, or where there is no vLLM to ask."""
    if name in OWN_KEYS:
        return f"{OWN_KEYS[name]} sets it"
    if name in REFUSED:
        return REFUSED[name]
    return wrong_kind(name, value)


def wrong_kind(name: str, value: Any) -> str | None:
    """Why vLLM itself would not take this value of this field; None where it may, or where there is no vLLM to ask."""
    known = fields()
    if known and name not in known:
        return "no field of vLLM's EngineArgs"
    kinds = [part.strip().partition("[")[0] for part in known.get(name, "").split("|")]
    if any(kind not in KINDS for kind in kinds) or any(_is(value, kind) for kind in kinds):
        return None
    return f"{known[name].replace(' | ', ' or ').replace('None', 'null')} is expected"


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
