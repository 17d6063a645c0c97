"""megatron-core parameters become Hugging Face tensors: a generator in layer order, one pipeline stage a rank.

Walks the units that the engine hands out (whole over data parallelism, local to a tensor-parallel rank), gathers each unit's
tensor-parallel shards with as few collectives as `gather_bytes` allows, and converts them with mbridge's pure functions.
No object collective, nothing broadcast over pipeline stages. Adapters, the parameters `lora_a` and `lora_b` beside a
`weight`, are merged on the way (merge.py). Leaves out buckets and the wire (publish.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.manifest import Manifest, TensorSpec
from bridge.merge import merge_into, squared_error

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


class _ViewTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which view a tensor without memory was copied from, for `reshape` and `contiguous`, which copy what is strided."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, torch.Tensor] = {}  # memory of a copy -> the view that was copied
        self._copies: list[torch.Tensor] = []  # kept, so that their memory is not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self._origins[result.untyped_storage()._cdata] = args[0]
            self._copies.append(result)
        return result

    def origin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view whose elements, in order, are those of `tensor`; of a part of a copy the part itself."""
        view = self._origins.get(tensor.untyped_storage()._cdata)
        return view if view is not None and tensor.is_contiguous() and tensor.numel() == view.numel() else tensor


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
        self._lasting: list[torch.Tensor] | None = None
        self._lasting_parameters: list[tuple[torch.nn.Parameter, int]] = []  # with the addresses that they had
        self._merge_sums = torch.zeros(2, dtype=torch.float64)  # lost and moved, squared: see merge.squared_error

    @property
    def is_sender(self) -> bool:
        return self.data_rank == 0 and (self.tensor_group is None or self.tensor_group.rank() == 0)

    def manifest(self) -> Manifest:
        """This stage's tensors in order. The first call walks the units once, without converting or sending anything."""
        if self._manifest is None:
            members = (member for unit in self.units() for member in members_of(unit))
            specs = [spec for member in members for spec in self._specs(member.name, member.parameter)]
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._merge_sums.zero_()
        for unit in self.units():
            self._merge_sums = self._merge_sums.to(unit[0][1].device)
            if self.data_rank != 0:
                continue
            for part in self._parts(members_of(unit)):
                for name, parameter, shards in self._gather(part):
                    if self.is_sender:
                        yield from self._convert(name, parameter, shards)

    @torch.no_grad()
    def lasting_tensors(self) -> list[torch.Tensor] | None:
        """This stage's tensors in the manifest's order as views of the parameters, which show their values at any time.

        Made once, and anew when a parameter has moved. A view may be strided and of another shape than its tensor, with the
        elements in the tensor's order. None where parameters do not stay, or where a tensor is computed from them: with
        shards to gather, adapters to merge, or conversions that do more than to take views and put them in order.
        """
        if not self._stays:
            return None
        if self._lasting is None or any(p.data_ptr() != address for p, address in self._lasting_parameters):
            members = [member for unit in self.units() for member in members_of(unit)]
            views = [self._views(member) for member in members]
            if any(view is None for view in views):
                self._stays = False
                return None
            self._lasting = [tensor for view in views if view is not None for tensor in view]
            self._lasting_parameters = [(member.parameter, member.parameter.data_ptr()) for member in members]
        return self._lasting

    def _views(self, member: Member) -> list[torch.Tensor] | None:
        """What the conversion makes of a parameter, as views of it; None where it makes something else."""
        weight = member.parameter.detach()
        if member.adapter is not None:
            return None
        shadow = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        tracer = _ViewTracer()
        with tracer:
            converted = [tensor for _, tensor in self._convert(member.name, member.parameter, [shadow])]
        origins = [tracer.origin(tensor) for tensor in converted]
        if any(o.untyped_storage()._cdata != shadow.untyped_storage()._cdata or o.dtype != shadow.dtype for o in origins):
            return None
        start = weight.storage_offset()
        return [weight.as_strided(o.shape, o.stride(), start + o.storage_offset()) for o in origins]

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
        size = self.tensor_group.size() if self.tensor_group is not None and is_sharded(parameter) else 1
        shadow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        converted = self._convert(name, parameter, [shadow] * size)
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

    def _parts(self, members: list[Member]) -> Iterator[list[Member]]:
        """The members in runs whose gathered shards stay within `gather_bytes`, or hold one parameter."""
        part: list[Member] = []
        num_bytes = 0
        size = self.tensor_group.size() if self.tensor_group is not None else 1
        for member in members:
            more = member.num_bytes * size
            if part and num_bytes + more > self.gather_bytes:
                yield part
                part, num_bytes = [], 0
            part.append(member)
            num_bytes += more
        if part:
            yield part

    def _gather(self, part: list[Member]) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
        """Each parameter with its shards in rank order; replicated ones with themselves. One collective a dtype."""
        gathered: dict[str, list[torch.Tensor]] = {}
        sharded = [m for m in part if self.tensor_group is not None and is_sharded(m.parameter)]
        for dtype in sorted({m.parameter.dtype for m in sharded}, key=str):
            members = [m for m in sharded if m.parameter.dtype == dtype]
            sizes = [m.parameter.numel() for m in members]
            flat = members[0].parameter.new_empty(sum(sizes))
            for member, piece in zip(members, torch.split(flat, sizes), strict=True):
                self._write(member, piece.view(member.parameter.shape))
            assert self.tensor_group is not None
            size = self.tensor_group.size()
            everything = flat.new_empty(size * flat.numel())
            dist.all_gather_into_tensor(everything, flat, group=self.tensor_group)
            ranks = torch.split(everything.view(size, -1), sizes, dim=1)
            for member, shards in zip(members, ranks, strict=True):
                gathered[member.name] = [shard.view(member.parameter.shape) for shard in shards]
        for member in part:
            if member.name not in gathered:
                whole = member.parameter.detach()
                gathered[member.name] = [self._write(member, torch.empty_like(whole)) if member.adapter else whole]
            yield member.name, member.parameter, gathered.pop(member.name)

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
