"""Engine: a wrapped model that takes optimizer steps and hands out whole parameters. SPMD: every rank calls.

Leaves out rollouts, rewards and weight sync; knows Samples only. Try it: tests/engine/test_engine.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine import alike, minibatch
from engine.objective import head, loss, metrics, logits
from engine.attention import flash, fused
from engine.runtime import device, parallel
from engine.model import exact, families, lora, stages
from engine.wrap import kernels
from engine.peft import factors
from engine.moe import router, router_bias
from engine.batch.batch import MicroBatch, SampleTable
from engine.batch.plan import needed_samples, split_members
from engine.config import AlgorithmConfig, EngineConfig, ModelConfig
from engine.objective.metrics import chosen_log_probs
from engine.objective.loss import Sums
from engine.runtime.megatron import finalize_model_grads
from engine.model.build import balance, build_mbridge, build_chunks, gpt_model, pipeline_layers
from engine.minibatch import MiniBatch
from engine.offload import HostState
from engine.wrap.optimizer import apply_gradients, build_optimizer, build_schedule, gradient_norm, loss_scale
from engine.passes import PipelineRunner
from engine.runtime.memory import after_return, return_free_memory
from engine.runtime.random_state import unchanged_random_state
from engine.sample import Sample
from engine.wrap.items import WeightItem
from engine.wrap.table import FrozenModel, WrappedModel


class HeldOut(NamedTuple):
    """Of one sample that is not trained on."""

    num_tokens: int  # sampled ones
    log_prob: float  # their sum, natural
    is_match: bool  # greedy decoding gives all of them


class Engine:
    """Model, wrap and optimizer of one rank. Process groups are built by `parallel.initialize` before."""

    def __init__(  # noqa: PLR0913 - what a run is told and what it resumes from, by keyword
        self,
        model: ModelConfig,
        engine: EngineConfig,
        algorithm: AlgorithmConfig,
        *,
        num_steps: int,
        temperature: float = 1.0,
        max_new_tokens: int = 0,
        weights_path: str | Path | None = None,
        adapter_path: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        """`temperature`: of the rollouts, which their log-probs are taken at; supervised steps take theirs at 1.

        `max_new_tokens`: most tokens of a response, which some choices of `algorithm` count with.

        For resuming: folders whose weights replace those of `model.path`, whose adapter that of `lora.adapter_path`.
        """
        self.config, self.algorithm = engine, algorithm
        self.temperature = temperature if algorithm.name == "grpo" else 1.0
        self.max_new_tokens = max_new_tokens
        if not max_new_tokens and (algorithm.loss_aggregation == "constant_length" or algorithm.truncated == "penalise"):
            raise ValueError("max_new_tokens: give the most tokens of a response, which this algorithm counts with")
        self.layout = parallel.layout()
        self.device = device.compute_device()
        if torch.are_deterministic_algorithms_enabled():
            self.config = engine = engine.model_copy(update={"kernels": "torch"})
        chosen = kernels.choose(engine, model.dtype)
        router_options = algorithm.load_balancing, algorithm.router_bias_update_rate
        self.mbridge = build_mbridge(model, engine, *router_options, adds_gradients=chosen.weight_gradients != "torch")
        alike.check_config(self.mbridge.hf_config, model.path)
        self.use_fused = fused.is_enabled(engine.fusions)
        self.kernels = kernels.describe(engine.kernels, chosen, flash.choose(engine.kernels, self.mbridge.config))
        self.stage_layers = pipeline_layers(self.mbridge, engine.parallel)
        self.balance = balance(engine, self.mbridge)
        self._describe_choices()
        chunks = with_head(self._start_chunks(weights_path or model.path), self.mbridge, engine)
        has_reference = algorithm.name == "grpo" and algorithm.kl_coefficient > 0
        if engine.lora.rank:
            lora.add_adapters(chunks, engine.lora, seed)
            self._load_adapters(chunks, Path(model.path), adapter_path, has_reference)
        alike.check_weights(chunks, weights_path or model.path, adapter_path or engine.lora.adapter_path)
        self.model_config: Any = gpt_model(chunks[0]).config
        self.wrapped = WrappedModel(engine, self.model_config, chunks)
        self.chunks = self.wrapped.modules
        self.optimizer = build_optimizer(engine.optimizer, self.chunks, self.mbridge.dtype, self.use_fused)
        self.schedule = build_schedule(engine.optimizer, self.optimizer, num_steps * algorithm.steps_per_batch)
        self.reference = self._build_reference(model.path) if has_reference else None
        self._host_state = HostState(self) if engine.optimizer.offload else None
        self._runner = PipelineRunner(self.mbridge, engine.logits_chunk_tokens, use_fused=self.use_fused)
        self._set_functions_of_the_schedule()

    def _describe_choices(self) -> None:
        """Of what was left to the engine, on rank 0."""
        told = families.describe(self.mbridge.hf_config)
        if device.has_cuda():
            told += [fused.describe(self.config.fusions), self.kernels]
        told += [stages.describe(self.stage_layers, self.layout.pipeline_size)] if self.layout.pipeline_size > 1 else []
        for line in told if self.layout.rank == 0 else ():
            print(line, file=sys.stderr, flush=True)

    def _build_reference(self, path: str) -> WrappedModel | FrozenModel:
        """The KL's: with LoRA the policy without its adapters, else the folder's weights once more."""
        if self.config.lora.rank:
            return self.wrapped
        chunks = build_chunks(self.mbridge, path)
        alike.check_weights(chunks, path)
        return FrozenModel(self.config, self.model_config, with_head(chunks, self.mbridge, self.config))

    def _set_functions_of_the_schedule(self) -> None:
        router_bias.leave_to_engine(self.model_config)
        self.model_config.finalize_model_grads_func = after_return(finalize_model_grads)
        if self.mbridge.dtype is torch.float16:
            self.model_config.grad_scale_func = self.optimizer.scale_loss
        self.model_config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        if len(self.chunks) == 1:
            self.model_config.no_sync_func = self.model_config.no_sync_func[0]

    def _start_chunks(self, path: str | Path) -> list[torch.nn.Module]:
        return build_chunks(self.mbridge, path)

    def _load_adapters(
        self, chunks: list[torch.nn.Module], model_path: Path, resumed: str | Path | None, has_reference: bool
    ) -> None:
        """Those of `lora.adapter_path`, also for the KL's reference; in the policy the ones of `resumed` replace them."""
        start = self.config.lora.adapter_path
        if start and (has_reference or not resumed):
            factors.load_adapter(chunks, Path(start), self.config.lora, self.mbridge, model_path)
            if has_reference:
                lora.keep_start(chunks)
        if resumed:
            factors.load_adapter(chunks, Path(resumed), self.config.lora, self.mbridge, model_path)

    def needed_samples(self, samples: SampleTable) -> list[list[int]]:
        """For each data-parallel rank the indices of the samples whose tokens `prepare` needs there."""
        parts = split_members(samples.members, self.algorithm.num_minibatches)
        return needed_samples(samples.lengths, parts, self.layout.data_size, self.config.tokens_per_microbatch, self.balance)

    def prepare(self, samples: Sequence[Sample] | SampleTable) -> list[MiniBatch]:
        """Cut a batch into mini-batches, pack this rank's part, and add advantages, old and reference log-probs.

        A table need hold no other tokens than those of `needed_samples`.
        """
        table = SampleTable.from_samples(samples)
        if self.algorithm.name == "grpo":
            table = minibatch.with_advantages(table, self.algorithm, self.max_new_tokens)
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
        return minibatches

    @property
    def _needs_old_log_probs(self) -> bool:
        """Whether the loss cannot take them from its own forward pass, because a step lies between or by configuration."""
        algorithm = self.algorithm
        return algorithm.name == "grpo" and (algorithm.steps_per_batch > 1 or algorithm.old_log_probs == "separate")

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
        """What an `update` took for the old log-probs of the response tokens of the `chosen` samples of its batch.

        On other ranks than 0 []. `samples`: what `prepare` was given.
        """
        packed = [(mini.first_sample, micro) for mini in minibatches for micro in mini.microbatches]
        return chosen_log_probs(packed if self._reports else [], samples, chosen, self.device)

    def held_out(self, samples: Sequence[Sample]) -> list[HeldOut]:
        """How likely the sampled tokens of each response are at temperature 1, and whether greedy decoding gives all of them.

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
        """Within the block the optimizer's state and main weights are on the device, for whoever reads or sets them."""
        return nullcontext() if self._host_state is None else self._host_state.on_device()

    def whole_parameters(self) -> Iterator[list[WeightItem]]:
        """This stage's parameters, layer by layer: see WrappedModel. Every rank must walk all of it."""
        return self.wrapped.whole_parameters()

    def adapter_tensors(self) -> Iterator[factors.PeftFactors]:
        """This stage's adapters in PEFT's names, on its sender. Every rank must walk all of it."""
        return factors.adapter_tensors(self.wrapped.whole_adapters(), self.mbridge, self.layout)

    # ------------------------------------------------------------------------------------------------ one step

    def _minibatch(self, table: SampleTable, first_sample: int = 0) -> MiniBatch:
        has_experts = bool(self.model_config.num_moe_experts)
        choices = self.config, self.algorithm, self.layout, self.balance
        return minibatch.cut(table, first_sample, *choices, has_experts=has_experts, device=self.device)

    def _step(self, mini: MiniBatch) -> dict[str, float]:
        self._zero_gradients()
        return_free_memory()
        with lora.training(self.chunks):
            reports = self._runner.run(mini.microbatches, self.chunks, self._read, partial(self._loss, mini))
        scale = loss_scale(self.optimizer)
        norm = gradient_norm(self.optimizer)
        sums = metrics.reduce(reports if self._reports else [], self.algorithm.name, self.device)
        if self.model_config.num_moe_experts:
            sums |= router.take_sums(self.chunks, len(mini.microbatches), self.layout, self.device)
        skipped = not (math.isfinite(sums["loss"]) and math.isfinite(norm))  # both are the same on every rank
        if not skipped:
            self.schedule.step(increment=1)
            with self.state_on_device():
                apply_gradients(self.optimizer, norm)
        elif self.algorithm.non_finite == "stop" and not (math.isfinite(sums["loss"]) and scale and scale > 1):
            raise metrics.non_finite_error(sums["loss"], norm, self.wrapped.gradients(), self.device)
        else:
            self._zero_gradients()
        router_bias.update(self.chunks, 0.0 if skipped else self.algorithm.router_bias_update_rate)
        rate = self.optimizer.param_groups[0]["lr"]
        return {**sums, "grad_norm": norm, "learning_rate": rate, "skipped": float(skipped), "loss_scale": scale}

    def _zero_gradients(self) -> None:
        chunk: Any
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def _read(self) -> logits.LogProbs:
        """What the loss is made of."""
        has_entropy = self.algorithm.name == "grpo" and self.algorithm.log_entropy
        return self._log_probs(self.temperature, has_entropy=has_entropy)

    def _log_probs(self, temperature: float, *, has_entropy: bool = False) -> logits.LogProbs:
        return logits.LogProbs(temperature, self.use_fused, has_entropy, is_exact=self.mbridge.is_exact)

    def _loss(self, mini: MiniBatch, micro: MicroBatch, values: head.Values) -> tuple[torch.Tensor, Sums]:
        log_probs, *entropy = values
        sizes = mini.num_tokens, mini.num_members
        weights = loss.aggregation_weights(micro, *sizes, self.algorithm.loss_aggregation, self.max_new_tokens)
        if self.algorithm.name == "grpo":
            micro.policy_log_probs = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
            value, sums = loss.grpo_loss(log_probs, micro, weights, self.algorithm)
            if entropy:
                sums["entropy"] = (entropy[0] * micro.mask).sum().double()
        else:
            value, sums = loss.sft_loss(log_probs, micro, weights)
        # the schedule divides by the number of micro-batches (schedules.py:269), the wrap by the data-parallel size
        return value * len(mini.microbatches) * self.layout.data_size, sums

    # ------------------------------------------------------------------------------------------------ evaluation

    def _set_log_probs(self, microbatches: list[MicroBatch], field: str, chunks: list[torch.nn.Module]) -> None:
        """Those of `chunks`, without gradients, into this field of each micro-batch; of the last stage alone."""
        with torch.no_grad():
            values = self._runner.run(microbatches, chunks, self._log_probs(self.temperature))
        for micro, own in zip(microbatches, values or [(None,)] * len(microbatches), strict=True):
            setattr(micro, field, own[0])

    def _response_values(
        self, samples: Sequence[Sample], read: head.LogitsFunction, num_values: int = 1
    ) -> list[tuple[torch.Tensor, ...]]:
        """The values that are read where each sample's response tokens are predicted; float32 on the CPU, on every rank."""
        table = SampleTable.from_samples(samples)
        microbatches = self._minibatch(table).microbatches
        with torch.no_grad():
            values = self._runner.run(microbatches, self.chunks, read)
        prompts, answers = table.prompt_lengths.tolist(), table.response_lengths.tolist()
        offsets = [0, *np.cumsum(answers).tolist()]
        flat = torch.zeros(num_values, offsets[-1], device=self.device)
        for micro, outputs in zip(microbatches, values, strict=True) if self._reports else []:
            for index, position in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
                prompt, answer = prompts[index], answers[index]
                for row, output in enumerate(outputs):
                    own = output[position + prompt - 1 : position + prompt + answer - 1]
                    flat[row, offsets[index] : offsets[index + 1]] = own
        dist.all_reduce(flat)
        return [tuple(part.cpu()) for part in torch.split(flat, answers, dim=1)]

    @property
    def _reports(self) -> bool:
        """One tensor- and context-parallel rank of the last pipeline stage speaks for each data-parallel rank."""
        return self.layout.is_last_stage and self.layout.tensor_rank == self.layout.context_rank == 0


def with_head(chunks: list[torch.nn.Module], mbridge: Any, config: EngineConfig) -> list[torch.nn.Module]:
    """The chunks, with the product that makes logits in the output layer."""
    if mbridge.is_exact:
        head.use_product(chunks, exact.product)
        exact.prepare_machine(chunks, mbridge.hf_config)
    elif config.head_dtype == "float32":
        head.use_product(chunks, head.in_float32)
    return chunks
