"""Driven: an Engine whose loop is the caller's: passes and optimizer steps of several adapters, in turns on one base model.

SPMD: every rank calls, with the same data. An adapter is created with a rank of its own, up to the engine's; rows above it are
zero and stay zero, since the gradient of each factor is a product with the other. Gradients add up over calls until
`optim_step`. An adapter that is not on the device lies in host memory: factors, optimizer state, gradients. Each so has the bits
that it would have alone. Leaves out losses (objective/token_losses.py), names of folders, and who asks.

    driven = Driven(engine)
    driven.create("mine", AdapterSpec(rank=8))
    driven.forward_backward("mine", data, "cross_entropy", {})
    driven.optim_step("mine", AdamParameters(learning_rate=1e-4))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine.attention import context
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import plan_microbatches
from engine.config import TARGET_OF, LoraConfig, LoraTarget
from engine.engine import Engine
from engine.model import lora
from engine.objective import logits, token_losses
from engine.passes import PipelineRunner
from engine.peft import factors
from engine.runtime.megatron import RowParallelLinear
from engine.runtime.memory import return_free_memory
from engine.runtime.tensor_file import save_tensors
from engine.sample import Sample
from engine.wrap.optimizer import apply_gradients, gradient_norm, inner_optimizers

ATTENTION, MLP = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence of N tokens, and at each position the token to predict and the loss's values."""

    tokens: npt.NDArray[np.int32]  # [N]
    targets: npt.NDArray[np.int64]  # [N]
    values: dict[str, npt.NDArray[np.float32]]  # by TokenLoss.inputs, [N]


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter. Linears that it does not train have zero factors, whose gradients are zero."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    seed: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        return (*(ATTENTION if self.train_attn else ()), *(MLP if self.train_mlp else ()))


@dataclass(frozen=True)
class AdamParameters:
    """Of one step of AdamW, whose weight decay is decoupled."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: gradients are not clipped


class Passed(NamedTuple):
    """The log-probs of each datum's targets, float32 [N], and the sum of the loss over all of them."""

    log_probs: list[npt.NDArray[np.float32]]
    loss: float


class RefusedError(ValueError):
    """What a caller asked for cannot be done; nothing has changed. The same on every rank."""


class Driven:
    """Takes over an engine with adapters, wrapped by DDP."""

    def __init__(self, engine: Engine) -> None:
        """ValueError for an engine whose state cannot be swapped."""
        _check(engine)
        self.engine, self.layout = engine, engine.layout
        self._read = logits.LogProbs(1.0, engine.use_fused, is_exact=engine.mbridge.is_exact)
        self._runner = PipelineRunner(engine.mbridge, engine.config.logits_chunk_tokens, use_fused=engine.use_fused)
        self._live = self._make_state()
        self.specs: dict[str, AdapterSpec] = {}
        self._away: dict[str, dict[str, torch.Tensor]] = {}  # host memory of the adapters that are not on the device
        self._present: str | None = None

    # ------------------------------------------------------------------------------------------------ the calls

    def create(self, name: str, spec: AdapterSpec) -> None:
        """A new adapter: A drawn by seed and linear as in lora.py, B zero.

        Raises:
            RefusedError: there is one of this name, or the rank is above the engine's.
        """
        if name in self.specs:
            raise RefusedError(f"there is an adapter {name!r} already")
        if not 0 < spec.rank <= self.engine.config.lora.rank:
            raise RefusedError(f"rank = {spec.rank}: from 1 to {self.engine.config.lora.rank}, which engine.lora.rank sets")
        if not spec.targets:
            raise RefusedError("train_attn and train_mlp are both false: there is nothing to train")
        self._leave()
        for tensor in self._live.values():
            tensor.zero_()
        self.specs[name], self._present = spec, name
        self._set_scale(spec)
        with torch.no_grad():
            for linear_name, linear in lora.adapted_linears(self.engine.chunks):
                if linear_name.rpartition(".")[2] in spec.targets:
                    linear.lora_a[: spec.rank].copy_(_initial_a(linear, linear_name, spec))
        self.engine.optimizer.reload_model_params()

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: str, options: Mapping[str, float], *, has_gradients: bool = True
    ) -> Passed:
        """Add the gradients of the loss, a sum over all positions of all data, to the adapter's.

        Raises:
            RefusedError: the loss or a gradient is not finite.
        """
        self._bring(name)
        microbatches = self._microbatches(data)
        chosen = token_losses.TOKEN_LOSSES[loss]
        of_loss = partial(self._loss, data, len(microbatches), chosen, {**chosen.options, **options})
        if has_gradients:
            self._zero_gradients()
            return_free_memory()
            reports = self._runner.run(microbatches, self.engine.chunks, self._read, of_loss)
        else:
            with torch.no_grad():
                values = self._runner.run(microbatches, self.engine.chunks, self._read)
                reports = [of_loss(micro, each)[1] for micro, each in zip(microbatches, values, strict=False)]
        passed = self._gather(microbatches, reports if self._reports else [], data)
        if not math.isfinite(passed.loss):
            raise RefusedError(f"the loss is {passed.loss}; its gradients were not added")
        if has_gradients:
            self._add_gradients()
        return passed

    def optim_step(self, name: str, parameters: AdamParameters) -> float:
        """One step of AdamW with the gradients so far, which are then zero. Returns their norm before clipping.

        Raises:
            RefusedError: the norm is not finite; the gradients are dropped.
        """
        self._bring(name)
        optimizer = self.engine.optimizer
        for gradient, added in zip(self.engine.wrapped.gradients(), self._added(), strict=True):
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
            self._zero_gradients()
            raise RefusedError(f"the norm of the gradients is {norm}; they were dropped, and the weights are as before")
        apply_gradients(optimizer, norm)
        return norm

    def forget(self, name: str) -> None:
        """Drop the adapter with all of its state."""
        del self.specs[name]
        self._away.pop(name, None)
        self._present = None if self._present == name else self._present

    # ------------------------------------------------------------------------------------------------ copies and files

    def factors(self, name: str) -> dict[str, torch.Tensor]:
        """A copy of this rank's part of the adapter, in host memory, for `show`."""
        self._bring(name)
        return {key: tensor.to("cpu", copy=True) for key, tensor in self._live.items() if key.startswith("parameter")}

    def show(self, spec: AdapterSpec | None, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the model have these factors, until the next call: for an export. None: those of no adapter, the base model."""
        self._leave()
        for key, tensor in self._live.items():
            if key.startswith("parameter"):
                tensor.zero_() if spec is None else tensor.copy_(tensors[key])
        self._set_scale(spec or AdapterSpec(self.engine.config.lora.rank))

    def save(self, name: str, folder: Path) -> None:
        """This rank's file of the whole state, in a folder that is there."""
        self._bring(name)
        save_tensors({key: tensor.cpu() for key, tensor in self._live.items()}, folder / self.file)

    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """The state that `save` wrote, by the same layout. Without the optimizer its state and the gradients are zero."""
        tensors = load_file(folder / self.file)
        self._bring(name)
        for key, tensor in self._live.items():
            if with_optimizer or key.startswith(("parameter", "main")):
                tensor.copy_(tensors[key])
            else:
                tensor.zero_()

    def save_peft(self, name: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Name and tensors of this stage's part of a PEFT folder, as factors.stage_file's."""
        self._bring(name)
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

    # ------------------------------------------------------------------------------------------------ turns

    def _make_state(self) -> dict[str, torch.Tensor]:
        """Every tensor that is an adapter's own, by name: what is swapped. The optimizer's are made before its first step."""
        engine = self.engine
        trained = [each for chunk in engine.chunks for each in chunk.parameters() if each.requires_grad]
        state = {f"parameter {number}": each.data for number, each in enumerate(trained)}
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

    def _added(self) -> list[torch.Tensor]:
        return [tensor for key, tensor in self._live.items() if key.startswith("added")]

    @property
    def file(self) -> str:
        """Name of this rank's file, in folders of one layout alone."""
        return f"rank_{self.layout.rank:05d}_of_{self.layout.world_size:05d}.safetensors"

    def _bring(self, name: str) -> None:
        if name == self._present:
            return
        if name not in self.specs:
            raise RefusedError(f"there is no adapter {name!r}")
        self._leave()
        for key, tensor in self._away.pop(name).items():
            self._live[key].copy_(tensor)
        self._present = name
        self._set_scale(self.specs[name])

    def _leave(self) -> None:
        """The adapter that is on the device goes to host memory."""
        if self._present is not None:
            self._away[self._present] = {key: tensor.to("cpu", copy=True) for key, tensor in self._live.items()}
            self._present = None

    def _set_scale(self, spec: AdapterSpec) -> None:
        for _, linear in lora.adapted_linears(self.engine.chunks):
            linear.lora_scale = self.scale(spec)

    # ------------------------------------------------------------------------------------------------ one pass

    def _microbatches(self, data: Sequence[Datum]) -> list[MicroBatch]:
        """This data-parallel rank's share, whose labels are the given targets."""
        engine, layout = self.engine, self.layout
        split = engine.config.parallel
        table = SampleTable.from_samples([Sample(each.tokens[:1], each.tokens[1:]) for each in data])
        chunks = context.num_chunks(split)
        multiple = chunks * (split.tensor if split.sequence else 1)
        bins = plan_microbatches(table.lengths, layout.data_size, engine.config.tokens_per_microbatch, engine.balance)
        microbatches = [pack(table, indices, multiple, engine.device, chunks) for indices in bins[layout.data_rank]]
        for micro in microbatches:
            for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
                micro.labels[0, start : start + len(data[index].targets)] = torch.from_numpy(data[index].targets)
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
        for index, start in zip(micro.samples, micro.starts, strict=False):
            part = slice(start, start + len(data[index].tokens))
            placed["mask"][part] = 1.0
            for name in loss.inputs:
                placed[name][part] = data[index].values[name]
        tensors = {name: torch.from_numpy(array).to(log_probs.device) for name, array in placed.items()}
        total = (loss.value(log_probs, tensors, options) * tensors["mask"]).sum()
        # the schedule divides by the number of micro-batches (schedules.py:269), the wrap by the data-parallel size
        return total * num_microbatches * self.layout.data_size, (total.detach().double(), log_probs.detach())

    def _gather(self, microbatches: list[MicroBatch], reports: Sequence[Any], data: Sequence[Datum]) -> Passed:
        """The log-probs of all data, and the loss, on every rank."""
        lengths = [len(each.tokens) for each in data]
        offsets = [0, *np.cumsum(lengths).tolist()]
        flat = torch.zeros(offsets[-1], device=self.engine.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for micro, (own_loss, log_probs) in zip(microbatches, reports, strict=bool(reports)):
            loss += own_loss
            for index, start in zip(micro.samples, micro.starts, strict=False):
                flat[offsets[index] : offsets[index + 1]] = log_probs[start : start + lengths[index]]
        dist.all_reduce(flat)
        dist.all_reduce(loss)
        return Passed([part.cpu().numpy() for part in torch.split(flat, lengths)], float(loss))

    @property
    def _reports(self) -> bool:
        """Whether this rank reports for its data-parallel rank."""
        return self.layout.is_last_stage and self.layout.tensor_rank == self.layout.context_rank == 0

    def _zero_gradients(self) -> None:
        chunk: Any
        for chunk in self.engine.chunks:
            chunk.zero_grad_buffer()
        self.engine.optimizer.zero_grad()

    def _add_gradients(self) -> None:
        """Reduced over ranks already: of a buffer's shards this rank's own counts, in this sum as in the optimizer."""
        for gradient, added in zip(self.engine.wrapped.gradients(), self._added(), strict=True):
            added += gradient


def _check(engine: Engine) -> None:
    config = engine.config
    problems = {
        "engine.lora.rank = 0: set it to the largest rank that an adapter may have": not config.lora.rank,
        f"engine.wrap = {config.wrap}: adapters take turns with engine.wrap=ddp alone": not engine.wrapped.is_in_place,
        f"engine.lora.dropout = {config.lora.dropout}: write 0": config.lora.dropout > 0,
        "engine.optimizer.offload = true: adapters that wait lie in host memory already; write false": config.optimizer.offload,
        "mixtures of experts have no adapters that take turns yet": engine.has_experts,
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
