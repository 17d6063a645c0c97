"""Adapters that take turns on one base model. While they wait, the last used ones lie on the device, the others in host memory.

SPMD: every rank calls. An adapter is created with a rank of its own, up to the engine's; rows above it are zero and stay zero,
since the gradient of each factor is a product with the other. The state of an adapter on this rank, or its shards, is copied in
and out: factors, optimizer state, gradients that were added up. Each so has the bits that it would have alone. In an engine
without lora an "adapter" is a copy of the whole model, which is trained in all parameters. Leaves out passes and steps
(driven.py).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.config import DELTA_NET_TARGETS, LATENT_TARGETS, LoraConfig, LoraTarget
from engine.engine import Engine
from engine.model import lora
from engine.peft import factors
from engine.peft.folder import fingerprint
from engine.runtime.tensor_file import save_tensors
from engine.wrap.items import Adapter, AdapterItem
from engine.wrap.optimizer import inner_optimizers, local

RESIDENT_SHARE = 0.1  # of a GPU's memory
ATTENTION, MLP = ("linear_qkv", *LATENT_TARGETS, *DELTA_NET_TARGETS), ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter. Linears that it does not train have zero factors, whose gradients are zero. `rank` 0: all parameters."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    seed: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(ATTENTION if self.train_attn else ()), *(MLP if self.train_mlp else ()))


class RefusedError(ValueError):
    """A request cannot be fulfilled; nothing has changed. Raised on every rank alike."""


class _SwappedOut:
    """The tensors of an adapter that another one has replaced: parts of a buffer for each dtype."""

    def __init__(self, live: Mapping[str, torch.Tensor], *, in_host_memory: bool) -> None:
        self._live, self.in_host_memory = live, in_host_memory
        sizes = Counter[tuple[torch.device, torch.dtype]]()
        for tensor in live.values():
            sizes[tensor.device, tensor.dtype] += _aligned(tensor.numel())
        self._buffers = {
            (device, dtype): torch.empty(size, dtype=dtype, device="cpu" if in_host_memory else device)
            for (device, dtype), size in sizes.items()
        }
        self._cut()

    def move(self, *, to_host: bool) -> None:
        if to_host is not self.in_host_memory:
            self.in_host_memory = to_host
            self._buffers = {place: buffer.to("cpu" if to_host else place[0]) for place, buffer in self._buffers.items()}
            self._cut()

    def _cut(self) -> None:
        ends = Counter[tuple[torch.device, torch.dtype]]()
        self.tensors = dict[str, torch.Tensor]()
        for key, tensor in self._live.items():
            place, size = (tensor.device, tensor.dtype), tensor.numel()
            self.tensors[key] = self._buffers[place][ends[place] : ends[place] + size].view(tensor.shape)
            ends[place] += _aligned(size)


def _aligned(size: int) -> int:
    """Elements up to the next part, so that kernels may read 16 bytes at a time."""
    return -(-size // 16) * 16


def _copy(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """By a kernel for each dtype, where both lie on one device."""
    pairs: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for key, tensor in source.items():
        pairs.setdefault((tensor.device, tensor.dtype), []).append((target[key], tensor))
    for alike in pairs.values():
        torch._foreach_copy_([own for own, _ in alike], [given for _, given in alike])


class Adapters:
    """Takes over an engine."""

    def __init__(self, engine: Engine, num_resident: int = 1) -> None:
        """`num_resident`: how many adapters may wait on the device, in at most a tenth of a GPU's memory; none where each is a
        copy of the whole model.

        Raises:
            ValueError: the engine's state cannot be swapped.
        """
        _check(engine)
        self.engine, self.layout = engine, engine.layout
        engine.wrapped.sync_parameters()
        self.trained: list[Any] = [each for chunk in engine.chunks for each in chunk.parameters() if each.requires_grad]
        self._live = self._make_state()
        self.is_full = not engine.config.lora.rank
        whole = self.parameters(self._live) if self.is_full else {}
        self._settings = _settings(engine)
        self._base = {key: tensor.to("cpu", copy=True) for key, tensor in whole.items()}  # of the base model
        self.specs: dict[str, AdapterSpec] = {}
        self._num_resident = 0 if self.is_full else min(num_resident, self._room())
        self._swapped_out: dict[str, _SwappedOut] = {}  # the one that was used last is the last one
        self._spare: _SwappedOut | None = None  # on the device
        self._active: str | None = None

    def create(self, name: str, spec: AdapterSpec) -> None:
        """A new adapter: A drawn by seed and linear as in lora.py, B zero. Of all parameters: those of the base model.

        Raises:
            RefusedError: there is one of this name, or the rank is above the engine's.
        """
        if name in self.specs:
            raise RefusedError(f"there is an adapter {name!r} already")
        least, most = (0 if self.is_full else 1), self.engine.config.lora.rank
        if not least <= spec.rank <= most:
            raise RefusedError(f"rank = {spec.rank}: from {least} to {most}, which engine.lora.rank sets")
        if not (self.is_full or set(spec.targets) & set(self.engine.config.lora.targets)):
            raise RefusedError("train_attn and train_mlp leave out all of engine.lora.targets: there is nothing to train")
        self._reset()
        self.specs[name], self._active = spec, name
        self._set_scale(spec)
        wrapped = self.engine.wrapped
        for number, chunk in enumerate(self.engine.chunks):
            for linear_name, linear in lora.adapted_linears([chunk]):
                if linear_name.rpartition(".")[2] in spec.targets:
                    first = lora.first_a(linear, linear_name, spec.seed, spec.rank, self.engine.config.lora.rank)
                    wrapped.set_trained(number, linear.lora_a, first)
        wrapped.set_main_weights()
        self.engine.optimizer.reload_model_params()

    def forget(self, name: str) -> None:
        """Drop the adapter with all of its state."""
        del self.specs[name]
        self._swapped_out.pop(name, None)
        self._active = None if self._active == name else self._active

    # ------------------------------------------------------------------------------------------------ copies and files

    def factors(self, name: str) -> dict[str, torch.Tensor]:
        """A copy of this rank's part of the adapter, in host memory, for `show`."""
        self.activate(name)
        return {key: tensor.to("cpu", copy=True) for key, tensor in self.parameters(self._live).items()}

    def show(self, spec: AdapterSpec | None, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the model have these factors, until the next call: for an export. None: those of no adapter, the base model."""
        self._reset()
        _copy(self._live, tensors)
        self._set_scale(spec or AdapterSpec(self.engine.config.lora.rank))

    def save(self, name: str, folder: Path) -> None:
        """This rank's file of the whole state, in a folder that is there."""
        self.activate(name)
        self.write(self._live, folder)

    def load(self, name: str, tensors: Mapping[str, torch.Tensor], *, with_optimizer: bool) -> None:
        """The state that `save` wrote, as `read`. Without the optimizer its state and the gradients are zero."""
        self.activate(name)
        for key, tensor in self._live.items():
            if with_optimizer or key.startswith(("parameter", "main")):
                tensor.copy_(tensors[key])
            else:
                tensor.zero_()

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """This rank's file of tensors of an adapter."""
        metadata = {"settings": json.dumps(self._settings)}
        save_tensors({key: tensor.cpu() for key, tensor in tensors.items()}, folder / self.file, metadata)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors that `write` wrote. RefusedError if the settings then differed in what they mean."""
        where = f"{folder.parent.name}/{folder.name}"
        if not (folder / self.file).exists():
            raise RefusedError(f"{where}: it was saved by another number of ranks than {self.layout.world_size}")
        with safe_open(folder / self.file, framework="pt") as file:
            saved = json.loads((file.metadata() or {}).get("settings", "null"))  # absent in older files
            for key, now in self._settings.items() if saved else ():
                if saved.get(key) != now:
                    problem = f"it was saved with {key} = {saved.get(key)}, which is {now} now"
                    raise RefusedError(f"{where}: {problem}; start the service as it was then, or with another run.name")
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is no dict
        if _shapes(found) not in (_shapes(self._live), _shapes(self.parameters(self._live))):
            problem = "it was saved with another model.path, model.dtype, engine.wrap or engine.lora"
            raise RefusedError(f"{where}: {problem}; start the service as it was then, or with another run.name")
        return found

    def save_peft(self, name: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Name and tensors of this stage's part of a PEFT folder, as factors.stage_file's."""
        self.activate(name)
        spec = self.specs[name]
        units = self.engine.wrapped.whole_adapters()
        own = ([_cut(each, spec.rank) for each in unit if each.linear.rpartition(".")[2] in spec.targets] for unit in units)
        return factors.stage_file(self.layout.pipeline_rank, factors.adapter_tensors(own, self.engine.mbridge, self.layout))

    def lora_config(self, spec: AdapterSpec) -> LoraConfig:
        """The adapter's own, for a PEFT folder."""
        targets: list[LoraTarget] = [target for target in self.engine.config.lora.targets if target in spec.targets]
        return self.engine.config.lora.model_copy(update={"rank": spec.rank, "targets": tuple(targets)})

    def scale(self, spec: AdapterSpec) -> float:
        """The factor of B A."""
        return self.engine.config.lora.model_copy(update={"rank": spec.rank}).scale

    # ------------------------------------------------------------------------------------------------ shared passes

    def leaves(self, name: str) -> dict[Any, torch.Tensor]:
        """The adapter's factors as leaves of a graph, by the model's parameters that hold the active one's."""
        if name != self._active:
            self._swapped_out[name] = self._swapped_out.pop(name)  # the last that was used
        state = self._state(name)
        owned = ((parameter, state[f"parameter {number}"]) for number, parameter in enumerate(self.trained))
        return {parameter: tensor.detach().to(parameter.device).requires_grad_() for parameter, tensor in owned}

    def add(self, name: str, gradients: Mapping[Any, torch.Tensor]) -> None:
        """Add this rank's gradients, by the model's parameters, to the adapter's, reduced over ranks by the wrap."""
        torch._foreach_copy_([parameter.main_grad for parameter in gradients], list(gradients.values()))
        self.engine.model_config.finalize_model_grads_func(self.engine.chunks)
        state = self._state(name)
        for number, gradient in enumerate(self.engine.wrapped.step_gradients()):
            state[f"added {number}"] += gradient.to(state[f"added {number}"].device)

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        return self._live if name == self._active else self._swapped_out[name].tensors

    # ------------------------------------------------------------------------------------------------ turns

    def _make_state(self) -> dict[str, torch.Tensor]:
        """Every tensor of one adapter, by name; a swap exchanges these. The optimizer's are made before its first step."""
        engine = self.engine
        state = {f"parameter {number}": each for number, each in enumerate(engine.wrapped.trained())}
        for place, inner in enumerate(inner_optimizers(engine.optimizer)):
            owned = [(group, parameter) for group in inner.param_groups for parameter in group["params"]]
            for number, (group, parameter) in enumerate(owned):
                device = parameter.device if group.get("fused") else "cpu"  # torch/optim/adam.py:163
                own = inner.state[parameter] = {
                    "step": torch.zeros((), device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
                state |= {f"{kind} {place} {number}": local(tensor) for kind, tensor in own.items()}
                if engine.mbridge.dtype is not torch.float32:  # else it is a view of the model's
                    state[f"main {place} {number}"] = local(parameter.data)
        added = {f"added {number}": torch.zeros_like(each) for number, each in enumerate(engine.wrapped.step_gradients())}
        return {**state, **added}

    @staticmethod
    def parameters(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's, without what the optimizer has."""
        return {key: tensor for key, tensor in state.items() if key.startswith("parameter")}

    @property
    def file(self) -> str:
        """Name of this rank's file, in folders of one layout alone."""
        return f"rank_{self.layout.rank:05d}_of_{self.layout.world_size:05d}.safetensors"

    def added(self) -> list[torch.Tensor]:
        """The sums of the gradients of the adapter on the device, in the order of WrappedModel.step_gradients."""
        return [tensor for key, tensor in self._live.items() if key.startswith("added")]

    def activate(self, name: str) -> None:
        """Swap the adapter into the model. RefusedError where there is none of this name."""
        self.engine.wrapped.sync_parameters()
        if name == self._active:
            return
        if name not in self.specs:
            raise RefusedError(f"there is no adapter {name!r}")
        brought = self._swapped_out.pop(name)
        self._swap_out()
        if self._num_resident:
            brought.move(to_host=False)
            self._spare = brought
        _copy(self._live, brought.tensors)
        self._active = name
        self._set_scale(self.specs[name])

    def _reset(self) -> None:
        """Leave the base model, without an active adapter."""
        self._swap_out()
        for key, tensor in self._live.items():
            tensor.copy_(self._base[key]) if key in self._base else tensor.zero_()

    def _swap_out(self) -> None:
        """Copy the active adapter's state out of the model."""
        self.engine.wrapped.sync_parameters()
        if self._active is None:
            return
        stored, self._spare = self._spare or _SwappedOut(self._live, in_host_memory=not self._num_resident), None
        _copy(stored.tensors, self._live)
        self._swapped_out[self._active], self._active = stored, None
        self._make_room()

    def _room(self) -> int:
        """How many adapters may wait on the device."""
        if self.engine.device.type == "cpu":
            return sys.maxsize
        num_bytes = sum(tensor.nbytes for tensor in self._live.values())
        return int(RESIDENT_SHARE * torch.cuda.get_device_properties(self.engine.device).total_memory / num_bytes)

    def _make_room(self) -> None:
        """Move all swapped-out adapters but the `num_resident` last used ones to host memory."""
        for stored in list(self._swapped_out.values())[: -self._num_resident or None]:
            stored.move(to_host=True)

    def _set_scale(self, spec: AdapterSpec) -> None:
        for _, linear in lora.adapted_linears(self.engine.chunks):
            linear.lora_scale = self.scale(spec)


def _check(engine: Engine) -> None:
    config = engine.config
    problems = {
        f"engine.lora.dropout = {config.lora.dropout}: write 0": config.lora.dropout > 0,
        "engine.optimizer.offload = true: adapters are moved to host memory in any case; write false": config.optimizer.offload,
        "model.dtype = float16: write bfloat16 or float32": engine.mbridge.dtype is torch.float16,
        "engine.lora.adapter_path: each adapter has a start of its own; leave it out": bool(config.lora.adapter_path),
    }
    foreign = [type(each).__name__ for each in inner_optimizers(engine.optimizer) if not isinstance(each, torch.optim.Adam)]
    if foreign:
        problems[f"the optimizer is {foreign[0]}; write engine.kernels=torch"] = True
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)


def _settings(engine: Engine) -> dict[str, Any]:
    """Settings, by key, that have to be equal where an adapter is read; without lora it is a whole model and needs no base."""
    config, own = engine.config, engine.config.lora
    found: dict[str, Any] = {"model.dtype": engine.model.dtype, "engine.wrap": config.wrap, "engine.lora.rank": own.rank}
    found |= {f"engine.parallel.{name}": getattr(config.parallel, name) for name in ("tensor", "pipeline", "expert")}
    found["engine.parallel.pipeline_layers"] = list(engine.stage_layers)
    if own.rank:
        found |= {"engine.lora.alpha": own.alpha, "engine.lora.rslora": own.rslora, "engine.lora.targets": sorted(own.targets)}
        found["model.path"] = f"a model of the fingerprint {fingerprint(Path(engine.model.path))[:16]}"
    return found


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in tensors.items()}


def _cut(item: AdapterItem, rank: int) -> AdapterItem:
    """The first `rank` rows of A, of each expert, and columns of B: those above are zero."""
    a, b, scale = item.adapter
    rows = a.view(item.num_experts or 1, -1, a.shape[1])[:, :rank]
    return item._replace(adapter=Adapter(rows.flatten(0, 1), b[:, :rank], scale))
