"""Parameters' values come together: tensor-parallel shards by collectives, adapters merged on the way, the rest as it lies.

A part is a run of parameters. What its gathering needs is worked out once (Fill) and run at every pass, in memory that all
parts share. Leaves out what the values become (export.py) and the merge itself (merge.py).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from bridge.export.merge import merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bridge.export.trace import Place

class Adapter(Protocol):
    """A low-rank update of a weight: W + scale * B @ A."""

    @property
    def a(self) -> torch.Tensor: ...
    @property
    def b(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


class WeightItem(Protocol):
    """A parameter as the engine hands it out, whole over data parallelism and local to the tensor-parallel rank.

    `shard_dim`: the dimension that tensor parallelism shards, None where it is replicated.
    """

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def shard_dim(self) -> int | None: ...
    @property
    def adapter(self) -> Adapter | None: ...


def _tensors(part: Sequence[WeightItem]) -> list[torch.Tensor]:
    adapters = ((item.adapter.a, item.adapter.b) if item.adapter else () for item in part)
    return [tensor for item, factors in zip(part, adapters, strict=True) for tensor in (item.tensor, *factors)]


class Shards(NamedTuple):
    """Where a parameter's value lies once its part is there: for each tensor-parallel rank which memory, from where on."""

    member: WeightItem
    places: list[Place]

    def tensors(self, memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's, as views."""
        size, shape = self.member.tensor.numel(), self.member.tensor.shape
        return [memory[name][start : start + size].view(shape) for name, start in self.places]


class Gatherer:
    """Makes fills, and holds what they share. `tensor_group`: None for tensor-parallel size 1."""

    def __init__(self, tensor_group: Any, gather_bytes: int) -> None:
        self.tensor_group, self.gather_bytes = tensor_group, gather_bytes
        self.merge_sums = torch.zeros(2, dtype=torch.float64)  # lost and moved, squared: see merge.squared_error
        self._slots: dict[str, torch.Tensor] = {}

    def num_shards(self, item: WeightItem) -> int:
        return self.tensor_group.size() if self.tensor_group is not None and item.shard_dim is not None else 1

    def moves(self, member: WeightItem) -> bool:
        """Whether its value has to be written somewhere, to be gathered or merged."""
        return member.adapter is not None or self.num_shards(member) > 1

    def cut(self, members: Iterable[WeightItem]) -> Iterator[list[WeightItem]]:
        """The members in runs for which `gather_bytes` of memory are enough, or which need it for one parameter."""
        part: list[WeightItem] = []
        num_bytes = 0
        for member in members:
            more = member.tensor.nbytes * self.num_shards(member) if self.moves(member) else 0
            if part and num_bytes + more > self.gather_bytes:
                yield part
                part, num_bytes = [], 0
            part.append(member)
            num_bytes += more
        if part:
            yield part

    def slot(self, name: str, size: int, like: torch.Tensor) -> torch.Tensor:
        """Memory of this name for `size` elements; made anew where what there is is too small."""
        if name not in self._slots or self._slots[name].numel() < size:
            self._slots.pop(name, None)
            self._slots[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._slots[name][:size]


class Fill:
    """How a part comes together. Good for the same parameters as long as they are where they were."""

    def __init__(self, part: list[WeightItem], gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        still = [member for member in part if not gatherer.moves(member)]
        self.memory = {member.name: member.tensor.detach().reshape(-1) for member in still}
        self._part = part
        self._views = [each.detach() for each in _tensors(part)]
        self._addresses = [view.data_ptr() for view in self._views]
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._merges: list[tuple[torch.Tensor, WeightItem]] = []
        self._gathers: list[tuple[torch.Tensor, torch.Tensor]] = []  # all ranks' values, this rank's
        places: dict[str, list[Place]] = {member.name: [(member.name, 0)] for member in still}
        moving = [member for member in part if gatherer.moves(member)]
        for dtype in sorted({member.tensor.dtype for member in moving}, key=str):
            members = [member for member in moving if member.tensor.dtype == dtype]
            starts = [0, *itertools.accumulate(member.tensor.numel() for member in members)]
            self.memory[str(dtype)] = self._prepare(members, starts)
            for member, start in zip(members, starts, strict=False):
                ranks = range(gatherer.num_shards(member))
                places[member.name] = [(str(dtype), rank * starts[-1] + start) for rank in ranks]
        self.shards = [Shards(member, places[member.name]) for member in part]

    def _prepare(self, members: list[WeightItem], starts: list[int]) -> torch.Tensor:
        """Where the values of members of one dtype will be; one alone is gathered from where it lies."""
        gatherer, first = self._gatherer, members[0]
        if len(members) == 1 and first.adapter is None:
            flat = first.tensor.detach().reshape(-1)
        else:
            flat = gatherer.slot(f"own {first.tensor.dtype}", starts[-1], first.tensor)
            for member, start, end in zip(members, starts, starts[1:], strict=False):
                out = flat[start:end].view(member.tensor.shape)
                if member.adapter is None:
                    self._copies[0].append(out)
                    self._copies[1].append(member.tensor.detach())
                else:
                    self._merges.append((out, member))
        if gatherer.tensor_group is None:
            return flat
        size = gatherer.tensor_group.size() * starts[-1]
        everything = gatherer.slot(f"gathered {first.tensor.dtype}", size, first.tensor)
        self._gathers.append((everything, flat))
        return everything

    def is_current(self, part: list[WeightItem] | None = None) -> bool:
        """Whether the parameters, which are those of `part` where it is given, are still where they were."""
        mine, theirs = _tensors(self._part), _tensors(part or self._part)
        return len(mine) == len(theirs) and all(
            one is other and one.data_ptr() == view.data_ptr() == address
            for one, other, view, address in zip(mine, theirs, self._views, self._addresses, strict=True)
        )

    def run(self) -> None:
        """Bring the values of now into `memory`. Collective over tensor-parallel ranks."""
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)
        errors = []
        for out, member in self._merges:
            assert member.adapter is not None
            weight, a, b = (tensor.detach() for tensor in (member.tensor, member.adapter.a, member.adapter.b))
            errors.append(merge(out, weight, a, b, member.adapter.scale))
        if errors:
            self._gatherer.merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
        for everything, flat in self._gathers:
            dist.all_gather_into_tensor(everything, flat, group=self._gatherer.tensor_group)
