"""What tests/engine/wrap/test_unshard.py runs on its ranks: walks over what Megatron-FSDP has sharded."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.engine_cases import engine, random_samples


def walk_in_parts(path: str) -> dict[str, Any]:
    """Names and tensors of walks around one that is left half-way and a training step, and what memory each walk leaves."""
    with engine(path, wrap="megatron_fsdp", name="sft") as built:
        seen, tensors, left = [], [], []
        for number in range(2):
            seen.append({item.name: item.tensor.clone() for unit in built.whole_parameters() for item in unit})
            tensors.append([item.tensor for unit in built.whole_parameters() for item in unit])
            unsharder = built.wrapped._chunks[0].unsharders[False]
            left.append([memory.untyped_storage().nbytes() for memory in unsharder._scratch])
            if number == 0:
                half = built.whole_parameters()
                next(half), next(half)
                half.close()  # type: ignore[attr-defined]
                built.update(built.prepare(random_samples(8, seed=0)))
        own = [name for unit in unsharder._own for name, _ in unit.tensors]
        upstreams = [name for unit in unsharder._units if not unit.gathers for name, _ in unit.tensors]
        return {
            "names": list(seen[0]),
            "changed": [name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name])],
            "same_tensors": all(one is other for one, other in zip(*tensors, strict=True)),
            "left": left,
            "own": len(own),
            "upstreams": upstreams,
            "finite": all(bool(tensor.isfinite().all()) for each in seen for tensor in each.values()),
        }


def weights_after_training(path: str, wrap: str, walks: bool) -> dict[str, torch.Tensor]:
    """With a walk before each of two steps, or without: the parameters at the end."""
    with engine(path, wrap=wrap, name="sft") as built:
        for step in range(2):
            if walks:
                for _ in built.whole_parameters():
                    pass
            built.update(built.prepare(random_samples(8, seed=step)))
        return {item.name: item.tensor.clone() for unit in built.whole_parameters() for item in unit}
