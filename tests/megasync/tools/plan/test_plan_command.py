"""The command: memory that fits and that does not, lengths, and a run beside its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.config import FAMILIES, LATENT_FAMILIES
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, with_changes
from megasync.models.model_shape import SHAPES
from megasync.report.log import TRAINING_DEVICE, WORKER_DEVICE
from megasync.tools.plan import command
from megasync.tools.plan.hardware import hardware, measured, num_bytes
from megasync.tools.plan.layout import Request
from megasync.tools.plan.make import make_plan
from megasync.tools.plan.run_comparison import measured_of
from megasync.tools.plan.text import KEYS

from tests.megasync.tools.plan.recorded import RECORDED
from tests.megasync.tools.plan.test_planned_memory import write_model
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


def test_sums_of_gradients_take_the_bytes_that_they_have(tmp_path: Path) -> None:
    """In each micro-batch a gradient is read, and the sum of those before read and written."""
    taken = []
    for dtype, gradient, size in (("bfloat16", "bfloat16", 6), ("bfloat16", "float32", 10), ("float32", "float32", 12)):
        engine = {"wrap": "ddp", "gradient_dtype": gradient, "tokens_per_microbatch": 256}
        folder = tmp_path / dtype / gradient
        config = with_changes(config_of(folder, engine=engine, algorithm={"name": "sft"}), {"model.dtype": dtype})
        known = replace(hardware("h100"), bandwidth=1.0)  # a byte a second: nothing else is seen beside that
        plan = make_plan(config, Request(1, known, 255.0, prompt_tokens=1, lengths=(255,)))
        assert plan.seconds
        taken.append(plan.seconds.train / size)
    assert taken == pytest.approx([taken[0]] * 3, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(family: str, tmp_path: Path) -> None:
    """In one stage, and in two."""
    path = write_tiny_model(tmp_path / family, family, **(SERVED if family in LATENT_FAMILIES else {}))
    config = config_of(tmp_path, "tiny", model={"path": str(path), "dtype": "float32"}, algorithm={"name": "sft"})
    held = sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    for stages in (1, 2):
        split = with_changes(config, {"engine.parallel.pipeline": stages})
        request = Request(stages, hardware("h100"), 64.0, lengths=(64,))
        plan = make_plan(split, request)
        assert not plan.problems
        assert plan.num_parameters == pytest.approx(held, rel=0.01), "padded vocabularies and counted stages"


def test_a_layout_that_training_refuses_is_refused(tmp_path: Path) -> None:
    config = with_changes(config_of(tmp_path), {"engine.parallel.tensor": 3})
    with pytest.raises(ConfigError, match="does not divide"):
        make_plan(config, Request(3, hardware("h100"), 256.0))


def test_a_gpu_has_the_memory_of_all_that_share_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"max_new_tokens": 512, "max_model_len": 1024, "kv_cache_bytes": "4GiB"})
    shared = with_changes(config, {"rollout.placement": "colocated"})
    apart, together = (make_plan(each, Request(1, hardware("h200"), 128.0)) for each in (config, shared))
    first, worker = apart.stages[0].memory, apart.worker
    assert worker is not None and TRAINING_DEVICE not in apart.predicted
    assert (apart.predicted["memory/device_bytes"], apart.predicted[WORKER_DEVICE]) == (first.device, worker.total)
    predicted, worker, parts = together.predicted, together.worker, together.stages[0].memory.parts
    assert worker is not None
    assert predicted[TRAINING_DEVICE] == together.stages[0].memory.device + worker.asleep
    assert predicted["memory/device_bytes"] == predicted[WORKER_DEVICE] > worker.total
    stays = with_changes(shared, {"rollout.offload_trainer": ["optimizer"]})
    more = make_plan(stays, Request(1, hardware("h200"), 128.0)).predicted
    assert more[WORKER_DEVICE] == predicted[WORKER_DEVICE] + parts["weights"] + parts["gradients"]


def test_a_checkpoint_is_in_host_memory_file_by_file_or_as_a_whole(tmp_path: Path) -> None:
    """Beside the process with its model; a large model takes more while it is loaded."""
    config = config_of(tmp_path, rollout={"max_new_tokens": 512, "max_model_len": 1024}, engine={"wrap": "ddp"})
    request, hosts = Request(1, hardware("h200"), 128.0), []
    for changes in ({}, {"checkpoint.every_steps": 5}, {"checkpoint.every_steps": 5, "checkpoint.asynchronous": True}):
        memory = make_plan(with_changes(config, changes), request).stages[0].memory
        hosts.append(memory.host)
    assert hosts[0] == num_bytes("host_loading") + memory.parts["weights"]
    assert hosts[1] == max(hosts[0], num_bytes("host_rank") + 2**29 + 2**32)
    assert hosts[2] == num_bytes("host_rank") + memory.parts["weights"] + memory.parts["optimizer"]


def test_a_reference_is_a_copy_of_the_weights_unless_adapters_are_switched_off_for_it(tmp_path: Path) -> None:
    config, request = config_of(tmp_path, "tiny", algorithm={"kl_coefficient": 0.1}), Request(1, hardware("h100"), 128.0)
    changes: list[dict[str, Any]] = [{}, {"engine.lora.rank": 8}, {"algorithm.kl_coefficient": 0.0}]
    parts = [make_plan(with_changes(config, change), request).stages[0].memory.parts for change in changes]
    assert parts[0]["reference"] == parts[0]["weights"] > 0
    assert ["reference" in each for each in parts] == [True, False, False]


def test_the_command_prints_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path, "tiny", model={"path": str(tmp_path / "model"), "dtype": "float32"})
    file, gpus = str(tmp_path / "config.yaml"), ["--gpu", "h100", "--gpus", "2"]
    assert command.main([file, *gpus, "--json", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("weights", "KV cache", "activations", "takes the longest", "tokens a day", "fits"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["predicted"]["memory/tensors_peak_bytes"] == max(found["trainer"][0][name] for name in ("passes", "step"))
    assert command.main([file, "sync.log=deltas", *gpus, "--json", str(tmp_path / "logged.json")]) == 0
    logged, weights = json.loads((tmp_path / "logged.json").read_text()), found["parameters"] * 4
    more = logged["predicted"]["memory/host_peak_bytes"] - found["predicted"]["memory/host_peak_bytes"]
    assert more == weights
    with pytest.raises(SystemExit) as refused:
        command.main([file])
    assert refused.value.code == 2 and "--gpu h100" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--mean-prompt-tokens", "-3"], ["--mean-prompt-tokens", "0"]])
def test_numbers_below_one_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["config.yaml", *flags])
    assert refused.value.code == 2 and " ".join(flags) in capsys.readouterr().err


def test_the_largest_parts_of_a_misfit_have_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path, engine={"wrap": "ddp"})
    assert command.main([str(tmp_path / "config.yaml"), "--gpu", "h100", "--gpus", "2"]) == 1
    problem = capsys.readouterr().out.partition("does not fit: a trainer rank takes")[2]
    assert [part for part in KEYS if f"{part}  " in problem and KEYS[part] in problem] == [
        "gradients",
        "optimizer",
        "activations",
    ]
    with pytest.raises(SystemExit) as stopped:
        command.main([str(tmp_path / "config.yaml"), "--gpu", "h100", "--gpus", "1"])
    assert stopped.value.code == 2 and "leave no GPU for the trainer" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "options", "lengths"), [
    ("sft", [], (6, [3, 3, 4, 5])),
    ("sft", ["--mean-response-tokens", "20"], (6, [])),
    ("sft", ["--mean-prompt-tokens", "50"], (50, [3, 3, 4, 5])),
    ("grpo", [], (6, [])),
    ("sft", ["data.train=/nowhere.jsonl"], (128, [])),
])  # fmt: skip
def test_lengths_are_those_of_the_data(name: str, options: list[str], lengths: tuple[int, list[int]], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("path", "error"), [("/nowhere/model", "there is no such folder"), ('""', "model.path is not set")])
def test_a_missing_model_is_named(path: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["configs/grpo_gpu.yaml", f"model.path={path}", "--gpu", "h100"])
    assert end.value.code == 2 and error in capsys.readouterr().err


def test_a_run_is_compared_with_the_plan_of_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peaks of all steps; medians without the first step, and lengths of responses from the metrics."""
    config_of(tmp_path, "tiny", model={"path": str(tmp_path / "model"), "dtype": "float32"})
    columns = [
        ("step/seconds", [9.0, 1.0, 2.0]),
        ("memory/tensors_peak_bytes", [1, 3, 2]),
        ("response/tokens_mean", [90, 90, 90]),
    ]
    steps = [{"step": number, **{name: values[number] for name, values in columns}} for number in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (tmp_path / "summary.json").write_text(json.dumps({WORKER_DEVICE: 5}))
    spans = [{"ph": "X", "name": "train", "dur": micros} for micros in (8e6, 5e5, 5e5)]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": spans}))
    assert measured_of(tmp_path) == {"memory/tensors_peak_bytes": 3, "step/seconds": 1.5, "train": 0.5, WORKER_DEVICE: 5}
    assert command.main(["--compare", str(tmp_path), "--gpu", "h100", "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("90 of a response")
    assert {line.split()[0] for line in lines[2:]} == {"memory/tensors_peak_bytes", "step/seconds", "train", WORKER_DEVICE}
    with pytest.raises(SystemExit) as end:
        command.main(["--compare", str(tmp_path / "other"), "--gpu", "h100"])
    assert end.value.code == 2


def test_every_constant_has_its_source() -> None:
    """A case of docs/bench; `kernels_h200` was a program of which no lines were kept."""
    files = (RECORDED, RECORDED.with_name("benchmarks.jsonl"))
    cases = {json.loads(line)["case"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    for name, entry in {**measured()["constants"], **measured()["bytes"]}.items():
        where, _, _ = entry["source"].partition(":")
        for word in where.replace("plan.jsonl, ", "").split(", "):
            assert word in cases or word.startswith(("quickstart", "kernels_h200")), (name, word)
