"""A run goes on in another layout or wrap with the tensors that it had, bit for bit, and with the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.resume import INDEX_FILE
from tests.support.file_limit import umask
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

FSDP = {"wrap": "megatron_fsdp"}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    small: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    small["vocab_size"] = 125  # padded where tensor parallelism does not divide it
    return {
        "dense": str(write_tiny_model(root / "dense", "qwen3", True, **small)),
        "experts": str(write_tiny_model(root / "experts", "qwen3_moe", hidden_size=64, moe_intermediate_size=32)),
    }


def test_a_run_goes_on_in_any_layout(models: dict[str, str], tmp_path: Path) -> None:
    """What is saved again right after resuming is the same bit for bit; the next 5 losses are those of the run that went on."""
    dense, experts, root = {"path": models["dense"]}, {"path": models["experts"]}, str(tmp_path)
    two = {"DP2": dense, "PP2": {**dense, "pipeline": 2}, "FSDP2": {**dense, **FSDP}, "EP2": {**experts, "expert": 2}}
    two |= {"TP2-LoRA": {**dense, "tensor": 2, **LORA}, "EP2-LoRA": {**experts, "expert": 2, **LORA}}
    one = {"DP1": dense}
    written = run_ranks(2, "tests.engine.checkpoint.resume_cases:wrote", {"root": root, "cases": two})[0]
    written |= run_ranks(1, "tests.engine.checkpoint.resume_cases:wrote", {"root": root, "cases": one})[0]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*") if path.is_file()} == {0o666 & ~umask()}
    for index in tmp_path.rglob(INDEX_FILE):
        others = {str(path.relative_to(index.parent)) for path in index.parent.rglob("*") if path.is_file() and path != index}
        assert set(json.loads(index.read_text())["files"]) == others
    readers: dict[int, list[tuple[str, dict[str, Any]]]] = {
        1: [("DP2", dense), ("EP2", {**experts, **FSDP}), ("EP2-LoRA", {**experts, **FSDP, **LORA})],
        2: [
            ("DP1", dense), ("DP1", {**dense, "tensor": 2}), ("DP1", {**dense, **FSDP, "pipeline": 2}),
            ("PP2", {**dense, "tensor": 2, "sequence": True}), ("DP2", {**dense, **FSDP}), ("FSDP2", dense),
            ("TP2-LoRA", {**dense, **FSDP, **LORA}), ("EP2-LoRA", {**experts, "tensor": 2, "sequence": True, **LORA}),
        ],
    }  # fmt: skip
    for num_ranks, cases in readers.items():
        results = run_ranks(num_ranks, "tests.engine.checkpoint.resume_cases:resumed", {"root": root, "cases": cases})[0]
        for (name, case), result in zip(cases, results, strict=True):
            layout = {key: value for key, value in case.items() if key != "path"}
            worst = max(abs(a[0] - b[0]) for a, b in zip(result["losses"], written[name], strict=True))
            print(f"{name} -> {num_ranks} ranks {layout}: {worst:.1e}; {result['note']}")
            assert not result["differing"], (name, case)
            assert worst < 1e-5, (name, case, result["losses"], written[name])
            former = two.get(name) or one[name]
            is_same = num_ranks == (2 if name in two else 1) and {**former, "wrap": ""} == {**case, "wrap": ""}
            assert (result["note"] is None) == is_same
            assert is_same or "random states are derived" in result["note"]


@pytest.mark.gpu(2)
def test_a_run_on_gpus_goes_on_in_the_other_wrap(models: dict[str, str], tmp_path: Path) -> None:
    """bf16 over NCCL, written beside the training; what is saved again right after resuming is the same bit for bit."""
    dense = {"path": models["dense"], "dtype": "bfloat16"}
    cases = {"DP2": dense, "FSDP2": {**dense, **FSDP}}
    run_ranks(2, "tests.engine.checkpoint.resume_cases:wrote", {"root": str(tmp_path), "cases": cases})
    readers = [("DP2", {**dense, **FSDP}), ("FSDP2", dense), ("FSDP2", {**dense, "tensor": 2, "sequence": True})]
    for result in run_ranks(2, "tests.engine.checkpoint.resume_cases:resumed", {"root": str(tmp_path), "cases": readers})[0]:
        assert not result["differing"]


@pytest.mark.parametrize("case", [{}, FSDP, {"dtype": "bfloat16"}], ids=["ddp", "fsdp", "bfloat16"])
def test_newer_weights_go_on_with_moments_of_a_checkpoint(models: dict[str, str], tmp_path: Path, case: dict[str, Any]) -> None:
    """Weights and learning rate are those of then; main weights of bfloat16 are what was published, not what was trained."""
    arguments = {"path": models["dense"], "root": str(tmp_path), **case}
    for found in run_ranks(2, "tests.engine.checkpoint.resume_cases:newer_weights", arguments):
        assert found["note"] == "resumed with weights of 2 steps after step_00000002, with the older optimizer state"
        own, expected = found["schedule"]
        assert own == expected
        moments = ("steps ", "exp_avg ", "exp_avg_sq ")
        assert all(not name.startswith(moments) for name in found["former"]), "the checkpoint's"
        rounded = ("weight ",) if case.get("dtype") else ()
        assert all(name.startswith((*moments, *rounded)) for name in found["later"]), "the weights are the newer ones"
        assert found["former"] and found["later"] and all(loss > 0 for loss, _ in found["losses"])


def test_the_learning_rate_ends_with_the_run_also_where_batches_have_other_numbers_of_steps(
    models: dict[str, str], tmp_path: Path
) -> None:
    """2 x 2 optimizer steps, 2 of one and 2 x 3: each part sees what is done and what is to come as it is known then."""
    arguments = {"path": models["dense"], "root": str(tmp_path), "parts": [(2, 2), (2, 1), (2, 3)]}
    (found,) = run_ranks(1, "tests.engine.checkpoint.resume_cases:rates", arguments)
    steps, totals = [2, 4, 5, 6, 9, 12], [12, 12, 8, 8, 12, 12]
    expected = [1e-3 * (1 - (step - 1) / total) for step, total in zip(steps, totals, strict=True)]
    assert found == pytest.approx(expected)


def test_a_save_that_fails_on_one_rank_is_reported_on_all_and_leaves_nothing(models: dict[str, str], tmp_path: Path) -> None:
    results = run_ranks(2, "tests.engine.checkpoint.resume_cases:failing_save", {"path": models["dense"], "root": str(tmp_path)})
    for result in results:
        assert "rank 1" in result["reported"]
        assert "differs from the exported tensor" in result["reported"]
        assert "rank 0" not in result["reported"]
        assert result["left"] == [] and result["then"] == ["step_00000002"]
        assert result["hf"] > 1, "each rank has written a part"


def test_first_files_that_cannot_be_written_are_reported_on_all_ranks(models: dict[str, str], tmp_path: Path) -> None:
    arguments = {"path": models["dense"], "root": str(tmp_path)}
    results = run_ranks(2, "tests.engine.checkpoint.resume_cases:early_failures", arguments)
    who = {"random states False": 1, "random states True": 1, "progress": 0, "file": 0, "adapter False": 0, "adapter True": 0}
    for seen in results:
        assert seen.pop("whole") == ""
        assert seen.keys() == who.keys()
        for name, text in seen.items():
            assert text.startswith(f"the checkpoint was not written: rank {who[name]}: "), (name, text)
            assert f"rank {1 - who[name]}" not in text
            words = "NotADirectoryError" if name == "file" else "File too large"
            assert words in text, (name, text)


def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_the_tensor(models: dict[str, str], tmp_path: Path) -> None:
    (seen,) = run_ranks(1, "tests.engine.checkpoint.resume_cases:strictness", {"path": models["dense"], "root": str(tmp_path)})
    name = "decoder.layers.{}.self_attention.linear_qkv.weight"
    expected = {
        "missing": f"1 tensors do not fit: {name.format(1)} is missing",
        "superfluous": f"1 tensors do not fit: {name.format(2)} is not in this model",
        "shape": f"{name.format(1)} has shape",
        "part": f"{name.format(1)}: ",
        "layers": f"{name.format(1)}: the optimizer's weights are not those of the Hugging Face folder",
        "damaged": "index.json: is damaged",
        "older": "has no index.json: a checkpoint of an older version",
    }
    for what, text in expected.items():
        print(seen[what])
        assert text in seen[what], what


def test_a_damage_that_one_rank_meets_is_reported_on_all(models: dict[str, str], tmp_path: Path) -> None:
    """A rank without the message would wait for one that has ended, and report that instead of the file."""
    arguments = {"path": models["dense"], "root": str(tmp_path)}
    zero, one = run_ranks(2, "tests.engine.checkpoint.resume_cases:damages_of_one_rank", arguments)
    print(zero)
    assert zero == one
    assert "the optimizer's weights are not those of the Hugging Face folder" in zero.pop("weight")
    for what, said in zero.items():
        file, how = what.split()
        assert said == "" if how == "whole" else f"{tmp_path / 'step_00000002' / file}: " in said, what


def test_the_former_checkpoint_is_whole_whenever_a_save_is_killed(models: dict[str, str], tmp_path: Path) -> None:
    moments = [0.0, 0.02, 0.05, 0.11]
    arguments = {"path": models["dense"], "root": str(tmp_path), "moments": moments}
    target = "tests.engine.checkpoint.resume_cases:readable_after_kills"
    assert run_ranks(1, target, arguments, alone=True) == [[[]] * len(moments)]
