"""A run one step off whose rewards fail, and how runs end: wrong input, a loss that is not finite, the accuracy wanted, a
launcher that is killed.

    python -m pytest tests/runs/test_unsteady_run.py
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megasync import cli
from megasync.report.advisories import advisories
from megasync.report.log import read_evaluations
from tests.runs.train_cases import (
    ROOT,
    SUBMIT,
    TORCHRUN,
    Run,
    environment,
    launch,
    left_running,
    metrics,
    processes_with,
    train,
    write_config,
    assert_metrics_have_rows,
)
from tests.support.processes import name_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]


@pytest.mark.parametrize("command", [TORCHRUN, SUBMIT], ids=["torchrun", "submit"])
def test_all_processes_end_with_a_launcher_that_is_killed(command: list[str], tmp_path: Path) -> None:
    """Ranks, Ray, vLLM and rewards, within 30 seconds."""
    config = write_config(tmp_path, rollout={"reward": "tests.runs.train_cases:breaking_reward"})
    own = environment(config, MEGASYNC_TEST_MARKER=tmp_path.name)
    with (tmp_path / "said").open("wb") as output:
        launcher = subprocess.Popen([*command, str(config), "run.steps=100000"], cwd=ROOT, env=own, stdout=output, stderr=output)
        run = Run(launcher, tmp_path / "runs" / "run", tmp_path.name, tmp_path / "said")
        try:
            run.wait_for(2)
            names = {name_of(process) for process in processes_with(run.marker)}
            assert any("raylet" in name for name in names) and any("EngineCor" in name for name in names), names
        finally:
            launcher.kill()
            launcher.wait()
    assert left_running(run.marker) == []


TROUBLED = "tests.runs.train_cases:troubled_reward"


@pytest.fixture(scope="module")
def unsteady_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run one step off, and what it said. For each batch a reward returns NaN, has its process killed, hangs or raises.

    With weights for its staler tokens, by sequence, and without the responses that are cut off.
    """
    folder = tmp_path_factory.mktemp("unsteady")
    rewards = {"reward": {"token_count": 1.0, TROUBLED: 0.5}, "reward_on_failure": "zero", "reward_timeout_seconds": 1}
    config = write_config(
        folder,
        engine={"wrap": "ddp", "optimizer": {"learning_rate": 1e-5}},  # or no response would end by itself in the end
        rollout={"max_staleness": 1, **rewards},
        algorithm={"importance_level": "sequence", "truncated": "mask", "loss_aggregation": "constant_length"},
        data={"shuffle": False},
        checkpoint={"every_steps": 0},
    )
    code, said = train(config, ranks=1)
    assert code == 0, said
    return folder / "runs" / "run", said


def test_rewards_that_fail_are_worth_0_and_counted(unsteady_run: tuple[Path, str]) -> None:
    folder, said = unsteady_run
    lines = metrics(folder)
    assert sum(line["reward/failures"] for line in lines) == 4 * 6, "a group that is late is in the next batch"
    for line in lines:
        assert line[f"reward/{TROUBLED}"] == 1 - line["reward/failures"] / 32
        assert abs(line["reward/mean"] - line["reward/token_count"] - line[f"reward/{TROUBLED}"] / 2) < 1e-9
    kinds = {8: "returned nan", 16: "had its process killed by SIGKILL", 24: "took longer", 32: "raised KeyError"}
    for line, words in kinds.items():
        assert re.search(rf"the reward {TROUBLED} {words}.*\n  data line: {line}\n", said), said


def test_the_end_of_a_run_advises(unsteady_run: tuple[Path, str]) -> None:
    folder, said = unsteady_run
    lines = metrics(folder)
    assert "reward_failures" in [each.name for each in advisories(lines)]
    num_steps = sum(line["reward/failures"] > 0 for line in lines)  # 6, or fewer where groups were late
    assert f"advisory: Calls of the reward fail and count as 0: 24 calls in {num_steps} of 6 steps\n  try: " in said
    assert "Calls of the reward fail and count as 0" in (folder / "report.html").read_text()


def test_every_metric_has_a_row_in_the_table(unsteady_run: tuple[Path, str]) -> None:
    """As those of test_train.py."""
    assert_metrics_have_rows([*metrics(unsteady_run[0]), *read_evaluations(unsteady_run[0])], at_least=35)


def test_one_step_off_generates_under_training(unsteady_run: tuple[Path, str]) -> None:
    folder, _ = unsteady_run
    lines = metrics(folder)
    assert [line["staleness/max"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert lines[0]["logprob_gap/max"] < 1e-4
    for line in lines:
        assert 0 < line["response/truncated_fraction"] < 1
        cut_off = 32 * 8 * line["response/truncated_fraction"]
        assert line["train/response_tokens"] == pytest.approx(32 * line["response/tokens_mean"] - cut_off)
        assert 0.9 < line["importance/ess"] <= 1 and line["entropy/mean"] > 0
    events = json.loads((folder / "timeline.json").read_text())
    spans = [event for event in events["traceEvents"] if event["ph"] == "X"]
    rollouts = {e["args"]["step"]: e for e in spans if e["name"] == "rollout"}
    trains = {e["args"]["step"]: e for e in spans if e["name"] in ("log-probs", "train")}
    under = [s for s in range(1, 6) if rollouts[s + 1]["ts"] < trains[s]["ts"] + trains[s]["dur"]]
    assert under == list(range(1, 6)), "batch s + 1 begins before step s has trained"


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        engine={"optimizer": {"learning_rate": 1e30, "clip_grad_norm": 0.0}},
        algorithm={"name": "sft", "num_minibatches": 1},
        checkpoint={"every_steps": 1},
    )
    code, said = train(config)
    assert code == 1, said
    assert "is not finite" in said and "step " in said and "rank(s)" in said
    assert "newest checkpoint: " in said


def test_bad_input_is_one_screen_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the launcher, which makes the check that `train --check` makes."""
    config = write_config(tmp_path)
    for override, reported in {
        "engine.warp=ddp": "engine.wrap",
        "engine.wrap=fsdp2": "megatron_fsdp",
        "run.steps=many": "run.steps",
        "sync.bucket_bytes=0": "sync.bucket_bytes",
        "model.path=/nowhere": "/nowhere",
    }.items():
        with pytest.raises(SystemExit) as left:
            cli.main(["train", "--check", str(config), override])
        said = capsys.readouterr().err
        assert left.value.code == 2 and reported in said and len(said.splitlines()) < 25, said
    done = launch(config, "engine.parallel.tensor=3")
    assert done.returncode == 2
    assert "engine.parallel.tensor" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 25


def test_an_unknown_override_of_the_wrap_is_named(tmp_path: Path) -> None:
    done = launch(write_config(tmp_path), "engine.overrides.bucket_sizes=1000", ranks=1)
    assert done.returncode != 0
    assert "engine.overrides.bucket_sizes" in done.stderr and "bucket_size" in done.stderr


def test_a_run_that_stops_at_its_accuracy_writes_its_last_checkpoint(tmp_path: Path) -> None:
    """Which is no multiple of `checkpoint.every_steps`. Started again it says that it is done."""
    data = tmp_path / "one.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 60, "stop_at_accuracy": 1.0},
        "engine": {"wrap": "ddp", "optimizer": {"learning_rate": 3e-3}},
        "rollout": {"evaluate_every_steps": 5},
        "algorithm": {"name": "sft", "num_minibatches": 1},
        "data": {"train": str(data), "eval": str(data), "batch_size": 1},
        "checkpoint": {"every_steps": 1000},
    }
    config, run = write_config(tmp_path, **sections), tmp_path / "runs" / "run"
    code, said = train(config, ranks=1)
    assert code == 0, said
    num_steps = len(metrics(run))
    assert num_steps < 60
    assert f"done: {num_steps} steps of 60, as the held-out accuracy 1.000 has reached run.stop_at_accuracy = 1," in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{num_steps:08d}"]
    reported = f"{run}: the accuracy is 1 after {num_steps} steps; for more of them raise run.stop_at_accuracy\n"
    assert train(config, ranks=1) == (0, reported) and len(metrics(run)) == num_steps
