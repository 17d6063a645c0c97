"""Bytes of one trainer rank by part: weights, gradients and optimizer state by wrap, activations, buckets, what CUDA takes.

A rank's peak is the larger one of its passes and of its optimizer step. Pure functions of counts (meta/ranks.py) and activations
(meta/activations.py). Checked against engines' own storages (tests/megasync/planning) and measured peaks (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.checkpoint.hf_folder import FILE_BYTES
from engine.checkpoint.state import MAX_FILE_BYTES
from engine.config import DTYPE_BYTES, EngineConfig
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.config.schema import Config
from megasync.planning.hardware import num_bytes, share
from megasync.planning.meta.activations import Activations
from megasync.planning.meta.ranks import Counts
from megasync.planning.shapes import Grid

PREFETCHED = 500_000_000  # elements that Megatron-FSDP gathers ahead (megatron_fsdp.py:444)
QUEUED = 1_000_000_000  # elements of gradients that wait to be reduced (megatron_fsdp.py:443)
RESERVED_SHARE = 0.02  # of what is allocated, that torch's allocator has reserved beside it


@dataclass(frozen=True)
class RankMemory:
    """In bytes. `passes` and `step` are the two moments that may be the peak, both with what always lies there."""

    parts: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    step: int = 0
    outside: int = 0  # of torch's allocator: CUDA's context, NCCL
    host: int = 0
    loading: int = 0  # of the host, before: with the file that the weights come from
    version_log: int = 0  # of `host`, where the rank is a sender: the copy that sync.log=deltas compares with

    @property
    def tensors_peak(self) -> int:
        """What torch.cuda.max_memory_allocated will say."""
        return max(self.passes, self.step)

    @property
    def device(self) -> int:
        """What the process takes of its device."""
        return round(self.tensors_peak * (1 + RESERVED_SHARE)) + self.outside


def state_bytes(counts: Counts, engine: EngineConfig, dtype: str, grid: Grid) -> dict[str, int]:
    """Weights, gradients and optimizer state of a rank, on whichever memory they lie."""
    item, gradient = DTYPE_BYTES[dtype], DTYPE_BYTES[engine.gradient_dtype]
    own = _shared(counts.dense, grid.shards) + _shared(counts.experts, grid.expert_shards)
    own_trained = _shared(counts.dense_trained, grid.shards) + _shared(counts.experts_trained, grid.expert_shards)
    is_sharded = SHARDS_PARAMETERS[engine.wrap]
    return {
        "weights": (own if is_sharded else counts.whole) * item,
        "gradients": (own_trained if is_sharded else counts.trained) * (gradient if dtype != "float32" else 4),
        "optimizer": own_trained * (12 if dtype != "float32" else 8),  # main weights in float32, and Adam's two moments
    }


def rank_memory(  # noqa: PLR0913 - the facts of a rank, by keyword
    counts: Counts,
    activations: Activations,
    *,
    engine: EngineConfig,
    dtype: str,
    grid: Grid,
    in_flight: float,
    has_reference: bool,
    bucket_bytes: int,
    is_cpu: bool,
    is_colocated: bool = False,
    sends_over_nccl: bool = False,
) -> RankMemory:
    """`bucket_bytes`: of one of the two buckets that a sender fills; 0: this run sends nothing."""
    state = state_bytes(counts, engine, dtype, grid)
    item, is_sharded = DTYPE_BYTES[dtype], SHARDS_PARAMETERS[engine.wrap] and grid.shards > 1
    reference = state["weights"] if has_reference and not engine.lora.rank else 0
    parts = {**state, "reference": reference}
    held = round(activations.held * in_flight)
    working = activations.peak - activations.held
    parts |= {"activations": held, "logits and temporaries": working}
    gathered = gathered_bytes(counts, engine, item, held, is_cpu=is_cpu) if is_sharded else (0, 0)
    parts["gathered by FSDP"] = sum(gathered)
    parts["sync buckets"] = 2 * bucket_bytes
    parts["workspaces"] = 0 if is_cpu else num_bytes("workspaces")
    always = state["weights"] + state["gradients"] + reference + 2 * bucket_bytes + parts["workspaces"]
    # the gathered layers and waiting gradients come while activations go (gathered_bytes)
    tensors = always + held + working + sum(gathered)
    copies = state["optimizer"] // 3 if engine.gradient_dtype == "bfloat16" and dtype == "bfloat16" else 0
    if is_cpu:  # a norm in float64, or two temporaries of Adam (torch/optim/adam.py:_single_tensor_adam)
        copies += 8 * _shared(counts.largest_trained, grid.shards)
    step = always + state["optimizer"] + copies
    is_away = engine.optimizer.offload
    outside = 0 if is_cpu else num_bytes("trainer") + (num_bytes("trainer_rollouts") if bucket_bytes else 0)
    outside += 0 if is_cpu or not sends_over_nccl else num_bytes("nccl")
    on_host = state["optimizer"] if is_away else 0
    if is_colocated:
        on_host = state["weights"] + reference + state["optimizer"]
    passes = tensors + (0 if is_away else state["optimizer"])
    own = num_bytes("host_process") + (num_bytes("host_driver") if bucket_bytes else 0) + round(share("heap_holes") * held)
    host = own if is_cpu else num_bytes("host_process_gpu") + on_host
    return RankMemory(
        {name: size for name, size in parts.items() if size},
        passes,
        step,
        outside,
        host + max(passes, step) if is_cpu else host,
        loading=0 if is_cpu else num_bytes("host_loading_gpu") + counts.whole * item,
    )


def gathered_bytes(counts: Counts, engine: EngineConfig, item: int, held: int, *, is_cpu: bool = False) -> tuple[int, int]:
    """Beside the shards, at the peak: what is gathered of embeddings and output layer; then of layers, and gradients that wait.

    The second come in the backward pass, as activations go: they add to the peak only where they are more than those. On CPUs
    layers stay gathered as far as they may be, from the forward pass on.
    """
    root = counts.output * item
    layers = min(PREFETCHED, 2 * counts.largest_layer) * item
    trained = counts.trained / max(1, counts.whole)
    waiting = round(min(QUEUED, counts.whole - counts.output) * trained) * DTYPE_BYTES[engine.gradient_dtype]
    if is_cpu:
        return root, min(PREFETCHED, counts.whole - counts.output) * item + max(0, waiting - held)
    return root, max(0, layers + waiting - held)


def checkpoint_bytes(parts: Mapping[str, int], config: Config, grid: Grid) -> int:
    """Copies in host memory of what a rank of a GPU writes: file by file, or all at once beside the training."""
    if not config.checkpoint.every_steps:
        return 0
    is_sharded = SHARDS_PARAMETERS[config.engine.wrap]
    weights = parts["weights"] if is_sharded else _shared(parts["weights"], grid.shards)
    weights, state = (0 if config.engine.lora.rank else weights), parts.get("optimizer", 0)
    if config.checkpoint.asynchronous:
        return weights + state
    return min(weights, FILE_BYTES) + min(state, MAX_FILE_BYTES)


def _shared(count: int, ranks: int) -> int:
    return -(-count // ranks)
