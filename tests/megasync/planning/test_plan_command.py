"""The command: what fits, what does not and what would, and what a run came to beside its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.config import FAMILIES
from megasync import plan as command
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, with_changes
from megasync.hf.model_shape import SHAPES
from megasync.planning.hardware import hardware, measured, with_memory
from megasync.planning.make import check, make_plan
from megasync.planning.record import RATIO, compare, outcome, warnings_of
from megasync.planning.remedies import nearest, suggest
from megasync.planning.shapes import Request
from megasync.planning.text import show

from tests.megasync.planning.test_planned_memory import BENCH, write_model
from tests.support.tiny_models import SERVED, write_tiny_model


def config_of(folder: Path, shapes: str = "3b", **sections: Any) -> Any:
    model = write_model(folder / "model", SHAPES[shapes].hf_config(8192))
    values: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "model": {"path": str(model)},
        "rollout": {"max_new_tokens": 512, "max_model_len": 1024},
        "data": {"batch_size": 32},
        **sections,
    }
    (folder / "config.yaml").write_text(json.dumps(values))
    return load_config(folder / "config.yaml")


def written_changes(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(": ", 1)[1].split())


def test_the_nearest_change_fits_and_training_takes_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tiny", engine={"wrap": "ddp"}, algorithm={"name": "sft"})
    request = Request(1, with_memory(hardware("h100"), 2_356_000_000), 256.0, lengths=(256,))
    plan = make_plan(config, request)
    assert not plan.fits and "a trainer rank takes" in plan.problems[0]
    assert [plan.problems[0] in line and "megasync plan" in line for line in warnings_of(plan.as_dict())] == [True]
    changes = written_changes(nearest(plan))
    fitting = load_config(tmp_path / "config.yaml", [f"{key}={value}" for key, value in changes.items()])
    check(fitting, 1, on_gpus=True)
    fits = make_plan(fitting, request)
    assert changes and fits.fits and not warnings_of(fits.as_dict())


def test_sums_of_gradients_take_the_bytes_that_they_have(tmp_path: Path) -> None:
    """In each micro-batch a gradient is read, and the sum of those before read and written."""
    taken = []
    for dtype, gradient, size in (("bfloat16", "bfloat16", 6), ("bfloat16", "float32", 10), ("float32", "float32", 12)):
        engine = {"wrap": "ddp", "gradient_dtype": gradient, "tokens_per_microbatch": 256}
        folder = tmp_path / dtype / gradient
        config = with_changes(config_of(folder, engine=engine, algorithm={"name": "sft"}), {"model.dtype": dtype})
        known = replace(hardware("h100"), bandwidth=1.0)  # a byte a second: nothing else is seen beside that
        plan = make_plan(config, Request(1, known, 255.0, prompt_tokens=1, lengths=(255,)))
        taken.append(plan.seconds.train / size)
    assert taken == pytest.approx([taken[0]] * 3, rel=0.01)


def test_suggestions_fit_and_are_no_slower(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, engine={"wrap": "ddp", "recompute": "full"}, rollout={"max_new_tokens": 512, "max_model_len": 1024}
    )
    plan = make_plan(config, Request(3, hardware("h200"), 256.0))
    lines = [line for line in suggest(plan).splitlines() if line[:1].isdigit()]
    assert 1 <= len(lines) <= 3
    for line in lines:
        overrides = [f"{key}={value}" for key, value in written_changes(line).items()]
        changed = load_config(tmp_path / "config.yaml", overrides)
        own = 0 if changed.rollout.is_colocated else changed.rollout.replicas * changed.rollout.tensor_parallel
        check(changed, 4 - own, on_gpus=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(family: str, tmp_path: Path) -> None:
    """On both kinds of devices, also in two stages."""
    path = write_tiny_model(tmp_path / family, family, **(SERVED if family == "deepseek_v3" else {}))
    config = config_of(tmp_path, "tiny", model={"path": str(path), "dtype": "float32"}, algorithm={"name": "sft"})
    held = sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    for machine, stages in (("cpu", 1), ("h100", 2)):
        split = with_changes(config, {"engine.parallel.pipeline": stages})
        plan = make_plan(split, Request(stages, hardware(machine), 64.0, lengths=(64,)))
        assert plan.fits and plan.seconds.step > 0
        assert plan.num_parameters == pytest.approx(held, rel=0.01), "padded vocabularies and counted stages"


def test_a_plan_for_a_cpu_counts_the_canary(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tiny", model={"path": str(tmp_path / "model"), "dtype": "float32"}, data={"batch_size": 2})
    request = Request(1, hardware("cpu"), 64.0)
    plans = [make_plan(with_changes(config, {"sync.canary_tolerance": each}), request) for each in (0.2, 0.0)]
    probed, not_probed = (plan.seconds for plan in plans)
    assert probed.log_probs > not_probed.log_probs > 0 and probed.train == not_probed.train
    assert probed.step == pytest.approx(not_probed.step + probed.log_probs - not_probed.log_probs)


@pytest.mark.parametrize(
    ("shapes", "is_eager", "bound"),
    [
        ("135m", False, "training and generation"),
        ("135m", True, "training and generation"),
        ("7b", True, "generation"),
        ("7b", False, ""),
    ],
)
def test_what_hosts_differ_in_is_told(shapes: str, is_eager: bool, bound: str, tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 512, "max_model_len": 1024, "enforce_eager": is_eager}
    config = config_of(tmp_path, shapes, engine={"tokens_per_microbatch": 8192}, rollout=rollout)
    told = [line for line in show(make_plan(config, Request(2, hardware("h200"), 256.0))).splitlines() if "hosts differ" in line]
    assert [f"binds {bound}:" in line for line in told] == [True] * bool(bound)


def test_a_layout_that_training_refuses_is_refused(tmp_path: Path) -> None:
    config = with_changes(config_of(tmp_path), {"engine.parallel.tensor": 3})
    with pytest.raises(ConfigError, match="does not divide"):
        make_plan(config, Request(3, hardware("h100"), 256.0))


def test_the_command_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path, "tiny", model={"path": str(tmp_path / "model"), "dtype": "float32"})
    file = str(tmp_path / "config.yaml")
    assert command.main([file, "--gpu", "h100", "--gpus", "2", "--json", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("weights", "KV cache", "activations", "binds", "tokens a day", "fits"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["predicted"]["memory/tensors_peak_bytes"] == found["trainer"][0]["tensors_peak_bytes"]
    assert found["version_log"] == {"host_bytes": 0, "disk_bytes": 0} and "former versions" not in said
    assert command.main([file, "sync.log=deltas", "--gpu", "h100", "--gpus", "2", "--json", str(tmp_path / "logged.json")]) == 0
    logged, weights = json.loads((tmp_path / "logged.json").read_text()), found["parameters"] * 4
    assert "kept of former versions, GiB:" in capsys.readouterr().out and logged["version_log"]["host_bytes"] == weights
    more = logged["predicted"]["memory/host_peak_bytes"] - found["predicted"]["memory/host_peak_bytes"]
    assert more == weights < logged["version_log"]["disk_bytes"]
    assert command.main([file, "rollout.gpu_memory_utilization=0.004", "--gpu", "h100", "--gpus", "2"]) == 1
    said = capsys.readouterr().out
    assert "KV cache holds" in said and "rollout.gpu_memory_utilization=0." in said
    with pytest.raises(SystemExit) as stopped:
        command.main([file, "--gpu", "h100", "--gpus", "1"])
    assert stopped.value.code == 2
    assert "leave no GPU for the trainer" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "options", "lengths"), [
    ("sft", [], (6, [3, 3, 4, 5])),
    ("sft", ["--mean-response-tokens", "20"], (6, [])),
    ("sft", ["--mean-prompt-tokens", "50"], (50, [3, 3, 4, 5])),
    ("grpo", [], (6, [])),
    ("sft", ["data.train=/nowhere.jsonl"], (128, [])),
])  # fmt: skip
def test_lengths_are_those_of_the_data(
    name: str, options: list[str], lengths: tuple[int, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tokens that are characters, and the end behind each answer."""
    model = write_tiny_model(tmp_path / "model", "qwen3")
    pairs = ("12+30=", "42"), ("90-79=", "11"), ("99+30=", "129"), ("99+99=", "0198")
    lines = "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in pairs)
    (tmp_path / "train.jsonl").write_text(lines)
    values = {"run": {"dir": str(tmp_path)}, "model": {"path": str(model), "dtype": "float32"}, "algorithm": {"name": name}}
    values |= {"data": {"train": str(tmp_path / "train.jsonl"), "batch_size": 4}, "rollout": {"max_new_tokens": 64}}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    where = ["--gpu", "h100", "--gpus", "2", "--json", str(tmp_path / "plan.json")]
    assert command.main([str(tmp_path / "config.yaml"), *where, *options]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["prompt_tokens"], found["response_lengths"]) == lengths
    assert capsys.readouterr().out.startswith(f"mean lengths: {lengths[0]} tokens of a prompt, ")


@pytest.mark.parametrize(("path", "told"), [("/nowhere/model", "there is no such folder"), ('""', "model.path is not set")])
def test_a_missing_model_is_named(path: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["configs/grpo_gpu.yaml", f"model.path={path}", "--gpu", "h100"])
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_what_a_run_took_stands_beside_its_plan(tmp_path: Path) -> None:
    predicted = {"memory/tensors_peak_bytes": 2**30, "step/seconds": 2.0, "train": 1.0, "sync/seconds": None}
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": predicted}))
    steps = [{"step": n, "step/seconds": [9.0, 1.0, 1.0][n], "memory/tensors_peak_bytes": 2**29 * (n + 1)} for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    spans = [{"ph": "X", "name": "train", "dur": micros} for micros in (8e6, 5e5, 5e5)]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": spans}))
    found = {name.removeprefix(RATIO): ratio for name, ratio in outcome(tmp_path, {}).items()}
    assert found == {"memory/tensors_peak_bytes": pytest.approx(2 / 3), "step/seconds": 2.0, "train": 2.0}
    assert "0.67" in compare(tmp_path) and "sync/seconds" not in compare(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no plan\.json"):
        compare(tmp_path / "other")


def test_every_measured_number_says_where_it_is_from() -> None:
    known = {path.relative_to(BENCH).as_posix() for path in BENCH.glob("**/*.json")}
    for section in ("shares", "seconds", "launches", "units", "bytes"):
        for name, entry in measured()[section].items():
            files = [file for file in entry["from"] if file.endswith(".json")]
            assert entry["from"] and entry["of"] and set(files) <= known, name
