"""The page that shows a run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from megasync.config.schema import Config, RunConfig
from megasync.config.files import write_atomically
from megasync.reporting.log import RunLog, write_summary
from megasync.reporting.page import PLOTS, write_report

ROOT = Path(__file__).resolve().parents[3]


def log_of(folder: Path) -> closing[RunLog]:
    config = Config(run=RunConfig(name=folder.name, dir=str(folder.parent), progress="none"))
    return closing(RunLog(config, first_step=0, write=True, tensorboard=False))


def traces_of(page: str) -> dict[str, dict[str, object]]:
    """What the page's script gives plotly to draw, by name."""
    call = page[page.rindex("Plotly.newPlot(") :]
    traces, _ = json.JSONDecoder().raw_decode(call[call.index("[") :])
    return {trace["name"]: trace for trace in traces}


def fake_run(folder: Path, num_steps: int) -> None:
    keys = [key for plot in PLOTS for key in plot.keys if key not in ("loss/sft", "eval/reward", "eval/accuracy")]
    with log_of(folder) as log:
        log.evaluation(0, {"eval/reward": 0.25})
        for step in range(num_steps):
            log.step(step + 1, dict.fromkeys(keys, step + 0.5) | {"staleness/max": math.nan if step == 1 else 1.0})
        log.evaluation(num_steps, {"eval/reward": 0.75})
    write_atomically(folder / "config.yaml", "run: {name: '<my run>', seed: 3}\nengine: {wrap: ddp}\n")


def test_report_has_every_curve_and_opens_offline(tmp_path: Path) -> None:
    fake_run(tmp_path, num_steps=4)
    write_summary(tmp_path, {"eval_reward_before": 0.25, "eval_reward_after": 0.75, "sync_bytes": 1234567})
    page = write_report(tmp_path).read_text()
    traces = traces_of(page)
    assert set(traces) == {key for plot in PLOTS for key in plot.keys} - {"loss/sft", "eval/accuracy"}
    assert traces["reward/mean"]["x"] == [1, 2, 3, 4]
    assert traces["reward/mean"]["y"] == [0.5, 1.5, 2.5, 3.5]
    assert traces["eval/reward"]["x"] == [0, 4]
    assert traces["staleness/max"]["x"] == [1, 3, 4]
    assert "&lt;my run&gt;" in page
    assert "<my run>" not in page
    for figure in ("eval_reward_after", "0.75", "1,234,567", "engine.wrap", "ddp", '"text":"Staleness"'):
        assert figure in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page.replace("</script>", ""))
    assert len(page) > 1_000_000  # plotly.js is within


def test_report_leaves_out_what_is_missing(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        log.step(1, {"loss/policy": 0.5})
    (tmp_path / "config.yaml").unlink()
    page = write_report(tmp_path).read_text()
    assert set(traces_of(page)) == {"loss/policy"}
    assert '"text":"Staleness"' not in page
    assert "steps so far" in page
    assert "<caption>Configuration" not in page


def test_report_has_a_plot_of_each_evaluation_set(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in (0, 5):
            log.evaluation(step, {"eval/math/avg@4": step / 10, "eval/math/pass@4": 0.5, "eval/gsm/avg@1": 0.25})
        log.step(1, {"loss/policy": 0.5})
    page = write_report(tmp_path).read_text()
    traces = traces_of(page)
    assert set(traces) == {"loss/policy", "eval/math/avg@4", "eval/math/pass@4", "eval/gsm/avg@1"}
    assert traces["eval/math/avg@4"]["x"] == [0, 5] and traces["eval/math/avg@4"]["y"] == [0.0, 0.5]
    assert '"text":"Evaluation set math"' in page and '"text":"Evaluation set gsm"' in page


def test_report_of_a_run_that_has_no_step_yet(tmp_path: Path) -> None:
    log_of(tmp_path).thing.close()
    assert "No step has been logged yet" in write_report(tmp_path).read_text()


def test_report_command(tmp_path: Path) -> None:
    fake_run(tmp_path / "run", num_steps=2)
    command = [sys.executable, "-m", "megasync.report"]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "run" / "report.html"))
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{tmp_path}/metrics.jsonl: there is no such file")
