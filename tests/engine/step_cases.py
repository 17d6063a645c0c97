"""What tests/engine/test_steps.py runs on its ranks (see ranks.py)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch.batch import MicroBatch, SampleTable
from engine.engine import Engine
from engine.objective.metrics import NonFiniteError
from engine.wrap.optimizer import inner_optimizers
from engine.sample import Sample
from bridge.export.source import whole_tensors
from tests.engine.engine_cases import engine, everywhere, exporter, log_probs, random_samples
from tests.engine.model.lora_cases import save_adapter


def old_log_prob_metrics(cases: list[dict[str, Any]], num_steps: int = 3) -> list[list[list[dict[str, float]]]]:
    """For each case the metrics of its steps, with `algorithm.old_log_probs` auto and separate."""
    results = []
    for case in cases:
        case = dict(case)
        path, both = case.pop("path"), []
        for choice in ("auto", "separate"):
            with engine(path, name="grpo", old_log_probs=choice, **case) as built:
                batches = [built.prepare(random_samples(16, seed=0))]
                both.append([built.update(batches[0])])
                both[-1] += [built.update(built.prepare(random_samples(16, seed=step))) for step in range(1, num_steps)]
                has_old = [micro.old_log_probs is not None for mini in batches[0] for micro in mini.microbatches]
                assert not built.layout.is_last_stage or set(has_old) == {choice == "separate"}
        results.append(both)
    return results


def optimizer_settings(path: str, wrap: str, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """What torch's Adam has of the keys of engine.optimizer, in each group of parameters."""
    with engine(path, wrap=wrap, optimizer=keys) as built:
        groups = [group for inner in inner_optimizers(built.optimizer) for group in inner.param_groups]
        return [{name: group[name] for name in ("betas", "eps", "weight_decay", "max_lr", "min_lr")} for group in groups]


def chosen_log_probs(cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """For each case how far what an update took for the old log-probs of three samples is from a pass of its own."""
    results: list[list[list[float]]] = []
    for case in cases:
        case, samples, chosen = dict(case), SampleTable.from_samples(random_samples(9, seed=0)), [0, 4, 8]
        with engine(case.pop("path"), name="grpo", **case) as built:
            whole = log_probs(built, samples.samples)
            batch = built.prepare(samples)
            built.update(batch)
            found = built.old_log_probs(batch, samples, chosen)
            assert len(found) == (3 if built.layout.rank == 0 else 0) and built.old_log_probs(batch, samples, []) == []
        results.append([[float((torch.tensor(a) - whole[b]).abs().max()) for a, b in zip(found, chosen, strict=False)]])
    return results


def first_ratios_with_dropout(cases: list[dict[str, Any]], num_steps: int = 2) -> list[list[float]]:
    """ratio/first_minibatch_mean of steps in which the adapters have grown."""
    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), name="grpo", **case) as built:
            steps = [built.update(built.prepare(random_samples(16, seed=step))) for step in range(num_steps)]
        results.append([step["ratio/first_minibatch_mean"] for step in steps])
    return results


def passes_and_updates(path: str, passes: int, case: dict[str, Any]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Metrics of two batches, each in so many passes at once, and in as many updates on the same preparation."""
    options = {"path": path, "name": "grpo", "num_steps": 2, "kl_coefficient": 0.1, **case}
    with engine(**options, num_passes=passes) as built:
        at_once = [built.update(built.prepare(random_samples(16, seed=seed))) for seed in (0, 1)]
    one_by_one = []
    with engine(**{**options, "num_steps": 2 * passes}, old_log_probs="separate") as built:
        for seed in (0, 1):
            prepared = built.prepare(random_samples(16, seed=seed))
            one_by_one.append([built.update(prepared) for _ in range(passes)][-1])
    return at_once, one_by_one


def supervised_metrics(path: str, temperatures: list[float]) -> list[dict[str, float]]:
    """Of a first step in runs that would sample at these temperatures."""
    results = []
    for temperature in temperatures:
        with engine(path, name="sft", temperature=temperature) as built:
            results.append(built.update(built.prepare(random_samples(16, seed=0))))
    return results


class LogitsRecorder(TorchDispatchMode):
    """Most tokens whose logits lie in one tensor."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.vocabulary_size, self.most = vocabulary_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_weight = func is torch.ops.aten.t.default
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.vocabulary_size,) and not is_weight:
            self.most = max(self.most, result.numel() // self.vocabulary_size)
        return result


def read_at_once_and_in_chunks(path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case, at once and in chunks of 7 tokens: metrics of a step, greedy matches and most tokens with logits."""
    results, samples = [], random_samples(12, seed=5)
    for case in cases:
        both: dict[str, Any] = {}
        for chunk_tokens in (8192, 7):
            with engine(path, name="grpo", num_minibatches=2, logits_chunk_tokens=chunk_tokens, **case) as built:
                with LogitsRecorder(built.mbridge.hf_config.vocab_size) as seen:
                    matches, metrics = built.held_out(samples), built.update(built.prepare(samples))
                both[str(chunk_tokens)] = {"metrics": metrics, "matches": matches, "most": seen.most}
        results.append(both)
    return results


def held_out_and_trained(path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of samples with given tokens in their responses, as conversations are: held-out figures, scores, and a step's loss."""
    results, generator = [], torch.Generator().manual_seed(7)
    masks = [torch.rand(len(each.response_ids), generator=generator) < 0.5 for each in random_samples(9, seed=5)]
    pairs = zip(random_samples(9, seed=5), masks, strict=True)
    samples = [dataclasses.replace(each, is_sampled=mask.numpy() | (mask.sum() == 0).item()) for each, mask in pairs]
    for case in cases:
        with engine(path, name="sft", **case) as built:
            scores = [each[torch.from_numpy(mask)] for each, mask in zip(built.score(samples), _masks(samples), strict=True)]
            found, metrics = built.held_out(samples), built.update(built.prepare(samples))
            results.append(
                {
                    "found": [tuple(each) for each in found],
                    "scores": [float(s.double().sum()) for s in scores],
                    "num_sampled": [each.num_sampled for each in samples],
                    "loss": metrics["loss/sft"],
                }
            )
    return results


def _masks(samples: list[Sample]) -> list[npt.NDArray[np.bool_]]:
    return [each.is_sampled if len(each.is_sampled) else np.ones(len(each.response_ids), np.bool_) for each in samples]


def spoilt(samples: list[Sample], how: str) -> list[Sample]:
    """One sample with a log-prob that is NaN, or with a reward whose gradient overflows."""
    first = samples[0]
    if how == "loss":
        return [dataclasses.replace(first, rollout_log_probs=(math.nan,) * len(first.response_ids)), *samples[1:]]
    return [dataclasses.replace(first, reward=1e38), *samples[1:]]


def state_of(built: Engine) -> dict[str, torch.Tensor]:
    """The exported weights, and the optimizer's own tensors."""
    state = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
    for number, inner in enumerate(inner_optimizers(built.optimizer)):
        for group in inner.param_groups:
            for index, parameter in enumerate(group["params"]):
                for key, value in {"weight": parameter, **inner.state.get(parameter, {})}.items():
                    local = getattr(value, "_local_tensor", value)
                    state[f"{number} {index} {key}"] = torch.as_tensor(local).detach().clone()
    return state


def gradients(built: Engine) -> list[torch.Tensor]:
    """The buffers that the wrap reduces gradients in."""
    if built.config.wrap == "ddp":
        return [buffer.grad_data for chunk in built.chunks for buffer in chunk.buffers]  # type: ignore[attr-defined]
    groups = (group for chunk in built.chunks for group in chunk.module.param_and_grad_buffer.parameter_groups)
    return [group.main_grad_buffer.data for group in groups if group.main_grad_buffer is not None]


def skipped_steps(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run whose second of three batches cannot be trained on, beside one that never saw it."""
    options = {"name": "grpo", "non_finite": "skip", "normalize_advantage_by_std": False, "num_steps": 6}
    results = []
    for case in cases:
        case = dict(case)
        path, how = case.pop("path"), case.pop("how")
        batches = [random_samples(16, seed=seed) for seed in range(3)]
        with engine(path, **options, **case) as built:
            built.update(built.prepare(batches[0]))
            without = built.update(built.prepare(batches[2]))
        with engine(path, **options, **case) as built:
            built.update(built.prepare(batches[0]))
            before, num_steps = state_of(built), built.schedule.num_steps
            skipped = built.update(built.prepare(spoilt(batches[1], how)))
            after = state_of(built)
            zero = [bool((gradient == 0).all()) for gradient in gradients(built)]
            same_schedule = num_steps == built.schedule.num_steps
            following = built.update(built.prepare(batches[2]))
        results.append(
            {
                "skipped": skipped["train/skipped_steps"],
                "loss": skipped["loss/policy"],
                "grad_norm": skipped["grad_norm"],
                "changed": [name for name in before if not torch.equal(before[name], after[name])],
                "num_tensors": len(before),
                "zero": zero,
                "same_schedule": same_schedule,
                "same_after": following == without,
                "finite_after": math.isfinite(following["loss/policy"]) and following["grad_norm"] > 0,
            }
        )
    return results


def stopped_weights(cases: list[dict[str, Any]]) -> list[list[str]]:
    """The tensors that changed although the step stopped the run."""
    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), name="grpo", **case) as built:
            before = state_of(built)
            with pytest.raises(NonFiniteError, match="loss is not finite"):
                built.update(built.prepare(spoilt(random_samples(16, seed=0), "loss")))
            after = state_of(built)
        results.append([name for name in before if not torch.equal(before[name], after[name])])
    return results


def start_adapters(cases: list[dict[str, Any]], folder: str) -> list[list[dict[str, float]]]:
    """Metrics of four steps from an adapter, the last of them once more by an engine that resumes from the third's weights."""
    results = []
    for number, case in enumerate(cases):
        case = dict(case)
        path, saved = case.pop("path"), Path(folder) / str(number)
        options = {"name": "grpo", "kl_coefficient": 0.1, **case}
        with engine(path, **options) as built:
            steps = [built.update(built.prepare(random_samples(16, seed=step))) for step in range(3)]
            save_adapter(built, saved, path)
            steps.append(built.update(built.prepare(random_samples(16, seed=3))))
        with engine(path, adapter_path=str(saved), **options) as built:
            steps.append(built.update(built.prepare(random_samples(16, seed=3))))
        results.append(steps)
    return results


def micro_batch(log_ratio: float, advantage: float) -> MicroBatch:
    """Three response tokens, whose old log-probs are `log_ratio` less than 0, that of the first token; else equal."""
    from engine.batch.batch import SampleTable, pack

    table = SampleTable.from_samples([Sample((5, 6), (7, 8, 9), (0.0, 0.0, 0.0))])
    micro = pack(dataclasses.replace(table, advantages=np.array([advantage])), [0], 1, torch.device("cpu"))
    micro.old_log_probs = torch.tensor([0.0, -log_ratio, 0.0, 0.0, 0.0])
    micro.reference_log_probs = torch.tensor([0.0, log_ratio, 0.0, 0.0, 0.0])
    return micro


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.marker),)


def restore_planted(path: str, root: str, how: str, marker: str) -> str:
    """What resuming says to a checkpoint with such an object in it: random states, one of their values, or other files."""
    from engine import checkpoint

    with engine(path, name="sft") as built:
        folder = checkpoint.save(Path(root), 1, built, everywhere(built), Path(path), keep=1).wait()
        file = folder / {"tensors": "rank_00000-000.safetensors", "index": "index.json"}.get(how, "random_00000.pt")
        state = torch.load(file, weights_only=True) if how == "one value" else {}
        torch.save({**state, "numpy": Planted(marker)} if how == "one value" else Planted(marker), file)
        with pytest.raises(ValueError, match=str(folder)) as caught:
            checkpoint.restore(folder, built)
    return str(caught.value)


def host_state(cases: list[dict[str, Any]], root: str) -> list[dict[str, Any]]:
    """Steps without and with `optimizer.offload`, the last again after resuming, and bytes on the device between steps."""
    from engine import checkpoint
    from engine.offload import storages

    results = []
    for number, case in enumerate(cases):
        case = {"name": "grpo", "kl_coefficient": 0.1, "num_steps": 4, **case}
        path, steps = case.pop("path"), []
        result: dict[str, Any] = {}
        for offload in (False, True):
            folder, options = Path(root) / f"{number}_{offload}", {**case, "optimizer": {"offload": offload}}
            with engine(path, **options) as built:
                history = [built.update(built.prepare(random_samples(16, seed=step))) for step in range(2)]
                reference = [tensor.untyped_storage() for tensor in built.reference.parameters()] if built.reference else []
                for kind, found in (("optimizer", storages(built, "optimizer")), ("reference", reference)):
                    result[f"{kind} {offload}"] = sum({each._cdata: each.nbytes() for each in found}.values())
                checkpoint.save(folder, 2, built, everywhere(built), Path(path), keep=1).wait()
                history.append(built.update(built.prepare(random_samples(16, seed=2))))
            with engine(path, **checkpoint.engine_arguments(folder / "step_00000002"), **options) as built:
                checkpoint.restore(folder / "step_00000002", built)
                history.append(built.update(built.prepare(random_samples(16, seed=2))))
            steps.append(history)
        results.append({**result, "steps": steps})
    return results
