"""Distillation in the engine: the same in every layout, beside transformers, from each kind of teacher, and after a resume.

python -m pytest tests/engine/test_teachers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.model.lora_cases import write_peft_adapter
from tests.engine.test_objectives import without_padding
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2+SP": {"tensor": 2, "sequence": True, "fusions": "all", "wrap": "megatron_fsdp"},
    "PP2": {"pipeline": 2, "wrap": "megatron_fsdp"},
    "CP2": {"context": 2},
    "FSDP, chunks": {"wrap": "megatron_fsdp", "logits_chunk_tokens": 7},
}
METRICS = ("teacher/kl_mean", "teacher/kl_max", "loss/total", "grad_norm")


@pytest.fixture(scope="module")
def other(root: Path) -> str:
    """A model of the same shape with other weights."""
    return str(write_tiny_model(root / "teacher", "qwen3", True, num_hidden_layers=2, seed=7))


@pytest.fixture(scope="module")
def adapter(root: Path, model: str) -> str:
    return str(write_peft_adapter(root / "adapter", model, shared=True))


def teachers(model: str, other: str, adapter: str) -> dict[str, dict[str, Any]]:
    """Cases of each kind of teacher and of objective."""
    far = {"teacher": {"path": other}}
    return {
        "sampled": {**far, "kl_coefficient": 0.1},
        "full": {"teacher": {"path": other, "objective": "full", "weight": 0.5, "reward_weight": 0.0}},
        "jsd": {"teacher": {"path": other, "objective": "full", "divergence": "jsd", "jsd_beta": 0.2}, "temperature": 0.7},
        "top_k": {"teacher": {"path": other, "objective": "top_k", "divergence": "forward_kl", "top_k": 9}},
        "adapter": {"teacher": {"adapter_path": adapter, "objective": "full"}, "lora": LORA, "entropy_coefficient": 0.01},
        "folder beside LoRA": {"teacher": {"path": other, "objective": "top_k", "top_k": 9}, "lora": LORA},
        "served": {"teacher": {"served": other}},
        "served top_k": {"teacher": {"served": other, "objective": "top_k", "divergence": "forward_kl", "top_k": 9}},
    }


@pytest.mark.long
def test_a_teacher_is_the_same_in_every_layout(model: str, other: str, adapter: str) -> None:
    """All that is logged, to 1e-5, over two steps of two mini-batches, as on one rank; asked in the rollout or in the trainer."""
    common = {"path": model, "num_minibatches": 2, "optimizer": {"learning_rate": 3e-3}, "tokens": 60}
    cases = teachers(model, other, adapter)
    alone = [{**common, **case, "tokens": 120} for case in cases.values()]
    references = run_ranks(1, "tests.engine.teacher_cases:teacher_metrics", {"cases": alone})[0]
    found = dict(zip(cases, references, strict=True))
    for name, steps in found.items():
        print(name, [{key: step[key] for key in METRICS} for step in steps])
        assert all(step["teacher/kl_max"] > abs(step["teacher/kl_mean"]) > 0 and step["grad_norm"] > 0 for step in steps)
        assert ("loss/teacher" in steps[0]) == ("sampled" not in name and name != "served")
    assert found["full"][0]["loss/total"] == pytest.approx(found["full"][0]["loss/teacher"])
    for served, own in (("served", "sampled"), ("served top_k", "top_k")):
        for name in ("teacher/kl_mean", "teacher/kl_max"):
            assert found[served][0][name] == pytest.approx(found[own][0][name], rel=1e-4)
    layouts = [{**common, **case, **layout} for layout in LAYOUTS.values() for case in cases.values()]
    results = run_ranks(2, "tests.engine.teacher_cases:teacher_metrics", {"cases": layouts})[0]
    for case, steps, reference in zip(layouts, results, references * len(LAYOUTS), strict=True):
        print(case)
        for step, wanted in zip(steps, reference, strict=True):
            assert without_padding(step) == pytest.approx(without_padding(wanted), rel=2e-5, abs=2e-5)


def test_a_supervised_step_with_a_teacher_is_that_of_transformers(model: str, other: str) -> None:
    teacher = {"path": other, "objective": "full", "divergence": "forward_kl", "weight": 0.7, "reward_weight": 0.3}
    cases: list[dict[str, Any]] = [
        {"path": model, "wrap": wrap, "tokens": 60, "teacher": teacher} for wrap in ("ddp", "megatron_fsdp")
    ]
    for found in run_ranks(2, "tests.engine.teacher_cases:beside_transformers", {"cases": cases})[0]:
        print(found)
        assert abs(found["data"]) < 1e-5 and abs(found["kl"]) < 1e-5 and found["gradient"] < 1e-5
        assert found["size"] > 1e-3 and found["named"] > 5


def test_a_teacher_equal_to_the_policy_gives_zero(model: str) -> None:
    """To the last bit, at every token of both steps, by the start model and by the same folder, at a learning rate of 0.

    Two models of which each rank has a part may be multiplied by other kernels, by how their memory is aligned.
    """
    common = {"path": model, "optimizer": {"learning_rate": 0.0}, "tokens": 60, "importance_correction": "none"}
    objectives: list[dict[str, Any]] = [
        {"objective": "sampled"},
        {"objective": "full"},
        {"objective": "full", "divergence": "jsd"},
        {"objective": "top_k", "divergence": "forward_kl", "top_k": 9},
    ]
    kinds: list[dict[str, Any]] = [{}, {"tensor": 2}, {"wrap": "megatron_fsdp"}, {"lora": LORA}, {"logits_chunk_tokens": 7}]
    teachers_: list[dict[str, Any]] = [{**each, "reward_weight": 0.0} for each in objectives]
    cases = [{**common, **kind, "teacher": teacher} for kind in kinds for teacher in teachers_]
    cases += [{**common, "teacher": {**teacher, "path": model}} for teacher in teachers_]
    for case, steps in zip(cases, run_ranks(2, "tests.engine.teacher_cases:teacher_metrics", {"cases": cases})[0], strict=True):
        print(case, steps)
        most = 2e-5 if "tensor" in case else 0.0
        for step in steps:
            values = [step[name] for name in ("teacher/kl_max", "teacher/kl_mean", "grad_norm", "loss/total")]
            assert max(map(abs, [*values, step.get("loss/teacher", 0.0)])) <= most


def test_a_resumed_run_has_its_teacher(model: str, other: str, adapter: str, tmp_path: Path) -> None:
    common = {"path": model, "optimizer": {"learning_rate": 3e-3}}
    cases: list[dict[str, Any]] = [
        {"teacher": {"objective": "full"}},
        {"teacher": {"objective": "full"}, "lora": {**LORA, "adapter_path": adapter}},
        {"teacher": {"adapter_path": adapter}, "lora": LORA},
        {"teacher": {"path": other, "objective": "top_k", "top_k": 9}, "lora": LORA},
    ]
    cases = [{**common, **case, "root": str(tmp_path / str(number))} for number, case in enumerate(cases)]
    for case, (steps, again) in zip(cases, run_ranks(1, "tests.engine.teacher_cases:resumed", {"cases": cases})[0], strict=True):
        print(case, [step["teacher/kl_mean"] for step in steps], again["teacher/kl_mean"])
        assert again == steps[2] and again["teacher/kl_mean"] != 0.0
        assert (steps[0]["teacher/kl_mean"] == 0.0) == (not {"path", "adapter_path"} & case["teacher"].keys())
