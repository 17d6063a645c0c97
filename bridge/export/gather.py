"""Parameters' values come together: tensor-parallel shards by collectives, adapters merged on the way, the rest as it lies.

A part is a run of parameters. What its gathering needs is worked out once (Fill) and run at every pass, in memory that all
parts share. Leaves out what the values become (export.py) and the merge itself (merge.py).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from bridge.export.merge import merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bridge.export.trace import Place

Unit = list[tuple[str, torch.Tensor]]


class Member(NamedTuple):
    """A parameter of a unit, and the A and B that are to be merged into it."""

    name: str
    parameter: torch.Tensor
    adapter: tuple[torch.Tensor, torch.Tensor] | None


def members_of(unit: Unit) -> list[Member]:
    """The unit's parameters without the adapters', which go to their weights."""
    adapters = {name: parameter for name, parameter in unit if name.endswith((".lora_a", ".lora_b"))}
    members = []
    for name, parameter in unit:
        linear = name.removesuffix(".weight")
        if name not in adapters:
            is_adapted = linear != name and f"{linear}.lora_a" in adapters
            adapter = (adapters[f"{linear}.lora_a"], adapters[f"{linear}.lora_b"]) if is_adapted else None
            members.append(Member(name, parameter, adapter))
    return members


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether the tensor is a tensor-parallel shard, by megatron-core's attribute."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _tensors(part: list[Member]) -> list[torch.Tensor]:
    return [tensor for member in part for tensor in (member.parameter, *(member.adapter or ()))]


class Shards(NamedTuple):
    """Where a parameter's value lies once its part is there: for each tensor-parallel rank which memory, from where on."""

    member: Member
    places: list[Place]

    def tensors(self, memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's, as views."""
        size, shape = self.member.parameter.numel(), self.member.parameter.shape
        return [memory[name][start : start + size].view(shape) for name, start in self.places]


class Gatherer:
    """Makes fills, and holds what they share. `tensor_group`: None for tensor-parallel size 1."""

    def __init__(self, tensor_group: Any, gather_bytes: int) -> None:
        self.tensor_group, self.gather_bytes = tensor_group, gather_bytes
        self.merge_sums = torch.zeros(2, dtype=torch.float64)  # lost and moved, squared: see merge.squared_error
        self._slots: dict[str, torch.Tensor] = {}

    def num_shards(self, parameter: torch.Tensor) -> int:
        return self.tensor_group.size() if self.tensor_group is not None and is_sharded(parameter) else 1

    def moves(self, member: Member) -> bool:
        """Whether its value has to be written somewhere, to be gathered or merged."""
        return member.adapter is not None or self.num_shards(member.parameter) > 1

    def cut(self, members: Iterable[Member]) -> Iterator[list[Member]]:
        """The members in runs for which `gather_bytes` of memory are enough, or which need it for one parameter."""
        part: list[Member] = []
        num_bytes = 0
        for member in members:
            more = member.parameter.nbytes * self.num_shards(member.parameter) if self.moves(member) else 0
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

    def __init__(self, part: list[Member], gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        still = [member for member in part if not gatherer.moves(member)]
        self.memory = {member.name: member.parameter.detach().reshape(-1) for member in still}
        self._part = part
        self._views = [each.detach() for each in _tensors(part)]
        self._addresses = [view.data_ptr() for view in self._views]
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._merges: list[tuple[torch.Tensor, Member]] = []
        self._gathers: list[tuple[torch.Tensor, torch.Tensor]] = []  # all ranks' values, this rank's
        places: dict[str, list[Place]] = {member.name: [(member.name, 0)] for member in still}
        moving = [member for member in part if gatherer.moves(member)]
        for dtype in sorted({member.parameter.dtype for member in moving}, key=str):
            members = [member for member in moving if member.parameter.dtype == dtype]
            starts = [0, *itertools.accumulate(member.parameter.numel() for member in members)]
            self.memory[str(dtype)] = self._prepare(members, starts)
            for member, start in zip(members, starts, strict=False):
                ranks = range(gatherer.num_shards(member.parameter))
                places[member.name] = [(str(dtype), rank * starts[-1] + start) for rank in ranks]
        self.shards = [Shards(member, places[member.name]) for member in part]

    def _prepare(self, members: list[Member], starts: list[int]) -> torch.Tensor:
        """Where the values of members of one dtype will be; one alone is gathered from where it lies."""
        gatherer, first = self._gatherer, members[0]
        if len(members) == 1 and first.adapter is None:
            flat = first.parameter.detach().reshape(-1)
        else:
            flat = gatherer.slot(f"own {first.parameter.dtype}", starts[-1], first.parameter)
            for member, start, end in zip(members, starts, starts[1:], strict=False):
                out = flat[start:end].view(member.parameter.shape)
                if member.adapter is None:
                    self._copies[0].append(out)
                    self._copies[1].append(member.parameter.detach())
                else:
                    self._merges.append((out, member))
        if gatherer.tensor_group is None:
            return flat
        size = gatherer.tensor_group.size() * starts[-1]
        everything = gatherer.slot(f"gathered {first.parameter.dtype}", size, first.parameter)
        self._gathers.append((everything, flat))
        return everything

    def is_current(self, part: list[Member] | None = None) -> bool:
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
            weight, a, b = (tensor.detach() for tensor in (member.parameter, *member.adapter))
            scale: float = member.adapter[0].lora_scale  # type: ignore[attr-defined]
            errors.append(merge(out, weight, a, b, scale))
        if errors:
            self._gatherer.merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
        for everything, flat in self._gathers:
            dist.all_gather_into_tensor(everything, flat, group=self._gatherer.tensor_group)
