"""What tests/engine/wrap/test_libraries.py runs on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint
from engine.wrap import kernels
from engine.sample import Sample
from engine.wrap.optimizer import inner_optimizers
from tests.engine.engine_cases import engine, losses
from tests.engine.checkpoint.resume_cases import history, save


class TorchProduct:
    """What apex's extension does."""

    num_calls = 0

    @classmethod
    def wgrad_gemm_accum_fp32(cls, inputs: torch.Tensor, gradient: torch.Tensor, main: torch.Tensor) -> None:
        cls.num_calls += 1
        main.add_(gradient.float().t() @ inputs.float())

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


@contextmanager
def torch_product() -> Iterator[None]:
    """Linears under DDP add their weights' gradients to the main ones themselves, as they do with apex."""
    from megatron.core.tensor_parallel import layers

    names = ("fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available")
    before = {name: vars(layers).get(name) for name in names}, kernels._choose
    vars(layers).update(zip(names, (TorchProduct, True), strict=True))
    kernels._choose = lambda *_: kernels.Kernels("auto", kernels.APEX)
    try:
        yield
    finally:
        vars(layers).update(before[0])
        kernels._choose = before[1]


def losses_with_and_without(cases: list[dict[str, Any]], num_steps: int) -> list[Any]:
    """Of engine_cases.losses, with torch_product and without, and how often it was called in the first."""
    TorchProduct.num_calls = 0
    with torch_product():
        found = losses(cases, num_steps)
    return [found, losses(cases, num_steps), TorchProduct.num_calls]


def steps_with_and_without(cases: list[dict[str, Any]], lengths: list[int]) -> list[Any]:
    """Of each case (loss, gradient norm) of two steps on samples of `lengths`, by torch_product and without.

    And the tokens of this rank's micro-batches in their order, and how often the product was called.
    """
    results = []
    for case in cases:
        TorchProduct.num_calls = 0
        with torch_product():
            found, tokens = _steps(case, lengths)
        results.append([found, _steps(case, lengths)[0], tokens, TorchProduct.num_calls])
    return results


def _steps(case: dict[str, Any], lengths: list[int]) -> tuple[list[tuple[float, float]], list[int]]:
    case, history, generator = dict(case), [], torch.Generator().manual_seed(0)
    tokens: list[int] = []
    with engine(case.pop("path"), **case) as built:
        for _ in range(2):
            ids = [tuple(torch.randint(3, 120, (length,), generator=generator).tolist()) for length in lengths]
            minibatches = built.prepare([Sample(each[:4], each[4:], ()) for each in ids])
            tokens = [micro.num_tokens for micro in minibatches[0].microbatches]
            metrics = built.update(minibatches)
            history.append((metrics["loss/sft"], metrics["grad_norm"]))
    return history, tokens


def trained_with(path: str, wrap: str, root: str) -> dict[str, Any]:
    """Losses and gradient norms on a GPU by `engine.kernels`; and those of a run that changes between torch's and te's Adam."""
    found: dict[str, Any] = {}
    settings = {"name": "sft", "wrap": wrap, "dtype": "bfloat16", "optimizer": {"warmup_steps": 0}}
    for chosen in ("torch", "auto", "te"):
        with engine(path, kernels=chosen, **settings) as built:
            found[chosen] = {"reported": built.kernels, "history": history(built, 0, 2)}
            found[chosen]["adam"] = {type(inner).__name__ for inner in inner_optimizers(built.optimizer)}
            save(built, Path(root) / chosen, path).wait()
            found[chosen]["history"] += history(built, 2, 5)
    for before, after in (("torch", "te"), ("te", "torch"), ("te", "te")):
        folder = checkpoint.newest(Path(root) / before)
        assert folder is not None
        with engine(path, kernels=after, **checkpoint.engine_arguments(folder), **settings) as built:
            checkpoint.restore(folder, built)
            found[f"{before} to {after}"] = history(built, 2, 5)
    return found
