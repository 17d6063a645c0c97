"""The router of our expert layers: megatron-core's, with each micro-batch's mask of tokens and their given experts.

The load-balancing loss (Switch Transformer, arXiv:2101.03961) is megatron-core's, of a micro-batch's tokens without padding; each
micro-batch counts as its share of the mini-batch's tokens, so that it is a mean over tokens. With the experts that a rollout
had (Rollout Routing Replay, arXiv:2510.11370) a token goes through those; their weights are made of this router's own scores,
as the family makes them, and have gradients. megatron-core's RouterReplay keeps its choices in one global list, in the
order of backward passes; here every pass of a layer gets its routing, so that recomputing and pipelines need no order.

    route_by_sequences(chunk)                           # once
    set_routing(micro, table, num_microbatches)          # then passes of the chunk
    take_sums(chunks, num_microbatches, layout, device)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.batch.batch import MicroBatch, SampleTable
from engine.runtime.megatron import MoEAuxLossAutoScaler, TopKRouter
from engine.batch.packed import NO_EXPERT, Routing
from engine.runtime.parallel import Layout


def set_routing(micro: MicroBatch, table: SampleTable, num_microbatches: int, *, replay: bool) -> None:
    """Give a micro-batch its routing. `table`: the mini-batch; `num_microbatches`: of all data-parallel ranks."""
    lengths = table.lengths[micro.samples].tolist()
    counts, num_tokens = np.zeros(micro.num_tokens, bool), sum(lengths)
    for start, length in zip(micro.starts, lengths, strict=False):  # a stand-in has no samples
        counts[start : start + length] = True
    scale = num_tokens / int(table.lengths.sum()) * num_microbatches
    experts = micro.routed_experts if replay else None
    micro.sequences.routing = Routing(torch.from_numpy(counts).to(micro.tokens.device), scale, experts)


@contextmanager
def own_choice(microbatches: Sequence[MicroBatch]) -> Iterator[None]:
    """The routers choose, whatever experts the rollout had: those are the policy's, not the KL's reference model's."""
    given = [micro.sequences.routing for micro in microbatches]
    for micro, routing in zip(microbatches, given, strict=True):
        micro.sequences.routing = None if routing is None else dataclasses.replace(routing, experts=None)
    try:
        yield
    finally:
        for micro, routing in zip(microbatches, given, strict=True):
            micro.sequences.routing = routing


class Router(TopKRouter):  # type: ignore[misc]
    """`token_routing` is for the pass to come; its own tokens are a slice of it under sequence parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.token_routing: Routing | None = None
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)  # topk_routing_with_score_function asks it
        self.sums: dict[str, torch.Tensor] = {}
        self.num_tokens: torch.Tensor | int = 0  # int64 [experts]: of the step so far, where biases move by it

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
        if self.is_aux_loss_enabled() and self.token_routing is not None:
            padding_mask = ~self._own(self.token_routing.counts)
        return super().forward(input, padding_mask)  # type: ignore[no-any-return]

    def is_aux_loss_enabled(self) -> bool:
        """Skipped for a stand-in, whose mean over no tokens would be 0 / 0."""
        return bool(super().is_aux_loss_enabled()) and self.token_routing is not None and self.token_routing.scale > 0

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        assert self.token_routing is not None
        self._add("balance", aux_loss.detach() / aux_loss_coeff * self.token_routing.scale)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self.token_routing.scale)  # type: ignore[no-any-return]

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and indices, each [T, k], of the given experts where there are any, best first; else of those chosen."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.token_routing is None or self.token_routing.experts is None:
            return values, chosen
        given = self._own(self.token_routing.experts[:, self.layer_number - 1]).long()
        ordered = given.sort(1).values
        is_given = (ordered[:, :1] != NO_EXPERT) & (ordered[:, 1:] != ordered[:, :-1]).all(1, keepdim=True)
        if torch.is_grad_enabled():
            same, counts = (given[:, :, None] == chosen[:, None]).any(2), is_given & self._own(self.token_routing.counts)[:, None]
            self._add("moved", (~same * counts).sum())
            self._add("compared", counts.sum() * topk)
        chosen = torch.where(is_given, given, chosen)
        values, order = scores.gather(1, chosen).sort(descending=True, stable=True)
        return values, chosen.gather(1, order)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count each expert's tokens for router_bias.update.

        megatron-core's takes padding off along the experts (router.py:542), and counts in the model's dtype (module.py:440).
        """
        if self.config.moe_router_bias_update_rate and self.token_routing is not None and torch.is_grad_enabled():
            self.num_tokens = self.num_tokens + (routing_map * self._own(self.token_routing.counts)[:, None]).sum(0)

    def _own(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """[T, ...] to the rows of this tensor-parallel rank."""
        if not self.config.sequence_parallel:
            return of_tokens
        return of_tokens.chunk(self.tp_group.size())[self.tp_group.rank()]  # type: ignore[no-any-return]

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + value.detach().double()


def route_by_sequences(chunk: torch.nn.Module) -> None:
    """From now on every pass of a transformer layer hands its packed sequences' `routing` to the layer's router."""

    def hand_over(layer: Any, _: Any, kwargs: dict[str, Any]) -> None:
        sequences = kwargs.get("packed_seq_params")
        layer.mlp.router.token_routing = None if sequences is None else sequences.routing

    for module in list(chunk.modules()):
        if isinstance(getattr(getattr(module, "mlp", None), "router", None), Router):
            module.register_forward_pre_hook(hand_over, with_kwargs=True)


def take_sums(chunks: Sequence[torch.nn.Module], num_microbatches: int, layout: Layout, device: torch.device) -> dict[str, float]:
    """The routers' sums over all ranks since the last call; collective.

    `balance_of_layers`: the load-balancing loss, a mean over tokens, the sum of layers; `balance`: its mean over layers; `moved`,
    `compared`: choices of experts that a given one replaced, of how many.
    """
    mine = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [sum((router.sums.get(name, zero) for router in mine), zero) for name in ("balance", "moved", "compared")]
    for router in mine:
        router.sums = {}
    total = torch.stack([*sums, zero + len(mine)])
    dist.all_reduce(total)
    balance, moved, compared, num_routers = total.tolist()
    of_layers = balance / (num_microbatches * layout.data_size)
    num_layers = num_routers * layout.pipeline_size / layout.world_size
    return {"balance_of_layers": of_layers, "balance": of_layers / num_layers, "moved": moved, "compared": compared}
