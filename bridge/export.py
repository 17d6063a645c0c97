"""megatron-core parameters become Hugging Face tensors: a generator in layer order, one pipeline stage a rank.

Walks the units that the engine hands out (whole over data parallelism, local to a tensor-parallel rank), gathers each unit's
tensor-parallel shards with as few collectives as `gather_bytes` allows, and converts them with mbridge's pure functions.
What these do is recorded at the first pass (trace.py), so that a sync copies without calling them. No object collective,
nothing broadcast over pipeline stages. Adapters, the parameters `lora_a` and `lora_b` beside a `weight`, are merged on the
way (merge.py). Leaves out buckets and the wire (publish.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bridge.manifest import Manifest, TensorSpec
from bridge.merge import merge_into, squared_error
from bridge.plan import Copy
from bridge.sender import Part
from bridge.trace import Place, trace

Unit = list[tuple[str, torch.nn.Parameter]]


class Member(NamedTuple):
    """A parameter of a unit, and the A and B that are to be merged into it."""

    name: str
    parameter: torch.nn.Parameter
    adapter: tuple[torch.nn.Parameter, torch.nn.Parameter] | None

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


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


class Shards(NamedTuple):
    """Where a parameter's value lies once its part was gathered: for each tensor-parallel rank which memory, from where on."""

    member: Member
    places: list[Place]

    def tensors(self, memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's, as views."""
        size, shape = self.member.parameter.numel(), self.member.parameter.shape
        return [memory[name][start : start + size].view(shape) for name, start in self.places]


class Exporter:
    """The weight source of one trainer rank: `manifest()` and iteration over (Hugging Face name, tensor).

    Every rank of the stage must iterate it to the end. Only the sender gets tensors out of it; the others take part in the
    collectives. A yielded tensor is valid until the next one is asked for.
    """

    def __init__(
        self,
        units: Callable[[], Iterator[Unit]],
        hf_bridge: Any,
        *,
        tensor_group: Any = None,
        stage: int = 0,
        num_stages: int = 1,
        data_rank: int = 0,
        gather_bytes: int = 64 * 2**20,
        stays: bool = False,
    ) -> None:
        """`hf_bridge`: an mbridge Bridge; `tensor_group`: the tensor-parallel group, None for size 1.

        `stays`: whether `units` gives parameters that are whole and in their place all the time, not gathered for a while.
        """
        self.units, self.hf_bridge = units, hf_bridge
        self.tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None
        self.stage, self.num_stages = stage, num_stages
        self.data_rank, self.gather_bytes = data_rank, gather_bytes
        self._manifest: Manifest | None = None
        self._stays = stays and self.tensor_group is None
        self._only_copies = True  # whether conversions do more
        self._copies: list[list[tuple[Copy, ...]]] = []  # of each part
        self._merge_sums = torch.zeros(2, dtype=torch.float64)  # lost and moved, squared: see merge.squared_error

    @property
    def is_sender(self) -> bool:
        return self.data_rank == 0 and (self.tensor_group is None or self.tensor_group.rank() == 0)

    def manifest(self) -> Manifest:
        """This stage's tensors in order. The first call walks the units once, without converting or sending anything."""
        if self._manifest is None:
            specs = []
            for member in (member for unit in self.units() for member in members_of(unit)):
                specs += self._specs(member.name, member.parameter)
                places = [("", 0)] * self._num_shards(member.parameter)
                self._only_copies &= self._trace(member.name, member.parameter, places) is not None
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for members, memory in self._walk():
            for shards in members:
                yield from self._convert(shards.member.name, shards.member.parameter, shards.tensors(memory))

    def parts(self) -> Iterator[Part] | None:
        """The same as iterating, as memory and what is to be copied out of it. None where conversions do more than to copy.

        Every rank must iterate it to the end.
        """
        self.manifest()
        return self._parts() if self._only_copies else None

    @torch.no_grad()
    def _parts(self) -> Iterator[Part]:
        for number, (members, memory) in enumerate(self._walk()):
            if number == len(self._copies):
                traced = (self._trace(each.member.name, each.member.parameter, each.places) for each in members)
                self._copies.append([copies for each in traced for copies in each or ()])
            yield Part(self._copies[number], memory)

    def _trace(self, name: str, parameter: torch.Tensor, places: list[Place]) -> list[tuple[Copy, ...]] | None:
        def convert(shards: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor for _, tensor in self._convert(name, parameter, shards)]

        return trace(convert, parameter.shape, parameter.dtype, places)

    def merge_error(self) -> float:
        """|round(W + D) - (W + D)| / |D| over the whole model at the last pass, D the adapters' update; 0 without one.

        Near 1 the model's dtype swallows the update. Collective over all ranks.
        """
        sums = self._merge_sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        lost, moved = sums.tolist()
        return math.sqrt(lost / moved) if moved else 0.0

    def _specs(self, name: str, parameter: torch.Tensor) -> list[TensorSpec]:
        shadow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        converted = self._convert(name, parameter, [shadow] * self._num_shards(parameter))
        return [
            TensorSpec(hf_name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for hf_name, t in converted
        ]

    def _convert(
        self, name: str, parameter: torch.Tensor, shards: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format; both only cat, chunk and view
        whole = self.hf_bridge._weight_merge_across_tp(name, shards, parameter) if len(shards) > 1 else shards[0]
        names, tensors = self.hf_bridge._weight_to_hf_format(name, whole)
        return zip(names, tensors, strict=True)

    def _num_shards(self, parameter: torch.Tensor) -> int:
        return self.tensor_group.size() if self.tensor_group is not None and is_sharded(parameter) else 1

    def _walk(self) -> Iterator[tuple[list[Shards], dict[str, torch.Tensor]]]:
        """Part by part: gather, and on the sender give the part's parameters and the memory that they lie in."""
        self._merge_sums.zero_()
        slots: dict[str, torch.Tensor] = {}
        units = (members_of(unit) for unit in self.units())
        for members in [[member for unit in units for member in unit]] if self._stays else units:
            self._merge_sums = self._merge_sums.to(members[0].parameter.device)
            if self.data_rank != 0:
                continue
            for part in self._cut(members):
                filled = self._fill(part, slots)
                if self.is_sender:
                    yield filled

    def _moves(self, member: Member) -> bool:
        """Whether its value has to be written somewhere, to be gathered or merged."""
        return member.adapter is not None or self._num_shards(member.parameter) > 1

    def _cut(self, members: list[Member]) -> Iterator[list[Member]]:
        """The members in runs for which `gather_bytes` of memory are enough, or which need it for one parameter."""
        part: list[Member] = []
        num_bytes = 0
        for member in members:
            more = member.num_bytes * self._num_shards(member.parameter) if self._moves(member) else 0
            if part and num_bytes + more > self.gather_bytes:
                yield part
                part, num_bytes = [], 0
            part.append(member)
            num_bytes += more
        if part:
            yield part

    def _fill(self, part: list[Member], slots: dict[str, torch.Tensor]) -> tuple[list[Shards], dict[str, torch.Tensor]]:
        """Bring the part's values together, by one collective a dtype; `slots` is memory that is used again by the next part."""
        memory = {m.name: m.parameter.detach().reshape(-1) for m in part if not self._moves(m)}
        places: dict[str, list[Place]] = {name: [(name, 0)] for name in memory}
        moving = [member for member in part if self._moves(member)]
        for dtype in sorted({member.parameter.dtype for member in moving}, key=str):
            members = [member for member in moving if member.parameter.dtype == dtype]
            sizes = [member.parameter.numel() for member in members]
            starts = [0, *itertools.accumulate(sizes)]
            flat = self._own_values(members, starts, slots)
            if self.tensor_group is not None:
                everything = _slot(slots, f"gathered {dtype}", self.tensor_group.size() * starts[-1], flat)
                dist.all_gather_into_tensor(everything, flat, group=self.tensor_group)
                flat = everything
            memory[str(dtype)] = flat
            for member, start in zip(members, starts, strict=False):
                ranks = range(self._num_shards(member.parameter))
                places[member.name] = [(str(dtype), rank * starts[-1] + start) for rank in ranks]
        return [Shards(member, places[member.name]) for member in part], memory

    def _own_values(self, members: list[Member], starts: list[int], slots: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's values end to end, merged with their adapters; one alone from where it is."""
        first = members[0]
        if len(members) == 1 and first.adapter is None:
            return first.parameter.detach().reshape(-1)
        flat = _slot(slots, f"own {first.parameter.dtype}", starts[-1], first.parameter)
        for member, start, end in zip(members, starts, starts[1:], strict=False):
            self._write(member, flat[start:end].view(member.parameter.shape))
        return flat

    def _write(self, member: Member, out: torch.Tensor) -> torch.Tensor:
        """The parameter's value, merged with its adapter, into other memory."""
        weight = member.parameter.detach()
        if member.adapter is None:
            return out.copy_(weight)
        a, b = (factor.detach() for factor in member.adapter)
        scale: float = member.adapter[0].lora_scale  # type: ignore[attr-defined]
        merge_into(out, weight, a, b, scale)
        self._merge_sums += squared_error(out, weight, a, b, scale)
        return out


def _slot(slots: dict[str, torch.Tensor], name: str, size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of this name for `size` elements; made anew where what there is is too small."""
    if name not in slots or slots[name].numel() < size:
        slots.pop(name, None)
        slots[name] = torch.empty(size, dtype=like.dtype, device=like.device)
    return slots[name][:size]
