"""What tests/engine/test_objectives.py runs on its ranks (see ranks.py), beside the cases of turns (turn_cases.py)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.export.source import whole_tensors
from engine.batch.batch import SampleTable
from engine.engine import Engine
from engine.sample import Sample
from tests.engine.engine_cases import engine, exporter, log_probs, random_samples
from tests.engine.moe.expert_cases import GRADIENT_STEP


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


def response_log_probs(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Of all tokens at each place of the response: [tokens, vocabulary], float32."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
    return torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature, -1)


def own_log_probs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Of the response's tokens: [tokens], float32."""
    return response_log_probs(model, sample).gather(1, torch.from_numpy(sample.response_ids).long()[:, None])[:, 0]


def trained(path: str, samples: list[Sample], **options: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of one update, and each exported tensor's gradient in it."""
    with engine(path, optimizer=GRADIENT_STEP, **options) as built:
        before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
        metrics = built.update(built.prepare(samples))
        return metrics, {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}


def gradient_gap(found: dict[str, torch.Tensor], model: PreTrainedModel, loss: torch.Tensor) -> tuple[float, int]:
    """The largest difference of a gradient to that of transformers, and of how many tensors; both 0 on ranks without tensors."""
    loss.backward()  # type: ignore[no-untyped-call]
    own = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    gaps = [float((found[name] - own[name]).abs().max()) for name in found.keys() & own.keys()]
    return max(gaps, default=0.0), len(gaps)


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
    results, samples = [], [dataclasses.replace(sample, reward=1.0) for sample in random_samples(12, seed=5)]
    num_tokens = sum(len(sample.response_ids) for sample in samples)
    for case in cases:
        _, found = trained(samples=samples, name="grpo", entropy_coefficient=1.0, temperature=0.7, **case)
        model = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32)
        each = [response_log_probs(model, sample, 0.7) for sample in samples]
        results.append(gradient_gap(found, model, sum((own.exp() * own).sum() for own in each) / num_tokens)[0])
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
    results = []
    for case in cases:
        with engine(name="grpo", support_replay=True, **case) as built:
            size = built.mbridge.hf_config.vocab_size
            table = SampleTable.from_samples(with_supports(random_samples(12, seed=5), size))
            batch = built.prepare(table)
            steps = [built.update(batch)]
            found = built.old_log_probs(batch, table, list(range(12)))
            steps.append(built.update(built.prepare(with_supports(random_samples(12, seed=6), size))))
        model, worst = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32).eval(), 0.0
        for sample, values in zip(table.samples, found, strict=False):
            assert sample is not None
            with torch.no_grad():
                wanted = over_support(response_log_probs(model, sample).double(), sample)
            worst = max(worst, float((torch.from_numpy(values) - wanted).abs().max()))
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
    results, samples = [], as_episodes(random_samples(12, seed=5), 0.0)
    for case in cases:
        metrics, found = trained(samples=samples, name="sft", **case)
        model, total = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32), torch.zeros(())
        for sample in samples:
            values = own_log_probs(model, sample)
            total = total - values[torch.tensor(sample.is_sampled)].sum() if len(sample.is_sampled) else total - values.sum()
        total = total / sum(sample.num_sampled for sample in samples)
        gap, named = gradient_gap(found, model, total)
        results.append({"loss": abs(metrics["loss/sft"] - float(total.detach())), "gradient": gap, "named": named})
    return results


def entropies_beside_transformers(cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """entropy/mean of a first step, and the mean of the entropies that transformers' logits have."""
    results, samples = [], random_samples(12, seed=5)
    for case in cases:
        with engine(name="grpo", **case) as built:
            mine = built.update(built.prepare(samples))["entropy/mean"]
        model = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32).eval()
        with torch.no_grad():
            log_probs = torch.cat([response_log_probs(model, sample).double() for sample in samples])
        results.append((mine, float(-(log_probs.exp() * log_probs).sum(-1).mean())))
    return results
