"""What tests/engine/test_teachers.py runs on its ranks (see ranks.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from bridge.export.source import whole_tensors
from engine import checkpoint
from engine.algorithm import TeacherObjective
from engine.engine import Engine
from engine.sample import Sample
from engine.teacher import TeacherChoice
from tests.engine.engine_cases import engine, everywhere, exporter
from tests.engine.moe.expert_cases import GRADIENT_STEP
from tests.engine.objective_cases import as_episodes, far_samples

SERVED = "served"  # in a case's `teacher`: the folder of a model that gives its values with the samples


def choice_of(given: dict[str, Any]) -> TeacherChoice:
    """Of a case: fields of the objective, `path` or `adapter_path`; with neither the start model."""
    given = dict(given)
    served = given.pop(SERVED, "")
    where = {name: given.pop(name) for name in ("path", "adapter_path") if name in given}
    return TeacherChoice(TeacherObjective(**given), is_in_trainer=not served, **where)


def plain_logits(model: Any, sample: Sample) -> torch.Tensor:
    """[response tokens, vocabulary], by transformers."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
    logits: torch.Tensor = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits


@torch.no_grad()
def asked(folder: str, samples: list[Sample], temperature: float, top_k: int) -> list[Sample]:
    """The samples with what a served teacher says of them."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for sample in samples:
        log_probs = torch.log_softmax(plain_logits(model, sample) / temperature, -1)
        own = log_probs.gather(1, torch.from_numpy(sample.response_ids.astype("int64"))[:, None])[:, 0]
        top = log_probs.topk(top_k, -1)
        arrays = {"teacher_top_ids": top.indices.numpy(), "teacher_top_log_probs": top.values.numpy()} if top_k else {}
        found.append(dataclasses.replace(sample, teacher_log_probs=own.numpy(), **arrays))
    return found


def batch_of(built: Engine, seed: int, given: dict[str, Any]) -> list[Sample]:
    """Episodes with given tokens and branches, of a policy near the engine's."""
    samples = as_episodes(far_samples(built, 16, seed=seed), -3.0)
    objective = TeacherObjective(**{name: value for name, value in given.items() if name in TeacherObjective.model_fields})
    if SERVED not in given:
        return samples
    return asked(given[SERVED], samples, built.temperature, objective.top_k if objective.objective == "top_k" else 0)


def teacher_metrics(cases: list[dict[str, Any]], num_steps: int = 2) -> list[list[dict[str, float]]]:
    """For each case the metrics of its steps."""
    results = []
    for case in cases:
        case, steps = {"name": "grpo", "max_new_tokens": 15, **case}, []
        given = case.pop("teacher")
        with engine(case.pop("path"), teacher=choice_of(given), **case) as built:
            built.warm_up()  # which needs no values of the teacher
            steps += [built.update(built.prepare(batch_of(built, step, given))) for step in range(num_steps)]
        results.append(steps)
    return results


def beside_transformers(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of supervised steps with a teacher in a folder: the difference of the loss, of the mean KL and of any gradient."""
    from transformers import AutoModelForCausalLM

    results = []
    for case in cases:
        case = dict(case)
        path, given = case.pop("path"), case.pop("teacher")
        with engine(path, name="sft", optimizer=GRADIENT_STEP, teacher=choice_of(given), **case) as built:
            samples = as_episodes(far_samples(built, 8, seed=5), -3.0)
            before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
            metrics = built.update(built.prepare(samples))
            found = {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}
        model, teacher = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (path, given["path"]))
        data, kl, count = torch.zeros(()), torch.zeros(()), sum(sample.num_sampled for sample in samples)
        for sample in samples:
            mask = torch.from_numpy(sample.is_sampled) if len(sample.is_sampled) else slice(None)
            log_q = plain_logits(model, sample)[mask].log_softmax(-1)
            log_p = plain_logits(teacher, sample)[mask].log_softmax(-1).detach()
            ids = torch.from_numpy(sample.response_ids.astype("int64"))[mask]
            data = data - log_q.gather(1, ids[:, None]).sum() / count
            kl = kl + (log_p.exp() * (log_p - log_q)).sum() / count
        total = given.get("reward_weight", 1.0) * data + given.get("weight", 1.0) * kl
        total.backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        worst = max([float((found[name] - gradients[name]).abs().max()) for name in found.keys() & gradients.keys()], default=0.0)
        differences = {"data": metrics["loss/sft"] - float(data.detach()), "kl": metrics["teacher/kl_mean"] - float(kl.detach())}
        results.append({**differences, "gradient": worst, "size": float(kl.detach()), "named": len(found)})
    return results


def resumed(cases: list[dict[str, Any]]) -> list[tuple[list[dict[str, float]], dict[str, float]]]:
    """For each case the metrics of three steps in one go, and of the third after a resume."""
    results = []
    for case in cases:
        case = {"name": "grpo", "max_new_tokens": 15, **case}
        path, root, given = case.pop("path"), Path(case.pop("root")), case.pop("teacher")
        with engine(path, teacher=choice_of(given), **case) as built:
            steps = [built.update(built.prepare(batch_of(built, number, given))) for number in range(2)]
            folder = checkpoint.save(root, 2, built, everywhere(built), Path(path), keep=1).wait()
            steps.append(built.update(built.prepare(batch_of(built, 2, given))))
        with engine(path, teacher=choice_of(given), **case, **checkpoint.engine_arguments(folder)) as built:
            checkpoint.restore(folder, built)
            results.append((steps, built.update(built.prepare(batch_of(built, 2, given)))))
    return results
