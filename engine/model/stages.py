"""The layers of each stage of the pipeline. Pure functions; no torch in here.

A stage has `virtual_pipeline` chunks of consecutive layers. Chunks are counted in the model's order: chunk c is on stage
c % pipeline, the first has the embedding, the last the output layer and the loss. Leaves out when they compute: megatron-core's
schedules (pipeline_parallel/schedules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from engine.config import ParallelConfig


def chunk_layers(parallel: ParallelConfig, num_layers: int, output_cost: float) -> tuple[int, ...]:
    """The number of layers of each chunk: `pipeline_layers`, else the same for all, or by cost where they do not divide.

    The output layer's cost (see costs.py) has no say where the chunks divide the layers.

    Raises:
        ValueError: what `problem` says.
    """
    if found := problem(parallel, num_layers):
        raise ValueError("; ".join(found))
    num_chunks = parallel.pipeline * parallel.virtual_pipeline
    if parallel.pipeline_layers:
        return parallel.pipeline_layers
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    return balanced(num_layers, parallel.pipeline, num_chunks, output_cost)


def balanced(num_layers: int, num_stages: int, num_chunks: int, output_cost: float) -> tuple[int, ...]:
    """The number of layers of each chunk, at least 1, such that the costliest chunk costs as little as can be.

    A layer costs 1, the last chunk `output_cost` more. Among equal chunks a layer goes to the cheapest stage, then to one
    without the embedding, whose parameters the optimizer steps, too.
    """
    counts = [1] * num_chunks
    costs = [1.0] * (num_chunks - 1) + [1.0 + output_cost]
    stages = [sum(costs[stage::num_stages]) for stage in range(num_stages)]
    for _ in range(num_layers - num_chunks):
        chunk = min(range(num_chunks), key=lambda c: (costs[c], stages[c % num_stages], c == 0, c))
        counts[chunk] += 1
        costs[chunk] += 1
        stages[chunk % num_stages] += 1
    return tuple(counts)


def problem(parallel: ParallelConfig, num_layers: int) -> tuple[str, str] | None:
    """The problem of the stages for a model of this many layers, and the remedy."""
    virtual, layers = parallel.virtual_pipeline, parallel.pipeline_layers
    num_chunks, has = parallel.pipeline * virtual, f"the model has num_hidden_layers = {num_layers}"
    sizes = f"pipeline x virtual_pipeline = {parallel.pipeline} x {virtual}"
    if virtual > 1 and parallel.pipeline == 1:
        message = f"engine.parallel.virtual_pipeline = {virtual}: needs engine.parallel.pipeline above 1, which is 1"
        return message, "write engine.parallel.virtual_pipeline=1"
    if num_chunks > num_layers:
        remedy = f"write sizes whose product is at most {num_layers}"
        return f"engine.parallel.{sizes}: more stages than layers, {has}", remedy
    if layers is not None and len(layers) != num_chunks:
        remedy = f"write {num_chunks} numbers, or leave engine.parallel.pipeline_layers out"
        return f"engine.parallel.pipeline_layers = {list(layers)}: {len(layers)} numbers for {sizes}", remedy
    if layers and min(layers) < 1:
        return f"engine.parallel.pipeline_layers = {list(layers)}: each has at least 1 layer", "write numbers of at least 1"
    if layers and sum(layers) != num_layers:
        remedy = f"write numbers whose sum is {num_layers}, or leave engine.parallel.pipeline_layers out"
        return f"engine.parallel.pipeline_layers = {list(layers)}: {sum(layers)} layers, {has}", remedy
    return None


def layout(counts: Sequence[int]) -> list[list[str]]:
    """The chunks as megatron-core's `pipeline_model_parallel_layout` (pipeline_parallel_layer_layout.py)."""
    chunks = [["decoder"] * count for count in counts]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def describe(counts: Sequence[int], num_stages: int) -> str:
    """One line: the layers of each stage, counted from 0."""
    ends = [f"{start}-{end - 1}" for start, end in pairwise([0, *accumulate(counts)])]
    stages = (f"stage {stage}: layers {', '.join(ends[stage::num_stages])}" for stage in range(num_stages))
    return f"pipeline: {'; '.join(stages)}"
