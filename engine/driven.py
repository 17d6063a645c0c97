"""Driven: an Engine whose loop is the caller's: passes and optimizer steps of adapters that take turns (adapters.py).

SPMD: every rank calls, with the same data. Gradients add up over calls until `optim_step`. Leaves out losses
(objective/token_losses.py), names of folders, and the callers.

    driven = Driven(engine)
    driven.adapters.create("mine", AdapterSpec(rank=8))
    driven.forward_backward("mine", data, "cross_entropy", {})
    driven.optim_step("mine", AdamParameters(learning_rate=1e-4))
    driven.share([PassRequest("mine", data, "cross_entropy"), PassRequest("other", data, "ppo")])     # one pass of both
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine import shared
from engine.adapters import Adapters, RefusedError
from engine.attention import context
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import plan_microbatches
from engine.engine import Engine
from engine.model.lora_linears import split_by_adapter
from engine.objective import logits, token_losses
from engine.passes import PipelineRunner
from engine.runtime.memory import return_free_memory
from engine.sample import Sample
from engine.wrap.optimizer import apply_gradients, gradient_norm, inner_optimizers


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence of N tokens, and at each position the token to predict and the loss's values."""

    tokens: npt.NDArray[np.int32]  # [N]
    targets: npt.NDArray[np.int64]  # [N]
    values: dict[str, npt.NDArray[np.float32]]  # by TokenLoss.inputs, [N]


def response_datum(
    prompt: Sequence[int] | npt.NDArray[np.int32],
    response: npt.NDArray[np.int32],
    log_probs: npt.NDArray[np.float32],
    advantage: float,
) -> Datum:
    """For the off-policy losses: a response with its log-probs when sampled, float32 [response tokens], and one advantage."""
    tokens = np.concatenate([np.asarray(prompt, np.int32), response])
    values = {name: np.zeros(len(tokens) - 1, np.float32) for name in ("logprobs", "advantages")}
    values["logprobs"][len(prompt) - 1 :] = log_probs
    values["advantages"][len(prompt) - 1 :] = advantage
    return Datum(tokens[:-1], tokens[1:].astype(np.int64), values)


@dataclass(frozen=True)
class AdamParameters:
    """Settings of one step of AdamW, whose weight decay is decoupled."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: gradients are not clipped


@dataclass(frozen=True, eq=False)
class PassRequest:
    """The arguments of a `forward_backward`."""

    name: str
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float] = field(default_factory=dict)


class Passed(NamedTuple):
    """The log-probs of each datum's targets, float32 [N], and the sum of the loss over all of them."""

    log_probs: list[npt.NDArray[np.float32]]
    loss: float


class Driven:
    """Takes over an engine."""

    def __init__(self, engine: Engine, num_resident: int = 1) -> None:
        """The arguments of Adapters."""
        self.adapters = Adapters(engine, num_resident)
        self.engine, self.layout = engine, engine.layout
        self._read = logits.LogProbs(1.0, engine.use_fused, is_exact=engine.mbridge.is_exact)
        self._can_share = shared.can_share(engine)
        self.shares = self._can_share and shared.rows_are_stable(engine)
        self._runner = PipelineRunner(engine.mbridge, engine.config.logits_chunk_tokens, use_fused=engine.use_fused)

    # ------------------------------------------------------------------------------------------------ the calls

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: str, options: Mapping[str, float], *, has_gradients: bool = True
    ) -> Passed:
        """Add the gradients of the loss, a sum over all positions of all data, to the adapter's.

        Raises:
            RefusedError: the loss is not finite.
        """
        self.adapters.activate(name)
        microbatches = self._microbatches(data)
        chosen = token_losses.TOKEN_LOSSES[loss]
        of_loss = partial(self._loss, data, len(microbatches), chosen, {**chosen.options, **options})
        if has_gradients:
            self.engine.zero_gradients()
            return_free_memory()
            reports = self._runner.run(microbatches, self.engine.chunks, self._read, of_loss)
        else:
            with torch.no_grad():
                values = self._runner.run(microbatches, self.engine.chunks, self._read)
                reports = [of_loss(micro, each)[1] for micro, each in zip(microbatches, values, strict=False)]
        passed = self._gather(microbatches, reports if self.layout.reports else [], data)
        if not math.isfinite(passed.loss):
            raise _not_finite(passed)
        if has_gradients:
            self._add_gradients()
        return passed

    def optim_step(self, name: str, parameters: AdamParameters) -> float:
        """One step of AdamW with the gradients so far, which are then zero. Returns their norm before clipping.

        Raises:
            RefusedError: the norm is not finite; the gradients are dropped.
        """
        self.adapters.activate(name)
        optimizer = self.engine.optimizer
        for gradient, added in zip(self.engine.wrapped.step_gradients(), self.adapters.added(), strict=True):
            gradient.copy_(added)
            added.zero_()
        for group in (group for inner in inner_optimizers(optimizer) for group in inner.param_groups):
            group["lr"], group["eps"] = parameters.learning_rate, parameters.eps
            group["betas"] = (parameters.beta1, parameters.beta2)
            group["weight_decay"] = parameters.weight_decay * group.get("wd_mult", 1.0)
        for member in getattr(optimizer, "chained_optimizers", [optimizer]):
            member.config.clip_grad = parameters.grad_clip_norm
        norm = gradient_norm(optimizer)
        if not math.isfinite(norm):
            self.engine.zero_gradients()
            raise RefusedError(f"the norm of the gradients is {norm}; they were dropped, and the weights are as before")
        apply_gradients(optimizer, norm)
        return norm

    def share(self, requests: Sequence[PassRequest]) -> list[Passed | RefusedError]:
        """`forward_backward` of adapters that all differ, each with the result and gradients that it has alone, on GPUs up to
        rounding.

        Their tokens go through the base model together (shared.py), or in turns where that would change bits.
        """
        if not self.shares or len(requests) == 1 or any(each.name not in self.adapters.specs for each in requests):
            return [self._alone(each) for each in requests]
        return_free_memory()
        own = [self._microbatches(each.data) for each in requests]
        leaves = [self.adapters.leaves(each.name) for each in requests]
        sums, reports = [shared.gradient_sums(each) for each in leaves], [list[Any]() for _ in requests]
        scales = [self.adapters.scale(self.adapters.specs[each.name]) for each in requests]
        most = min(self.engine.config.tokens_per_microbatch, self.engine.config.logits_chunk_tokens)
        shards = shared.num_shards(self.engine.config.parallel)
        for group in shared.groups([[micro.num_tokens for micro in each] for each in own], most):
            members = [(number, own[number][index]) for number, index in group]
            rows = [(micro.tokens.shape[1] // shards, leaves[number], scales[number]) for number, micro in members]
            joined = [shared.join([micro for _, micro in members], shards)]
            self._runner.set_rotary(joined, self.engine.chunks[0])
            of_loss = partial(self._shared_loss, requests, [len(each) for each in own], members)
            with shared.sharing(self.engine.chunks, rows), shared.unreduced(self.engine):
                found = self._runner.run(joined, self.engine.chunks, self._read, of_loss)
            for (number, _), report in zip(members, *found, strict=True) if self.layout.reports else ():
                reports[number].append(report)
            for number, _ in members:
                shared.move_gradients(leaves[number], sums[number])
        passed = [self._gather(*each) for each in zip(own, reports, (request.data for request in requests), strict=True)]
        return [self._keep(*each) for each in zip(requests, passed, sums, strict=True)]

    # ------------------------------------------------------------------------------------------------ one pass

    def _microbatches(self, data: Sequence[Datum]) -> list[MicroBatch]:
        """This data-parallel rank's share, whose labels are the given targets."""
        engine, layout = self.engine, self.layout
        split = engine.config.parallel
        table = SampleTable.from_samples([Sample(each.tokens[:1], each.tokens[1:]) for each in data])
        chunks = context.num_chunks(split)
        multiple = shared.num_shards(split) * (shared.ROWS * split.context if self._can_share else chunks)
        bins = plan_microbatches(table.lengths, layout.data_size, engine.config.tokens_per_microbatch, engine.balance)
        microbatches = [pack(table, indices, multiple, engine.device, chunks) for indices in bins[layout.data_rank]]
        for micro in microbatches:
            labels = micro.labels.to("cpu", copy=True)
            for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
                labels[0, start : start + len(data[index].targets)] = torch.from_numpy(data[index].targets)
            micro.labels.copy_(labels)
        microbatches = context.shard_microbatches(microbatches, split)
        self._runner.set_rotary(microbatches, engine.chunks[0])
        return microbatches

    def _loss(
        self,
        data: Sequence[Datum],
        num_microbatches: int,
        loss: token_losses.TokenLoss,
        options: dict[str, float],
        micro: MicroBatch,
        values: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        (log_probs,) = values
        placed = {name: np.zeros(micro.num_tokens, np.float32) for name in ("mask", *loss.inputs)}
        placed["sequence"] = np.full(micro.num_tokens, len(micro.samples))  # padding: one of its own
        for number, (index, start) in enumerate(zip(micro.samples, micro.starts, strict=False)):
            part = slice(start, start + len(data[index].tokens))
            placed["mask"][part], placed["sequence"][part] = 1.0, number
            for name in loss.inputs:
                placed[name][part] = data[index].values[name]
        tensors = {name: torch.from_numpy(array).to(log_probs.device) for name, array in placed.items()}
        total = (loss.value(log_probs, tensors, options) * tensors["mask"]).sum()
        # the schedule divides by the number of micro-batches (schedules.py:269), the wrap by the data-parallel size
        return total * num_microbatches * self.layout.data_size, (total.detach().double(), log_probs.detach())

    def _shared_loss(
        self,
        requests: Sequence[PassRequest],
        counts: Sequence[int],
        members: Sequence[tuple[int, MicroBatch]],
        _joined: MicroBatch,
        values: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, list[Any]]:
        """The sum over the members' losses. Each is multiplied and divided by its number of micro-batches, as alone."""
        shards = shared.num_shards(self.engine.config.parallel)
        parts = split_by_adapter(values[0], [micro.num_tokens // shards for _, micro in members])
        total, reports = values[0].new_zeros(()), []
        for (number, micro), part in zip(members, parts, strict=True):
            request, count = requests[number], counts[number]
            loss = token_losses.TOKEN_LOSSES[request.loss]
            own, report = self._loss(request.data, count, loss, {**loss.options, **request.options}, micro, (part,))
            total = total + own / count
            reports.append(report)
        return total, reports

    def _keep(self, request: PassRequest, passed: Passed, sums: Mapping[Any, torch.Tensor]) -> Passed | RefusedError:
        if not math.isfinite(passed.loss):
            return _not_finite(passed)
        self.adapters.add(request.name, sums)
        return passed

    def _alone(self, request: PassRequest) -> Passed | RefusedError:
        try:
            return self.forward_backward(request.name, request.data, request.loss, request.options)
        except RefusedError as error:
            return error

    def _gather(self, microbatches: list[MicroBatch], reports: Sequence[Any], data: Sequence[Datum]) -> Passed:
        """The log-probs of all data, and the loss, on every rank."""
        lengths = [len(each.tokens) for each in data]
        offsets = [0, *np.cumsum(lengths).tolist()]
        flat = torch.zeros(offsets[-1])
        loss = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for micro, (own_loss, log_probs) in zip(microbatches, reports, strict=bool(reports)):
            loss += own_loss
            on_host = log_probs.cpu()
            for index, start in zip(micro.samples, micro.starts, strict=False):
                flat[offsets[index] : offsets[index + 1]] = on_host[start : start + lengths[index]]
        flat = flat.to(self.engine.device)
        dist.all_reduce(flat)
        dist.all_reduce(loss)
        return Passed([part.numpy() for part in torch.split(flat.cpu(), lengths)], float(loss))

    def _add_gradients(self) -> None:
        """Reduced over ranks already: of a buffer's shards this rank's own counts, in this sum as in the optimizer."""
        for gradient, added in zip(self.engine.wrapped.step_gradients(), self.adapters.added(), strict=True):
            added += gradient


def _not_finite(passed: Passed) -> RefusedError:
    return RefusedError(f"the loss is {passed.loss}; its gradients were not added")
