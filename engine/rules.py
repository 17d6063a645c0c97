"""Compatibility rules of an engine, used by the check before the start and by the code that relies on them.

Each returns the fault with its remedy, or None. Pure functions of sizes; no torch in here. Leaves out pipeline stages
(stages.py) and megatron-core's own fields (ddp_fields.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.config import (
    DELTA_NET_FAMILIES,
    DTYPE_BYTES,
    EXPERT_ROW_BYTES,
    GEMMA,
    GPT_OSS,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
)


class Problem(NamedTuple):
    """A problem and its remedy. `allowed`: the possible values."""

    message: str
    remedy: str
    allowed: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" + (f" (allowed: {self.allowed})" if self.allowed else "")


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def ranks_problem(parallel: ParallelConfig, world_size: int) -> Problem | None:
    """Rules of a layout on this many ranks."""
    for name, size in (("context", parallel.context), ("expert", parallel.expert)):
        product, sizes = parallel.tensor * parallel.pipeline * size, f"{parallel.tensor} x {parallel.pipeline} x {size}"
        if world_size % product:
            message = f"engine.parallel.tensor x pipeline x {name} = {sizes}: {product} does not divide {world_size} ranks"
            remedy = f"start a multiple of {product} ranks, or make the product one of the choices"
            return Problem(message, remedy, f"products of {', '.join(map(str, divisors(world_size)))}")
    return None


def float16_problem(model_type: str, num_experts: int) -> Problem | None:
    """Rules of model.dtype = float16."""
    why = f"{model_type} has values that float16 cannot hold, and vLLM refuses it" if model_type == GEMMA else ""
    if num_experts:
        why = "experts have an optimizer of their own, whose loss scale would change by itself"
    message = f"model.dtype = float16: {why}"
    return Problem(message, "write model.dtype=bfloat16", "float32, bfloat16") if why else None


def experts_problem(sizes: Any, num_experts: int, dtype: str, parallel: ParallelConfig) -> Problem | None:
    """Rules of a layout with a mixture of `num_experts` (0: none). `sizes`: those of config.json, by name."""
    message = f"engine.parallel.expert = {parallel.expert}"
    if not num_experts:
        message, remedy = f"{message}: {sizes.model_type} has no experts", "write engine.parallel.expert=1"
        return Problem(message, remedy, "1") if parallel.expert > 1 else None
    if num_experts % parallel.expert:
        sizes_there = divisors(num_experts)
        remedy = f"write engine.parallel.expert={max(size for size in sizes_there if size <= parallel.expert)}"
        message = f"{message}: does not divide the model's num_experts = {num_experts}"
        return Problem(message, remedy, ", ".join(map(str, sizes_there)))
    if parallel.tensor > 1 and not parallel.sequence:
        message = f"engine.parallel.sequence = false with engine.parallel.tensor = {parallel.tensor}: megatron-core trains "
        message += "mixtures of experts under tensor parallelism with sequence parallelism only"
        return Problem(message, "write engine.parallel.sequence=true, or engine.parallel.tensor=1")
    for name, split in {"hidden_size": 1, "moe_intermediate_size": parallel.tensor}.items():
        row_bytes = getattr(sizes, name) // split * DTYPE_BYTES[dtype]
        if row_bytes % EXPERT_ROW_BYTES:
            message = f"{name} = {getattr(sizes, name)}: experts' rows have {row_bytes} bytes on a rank"
            remedy = "write a smaller engine.parallel.tensor" if split > 1 else "choose another model, or model.dtype=float32"
            return Problem(message, remedy, f"multiples of {EXPERT_ROW_BYTES}, as torch's grouped matrix product takes them")
    return None


def experts_lora_problem(lora: LoraConfig, target: str, dtype: str) -> Problem | None:
    """Rules of adapters of experts; `target` is a linear of theirs."""
    if lora.dropout > 0:
        message = f"engine.lora.dropout = {lora.dropout:g}: PEFT has none for experts, of which {target} is"
        return Problem(message, "write engine.lora.dropout=0")
    multiple = EXPERT_ROW_BYTES // DTYPE_BYTES[dtype]
    if lora.rank % multiple:
        message = f"engine.lora.rank = {lora.rank}: experts' adapters have rows of {lora.rank} numbers in {dtype}"
        remedy = f"write engine.lora.rank={-(-lora.rank // multiple) * multiple}"
        return Problem(message, remedy, f"multiples of {multiple}, as torch's grouped matrix product takes them")
    return None


def recompute_problem(model_type: str, config: EngineConfig) -> Problem | None:
    """Rules of what is recomputed."""
    if model_type != GPT_OSS or config.recompute != "selective" or "mlp_act" not in config.recompute_modules:
        return None
    message = f"engine.recompute_modules = {', '.join(config.recompute_modules)}: experts of {model_type} keep their activations"
    return Problem(message, "write engine.recompute_modules=[layernorm]", "layernorm, core_attn, moe")


def context_problem(model_type: str, num_kv_heads: int, parallel: ParallelConfig) -> Problem | None:
    """Rules of attention over context ranks; `num_kv_heads`: the model's."""
    if parallel.context > 1 and model_type in DELTA_NET_FAMILIES:
        message = f"engine.parallel.context = {parallel.context}: the gated delta nets of {model_type} need whole sequences"
        return Problem(message, "write engine.parallel.context=1, and engine.parallel.tensor for longer sequences", "1")
    heads = num_kv_heads // parallel.tensor
    if parallel.context_attention != "ulysses" or heads % parallel.context == 0:
        return None
    message = f"engine.parallel.context_attention = ulysses: engine.parallel.context = {parallel.context} does not divide the"
    message += f" {heads} KV heads of a tensor-parallel rank"
    return Problem(message, "write engine.parallel.context_attention=allgather", "allgather")
