"""What tests/engine/test_steps.py runs on its ranks (see ranks.py)."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
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
from tests.engine.moe.expert_cases import GRADIENT_STEP


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


def far_samples(built: Engine, count: int, seed: int) -> list[Sample]:
    """Samples of a policy near the engine's; the longer responses are cut off at 15 tokens."""
    samples = random_samples(count, seed)
    samples = [dataclasses.replace(s, response_ids=s.response_ids[:15], rollout_log_probs=()) for s in samples]
    for index, values in enumerate(log_probs(built, samples)):
        gaps = tuple(value + 0.3 * math.sin(7 * index + 0.5 * place) for place, value in enumerate(values.tolist()))
        reason = "length" if len(gaps) == 15 else "stop"
        samples[index] = dataclasses.replace(samples[index], rollout_log_probs=gaps, finish_reason=reason)
    return samples


def as_episodes(samples: list[Sample], given_log_prob: float) -> list[Sample]:
    """In each group of four samples the first two are branches of one member; of longer responses a third is given tokens."""
    found = []
    for index, sample in enumerate(samples):
        mask = np.arange(len(sample.response_ids)) % 3 != 1
        log_probs, member = np.where(mask, sample.rollout_log_probs, given_log_prob), max(0, index % 4 - 1)
        reward = samples[index - index % 4].reward if member == 0 else sample.reward
        own = {"rollout_log_probs": log_probs, "is_sampled": mask, "member": member, "reward": reward}
        found.append(dataclasses.replace(sample, **own))
    return found


def as_turns(samples: list[Sample]) -> list[Sample]:
    """`as_episodes` in which each run of sampled tokens is a turn with a reward; a member's branches have turns by turns."""
    draw, found = np.random.default_rng(3), list[Sample]()
    for _, own in groupby(as_episodes(samples, 0.0), lambda sample: (sample.group, sample.member)):
        branches = list(own)
        masks = [each.is_sampled if len(each.is_sampled) else np.ones(len(each.response_ids), np.bool_) for each in branches]
        edges = [np.flatnonzero(np.diff([False, *mask, False])).tolist() for mask in masks]
        pairs = [(first, place, end) for place, own in enumerate(edges) for first, end in zip(own[::2], own[1::2], strict=True)]
        turns, rewards = sorted(pairs), draw.normal(size=len(pairs))
        returns = [math.fsum(rewards[turn:]) for turn in range(len(rewards))]
        for place, branch in enumerate(branches):
            spans = [(turn, first, end - first) for turn, (first, at, end) in enumerate(turns) if at == place]
            found.append(dataclasses.replace(branch, reward=returns[0], turn_returns=returns, turn_spans=spans))
    return found


def turns_beside_transformers(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Policy loss and largest difference of a gradient to transformers, by advantages of each token that plain loops give."""
    from transformers import AutoModelForCausalLM

    results, samples = [], as_turns(random_samples(12, seed=5))
    for case in cases:
        case = dict(case)
        path, options = case.pop("path"), {"importance_correction": "none", "optimizer": GRADIENT_STEP, "credit": "turn"}
        with engine(path, name="grpo", **options, **case) as built:
            before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
            metrics = built.update(built.prepare(samples))
            found = {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}
        model, total = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.zeros(())
        for sample in samples:
            members = {each.member: list(each.turn_returns) for each in samples if each.group == sample.group}
            totals = [own[0] for own in members.values()]
            most = max(map(len, members.values()))
            earlier = [[own[0] - own[turn] for own in members.values() if turn < len(own)] for turn in range(most)]
            deviation = max(float(np.std(each, ddof=1)) for each in (totals, *earlier) if len(each) > 1) + 1e-6
            ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
            values = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1], -1)
            values = values.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
            for turn, first, number in sample.turn_spans:
                before = sample.turn_returns[0] - sample.turn_returns[turn] - float(np.mean(earlier[turn]))
                advantage = (sample.turn_returns[0] - float(np.mean(totals)) - before) / deviation
                total = total - advantage * values[first : first + number].sum()
        (total / sum(sample.num_sampled for sample in samples)).backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        shared = found.keys() & gradients.keys()
        worst = max((float((found[name] - gradients[name]).abs().max()) for name in shared), default=0.0)
        results.append({"gradient": worst, "named": len(shared), "norm": metrics["grad_norm"]})
    return results


def objective_metrics(cases: list[dict[str, Any]], num_steps: int = 2) -> list[list[dict[str, float]]]:
    """For each case the metrics of its steps; `episodes`: with given tokens, which have this log-prob, and branches."""
    results = []
    for case in cases:
        case = dict(case)
        given, steps = case.pop("episodes", None), []
        with engine(case.pop("path"), name="grpo", max_new_tokens=15, **case) as built:
            for step in range(num_steps):
                samples = far_samples(built, 16, seed=step)
                steps.append(built.update(built.prepare(samples if given is None else as_episodes(samples, given))))
        results.append(steps)
    return results


def entropy_gradients(cases: list[dict[str, Any]]) -> list[float]:
    """The largest difference of a gradient to transformers, where the loss is the mean entropy of sampled tokens, times -1."""
    from transformers import AutoModelForCausalLM

    results, samples = [], [dataclasses.replace(sample, reward=1.0) for sample in random_samples(12, seed=5)]
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        options = {"entropy_coefficient": 1.0, "optimizer": GRADIENT_STEP, "temperature": 0.7, **case}
        with engine(path, name="grpo", **options) as built:
            before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
            built.update(built.prepare(samples))
            found = {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}
        model, total = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.zeros(())
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
            log_probs = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.7, -1)
            total = total + (log_probs.exp() * log_probs).sum()
        (total / sum(len(sample.response_ids) for sample in samples)).backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        shared = found.keys() & gradients.keys()
        results.append(max((float((found[name] - gradients[name]).abs().max()) for name in shared), default=0.0))
    return results


def with_supports(samples: list[Sample], vocab_size: int) -> list[Sample]:
    """Of each response token, itself among up to seven others."""
    generator, found = np.random.default_rng(0), []
    for sample in samples:
        kept = [generator.permutation(vocab_size)[: generator.integers(0, 8)] for _ in sample.response_ids]
        kept = [np.union1d(others, token) for others, token in zip(kept, sample.response_ids, strict=True)]
        support = np.concatenate([[len(each) for each in kept], *kept]).astype(np.int32)
        found.append(dataclasses.replace(sample, support=support))
    return found


def supports_beside_transformers(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics of two steps on kept tokens, and on rank 0 how far the first step's old log-probs are from transformers'."""
    from transformers import AutoModelForCausalLM

    results = []
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        with engine(path, name="grpo", support_replay=True, **case) as built:
            size = built.mbridge.hf_config.vocab_size
            table = SampleTable.from_samples(with_supports(random_samples(12, seed=5), size))
            batch, chosen = built.prepare(table), list(range(12))
            steps = [built.update(batch)]
            found = built.old_log_probs(batch, table, chosen)
            steps.append(built.update(built.prepare(with_supports(random_samples(12, seed=6), size))))
        model, worst = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), 0.0
        for sample, values in zip(table.samples, found, strict=False):
            assert sample is not None
            with torch.no_grad():
                ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
                logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double()
            worst = max(worst, float((torch.from_numpy(values) - over_support(logits, sample)).abs().max()))
        results.append({"steps": steps, "worst": worst})
    return results


def over_support(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Each response token's log-prob over the tokens that were kept for it, in float64."""
    ends, found = np.cumsum([len(sample.response_ids), *sample.support[: len(sample.response_ids)]]), []
    for place, token in enumerate(sample.response_ids.tolist()):
        kept = sample.support[ends[place] : ends[place + 1]].tolist()
        found.append(logits[place, token] - logits[place, kept].logsumexp(0))
    return torch.stack(found)


def supervised_beside_transformers(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Loss and largest difference of a gradient to transformers, over the sampled tokens of samples that have given ones."""
    from transformers import AutoModelForCausalLM

    results, samples = [], as_episodes(random_samples(12, seed=5), 0.0)
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        with engine(path, name="sft", optimizer=GRADIENT_STEP, **case) as built:
            before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
            loss = built.update(built.prepare(samples))["loss/sft"]
            found = {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}
        model, total = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.zeros(())
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
            values = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1], -1)
            values = values.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
            total = total - values[torch.tensor(sample.is_sampled)].sum() if len(sample.is_sampled) else total - values.sum()
        total = total / sum(sample.num_sampled for sample in samples)
        total.backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        worst = max([float((found[name] - gradients[name]).abs().max()) for name in found.keys() & gradients.keys()], default=0.0)
        results.append({"loss": abs(loss - float(total.detach())), "gradient": worst, "named": len(found)})
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


def entropies_beside_transformers(cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """entropy/mean of a first step, and the mean of the entropies that transformers' logits have."""
    from transformers import AutoModelForCausalLM

    results, samples = [], random_samples(12, seed=5)
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        with engine(path, name="grpo", **case) as built:
            mine = built.update(built.prepare(samples))["entropy/mean"]
        model, values = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
        for sample in samples:
            with torch.no_grad():
                logits = model(torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])).logits[0].double()
            probs = torch.softmax(logits[len(sample.prompt_ids) - 1 : -1], -1)
            values += (-(probs * probs.log()).sum(-1)).tolist()
        results.append((mine, sum(values) / len(values)))
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
