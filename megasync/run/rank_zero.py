"""Work of rank 0 for all ranks, whose result or failure reaches every rank; and the scatter of a batch's tokens.

Tokens go to the ranks that train on them as flat buffers, without pickle. Sizes and rewards of all samples are on every
rank already (SampleTable), so that both sides know what a buffer holds. Rank 0 sends each data-parallel rank's share to the first
of its tensor- and pipeline-parallel peers, which passes it on to the others. Leaves out who needs which sample
(engine.batch.plan.needed_samples).

    number = on_rank_zero(lambda: ask_ray())                  # collective
    pool = RankZero(start_replicas)                       # collective
    hosts = pool.call(lambda pool: pool.reader_hosts())       # collective
    scatter = TokenScatter.from_layout(engine.layout)
    table = scatter(table, engine.needed_samples(table))      # collective
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine.batch.batch import SampleTable
from engine.sample import TEACHER_ARRAYS, TOKEN_ARRAYS, Sample

if TYPE_CHECKING:
    from engine.runtime.parallel import Layout

NO_LIMIT = timedelta(days=365)
Part = TypeVar("Part")
Result = TypeVar("Result")
EXPECTED = (RuntimeError, ValueError, OSError)  # their text says enough; anything else keeps its traceback
MESSAGE_ELEMENTS = 2**28  # of 4 bytes


class RankZeroError(RuntimeError):
    """Rank 0 failed in work that it does for all ranks; raised on every rank with its message."""


def on_rank_zero(work: Callable[[], Any], for_others: Callable[[Any], Any] = lambda result: result) -> Any:
    """Do `work` on rank 0 alone. Every rank returns its result, or raises its error, so that none waits. Collective.

    `for_others`: makes the other ranks' result, where they do not need all of it.

    Raises:
        RankZeroError: on every rank, with the text of what `work` raised.
    """
    box: list[Any] = [None, None]
    result: Any = None
    failure: BaseException | None = None
    group = control_group()
    if dist.get_rank() == 0:
        try:
            result = work()
            box[0] = for_others(result)
        except Exception as error:  # noqa: BLE001 # handed on to every rank below
            failure = error
            box[1] = str(error) if isinstance(error, EXPECTED) else traceback.format_exc()
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise RankZeroError(box[1]) from failure
    return result if dist.get_rank() == 0 else box[0]


def of_rank_zero(part: Part | None) -> Part:
    """The part, in code that only rank 0 runs."""
    assert part is not None
    return part


class RankZero(Generic[Part]):
    """A part of a run that rank 0 alone has, such as its replicas. Methods are collective."""

    def __init__(self, make: Callable[[], Part]) -> None:
        """`make` is called on rank 0. RankZeroError on every rank where it raises."""
        self.here: Part | None = on_rank_zero(make, lambda _: None)  # rank 0's

    def call(self, work: Callable[[Part], Result], for_others: Callable[[Result], Result] = lambda result: result) -> Result:
        """Like on_rank_zero; `work` gets the part."""
        found: Result = on_rank_zero(lambda: work(of_rank_zero(self.here)), for_others)
        return found


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for objects and for whoever waits on rank 0. The first call is collective.

    A rank that waits here occupies no GPU, unlike in NCCL, whose kernel spins beside the replicas that generate. There is no
    time limit, since a rollout takes as long as it takes; the wait ends with an error when rank 0 does.
    """
    return _control_group(dist.group.WORLD)


@lru_cache(maxsize=1)
def _control_group(world: dist.ProcessGroup) -> dist.ProcessGroup:  # noqa: ARG001 # the key of the cache
    """Made once for each `world`."""
    group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def flatten(table: SampleTable, indices: Sequence[int]) -> torch.Tensor:
    """The arrays of these samples in one int32 buffer, sample after sample; log-probs reinterpreted as int32."""
    samples = [table.samples[index] for index in indices]
    arrays = [array for sample in samples if sample is not None for array in _arrays(sample, table)]
    sizes = chain.from_iterable(array_sizes(table, indices))
    assert [len(array) for array in arrays] == list(sizes), "each token has a log-prob, a version, and a teacher's if any has"
    return torch.from_numpy(np.concatenate(arrays))


def with_tokens(table: SampleTable, indices: Sequence[int], buffer: torch.Tensor) -> SampleTable:
    """The table with exactly these samples; their arrays are views of what `flatten` made of them."""
    sizes = array_sizes(table, indices)
    pieces = iter(np.split(buffer.numpy(), np.cumsum(list(chain.from_iterable(sizes)))[:-1]))
    samples: list[Sample | None] = [None] * len(table)
    for index in indices:
        fields: dict[str, Any] = {name: next(pieces).view(dtype) for name, dtype in TOKEN_ARRAYS.items()}
        for name in teacher_arrays(table):
            values = next(pieces).view(TEACHER_ARRAYS[name])
            fields[name] = values if name == "teacher_log_probs" else values.reshape(-1, table.teacher_top_k or 0)
        if table.routed is not None:
            num_rows, (*shape, dtype) = int(table.lengths[index]) - 1, table.routed
            values = next(pieces).view(dtype)
            fields["routed_experts"] = values[: num_rows * shape[0] * shape[1]].reshape(num_rows, *shape)
        if table.support_lengths[index]:
            fields["support"] = next(pieces)
        if table.has_mask[index]:
            fields["is_sampled"] = next(pieces).view(np.bool_)[: int(table.response_lengths[index])]
        samples[index] = Sample(**fields, **{name: column[index].tolist() for name, column in table.columns.items()})
    return dataclasses.replace(table, samples=samples)


def teacher_arrays(table: SampleTable) -> list[str]:
    """The names in TEACHER_ARRAYS that the table's samples have."""
    return list(TEACHER_ARRAYS)[: 0 if table.teacher_top_k is None else 3 if table.teacher_top_k else 1]


def array_sizes(table: SampleTable, indices: Sequence[int]) -> list[tuple[int, ...]]:
    """How many elements of 4 bytes each sample has of each of TOKEN_ARRAYS and, where there are any, of a teacher's arrays, of
    routed experts, of its support and of the mask of sampled tokens.
    """
    lengths = zip(table.prompt_lengths[indices].tolist(), table.response_lengths[indices].tolist(), strict=True)
    of_response = [1, 1, 1, *(1 if name == "teacher_log_probs" else table.teacher_top_k or 0 for name in teacher_arrays(table))]
    sizes: list[tuple[int, ...]] = [(prompt, *(response * each for each in of_response)) for prompt, response in lengths]
    if table.routed is not None:
        num_layers, num_chosen, dtype = table.routed
        row_bytes = num_layers * num_chosen * np.dtype(dtype).itemsize
        sizes = [(*size, -(-(size[0] + size[1] - 1) * row_bytes // 4)) for size in sizes]
    kept = table.support_lengths[indices].tolist()
    sizes = [(*size, number) if number else size for size, number in zip(sizes, kept, strict=True)]
    masked = table.has_mask[indices].tolist()
    return [(*size, -(-size[1] // 4)) if is_masked else size for size, is_masked in zip(sizes, masked, strict=True)]


def _arrays(sample: Sample, table: SampleTable) -> Iterator[npt.NDArray[np.int32]]:
    """A sample's arrays, as in `array_sizes`. Unknown routed experts are 0, one expert for all, which no router chooses."""
    for name in TOKEN_ARRAYS:
        yield getattr(sample, name).view(np.int32)
    for name in teacher_arrays(table):
        yield np.ascontiguousarray(getattr(sample, name)).reshape(-1).view(np.int32)
    if table.routed is not None:
        num_layers, num_chosen, dtype = table.routed
        num_bytes = (sample.num_tokens - 1) * num_layers * num_chosen * np.dtype(dtype).itemsize
        padded = np.zeros(-(-num_bytes // 4) * 4, np.uint8)
        if len(sample.routed_experts):
            padded[:num_bytes] = np.ascontiguousarray(sample.routed_experts).reshape(-1).view(np.uint8)
        yield padded.view(np.int32)
    if len(sample.support):
        yield sample.support
    if len(sample.is_sampled):
        padded = np.zeros(-(-len(sample.is_sampled) // 4) * 4, np.uint8)
        padded[: len(sample.is_sampled)] = sample.is_sampled
        yield padded.view(np.int32)


class TokenScatter:
    """Sends over the control group. `peers`: for each data-parallel rank the ranks that are its parts, in order."""

    def __init__(self, layout: Layout, peers: list[list[int]]) -> None:
        self.layout, self.peers, self.group = layout, peers, control_group()

    @staticmethod
    def from_layout(layout: Layout) -> TokenScatter:
        """Among all ranks of the world, which tell each other where they stand. Collective."""
        data_ranks = [torch.zeros((), dtype=torch.int64) for _ in range(layout.world_size)]
        dist.all_gather(data_ranks, torch.tensor(layout.data_rank), group=control_group())
        peers: list[list[int]] = [[] for _ in range(layout.data_size)]
        for rank, data_rank in enumerate(data_ranks):
            peers[int(data_rank)].append(rank)
        return TokenScatter(layout, peers)

    def __call__(self, table: SampleTable, needed: Sequence[Sequence[int]]) -> SampleTable:
        """`table` with the tokens of `needed[data rank]` alone. Rank 0 has those of all samples, the others none. Collective."""
        own, rank = needed[self.layout.data_rank], self.layout.rank
        if rank == 0:
            for indices, (first, *others) in zip(needed, self.peers, strict=True):
                if receivers := others if first == 0 else [first]:
                    self._send(flatten(table, indices), receivers)
            return table.only(own)
        first, *others = self.peers[self.layout.data_rank]
        buffer = torch.empty(sum(chain.from_iterable(array_sizes(table, own))), dtype=torch.int32)
        for piece in torch.split(buffer, MESSAGE_ELEMENTS):
            dist.recv(piece, 0 if rank == first else first, group=self.group)
        if rank == first:
            self._send(buffer, others)
        return with_tokens(table, own, buffer)

    def _send(self, buffer: torch.Tensor, receivers: Sequence[int]) -> None:
        for receiver in receivers:
            for piece in torch.split(buffer, MESSAGE_ELEMENTS):
                dist.send(piece, receiver, group=self.group)
