"""Engine: a wrapped model that takes optimizer steps and hands out whole parameters. SPMD: every rank calls.

Leaves out rollouts, rewards and weight sync; knows Samples only. Try it: tests/engine/test_engine.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine import alike, minibatch
from engine.objective import metrics, logits
from engine.attention import delta_net, flash, fused
from engine.runtime import device, parallel
from engine.model import head, lora, stages
from engine.model.families import table as families
from engine.wrap import kernels
from engine.peft import factors
from engine.moe import router, router_bias
from engine.batch.batch import MicroBatch, SampleTable
from engine.batch.plan import needed_samples, split_members
from engine.config import EngineConfig, ModelConfig
from engine.algorithm import AlgorithmConfig
from engine.objective.metrics import chosen_log_probs
from engine.objective.loss import Sums
from engine.objective.own import OwnFunctions
from engine.runtime.megatron import finalize_model_grads
from engine.model.build import balance, build_mbridge, gpt_model, pipeline_layers
from engine.minibatch import MiniBatch
from engine.models import FrozenModels, adapter_loader, add_adapters, build_model
from engine.criterion import Criterion
from engine.offload import HostState
from engine.wrap.optimizer import apply_gradients, build_optimizer, build_schedule, gradient_norm, loss_scale
from engine.passes import PipelineRunner
from engine.runtime.memory import after_return, return_free_memory
from engine.runtime.random_state import unchanged_random_state
from engine.teacher import TeacherChoice
from engine.sample import AS_THE_MODEL, RolloutSampling, Sample
from engine.wrap.items import WeightItem
from engine.wrap.table import FrozenModel, WrappedModel


WARM_TOKENS = 64  # of a sequence of `warm_up`
NAMED_ALONE = OwnFunctions()  # no function of the user's own


class HeldOut(NamedTuple):
    """Scores of one sample that is not trained on."""

    num_tokens: int  # sampled ones
    log_prob: float  # their sum, natural
    is_match: bool  # greedy decoding gives all of them


class Engine:
    """Model, wrap and optimizer of one rank. Process groups are built by `parallel.initialize` before."""

    def __init__(  # noqa: PLR0913 # what a run gives, by name
        self,
        model: ModelConfig,
        engine: EngineConfig,
        algorithm: AlgorithmConfig,
        *,
        num_steps: int,
        sampling: RolloutSampling = AS_THE_MODEL,
        weights_path: str | Path | None = None,
        adapter_path: str | Path | None = None,
        seed: int = 0,
        own: OwnFunctions = NAMED_ALONE,
        teacher: TeacherChoice | None = None,
    ) -> None:
        """
        Args:
            model: of the folder to train, like `engine` and `algorithm` a part of the configuration.
            num_steps: of the whole run, for the learning-rate schedule.
            sampling: GRPO computes log-probs at its temperature; `max_new_tokens` is needed by constant_length and penalise.
            weights_path: a folder with the weights to resume from, in place of `model.path`.
            adapter_path: a folder with the adapter to resume from, in place of `lora.adapter_path`.
            seed: of new adapters.
            own: functions that replace those named by `algorithm`.
            teacher: the model that the policy is distilled from.
        """
        self.model, self.config, self.algorithm, self.own, self.num_steps = model, engine, algorithm, own, num_steps
        self.temperature = sampling.temperature if algorithm.name == "grpo" else 1.0
        self.max_new_tokens = sampling.max_new_tokens
        check_limit(algorithm, sampling)
        self.layout, self.device = parallel.layout(), device.compute_device()
        self._kernels = kernels.choose(engine, model.dtype)
        self.mbridge = build_mbridge(model, engine, algorithm, adds_gradients=self._kernels.weight_gradients != "torch")
        alike.check_config(self.mbridge.hf_config, model.path)
        self.use_fused = fused.is_enabled(engine.fusions)
        self.stage_layers = pipeline_layers(self.mbridge, engine.parallel)
        self.balance = balance(engine, self.mbridge)
        setting, config = self._kernels.setting, self.mbridge.config
        self.kernels = self._kernels.describe(flash.choose(setting, config), delta_net.choose_kernels(setting, config))
        self._describe_choices()
        chunks = build_model(self.mbridge, engine, weights_path or model.path)
        has_reference = algorithm.name == "grpo" and algorithm.kl_coefficient > 0
        load = adapter_loader(chunks, engine, self.mbridge, Path(model.path))
        add_adapters(chunks, engine, load, seed=seed, resumed=adapter_path, has_reference=has_reference, teacher=teacher)
        alike.check_weights(chunks, weights_path or model.path, adapter_path or engine.lora.adapter_path)
        self.model_config: Any = gpt_model(chunks[0]).config
        self.wrapped = WrappedModel(engine, self.model_config, chunks)
        self.chunks = self.wrapped.modules
        self.optimizer = build_optimizer(engine.optimizer, self.chunks, self.mbridge.dtype, self.use_fused)
        self.plan_steps(0, 0)
        frozen = FrozenModels(self.wrapped, engine, self.model_config, self.mbridge, model.path)
        self.reference = frozen.reference() if has_reference else None
        self.teacher = frozen.teacher(teacher, self.reference) if teacher else None
        read = self._log_probs(self.temperature)
        self._criterion = Criterion(algorithm, own, read, self.max_new_tokens, self.teacher)
        self._host_state = HostState(self) if engine.optimizer.offload else None
        in_layer = self._criterion.read.divergence is not None
        self._runner = PipelineRunner(
            self.mbridge, engine.logits_chunk_tokens, use_fused=self.use_fused, reads_in_layer=in_layer
        )
        self._cutter = minibatch.Cutter(engine, algorithm, self.layout, self.balance, self.has_experts, self.device)
        self._set_functions_of_the_schedule()

    @property
    def has_experts(self) -> bool:
        return bool(self.model_config.num_moe_experts)

    def _describe_choices(self) -> None:
        """Print the choices that the engine has made itself, on rank 0."""
        lines = families.describe(self.mbridge.hf_config)
        if device.has_cuda():
            lines += [fused.describe(self.config.fusions), self.kernels]
        lines += [stages.describe(self.stage_layers, self.layout.pipeline_size)] if self.layout.pipeline_size > 1 else []
        for line in lines if self.layout.rank == 0 else ():
            print(line, file=sys.stderr, flush=True)

    def _set_functions_of_the_schedule(self) -> None:
        router_bias.leave_to_engine(self.model_config)
        self.model_config.finalize_model_grads_func = after_return(finalize_model_grads)
        if self.mbridge.dtype is torch.float16:
            self.model_config.grad_scale_func = self.optimizer.scale_loss
        self.model_config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        if len(self.chunks) == 1:
            self.model_config.no_sync_func = self.model_config.no_sync_func[0]

    def plan_steps(self, batches: int, optimizer_steps: int) -> None:
        """Build the learning-rate schedule: the first `batches` take `optimizer_steps` in total, each later one as configured."""
        self.num_optimizer_steps = optimizer_steps + (self.num_steps - batches) * self.algorithm.steps_per_batch
        self.schedule = build_schedule(self.config.optimizer, self.optimizer, self.num_optimizer_steps)

    def needed_samples(self, samples: SampleTable) -> list[list[int]]:
        """For each data-parallel rank the indices of the samples whose tokens `prepare` needs on it."""
        parts = split_members(samples.members, self.algorithm.num_minibatches)
        return needed_samples(samples.lengths, parts, self.layout.data_size, self.config.tokens_per_microbatch, self.balance)

    def prepare(self, samples: Sequence[Sample] | SampleTable) -> list[MiniBatch]:
        """Cut a batch into mini-batches, pack this rank's part, and add advantages, old and reference log-probs.

        A table needs to hold only the tokens of `needed_samples`.
        """
        table = SampleTable.from_samples(samples)
        if self.algorithm.name == "grpo":
            table = minibatch.with_advantages(table, self.algorithm, self.max_new_tokens, self.own)
        parts = split_members(table.members, self.algorithm.num_minibatches)
        minibatches = [self._minibatch(table.part(part), part.start) for part in parts if len(part)]
        microbatches = [micro for mini in minibatches for micro in mini.microbatches]
        if self._needs_old_log_probs:
            with lora.training(self.chunks), unchanged_random_state():  # the training pass draws the same dropout masks
                self._set_log_probs(microbatches, "old_log_probs", self.chunks)
        if self.algorithm.log_router_gap:
            with router.own_choice(microbatches):
                self._set_log_probs(microbatches, "own_choice_log_probs", self.chunks)
        if self.reference is not None:
            with lora.reference(self.reference.modules), router.own_choice(microbatches):
                self._set_log_probs(microbatches, "reference_log_probs", self.reference.modules)
            if isinstance(self.reference, FrozenModel):
                self.reference.release()
        if self.teacher is not None:
            self.teacher.fill(microbatches, self._runner, self._log_probs(self.temperature))
        if self.algorithm.name == "grpo" and self.algorithm.penalises_kl:
            reporting = minibatches if self.layout.reports else []
            penalties = minibatch.kl_penalties(reporting, len(table), self.algorithm, self.device)
            table = minibatch.with_advantages(table, self.algorithm, self.max_new_tokens, self.own, penalties)
            minibatch.set_advantages(minibatches, table)
        return minibatches

    @property
    def _needs_old_log_probs(self) -> bool:
        """Whether a separate forward pass is needed: several optimizer steps per batch, a KL in the reward, or configured."""
        algorithm = self.algorithm
        is_separate = algorithm.old_log_probs == "separate" or algorithm.steps_per_batch > 1
        return algorithm.name == "grpo" and (is_separate or algorithm.penalises_kl)

    def update(self, minibatches: Sequence[MiniBatch]) -> dict[str, float]:
        """One optimizer step a mini-batch and pass. Returns metrics, the same on every rank.

        Raises:
            metrics.NonFiniteError: a loss or a gradient norm is not finite and `algorithm.non_finite` is `stop`; the weights are
                those before the step.
        """
        padding = sum(mini.padding for mini in minibatches) / len(minibatches)
        found = metrics.step_metrics(
            [self._step(mini) for _ in range(self.algorithm.num_passes) for mini in minibatches], self.algorithm
        )
        return {**found, "train/padding_fraction": padding}

    def old_log_probs(
        self, minibatches: Sequence[MiniBatch], samples: SampleTable, chosen: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """The old log-probs that an `update` has used, at the response tokens of the `chosen` samples of its batch.

        [] on all ranks but 0. `samples`: those given to `prepare`.
        """
        packed = [(mini.first_sample, micro) for mini in minibatches for micro in mini.microbatches]
        return chosen_log_probs(packed if self.layout.reports else [], samples, chosen, self.device)

    def held_out(self, samples: Sequence[Sample]) -> list[HeldOut]:
        """The log-prob of each response's sampled tokens at temperature 1, and whether greedy decoding gives all of them.

        One forward pass: as long as every token so far was the arg-max, the prefix is that of greedy decoding.
        """
        found = self._response_values(samples, logits.ScoresAndMatches(self._log_probs(1.0)), num_values=2)
        masks = [torch.from_numpy(each.is_sampled) if len(each.is_sampled) else slice(None) for each in samples]
        own = [(log_probs[mask], matches[mask]) for (log_probs, matches), mask in zip(found, masks, strict=True)]
        return [HeldOut(len(each), float(each.double().sum()), bool(matches.all())) for each, matches in own]

    def score(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Natural log-probs of each sample's response tokens at temperature 1, float32 on the CPU, on every rank."""
        return [values for (values,) in self._response_values(samples, self._log_probs(1.0))]

    def state_on_device(self) -> AbstractContextManager[None]:
        """Within the block the optimizer's state and main weights are on the device, to be read or set."""
        return nullcontext() if self._host_state is None else self._host_state.on_device()

    def whole_parameters(self) -> Iterator[list[WeightItem]]:
        """This stage's parameters, layer by layer: see WrappedModel. Collective: every rank iterates to the end."""
        return self.wrapped.whole_parameters()

    def adapter_tensors(self) -> Iterator[factors.PeftFactors]:
        """This stage's adapters in PEFT's names, on its sender. Collective: every rank iterates to the end."""
        return factors.adapter_tensors(self.wrapped.whole_adapters(), self.mbridge, self.layout)

    def warm_up(self) -> None:
        """Compile kernels, load libraries and connect process groups, which the first step would do. Collective.

        A forward and a backward pass over a micro-batch of made-up tokens, with a loss of 0. Nothing else is changed.
        """
        sequence = Sample(np.zeros(2, np.int32), np.zeros(WARM_TOKENS - 2, np.int32), np.zeros(WARM_TOKENS - 2, np.float32))
        num_tokens = min(self.config.tokens_per_microbatch, self.config.logits_chunk_tokens + WARM_TOKENS)
        number = self.layout.data_size * max(1, num_tokens // WARM_TOKENS)
        microbatches = self._minibatch(SampleTable.from_samples([sequence] * number)).microbatches
        with unchanged_random_state(), lora.training(self.chunks):
            read = replace(self._criterion.read, divergence=None)  # no teacher has seen these tokens
            self._runner.run(microbatches, self.chunks, read, lambda _, values: (0.0 * values[0].sum(), None))
        if self.has_experts:
            router.take_sums(self.chunks, len(microbatches), self.layout, self.device)
        router_bias.update(self.chunks, 0.0)
        self.zero_gradients()
        return_free_memory()

    # ------------------------------------------------------------------------------------------------ one step

    def _minibatch(self, table: SampleTable, first_sample: int = 0) -> MiniBatch:
        mini = self._cutter.cut(table, first_sample)
        self._runner.set_rotary(mini.microbatches, self.chunks[0])
        return mini

    def _step(self, mini: MiniBatch) -> dict[str, float]:
        self.zero_gradients()
        return_free_memory()
        with lora.training(self.chunks):
            reports = self._runner.run(mini.microbatches, self.chunks, self._criterion.read, partial(self._loss, mini))
        scale = loss_scale(self.optimizer)
        norm = gradient_norm(self.optimizer)
        sums = metrics.reduce(reports if self.layout.reports else [], self._criterion.sum_names, self.device)
        if self.has_experts:
            sums |= router.take_sums(self.chunks, len(mini.microbatches), self.layout, self.device)
        skipped = not (math.isfinite(sums["loss"]) and math.isfinite(norm))  # both are the same on every rank
        if not skipped:
            self.schedule.step(increment=1)
            with self.state_on_device():
                apply_gradients(self.optimizer, norm)
        elif self.algorithm.non_finite == "stop" and not (math.isfinite(sums["loss"]) and scale and scale > 1):
            raise metrics.non_finite_error(sums["loss"], norm, self.wrapped.gradients(), self.device)
        else:
            self.zero_gradients()
        router_bias.update(self.chunks, 0.0 if skipped else self.algorithm.router_bias_update_rate)
        rate = self.optimizer.param_groups[0]["lr"]
        return {**sums, "grad_norm": norm, "learning_rate": rate, "skipped": float(skipped), "loss_scale": scale}

    def zero_gradients(self) -> None:
        """Zero the gradients of the wrap and of the optimizer."""
        chunk: Any
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _log_probs(self, temperature: float) -> logits.LogProbs:
        return logits.LogProbs(temperature, self.use_fused, is_exact=self.mbridge.is_exact)

    def _loss(self, mini: MiniBatch, micro: MicroBatch, values: head.Values) -> tuple[torch.Tensor, Sums]:
        value, sums = self._criterion.loss(mini, micro, values)
        # the schedule divides by the number of micro-batches (schedules.py:269), the wrap by the data-parallel size
        return value * len(mini.microbatches) * self.layout.data_size, sums

    # ------------------------------------------------------------------------------------------------ evaluation

    def _set_log_probs(self, microbatches: list[MicroBatch], field: str, chunks: list[torch.nn.Module]) -> None:
        """Log-probs by `chunks`, without gradients, into this field of each micro-batch, on the last stage only."""
        with torch.no_grad():
            values = self._runner.run(microbatches, chunks, self._log_probs(self.temperature))
        for micro, own in zip(microbatches, values or [(None,)] * len(microbatches), strict=True):
            setattr(micro, field, own[0])

    def _response_values(
        self, samples: Sequence[Sample], read: head.LogitsFunction, num_values: int = 1
    ) -> list[tuple[torch.Tensor, ...]]:
        """The values read at the positions that predict each sample's response tokens; float32 on the CPU, on every rank."""
        table = SampleTable.from_samples(samples)
        microbatches = self._minibatch(table).microbatches
        for micro in microbatches:
            micro.support = None
        with torch.no_grad():
            values = self._runner.run(microbatches, self.chunks, read)
        prompts, answers = table.prompt_lengths.tolist(), table.response_lengths.tolist()
        offsets = [0, *np.cumsum(answers).tolist()]
        flat = torch.zeros(num_values, offsets[-1], device=self.device)
        for micro, outputs in zip(microbatches, values, strict=True) if self.layout.reports else []:
            for index, position in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
                prompt, answer = prompts[index], answers[index]
                for row, output in enumerate(outputs):
                    own = output[position + prompt - 1 : position + prompt + answer - 1]
                    flat[row, offsets[index] : offsets[index + 1]] = own
        dist.all_reduce(flat)
        return [tuple(part.cpu()) for part in torch.split(flat, answers, dim=1)]


def check_limit(algorithm: AlgorithmConfig, sampling: RolloutSampling) -> None:
    """ValueError where `algorithm` needs the limit of a response and there is none."""
    if not sampling.max_new_tokens and (algorithm.loss_aggregation == "constant_length" or algorithm.truncated == "penalise"):
        raise ValueError("sampling.max_new_tokens = 0: this algorithm needs the limit of a response, in tokens")
