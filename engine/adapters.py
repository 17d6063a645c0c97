"""Adapters that take turns on one base model: the one that works is on the device, the others lie in host memory.

SPMD: every rank calls. An adapter is created with a rank of its own, up to the engine's; rows above it are zero and stay zero,
since the gradient of each factor is a product with the other. All that is an adapter's own is swapped: factors, optimizer state,
gradients that were added up. Each so has the bits that it would have alone. In an engine without lora an "adapter" is a copy of
the whole model, which is trained in all parameters. Leaves out passes and steps (driven.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine import rules
from engine.config import DELTA_TARGETS, LATENT_TARGETS, TARGET_OF, LoraConfig, LoraTarget
from engine.engine import Engine
from engine.model import lora
from engine.peft import factors
from engine.runtime.megatron import RowParallelLinear
from engine.runtime.tensor_file import save_tensors
from engine.wrap.optimizer import inner_optimizers

ATTENTION, MLP = ("linear_qkv", *LATENT_TARGETS, *DELTA_TARGETS), ("linear_fc1", "linear_fc2")


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
    """What a caller asked for cannot be done; nothing has changed. The same on every rank."""


class Adapters:
    """Takes over an engine wrapped by DDP."""

    def __init__(self, engine: Engine) -> None:
        """ValueError for an engine whose state cannot be swapped."""
        _check(engine)
        self.engine, self.layout = engine, engine.layout
        self.trained: list[Any] = [each for chunk in engine.chunks for each in chunk.parameters() if each.requires_grad]
        self._live = self._make_state()
        self.is_full = not engine.config.lora.rank
        whole = self.parameters(self._live) if self.is_full else {}
        self._base = {key: tensor.to("cpu", copy=True) for key, tensor in whole.items()}  # of the base model
        self.specs: dict[str, AdapterSpec] = {}
        self._away: dict[str, dict[str, torch.Tensor]] = {}  # host memory of the adapters that are not on the device
        self._present: str | None = None

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
        self.specs[name], self._present = spec, name
        self._set_scale(spec)
        with torch.no_grad():
            for linear_name, linear in lora.adapted_linears(self.engine.chunks):
                if linear_name.rpartition(".")[2] in spec.targets:
                    linear.lora_a[: spec.rank].copy_(_initial_a(linear, linear_name, spec))
        self.engine.optimizer.reload_model_params()

    def forget(self, name: str) -> None:
        """Drop the adapter with all of its state."""
        del self.specs[name]
        self._away.pop(name, None)
        self._present = None if self._present == name else self._present

    # ------------------------------------------------------------------------------------------------ copies and files

    def factors(self, name: str) -> dict[str, torch.Tensor]:
        """A copy of this rank's part of the adapter, in host memory, for `show`."""
        self.bring(name)
        return {key: tensor.to("cpu", copy=True) for key, tensor in self.parameters(self._live).items()}

    def show(self, spec: AdapterSpec | None, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the model have these factors, until the next call: for an export. None: those of no adapter, the base model."""
        self._reset()
        for key, tensor in tensors.items():
            self._live[key].copy_(tensor)
        self._set_scale(spec or AdapterSpec(self.engine.config.lora.rank))

    def save(self, name: str, folder: Path) -> None:
        """This rank's file of the whole state, in a folder that is there."""
        self.bring(name)
        save_tensors({key: tensor.cpu() for key, tensor in self._live.items()}, folder / self.file)

    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """The state that `save` wrote, by the same layout. Without the optimizer its state and the gradients are zero."""
        tensors = load_file(folder / self.file)
        self.bring(name)
        for key, tensor in self._live.items():
            if with_optimizer or key.startswith(("parameter", "main")):
                tensor.copy_(tensors[key])
            else:
                tensor.zero_()

    def save_peft(self, name: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Name and tensors of this stage's part of a PEFT folder, as factors.stage_file's."""
        self.bring(name)
        spec = self.specs[name]
        trained = self.lora_config(spec).targets
        kept = {hf for hf, target in TARGET_OF.items() if target in trained}
        adapters = (each for each in self.engine.adapter_tensors() if each.name.rpartition(".")[2] in kept)
        cut = (each._replace(a=each.a[: spec.rank], b=each.b[..., : spec.rank]) for each in adapters)
        return factors.stage_file(self.layout.pipeline_rank, cut)

    def lora_config(self, spec: AdapterSpec) -> LoraConfig:
        """The adapter's own, for a PEFT folder."""
        targets: list[LoraTarget] = [target for target in self.engine.config.lora.targets if target in spec.targets]
        return self.engine.config.lora.model_copy(update={"rank": spec.rank, "targets": tuple(targets)})

    def scale(self, spec: AdapterSpec) -> float:
        """The factor of B A."""
        return self.engine.config.lora.model_copy(update={"rank": spec.rank}).scale

    # ------------------------------------------------------------------------------------------------ shared passes

    def leaves(self, name: str) -> dict[Any, torch.Tensor]:
        """The adapter's factors as leaves of a graph, by the model's parameters that hold those of the one on the device."""
        state = self._state(name)
        owned = ((parameter, state[f"parameter {number}"]) for number, parameter in enumerate(self.trained))
        return {parameter: tensor.detach().to(parameter.device).requires_grad_() for parameter, tensor in owned}

    def add(self, name: str, gradients: Mapping[Any, torch.Tensor]) -> None:
        """Add this rank's gradients, by the model's parameters, to the adapter's, reduced over ranks by the wrap."""
        for parameter, gradient in gradients.items():
            parameter.main_grad.copy_(gradient)
        self.engine.model_config.finalize_model_grads_func(self.engine.chunks)
        state = self._state(name)
        for number, gradient in enumerate(self.engine.wrapped.gradients()):
            state[f"added {number}"] += gradient.to(state[f"added {number}"].device)

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        return self._live if name == self._present else self._away[name]

    # ------------------------------------------------------------------------------------------------ turns

    def _make_state(self) -> dict[str, torch.Tensor]:
        """Every tensor of one adapter, by name; a swap exchanges these. The optimizer's are made before its first step."""
        engine = self.engine
        state = {f"parameter {number}": each.data for number, each in enumerate(self.trained)}
        for place, inner in enumerate(inner_optimizers(engine.optimizer)):
            owned = [(group, parameter) for group in inner.param_groups for parameter in group["params"]]
            for number, (group, parameter) in enumerate(owned):
                device = parameter.device if group.get("fused") else "cpu"  # torch/optim/adam.py:163
                own = inner.state[parameter] = {
                    "step": torch.zeros((), device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
                state |= {f"{kind} {place} {number}": tensor for kind, tensor in own.items()}
                if engine.mbridge.dtype is not torch.float32:  # else it is a view of the model's
                    state[f"main {place} {number}"] = parameter.data
        added = {f"added {number}": torch.zeros_like(each) for number, each in enumerate(engine.wrapped.gradients())}
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
        """The sums of the gradients of the adapter on the device, in the order of Wrapped.gradients."""
        return [tensor for key, tensor in self._live.items() if key.startswith("added")]

    def bring(self, name: str) -> None:
        """Onto the device. RefusedError where there is no such adapter."""
        if name == self._present:
            return
        if name not in self.specs:
            raise RefusedError(f"there is no adapter {name!r}")
        self._leave()
        for key, tensor in self._away.pop(name).items():
            self._live[key].copy_(tensor)
        self._present = name
        self._set_scale(self.specs[name])

    def _reset(self) -> None:
        """The model is the base model, and no adapter is on the device."""
        self._leave()
        for key, tensor in self._live.items():
            tensor.copy_(self._base[key]) if key in self._base else tensor.zero_()

    def _leave(self) -> None:
        """The adapter that is on the device goes to host memory."""
        if self._present is not None:
            self._away[self._present] = {key: tensor.to("cpu", copy=True) for key, tensor in self._live.items()}
            self._present = None

    def _set_scale(self, spec: AdapterSpec) -> None:
        for _, linear in lora.adapted_linears(self.engine.chunks):
            linear.lora_scale = self.scale(spec)


def _check(engine: Engine) -> None:
    config = engine.config
    problems = {
        f"engine.wrap = {config.wrap}: adapters take turns with engine.wrap=ddp alone": not engine.wrapped.is_in_place,
        f"engine.lora.dropout = {config.lora.dropout}: write 0": config.lora.dropout > 0,
        "engine.optimizer.offload = true: adapters that wait lie in host memory already; write false": config.optimizer.offload,
        f"engine.lora.targets = {', '.join(config.lora.targets)}: {rules.EXPERTS_IN_TURNS}": engine.has_experts
        and not rules.leaves_experts(config.lora),
        "model.dtype = float16: write bfloat16 or float32": engine.mbridge.dtype is torch.float16,
        "engine.lora.adapter_path: each adapter has a start of its own; leave it out": bool(config.lora.adapter_path),
    }
    foreign = [type(each).__name__ for each in inner_optimizers(engine.optimizer) if not isinstance(each, torch.optim.Adam)]
    if foreign:
        problems[f"the optimizer is {foreign[0]}; write engine.kernels=torch"] = True
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)


def _initial_a(linear: Any, name: str, spec: AdapterSpec) -> torch.Tensor:
    """This tensor-parallel rank's part of the A that every layout draws, [rank, in]."""
    first = lora.initial_a(spec.rank, linear.input_size, name, spec.seed)
    if isinstance(linear, RowParallelLinear):
        first = first.chunk(linear.tp_group.size(), dim=1)[linear.tp_group.rank()]
    return first
