"""The fields of megatron-core's DistributedDataParallelConfig that `engine.overrides` may set, by wrap. No torch in here.

A field is taken where training and export were seen to be right with it (tests/engine/wrap/test_overrides.py); any other is
refused with the reason. Leaves out building the config (table.py). Source: megatron-core 0.16.1
distributed_data_parallel_config.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

DDP, FSDP = "ddp", "megatron_fsdp"
SHARDS_PARAMETERS = {DDP: False, FSDP: True}


class Field(NamedTuple):
    """A field that may be set. `choices`: of a str."""

    kind: type
    wraps: tuple[str, ...]
    choices: tuple[str, ...] = ()


TAKEN = {
    "bucket_size": Field(int, (DDP, FSDP)),
    "check_for_large_grads": Field(bool, (DDP,)),
    "check_for_nan_in_grad": Field(bool, (DDP, FSDP)),
    "data_parallel_sharding_strategy": Field(str, (FSDP,), ("optim", "optim_grads", "optim_grads_params")),
    "fsdp_double_buffer": Field(bool, (FSDP,)),
    "overlap_grad_reduce": Field(bool, (DDP, FSDP)),
    "overlap_param_gather": Field(bool, (DDP, FSDP)),
    "pad_buckets_for_high_nccl_busbw": Field(bool, (DDP,)),
    "suggested_communication_unit_size": Field(int, (FSDP,)),
}

_FP8 = "the engine trains without FP8"
_NCCL_BUFFERS = "NCCL's user buffers were never tried with the engine"
_ONE_GROUP = "the engine builds no groups for a second level of data parallelism"
_WRAP = "engine.wrap sets it"
REFUSED = {
    "align_param_gather": "the chunks of a virtual pipeline gather their parameters each when it needs them",
    "average_in_collective": "it changes how gradients are rounded, and gloo cannot do it; the engine divides before it sums",
    "delay_wgrad_compute": "it is for TransformerEngine's layers, which the engine does not use",
    "disable_symmetric_registration": _NCCL_BUFFERS,
    "fp8_param_gather": _FP8,
    "fsdp_manual_registration": _NCCL_BUFFERS,
    "grad_reduce_in_fp32": "engine.gradient_dtype sets it",
    "gradient_reduce_div_fusion": "the engine sets it by what the communication backend can do",
    "keep_fp8_transpose_cache": _FP8,
    "nccl_ub": _NCCL_BUFFERS,
    "num_distributed_optimizer_instances": _ONE_GROUP,
    "outer_dp_sharding_strategy": _ONE_GROUP,
    "preserve_fp32_weights": "megatron-fsdp 0.6.1 does not read it",
    "reduce_scatter_with_fp32_accumulation": "it replaces the reduce-scatter of the whole process (param_and_grad_buffer.py:163)",
    "reuse_grad_buf_for_mxfp8_param_ag": _FP8,
    "use_custom_fsdp": _WRAP,
    "use_distributed_optimizer": f"{_WRAP}; Megatron-FSDP trains wrongly without it",
    "use_megatron_fsdp": _WRAP,
}


def refusal(wrap: str, name: str, value: Any) -> str | None:
    """Why `engine.overrides` may not set this field to this value; None where it may."""
    if name in REFUSED:
        return REFUSED[name]
    if name not in TAKEN:
        return "no field of megatron-core's DistributedDataParallelConfig"
    kind, wraps, choices = TAKEN[name]
    if wrap not in wraps:
        return f"it has no effect with engine.wrap={wrap}"
    if type(value) is not kind or (type(value) is int and value < 1):
        return {bool: "choose true or false", int: "expected a whole number of at least 1", str: "expected text"}[kind]
    if choices and value not in choices:
        return f"choose from {', '.join(choices)}"
    return None
