"""Passes of several adapters in one, on the ranks of test_driven.py."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from engine import shared
from engine.adapters import AdapterSpec, RefusedError
from engine.driven import Passed, PassRequest
from engine.model import lora_linears
from tests.engine.driven_cases import ADAM, adapter_of, build, difference, leaves_groups, make_data


@leaves_groups
def together(path: str, losses: tuple[str, ...], **options: Any) -> dict[str, bool]:
    """Whether adapters whose passes are one have the bits of each alone, also beside one whose loss is not finite."""
    driven = build(path, **options)
    broken = make_data(0, 2)
    broken[0].values["weights"][:] = math.inf

    def request(step: int, number: int) -> PassRequest:
        """Of other data for each, of other lengths."""
        is_broken = (step, number) == (2, 0)
        return PassRequest(losses[number], broken if is_broken else make_data(10 * step + number, 1 + 3 * number), losses[number])

    def in_turns(requests: Sequence[PassRequest]) -> list[Passed | RefusedError]:
        return [found for each in requests for found in driven.share([each])]

    def results(share: Callable[[Sequence[PassRequest]], list[Passed | RefusedError]]) -> list[list[Any]]:
        """By adapter, the weights at the end, too."""
        found: list[list[Any]] = [[] for _ in losses]
        for number, name in enumerate(losses):
            driven.adapters.create(name, AdapterSpec(rank=1 + number, train_mlp=number != 1, seed=number))
        for step in range(4):
            for own, passed in zip(found, share([request(step, number) for number in range(len(losses))]), strict=True):
                own.append(str(passed) if isinstance(passed, RefusedError) else [passed.loss, *map(bytes, passed.log_probs)])
            for own, name in zip(found, losses, strict=True):
                own.append(driven.optim_step(name, ADAM) if step % 2 else None)
        for own, name in zip(found, losses, strict=True):
            own += [tensor.float().numpy().tobytes() for tensor in adapter_of(driven, name).values()]
            driven.adapters.forget(name)
        return found

    turns, shared = results(in_turns), results(driven.share)
    assert "is inf" in turns[0][4]
    equal = dict(zip(losses, (own == other for own, other in zip(turns, shared, strict=True)), strict=True))
    return {**equal, "shared": driven.shares}


@leaves_groups
def grouped(path: str) -> dict[str, Any]:
    """The largest relative difference of log-probs and of gradients between adapters alone and in one pass whose products are
    those of GPUs, and how many of these there were.
    """
    driven, names, products = build(path, tokens_per_microbatch=512), ("one", "two", "three"), list[bool]()
    for number, name in enumerate(names):
        driven.adapters.create(name, AdapterSpec(rank=2 + 3 * number, seed=number))
        driven.share([PassRequest(name, make_data(9, 2), "cross_entropy")])
        driven.optim_step(name, ADAM)  # B is not zero any more
    requests = [PassRequest(name, make_data(number, 2 + number), "cross_entropy") for number, name in enumerate(names)]

    def results(share: Callable[[Sequence[PassRequest]], list[Passed | RefusedError]]) -> list[torch.Tensor]:
        found = []
        for name, passed in zip(names, share(requests), strict=True):
            assert isinstance(passed, Passed)
            driven.adapters.activate(name)
            found += [torch.from_numpy(np.concatenate(passed.log_probs)), *(each.clone() for each in driven.adapters.added())]
            for each in driven.adapters.added():
                each.zero_()
        return found

    alone = results(lambda given: [found for each in given for found in driven.share([each])])
    of_groups = lora_linears.GroupedProduct.product

    def counted(self: lora_linears.GroupedProduct, *given: Any, **named: Any) -> torch.Tensor:
        products.append(True)
        return of_groups(self, *given, **named)

    fits = mock.patch.object(shared, "fits_grouped_product", return_value=True)
    with fits, mock.patch.object(lora_linears.GroupedProduct, "product", counted):
        together = results(driven.share)
    return {"products": len(products), "difference": max(difference(a, b) for a, b in zip(alone, together, strict=True))}


class UnstableProducts(TorchDispatchMode):
    """Products of many rows differ in the last bit, on one rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and len(found) > 64 and dist.get_rank() == dist.get_world_size() - 1:
            return torch.nextafter(found, torch.zeros(()))
        return found


@leaves_groups
def unstable(path: str) -> dict[str, Any]:
    """As `together` on a machine where the rows beside a row change its bits; and the lines that say so."""
    lines = io.StringIO()
    with UnstableProducts(), redirect_stderr(lines):
        equal = together.__wrapped__(path, ("cross_entropy", "ppo"), tokens_per_microbatch=512)  # type: ignore[attr-defined]
    return {**equal, "lines": len([line for line in lines.getvalue().splitlines() if "take turns" in line])}
