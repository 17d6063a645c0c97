"""Whole runs through the commands that users type: resumed and killed, through Ray with shared devices until a reward raises.

The first is on tables of messages, with sampling keys and several evaluation sets.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bridge.versions.reader import VersionReader
from megasync import cli
from megasync.tools.evaluate import command as evaluate
from megasync.tools.export import command as export
from megasync.tools.generate import command as generate
from megasync.config.load import load_config
from megasync.models.tensors import num_parameters
from megasync.tools.doctor.system import bytes_below, disk_bytes, log_bytes
from megasync.report.log import read_evaluations, read_samples, read_summary
from megasync.report.log import WORKER_DEVICE, WORKER_PEAK
from megasync.run.step_log import PHASES
from megasync.tools.serving.replicas import replicas
from megasync.tools.serving.source import find_source
from tests.runs.table_cases import BUFFER, STOPS, table_config
from tests.runs.train_cases import (
    SUBMIT,
    TORCHRUN,
    break_rewards,
    cut_off_copy,
    endless_run,
    exact,
    far_listeners,
    launch,
    metrics,
    assert_metrics_have_rows,
    processes_with,
)
from tests.support.processes import command_of

pytestmark = pytest.mark.vllm_on_cpu
UNASKED = "rollout.engine_arguments=null"  # vLLM takes seconds to say whether it takes some (checks/data.py)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of six steps under Megatron-FSDP on two ranks: its run folder, and what it said."""
    folder = tmp_path_factory.mktemp("first")
    done = launch(table_config(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "run", done.stdout


@pytest.fixture(scope="module")
def first_run(first_start: tuple[Path, str]) -> Path:
    return first_start[0]


def test_a_run_says_what_it_will_do_and_where_its_results_are(first_start: tuple[Path, str]) -> None:
    folder, said = first_start
    lines = said.splitlines()
    begin = lines.index("megasync: grpo run 'run'")
    seen = dict(re.findall(r"^  ([\w ]+): +(.*)$", "\n".join(lines[begin + 1 : begin + 11]), flags=re.MULTILINE))
    assert "qwen3, 496 k parameters, float32" in seen["model"] and seen["layout"] == "2 ranks (data 2), wrap megatron_fsdp"
    assert "8 prompts x 4 samples a step, up to 8 tokens" in seen["rollouts"] and seen["reward"] == "token_count"
    counts = "data.train has 200 examples; data.eval.small has 2 examples; data.eval.sums has 12 examples"
    assert seen["data"] == counts
    assert re.fullmatch(r"'xyz \d+\+\d+=' \(\d+ tokens; answer '\d+'\)", seen["first prompt"])
    assert seen["folder"] == str(folder) and seen["resumes"] == "nothing: from the weights of model.path"
    assert seen["will do"] == "steps 1 to 6; evaluation every 3 steps, after the last; checkpoint every 3 steps, after the last"
    done, places = lines[-2:]
    assert re.fullmatch(r"done: 6 steps, \d+ s", done)
    assert (
        places == f"report: {folder}/report.html; figures: {folder}/summary.json; checkpoint: {folder}/checkpoints/step_00000006"
    )


def test_a_finished_run_says_so_before_anything_is_started(first_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(first_run.parents[1] / "config.yaml")
    more = "for more of them write run.steps=NUMBER, for another run run.name=NAME"
    for command in (["train", config], ["train", "--check", config], ["submit", config]):
        assert cli.main([*command, UNASKED]) == 0
        assert capsys.readouterr().out == f"{first_run}: all 6 steps are done; {more}\n"


def test_check_says_what_would_start_and_refuses_what_the_checkpoint_does_not_fit(
    first_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, before = first_run.parents[1] / "config.yaml", sorted(first_run.parent.rglob("*"))
    check = ["train", "--check", str(config), UNASKED, "run.steps=8"]
    assert cli.main(check) == 0
    said = capsys.readouterr().out
    assert f"from {first_run}/checkpoints/step_00000006\n" in said and "steps 7 to 8; " in said
    for override, words in (("engine.lora.rank=4", "lora_rank is 4, the checkpoint has 0"), ("model.dtype=bfloat16", "dtype is")):
        with pytest.raises(SystemExit) as left:
            cli.main([*check, override])
        said = capsys.readouterr().err
        assert left.value.code == 2 and words in said and "checkpoint.resume=never" in said, said
    assert cli.main([*check, "run.name=another", "run.dir=" + str(first_run.parent / "new")]) == 0
    assert sorted(first_run.parent.rglob("*")) == before, "nothing was written"


def test_a_run_leaves_what_the_design_names(first_run: Path) -> None:
    lines = metrics(first_run)
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == list(range(1, 7))
    assert all(abs(line["ratio/first_minibatch_mean"] - 1) < 1e-6 for line in lines)
    assert all(line["logprob_gap/max"] > 1e-3 for line in lines), "vLLM's are above ours by what top_k and min_p left out"
    assert all(line["staleness/max"] == 0 and line["sync/verified"] == 1 for line in lines)
    assert any(line["loss/policy"] != 0 for line in lines) and all(line["grad_norm"] > 0 for line in lines)
    for key in ("sync/seconds", "sync/bytes", "sync/gb_per_second", "sync/pause_seconds", "step/seconds"):
        assert all(line[key] > 0 for line in lines), key
    for name in ("config.yaml", "timeline.json", "report.html", "summary.json"):
        assert (first_run / name).stat().st_size > 0
    assert list(first_run.glob("events.out.tfevents.*"))
    assert sorted(p.name for p in (first_run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    summary = json.loads((first_run / "summary.json").read_text())
    assert summary["num_syncs"] == 7
    assert summary[WORKER_PEAK] > 0
    assert WORKER_DEVICE not in summary, "there is no GPU"


def test_every_version_is_in_the_runs_log(first_run: Path, tmp_path: Path) -> None:
    log = VersionReader(first_run / "versions")
    assert log.versions == list(range(7))
    assert [len(log.chain(version, 0)) for version in log.versions] == [1, 2, 3, 4, 1, 2, 3]
    for step in (3, 6):
        assert same_weights(dict(log.tensors(step)), load_file(first_run / f"checkpoints/step_{step:08d}/hf/model.safetensors"))
    assert export.main([str(first_run), "--to", str(tmp_path / "model"), "--version", "5"]) == 0
    assert same_weights(dict(log.tensors(5)), load_file(tmp_path / "model" / "model.safetensors"))
    assert load_config(first_run / "config.yaml").sync.log == "deltas" and (tmp_path / "model" / "config.json").is_file()
    lines = metrics(first_run)
    assert all(line["sync/log_bytes"] > 0 and line["sync/log_seconds"] > 0 for line in lines)
    assert [0 < line.get("sync/changed_fraction", -1) <= 1 for line in lines] == [True, True, True, False, True, True]


def same_weights(own: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)


def test_every_metric_has_a_row_in_the_table(first_run: Path) -> None:
    """That docs/metrics.md and the report's names are made of: megasync/report/registry.py."""
    assert_metrics_have_rows([*metrics(first_run), *read_evaluations(first_run)], at_least=45)


def test_the_phases_of_a_run_add_up_to_its_wall_time(first_run: Path) -> None:
    lines, summary = metrics(first_run), read_summary(first_run)
    for line in lines:
        phases = {key: value for key, value in line.items() if key.startswith("step/") and key != "step/seconds"}
        assert set(phases) == {f"step/{name}_seconds" for name in (*PHASES, "other")}
        assert sum(phases.values()) == pytest.approx(line["step/seconds"]) and min(phases.values()) >= 0
    is_after_3 = [line["step/evaluation_seconds"] > 0 and line["step/checkpoint_seconds"] > 0 for line in lines]
    assert is_after_3 == [False, False, False, True, False, False], "what follows step 3 is in the next line"
    assert sum(line["step/seconds"] for line in lines) == pytest.approx(summary["seconds_steps"])
    parts = [summary[f"seconds_{part}"] for part in ("start", "steps", "end")]
    assert sum(parts) == pytest.approx(summary["seconds_total"]) and min(parts) > 0


def test_sets_are_evaluated_when_due_and_not_at_the_start(first_run: Path) -> None:
    lines = read_evaluations(first_run)
    assert [line["step"] for line in lines] == [3, 6]
    keys = {"step", "eval/sums/truncated", "eval/small/truncated", "eval/small/avg@1", "eval/small/pass@1"}
    keys |= {"eval/sums/error", "eval/small/error"}
    assert set(lines[0]) == keys | {f"eval/sums/{name}" for name in ("avg@3", "pass@1", "pass@2", "pass@3")}
    assert all(0 <= value <= 1 for line in lines for key, value in line.items() if key != "step")
    summary = read_summary(first_run)
    assert summary["eval/sums/pass@3"] == lines[-1]["eval/sums/pass@3"] and "eval_reward_after" not in summary


def test_samples_show_what_the_model_got_and_gave(first_run: Path) -> None:
    lines = read_samples(first_run)
    by_set: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_set.setdefault(line["set"], []).append(line)
    assert {name: len(found) for name, found in by_set.items()} == {"train": 6 * 8, "sums": 2 * 8, "small": 2 * 2}
    assert [line["step"] for line in by_set["train"]] == [step for step in range(1, 7) for _ in range(8)]
    largest = {line["step"]: line["logprob_gap/max"] for line in metrics(first_run)}
    for line in by_set["train"]:
        assert line["prompt"].startswith("xyz ") and line["prompt"].endswith("=") and "+" in line["prompt"]
        assert line["versions"] == [line["step"] - 1] * 2 and line["reward"] == line["tokens"] / 8
        assert line["version_runs"] == [[line["step"] - 1, line["tokens"]]]
        assert "".join(line["token_texts"]).removesuffix("<eos>") == line["response"]
        assert len(line["token_texts"]) == line["tokens"]
        both = zip(line["trainer_log_probs"], line["rollout_log_probs"], strict=True)
        assert max(abs(trainer - rollout) for trainer, rollout in both) < largest[line["step"]] + 1e-3
        left, right = line["prompt"].removeprefix("xyz ").removesuffix("=").split("+")
        assert int(left) + int(right) == int(line["answer"])
        ends = [line["response"].index(stop) + len(stop) for stop in STOPS if stop in line["response"]]
        if ends:
            assert min(ends) == len(line["response"]) and line["finish_reason"] == "stop"
        else:
            assert line["tokens"] == 8 or line["finish_reason"] == "stop"
    assert any(stop in line["response"] for stop in STOPS for line in by_set["train"])
    assert all(line["tokens"] <= 5 for line in by_set["sums"])


def test_rewards_are_shown_as_given_and_beside_them_what_the_penalty_for_length_takes(first_run: Path) -> None:
    lines = [line for line in read_samples(first_run) if line["set"] == "train"]
    assert all(line["penalty"] == -max(0, line["tokens"] - (8 - BUFFER)) / BUFFER for line in lines)
    for step in metrics(first_run):
        assert step["reward/mean"] == pytest.approx(step["response/tokens_mean"] / 8)
        assert -1 <= step["reward/penalty_mean"] <= -max(0, step["response/tokens_mean"] - (8 - BUFFER)) / BUFFER + 1e-9


def test_checkpoints_take_what_doctor_expects(first_run: Path) -> None:
    config = load_config(first_run / "config.yaml")
    parameters = num_parameters(Path(config.model.path))
    expected = disk_bytes(config, parameters) - log_bytes(config, parameters)
    assert bytes_below(first_run / "checkpoints") == pytest.approx(expected, rel=0.05)


@pytest.mark.long
def test_evaluate_and_generate_find_what_the_run_found(
    first_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its last checkpoint: each set's metrics, sampled ones too, and the same responses."""
    own = {f"{line['set']} {line['prompt']}": line for line in read_samples(first_run) if line["step"] == 6}
    with replicas(find_source(first_run, tmp_path, None, []).config) as pool:

        def said(command: Any, *arguments: str) -> str:
            capsys.readouterr()
            assert command.main([str(first_run), *arguments], serve=lambda _: nullcontext(pool)) == 0
            return capsys.readouterr().out

        found = json.loads(said(evaluate, "--json", "--to", str(tmp_path / "answers.jsonl")))
        small = str(first_run.parents[1] / "small.jsonl")
        generated = said(generate, "--data", small, "data.prompt_key=q").splitlines()
        greedy = said(evaluate, "--data", small, "data.prompt_key=q", "data.answer_key=a", "--samples", "1")
    expected = read_evaluations(first_run)[-1]
    assert found["sets"].keys() == {"sums", "small"} and found["weights"].endswith("step_00000006")
    for name, values in found["sets"].items():
        metrics = {f"eval/{name}/{metric}": value["mean"] for metric, value in values.items() if "@" in metric}
        metrics[f"eval/{name}/truncated"] = values["truncated"]
        (of_prompts,) = (value for metric, value in values.items() if metric.startswith("avg@"))
        metrics[f"eval/{name}/error"] = (of_prompts["high"] - of_prompts["mean"]) / NormalDist().inv_cdf(0.975)
        assert metrics == pytest.approx({key: value for key, value in expected.items() if key.startswith(f"eval/{name}/")})
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 12 * 3 + 2
    firsts = {f"{line['set']} {line['prompt']}": line for line in answers if line["sample"] == 0}
    assert own.keys() <= firsts.keys() | {key for key in own if key.startswith("train ")}
    for key, line in firsts.items():
        same = ("response", "answer", "reward", "tokens", "finish_reason")
        assert key not in own or {name: line[name] for name in same} == {name: own[key][name] for name in same}
    assert [json.loads(line)["response"] for line in generated] == [a["response"] for a in answers if a["set"] == "small"]
    assert f"avg@1    {found['sets']['small']['avg@1']['mean']:.4f}  [" in greedy


def test_a_resumed_run_has_each_sample_and_evaluation_once_until_a_rank_is_killed(
    first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on for ever, so that it is cut off in the midst of its work. Ray starts all of its processes (sitecustomize.py)."""
    monkeypatch.delenv("PYTHONPATH")
    copy = cut_off_copy(first_run, tmp_path)
    with endless_run(TORCHRUN, table_config(tmp_path), "--nproc", "2") as run:
        run.wait_for(7)
        assert far_listeners(run.marker) == []
        assert any("log_monitor" in command_of(process) for process in processes_with(run.marker))
        run.ranks()[0].kill()
    said = run.said.read_text()
    assert run.process.returncode == 1, said
    cause, report, newest, again = said.splitlines()[-4:]
    assert "`megasync doctor CONFIG`" in cause.partition("rank 0 was ended by SIGKILL: ")[2]  # behind a library's unended line
    assert report == f"report: {copy}/report.html" and (copy / "report.html").stat().st_size > 0
    assert f"from {copy}/checkpoints/step_00000003" in said
    assert (newest[:19], again[:15]) == ("newest checkpoint: ", "go on from it: ")
    checkpoints = {p.name for p in (copy / "checkpoints").iterdir()}
    assert {"step_00000003", "step_00000006"} <= checkpoints and ".partial_step_00000006" not in checkpoints
    assert exact(copy)[:6] == exact(first_run)
    assert [line["step"] for line in read_evaluations(copy)][:2] == [3, 6]
    log, former = VersionReader(copy / "versions"), VersionReader(first_run / "versions")
    assert all(log.digests(version) == former.digests(version) for version in range(7))
    assert [len(log.chain(version, 0)) for version in range(7)] == [1, 2, 3, 1, 2, 3, 4], "the checkpoint's is whole"

    def places(folder: Path) -> list[tuple[int, str, str]]:
        lines = [line for line in read_samples(folder) if line["step"] <= 6]  # the steps of the first run
        return sorted((line["step"], line["set"], line["prompt"]) for line in lines)

    assert places(copy) == places(first_run)
    trained = Counter(line["step"] for line in read_samples(copy) if line["set"] == "train")
    assert set(trained.values()) == {8}, f"those of the step that was cut off are with another: {trained}"


def test_through_ray_and_colocated_the_same_bit_for_bit_until_a_reward_raises(first_run: Path, tmp_path: Path) -> None:
    """Whoever starts the ranks, and whoever has the devices."""
    overrides = ("rollout.reward=tests.runs.train_cases:breaking_reward", "rollout.placement=colocated", "sync.transport=ipc")
    with endless_run(SUBMIT, table_config(tmp_path), *overrides) as run:
        run.wait_for(6)
        assert far_listeners(run.marker) == []
        break_rewards(tmp_path)
    said = run.said.read_text()
    assert run.process.returncode == 1, said
    done = exact(tmp_path / "runs" / "run")
    assert done[:6] == exact(first_run)
    newest = max(path.name for path in (tmp_path / "runs" / "run" / "checkpoints").iterdir())
    assert newest == f"step_{len(done):08}", "the steps before it are not lost"
    reward = "tests.runs.train_cases:breaking_reward"
    seen = (f"the reward {reward} raised RuntimeError: broken on purpose", "data line: ", "response: ")
    assert all(words in said for words in seen) and "in breaking_reward" in said, said
