"""vLLM's model under `model.exact` beside the trainer's, in one process and without vLLM's engine: every schedule there may be.

Sequences go through it in chunks of any sizes, in batches of 1 to 64, some from a prefix that others have computed, all once more
from the start in other pages, as after a preemption; pages lie in any order, with NaN where nothing was written.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.sample import Sample
from tests.engine.engine_cases import engine

STARTS_PROCESSES = True  # a process of its own: see ranks.py
PAGE, PREFIX = 32, 64


class Sequence:
    """Tokens on their way through vLLM's model."""

    def __init__(self, ids: torch.Tensor, pages: list[int]) -> None:
        self.ids, self.pages, self.done = ids, pages, 0
        self.log_probs = torch.full((len(ids) - 1,), torch.nan)


def sequences(count: int, free: list[int]) -> list[Sequence]:
    """Of 2 to 530 tokens; the first PREFIX are the same in all that are longer."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda number: torch.randint(3, 120, (number,), generator=generator)  # noqa: E731
    prefix, made = draw(PREFIX), []
    lengths = [2, 3, 33, 64, 65, 129, 530, *(int(draw(1)) * 2 for _ in range(count - 7))]
    for length in lengths:
        ids = torch.cat([prefix, draw(length)])[: max(length, 2)] if length > PREFIX else draw(length)
        made.append(Sequence(ids, [free.pop() for _ in range(-(-len(ids) // PAGE))]))
    return made


@contextmanager
def vllm_model(path: str, num_pages: int) -> Iterator[tuple[Any, Any, list[str]]]:
    """Its model, its config and the names of the attention layers."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()  # as vLLM's CPU worker does first
    options = {"quantization": "megasync_exact", "enforce_eager": True, "max_model_len": 1024, "skip_tokenizer_init": True}
    config = EngineArgs(model=path, dtype="float32", kv_cache_memory_bytes=2**26, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
        layers = config.compilation_config.static_forward_context
        for layer in layers.values():
            layer.kv_cache = torch.full((num_pages, layer.num_kv_heads, PAGE, 2 * layer.head_size), torch.nan)
        yield model, config, list(layers)


def run_chunks(model: Any, config: Any, names: list[str], chunks: list[tuple[Sequence, int]]) -> None:
    """One batch: of each sequence so many next tokens."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.sample.sampler import Sampler

    counts = [count for _, count in chunks]
    parts = [torch.arange(sequence.done, sequence.done + count) for sequence, count in chunks]
    tables = [torch.tensor(sequence.pages, dtype=torch.int32) for sequence, _ in chunks]
    slots = [table[part // PAGE] * PAGE + part % PAGE for part, table in zip(parts, tables, strict=True)]
    metadata = SimpleNamespace(
        num_actual_tokens=sum(counts),
        query_start_loc=torch.tensor([0, *counts]).cumsum(0),
        seq_lens=torch.tensor([sequence.done + count for sequence, count in chunks]),
        block_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
    )
    mapping = dict.fromkeys(names, torch.cat(slots))
    ids = torch.cat([sequence.ids[part] for (sequence, _), part in zip(chunks, parts, strict=True)])
    with torch.inference_mode(), set_forward_context(dict.fromkeys(names, metadata), config, sum(counts), slot_mapping=mapping):
        hidden = model(ids, torch.cat(parts), None)
        found = Sampler.compute_logprobs(model.compute_logits(hidden))
    for (sequence, count), rows in zip(chunks, found.split(counts), strict=True):
        targets = sequence.ids[sequence.done + 1 : sequence.done + count + 1]
        sequence.log_probs[sequence.done : sequence.done + len(targets)] = rows[: len(targets)].gather(1, targets[:, None])[:, 0]
        sequence.done += count


def differing(path: str, count: int, rounds: int) -> dict[str, Any]:
    """Tokens compared with the trainer, those that differ, and the sizes of batches and chunks that there were."""
    from bridge.vllm.exact import register
    from bridge.vllm.serving import api

    os.environ |= {**api.environment(cuda=False), register.VARIABLE: "1"}
    free = random.Random(1).sample(range(4000), 4000)
    waiting, rng = sequences(count, free), random.Random(0)
    with engine(path, exact=True, name="sft", tokens=4000) as built:
        samples = [Sample(s.ids[:1].numpy().astype(np.int32), s.ids[1:].numpy().astype(np.int32)) for s in waiting]
        expected = built.score(samples)
        result: dict[str, Any] = {"compared": 0, "differing": 0, "batches": set(), "chunks": set()}
        with vllm_model(path, 4000) as (model, config, names):
            shared: list[int] = []
            for turn in range(rounds):
                for sequence in waiting:  # begun again in other pages, but for those of the common prefix
                    sequence.done, has_prefix = 0, len(sequence.ids) > PREFIX + 1
                    keeps = bool(shared) and has_prefix and rng.random() < 0.7
                    sequence.pages = [free.pop(0) for _ in sequence.pages]
                    if keeps:
                        sequence.pages[: PREFIX // PAGE], sequence.done = shared, PREFIX
                    free.extend(sequence.pages[PREFIX // PAGE :] if keeps or has_prefix else sequence.pages)
                open_ = list(waiting)
                while open_:
                    chosen = rng.sample(open_, min(len(open_), 1 << rng.randrange(7)))
                    sizes = [rng.choice((1, 1, 1, rng.randint(1, 64), 600)) for _ in chosen]
                    left = [min(size, len(s.ids) - s.done) for size, s in zip(sizes, chosen, strict=True)]
                    result["batches"].add(len(chosen))
                    result["chunks"] |= set(left)
                    run_chunks(model, config, names, list(zip(chosen, left, strict=True)))
                    for sequence in [s for s in chosen if s.done == len(s.ids)]:
                        open_.remove(sequence)
                shared = shared or next(s.pages[: PREFIX // PAGE] for s in waiting if len(s.ids) > PREFIX + 1)
                first = PREFIX if turn else 0  # what came of a prefix was compared in the first turn
                for sequence, own in zip(waiting, expected, strict=True):
                    begin = min(first, len(own) - 1)
                    result["compared"] += len(own) - begin
                    result["differing"] += int((sequence.log_probs[begin:] != own[begin:]).sum())
    return result
