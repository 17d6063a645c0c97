"""What the engine's tests run on their ranks (see ranks.py). Each case builds its own groups and leaves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bridge.export.exporter import Exporter, Position
from bridge.export.source import whole_tensors
from engine.runtime import parallel
from engine.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.algorithm import AlgorithmConfig
from engine.engine import Engine
from engine.runtime.megatron import parallel_state as mpu
from engine.sample import RolloutSampling, Sample
from bench.equivalence.measure import forget_wrappers, leave_groups

GATHER_BYTES = 100_000  # several gathers a unit


def random_samples(count: int, seed: int, longest: int = 20) -> list[Sample]:
    """Prompts and responses of mixed lengths, in groups of four."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(at_least: int) -> tuple[int, ...]:
        length = int(torch.randint(at_least, longest, (1,), generator=generator))
        return tuple(torch.randint(3, 120, (length,), generator=generator).tolist())

    samples = []
    for index in range(count):
        prompt, response = tokens(2), tokens(1)
        reward = float(torch.rand(1, generator=generator))
        samples.append(Sample(prompt, response, tuple([-4.8] * len(response)), reward=reward, group=index // 4))
    return samples


@contextmanager
def engine(
    path: str,
    wrap: str = "ddp",
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    context: int = 1,
    sequence: bool = False,
    **options: Any,
) -> Iterator[Engine]:
    """An engine on this rank, its groups torn down afterwards. `options`: AlgorithmConfig fields, `lora`'s, or as read here."""
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.01, "warmup_steps": 2, **options.pop("optimizer", {})}
    config = EngineConfig(
        wrap=wrap,
        parallel=ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            context=context,
            context_attention=options.pop("context_attention", "allgather"),
            sequence=sequence,
            **options.pop("stages", {}),
        ),
        tokens_per_microbatch=options.pop("tokens", 120),
        recompute=options.pop("recompute", "none"),
        **{name: options.pop(name) for name in ("recompute_modules", "recompute_inputs") if name in options},
        logits_chunk_tokens=options.pop("logits_chunk_tokens", 8192),
        head_dtype=options.pop("head_dtype", "model"),
        fusions=options.pop("fusions", "auto"),
        kernels=options.pop("kernels", "auto"),
        gradient_dtype=options.pop("gradient_dtype", "float32"),
        overrides=options.pop("overrides", {}),
        optimizer=OptimizerConfig(**optimizer),
        lora=LoraConfig(**options.pop("lora", {})),
    )
    model = ModelConfig(path=path, dtype=options.pop("dtype", "float32"), exact=options.pop("exact", False))
    num_steps = options.pop("num_steps", 10)
    start = {name: options.pop(name) for name in ("weights_path", "adapter_path", "teacher") if name in options}
    sampling = RolloutSampling(options.pop("temperature", 1.0), options.pop("max_new_tokens", 0))
    parallel.initialize(config.parallel, seed=0)
    try:
        yield Engine(model, config, AlgorithmConfig(**options), num_steps=num_steps, sampling=sampling, **start)
    except BaseException:
        if dist.get_world_size() == 1:  # else the other ranks may never come to leave, and this one has to fail
            leave_groups()
        raise
    leave_groups()
    if wrap == "megatron_fsdp":
        forget_wrappers()


def exporter(built: Engine, *, on_all_ranks: bool = False) -> Exporter:
    return Exporter(
        built.whole_parameters,
        built.mbridge,
        Position(
            stage=built.layout.pipeline_rank,
            num_stages=built.layout.pipeline_size,
            tensor_group=mpu.get_tensor_model_parallel_group(),
            data_rank=built.layout.copy_rank,
            expert_group=parallel.expert_group(),
            expert_data_rank=built.layout.expert_data_rank,
        ),
        gather_bytes=GATHER_BYTES,
        is_in_place=built.wrapped.is_in_place,
        on_all_ranks=on_all_ranks,
    )


def everywhere(built: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """This stage's tensors on all of its ranks."""
    return whole_tensors(exporter(built, on_all_ranks=True))


def converted(source: Exporter) -> dict[str, torch.Tensor]:
    """The export by mbridge's conversions of the gathered values themselves, without the copies that are recorded of them."""
    tensors: dict[str, torch.Tensor] = {}
    source.manifest()
    plans = iter([plan for unit in source._unit_plans for plan in unit.plans])
    for part in source.parts():  # only on the sender
        plan = next(plans)
        for weight, places in zip(plan._weights, plan._places, strict=True):
            size, shape = weight.tensor.numel(), weight.tensor.shape
            shards = [part.memory[name][start : start + size].view(shape) for name, start in places]
            tensors |= {name: tensor.clone() for name, tensor in source._convert(weight, shards)}
    return tensors


def losses(cases: list[dict[str, Any]], num_steps: int = 10) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step of each case."""
    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), **case) as built:
            history = []
            for step in range(num_steps):
                metrics = built.update(built.prepare(random_samples(16, seed=step)))
                loss = metrics["loss/total" if built.algorithm.name == "grpo" else "loss/sft"]
                history.append((loss, metrics["grad_norm"]))
        results.append(history)
    return results


def offloaded_losses(cases: list[dict[str, Any]], num_steps: int = 3) -> list[dict[str, Any]]:
    """Losses without and with a warm-up, and an offload of `kinds` after each step; what was left of the storages meanwhile."""
    from engine.config import OFFLOAD_KINDS
    from engine.offload import Offload, storages

    results = []
    for case in cases:
        case = dict(case)
        path, kinds = case.pop("path"), case.pop("kinds", OFFLOAD_KINDS)
        histories, left, freed = [], 0, 0
        for moves in (False, True):
            with engine(path, name="grpo", kl_coefficient=0.01, **case) as built:
                offload, history = Offload(built), []
                if moves:
                    built.warm_up()
                for step in range(num_steps):
                    metrics = built.update(built.prepare(random_samples(16, seed=step)))
                    history.append((metrics["loss/total"], metrics["grad_norm"]))
                    if moves:
                        freed = offload.offload(kinds)
                        left += sum(storage.nbytes() for kind in kinds for storage in storages(built, kind))
                        offload.reload()
                history.append([values.tolist() for values in log_probs(built, random_samples(4, seed=99))])
                histories.append(history)
        results.append({"same": histories[0] == histories[1], "left": left, "freed": freed})
    return results


def first_ratios(path: str, cases: list[dict[str, Any]], max_examples: int) -> list[list[float]]:
    """ratio/first_minibatch_mean for batches of any lengths that hypothesis comes up with, the same on every rank."""
    import hypothesis.strategies as st
    from hypothesis import given, settings

    sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=20)

    def ratios_of(built: Engine) -> list[float]:
        ratios = []

        @settings(derandomize=True, database=None, deadline=None, max_examples=max_examples)
        @given(sizes, st.integers(0, 2**31))
        def check(batch: list[tuple[int, int]], seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            samples = []
            for index, (prompt, response) in enumerate(batch):
                ids = tuple(torch.randint(3, 120, (prompt + response,), generator=generator).tolist())
                samples.append(Sample(ids[:prompt], ids[prompt:], tuple([-4.0] * response), reward=index % 3))
            ratios.append(built.update(built.prepare(samples))["ratio/first_minibatch_mean"])

        check()
        return ratios

    results = []
    for case in cases:
        with engine(path, name="grpo", **case) as built:
            results.append(ratios_of(built))
    return results


def export_differences(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case's export against the safetensors on disk, before and after a training step, on the senders."""
    results = []
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        with engine(path, name="sft", **case) as built:
            source = exporter(built)
            manifest = source.manifest()
            tensors = {name: tensor.clone() for name, tensor in whole_tensors(source)}
            disk = load_file(Path(path) / "model.safetensors")
            mine = {spec.name: spec for spec in manifest.tensors}
            differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, disk[name])]
            specs_match = not source.is_sender or [(spec.name, spec.shape) for spec in manifest.tensors] == [
                (name, tuple(tensor.shape)) for name, tensor in tensors.items()
            ]
            before = built.update(built.prepare(random_samples(8, seed=1)))
            changed = {name: tensor.clone() for name, tensor in whole_tensors(source)}
            moved = [name for name in tensors if not torch.equal(tensors[name], changed[name])]
            plain = converted(source)
            results.append(
                {
                    "copied": plain.keys() == changed.keys() and all(torch.equal(plain[n], changed[n]) for n in changed),
                    "case": case,
                    "sender": source.is_sender,
                    "names": sorted(tensors),
                    "manifest": sorted(mine),
                    "disk": sorted(disk),
                    "differing": differing,
                    "specs_match": specs_match,
                    "moved": len(moved),
                    "loss": before["loss/sft"],
                    "scratch_bytes": {name: tensor.nbytes for name, tensor in source._scratch._memory.items()},
                }
            )
    return results


def negated_export(path: str) -> dict[str, Any]:
    """An engine of the bench that trains nothing: which of its tensors the export has, and has negated after `negate`."""
    from engine.offload import storages
    from bench.common.random_engine import FrozenEngine, negate

    parallel.initialize(ParallelConfig(), seed=0)
    built = FrozenEngine(
        ModelConfig(path=path, dtype="float32"), EngineConfig(wrap="ddp"), AlgorithmConfig(name="sft"), num_steps=1
    )
    source = exporter(built)
    before = {name: tensor.clone() for name, tensor in whole_tensors(source)}
    negate(built)
    after = dict(whole_tensors(source))
    state = sum(storage.nbytes() for kind in ("gradients", "optimizer") for storage in storages(built, kind))
    leave_groups()
    return {
        "names": sorted(before),
        "negated": sorted(name for name in after if torch.equal(after[name], -before[name])),
        "state_bytes": state,
    }


def random_experts_over_two_ranks(path: str) -> bool:
    """An engine of the bench whose ranks had other states of the host's generator, as on GPUs; that they are compared."""
    from bench.common.random_engine import FrozenEngine

    parallel.initialize(ParallelConfig(expert=2), seed=0)
    torch.default_generator.manual_seed(dist.get_rank())
    config = EngineConfig(wrap="ddp", parallel=ParallelConfig(expert=2))
    FrozenEngine(ModelConfig(path=path, dtype="float32"), config, AlgorithmConfig(name="sft"), num_steps=1)  # compares them
    leave_groups()
    return True


def log_probs(built: Engine, samples: list[Sample]) -> list[torch.Tensor]:
    """Of each sample's response tokens, by the code that training runs; on every rank."""
    return [values for (values,) in built._response_values(samples, built._log_probs(built.temperature))]


def hf_log_probs(path: str, samples: list[Sample]) -> list[torch.Tensor]:
    """The same log-probs from transformers, one sample at a time."""
    from tests.support.tiny_models import load_model

    model, results = load_model(path), []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0].float(), -1)
        start = len(sample.prompt_ids)
        picked = log_probs[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)
        results.append(picked)
    return results


def log_probs_against_hf(cases: list[dict[str, Any]]) -> list[float]:
    """Largest difference to transformers over all tokens, for each case."""
    results = []
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        samples = random_samples(12, seed=5)
        with engine(path, name="sft", **case) as built:
            mine = log_probs(built, samples)
            again = log_probs(built, [dataclasses.replace(s) for s in reversed(samples)])
        reference = hf_log_probs(path, samples)
        worst = max(float((a - b).abs().max()) for a, b in zip(mine, reference, strict=True))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(mine, reversed(again), strict=True)))
        results.append(worst)
    return results


def interrupted_run(
    path: str, folder: Path, case: dict[str, Any], steps: int, stop: int, at_end: Callable[[Engine], None] = lambda built: None
) -> dict[str, Any]:
    """Of a run that saves at `stop`, and of a fresh engine that resumes there: losses, norms, and log-probs of held-out samples.

    `at_end` gets the resumed engine after its last step.
    """
    from engine import checkpoint

    options = {"num_minibatches": 2, "name": "grpo", "num_steps": steps, **case}

    def run(built: Engine, first: int) -> list[tuple[float, float]]:
        history = []
        for step in range(first, steps):
            metrics = built.update(built.prepare(random_samples(16, seed=step)))
            history.append((metrics["loss/total"], metrics["grad_norm"]))
            if step + 1 == stop and first == 0:
                checkpoint.save(folder, stop, built, everywhere(built), Path(path), keep=2).wait()
        return history

    with engine(path, **options) as built:
        whole, end = run(built, 0), log_probs(built, random_samples(6, seed=99))
    saved = checkpoint.newest(folder)
    assert saved is not None
    with engine(path, **checkpoint.engine_arguments(saved), **options) as built:
        checkpoint.restore(saved, built)
        rest, again = run(built, checkpoint.step_of(saved)), log_probs(built, random_samples(6, seed=99))
        at_end(built)
    return {"whole": whole, "rest": rest, "end": end, "end_again": again, "saved": saved}


def resumed_losses(path: str, root: str, cases: list[dict[str, Any]], steps: int, stop: int) -> list[dict[str, Any]]:
    """Losses of an uninterrupted run and of a resumed one, whose last checkpoint is compared with transformers."""
    from engine import checkpoint

    results = []
    for number, case in enumerate(cases):
        folder = Path(root) / str(number)

        def save(built: Engine, folder: Path = folder) -> None:
            checkpoint.save(folder, steps, built, everywhere(built), Path(path), keep=1).wait()

        found = interrupted_run(path, folder, case, steps, stop, save)
        reference = hf_log_probs(str(folder / f"step_{steps:08d}" / "hf"), random_samples(6, seed=99))
        worst = max(float((a - b).abs().max()) for a, b in zip(found["end_again"], reference, strict=True))
        kept = sorted(each.name for each in folder.iterdir())
        results.append({"whole": found["whole"][stop:], "resumed": found["rest"], "worst": worst, "kept": kept})
    return results
