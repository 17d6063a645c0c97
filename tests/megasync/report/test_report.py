"""The page that shows a run, or several: what is in it, that it opens offline, and that it is served up to date."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from megasync.config.files import write_atomically
from megasync.config.schema import Config, RunConfig
from megasync.report.html.curves import charts
from megasync.report.html.phases import phases, timeline
from megasync.report.html.record import Record, read_record
from megasync.report.log import RunLog, write_summary
from megasync.report.registry import CHARTS, METRICS, label, metric
from megasync.tools.report import command as report
from megasync.report.page import advice_lines, write_comparison, write_report

ROOT = Path(__file__).resolve().parents[3]
MAX_BYTES = 6_000_000
EVALUATED = "eval/reward"


def log_of(folder: Path) -> closing[RunLog]:
    config = Config(run=RunConfig(name=folder.name, dir=str(folder.parent), progress="none", steps=40, loggers=()))
    return closing(RunLog(config, first_step=0, write=True))


def data_of(page: str, name: str) -> Any:
    """What the page's script reads."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def curves_of(page: str) -> dict[str, dict[str, Any]]:
    """By metric, or by metric and run where there are several."""
    drawn = [curve for group in data_of(page, "curves").values() for chart in group for curve in chart["curves"]]
    return {f"{curve['key']}{' of ' if curve['name'] else ''}{curve['name']}": curve for curve in drawn}


def text_of(page: str) -> str:
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


TOKENS = {
    "token_texts": ["1", "2", "</script>"], "rollout_log_probs": [-0.1, None, -2.5], "trainer_log_probs": [-0.1, -0.2, -2.0],
    "version_runs": [[3, 2], [4, 1]],
}  # fmt: skip


def fake_run(folder: Path, num_steps: int = 4, factor: float = 1.0) -> None:
    keys = [key for chart in CHARTS for key in chart.keys if "*" not in key and not key.startswith("eval/")]
    with log_of(folder) as log:
        log.evaluation(0, {EVALUATED: 0.25})
        for step in range(num_steps):
            values: dict[str, float] = dict.fromkeys(keys, factor * (step + 0.5)) | {"ratio/mean": 1.0, "sync/bytes": 1234567.0}
            values |= {"loss/total": -1.0 * step, "importance/ess": 1.0, "staleness/max": 2.0 * step}
            phases = {"step/train_seconds": 0.41, "step/sync_seconds": 0.1, "step/other_seconds": 0.49}
            log.step(step, values | phases | {"ratio/clipped_fraction": 0.1})
            for name, begin in (("wait for rollout", 0.0), ("train", 0.4)):
                log.timeline.add(name, "trainer", 100.0 + step + begin, 100.4 + step + begin, {"step": step})
            log.timeline.add("pack", "sync", 100.8 + step, 100.9 + step, {"version": step + 1})
            log.timeline.add("rollout", "rollout", 100.0 + step, 100.4 + step, {"step": step})
            line = {"prompt": "<b>1+1=</b>", "response": "12", "answer": "2", "reward": 1.0, "tokens": 3, "versions": [3, 4]}
            log.samples(step, [{"set": "train", **line, **TOKENS}])
        log.samples(0, [{"set": "held_out", **line, "response": "before"}])
        log.samples(num_steps, [{"set": "held_out", **line, "response": "after"}])
        log.evaluation(num_steps, {EVALUATED: 0.75})
    write_atomically(folder / "config.yaml", "run: {name: '<my run>', seed: 3, steps: 40}\nengine: {wrap: ddp}\n")


def test_report_has_every_curve_and_opens_offline(tmp_path: Path) -> None:
    fake_run(tmp_path)
    write_summary(tmp_path, {"eval_reward_before": 0.25, "sync_bytes": 1234567, "seconds_total": 300.0})
    page = write_report(tmp_path).read_text()
    curves = curves_of(page)
    assert curves.keys() == {key for chart in CHARTS for key in chart.keys if "*" not in key} - {
        *("eval/accuracy", "eval/loss", "importance/ess", "ratio/clipped_fraction"),
    }
    assert (curves["reward/mean"]["x"], curves["reward/mean"]["y"]) == ([0, 1, 2, 3], [0.5, 1.5, 2.5, 3.5])
    assert curves[EVALUATED]["x"] == [0, 4] and curves[EVALUATED]["label"] == "Held-out reward"
    assert curves["sync/seconds"]["y"] == [500, 1500, 2500, 3500], "in ms"
    assert "&lt;my run&gt;" in page and "<my run>" not in page and "<b>1+1=" not in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=|@import|url\(", outside)
    assert 1_000_000 < len(page.encode()) < MAX_BYTES, "plotly.js is within"
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_what_does_not_vary_is_a_number(tmp_path: Path) -> None:
    fake_run(tmp_path)
    text = text_of(write_report(tmp_path).read_text())
    for shown in ("Policy ratio <b>1</b>", "Clipped tokens <b>10 %</b>", "Sync size <b>1.18 MiB</b>", "Effective sample size"):
        assert shown in text


def test_headline_figures(tmp_path: Path) -> None:
    fake_run(tmp_path)
    write_summary(tmp_path, {"seconds_total": 300.0})
    text = text_of(write_report(tmp_path).read_text())
    for shown in ("0.250 → 0.750", "+0.500 in 4 steps", "5 min in all", "2e+03 ms", "4 of 40 steps", "train 41%", "sync 10%"):
        assert shown in text, shown


def test_advisories_are_in_the_report_and_on_the_terminal(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in range(12):
            log.step(step, {"response/truncated_fraction": 0.8})
    assert "Many responses are cut off" in text_of(write_report(tmp_path).read_text())
    verdict, first, second = advice_lines(tmp_path)
    assert verdict == "result: too early to tell whether it learns: 10 steps or two evaluations of data.eval are needed"
    assert first == "advisory: Many responses are cut off: 80% of the responses, steps 2 to 11" and second.startswith("  try: ")


def test_the_first_thing_said_is_whether_it_learned(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in range(20):
            log.step(step, {"reward/mean": 0.2 + 0.02 * step, "response/truncated_fraction": 0.8})
    expected = "sampled reward rose from 0.230 to 0.550, +0.320 ± 0.000 (± one standard error)"
    assert advice_lines(tmp_path)[0] == f"result: {expected}"
    text = text_of(write_report(tmp_path).read_text())
    assert text.index(expected) < text.index('class="tiles"') < text.index("Many responses are cut off")


def test_samples_have_their_tokens_and_show_before_and_after(tmp_path: Path) -> None:
    fake_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert data_of(page, "tokens") == [TOKENS] * 3, "of the first step, the last and one between"
    text = text_of(page)
    assert text.index(">before<") < text.index(">after<") and text.count("data-tokens=") == 3
    assert "version 3 to 4" in text and "&lt;b&gt;1+1=&lt;/b&gt;" in text


def test_the_timeline_is_of_the_last_steps_and_phases_add_up(tmp_path: Path) -> None:
    fake_run(tmp_path, num_steps=6)
    record = read_record(tmp_path)
    steps, sync = timeline(record)
    assert steps.title == "The last steps, 2 to 5" and sync.title == "The last sync"
    titles = [bar.title for row in steps.rows for bar in row.bars]
    assert sum(title.startswith("train step") for title in titles) == 4 and "sync version 6: 100 ms" in titles
    with log_of(tmp_path) as log:
        log.step(0, {"step/seconds": 3.0, "step/train_seconds": 2.0, "step/rollout_seconds": 0.75, "step/other_seconds": 0.25})
    assert phases(read_record(tmp_path)) == [("train", 2.0), ("waiting for rollouts", 0.75), ("other", 0.25)]


def test_report_leaves_out_what_is_missing(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in range(3):
            log.step(step, {"loss/policy": 0.5 * step, "unknown/metric": step})
    (tmp_path / "config.yaml").unlink()
    page = write_report(tmp_path).read_text()
    assert curves_of(page).keys() == {"loss/policy"}
    for section in ("samples", "timeline", "configuration"):
        assert f'id="{section}"' not in page


def test_report_has_a_chart_of_each_evaluation_set_reward_and_phase(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in (0, 5):
            log.evaluation(step, {"eval/MATH_K/avg@4": step / 10, "eval/MATH_K/pass@4": step, "eval/gsm/avg@1": step})
            log.step(step, {"reward/a.b:c": step, "reward/mean": step, "step/train_seconds": step, "step/seconds": step})
            log.step(step, {"source/math/reward": step / 2, "source/math/prompts": 4})
    page = write_report(tmp_path).read_text()
    titles = [chart["title"] for group in data_of(page, "curves").values() for chart in group]
    of_sets = ["Evaluation set MATH_K", "Evaluation set gsm"]
    assert titles == ["Reward", "Parts of the reward", "Reward by source", *of_sets, "Time of a step"]
    curves = curves_of(page)
    assert curves["eval/MATH_K/avg@4"]["y"] == [0, 0.5] and curves["eval/MATH_K/avg@4"]["label"] == "MATH_K avg@4"
    assert curves["source/math/reward"]["label"] == "Reward of math" and "source/math/prompts" not in curves
    assert curves["reward/a.b:c"]["label"] == "Reward a.b:c" and curves["step/train_seconds"]["label"] == "Train"
    assert "MATH_K avg@4" in text_of(page), "the headline, where there is no single file"


def test_report_of_a_run_that_has_no_step_yet(tmp_path: Path) -> None:
    with log_of(tmp_path):
        pass
    page = write_report(tmp_path).read_text()
    assert "No step has been logged yet" in page and len(page) < 100_000


def test_long_runs_make_no_larger_page(tmp_path: Path) -> None:
    fake_run(tmp_path, num_steps=600)
    page = write_report(tmp_path).read_text()
    points = curves_of(page)["reward/mean"]["x"]
    assert len(points) == 500 and (points[0], points[-1]) == (0, 599) and len(page.encode()) < MAX_BYTES
    page = write_comparison([tmp_path] * 4, tmp_path / "c.html").read_text()
    assert len(curves_of(page)[f"reward/mean of {tmp_path}"]["x"]) == 375 and len(page.encode()) < MAX_BYTES


def test_comparison_of_runs(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        fake_run(tmp_path / name, factor=factor)
        config = {"run": {"name": name, "steps": 4}, "engine": {"wrap": "ddp", "tokens": 100 if name == "a" else 200}}
        write_atomically(tmp_path / name / "config.yaml", yaml.safe_dump(config))
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text()
    curves = curves_of(page)
    assert curves["reward/mean of a"]["y"] == [0.5, 1.5, 2.5, 3.5] and curves["reward/mean of b"]["y"] == [1, 3, 5, 7]
    configuration = page.partition('id="configuration"')[2]
    assert "engine.tokens" in configuration and "engine.wrap" not in configuration, "only what differs"
    assert len(data_of(page, "tokens")) == 2 and "2 runs side by side" in page
    fake_run(tmp_path / "c")
    fake_run(tmp_path / "d")
    page = write_comparison([tmp_path / "c", tmp_path / "d"], tmp_path / "c.html").read_text()
    by_folder = {f"reward/mean of {tmp_path / name}" for name in "cd"}
    assert by_folder <= curves_of(page).keys(), "runs of one name differ by their folders"


def test_metrics_have_one_row_each() -> None:
    assert len({each.key for each in METRICS}) == len(METRICS)
    assert label("eval/x-1/pass@16") == "x-1 pass@16" and label("reward/my.module:f") == "Reward my.module:f"
    found = metric("reward/mean")
    assert found and found.key == "reward/mean" and metric("no/such") is None
    assert {key for chart in CHARTS for key in chart.keys if "*" not in key} <= {each.key for each in METRICS}


def record_of(steps: list[dict[str, Any]]) -> Record:
    return Record("r", Path(), {}, steps, [], [], {}, [])


def test_every_metric_that_varies_is_drawn_or_named_elsewhere() -> None:
    """All but those that others stand for."""
    keys = [each.key for each in METRICS if each.key == each.key.lower()]
    groups = charts([record_of([{"step": step, **dict.fromkeys(keys, float(step))} for step in range(3)])])
    drawn = {curve["key"] for group in groups for chart in group.charts for curve in chart["curves"]}
    ratios = {"ratio/mean", "ratio/first_minibatch_mean", "importance/mean"}
    constant = {"version", "sync/bytes", "sync/verified", "sync/replicas", "memory/device_total_bytes"}
    of_log = {"sync/log_bytes", "sync/log_seconds", "sync/changed_fraction", "sync/sent_bytes"}
    of_resume = {"episode/resumed", "episode/restarted"}
    of_summary = {"memory/worker_device_bytes", "memory/worker_host_peak_bytes"}
    errors = {"eval/reward_error", "eval/accuracy_error", "eval/loss_error"}
    others = {"service/client", "loss/total", "train/skipped_steps", "train/response_tokens", "eval/perplexity"}
    assert set(keys) - drawn == ratios | constant | of_log | of_resume | of_summary | errors | others


def test_a_metric_that_was_not_measured_has_no_chart() -> None:
    """Nor has one that is null in every step."""
    cases: list[tuple[dict[str, float | None], set[str]]] = [
        ({}, set()),
        ({"loss/kl": None}, set()),
        ({"loss/kl": 0.5}, {"loss/kl"}),
    ]
    for own, expected in cases:
        steps: list[dict[str, Any]] = [
            {"step": step, **{key: value and value * step for key, value in own.items()}} for step in range(3)
        ]
        groups = charts([record_of(steps)])
        drawn = {curve["key"] for group in groups for chart in group.charts for curve in chart["curves"]}
        assert drawn & {"loss/kl"} == expected, own


def test_each_metric_that_episodes_return_has_a_curve_of_its_own() -> None:
    own = {"episode/solved": 0.5, "episode/tools/calls": 3.0}
    (group,) = charts([record_of([{"step": step, **{key: value * step for key, value in own.items()}} for step in range(3)])])
    assert group.name == "rollouts"
    found = {chart["title"]: [(curve["key"], curve["y"]) for curve in chart["curves"]] for chart in group.charts}
    assert found == {
        "Solved of an episode": [("episode/solved", [0.0, 0.5, 1.0])],
        "Tools/calls of an episode": [("episode/tools/calls", [0.0, 3.0, 6.0])],
    }


COMMAND = [sys.executable, "-m", "megasync", "report"]


def test_report_command(tmp_path: Path) -> None:
    for name in ("run", "other"):
        fake_run(tmp_path / name)
    done = subprocess.run([*COMMAND, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "run" / "report.html"))
    both = [*COMMAND, str(tmp_path / "run"), str(tmp_path / "other"), "--to", str(tmp_path / "c.html")]
    assert subprocess.run(both, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == str(tmp_path / "c.html")
    for arguments in ([str(tmp_path)], [str(tmp_path), "--watch"]):
        done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{tmp_path}/metrics.jsonl: there is no such file")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--to", "{folder}/run"], "{folder}/run: Is a directory"),
        (["--to", "/proc/x.html"], "/proc/x.html: No such file or directory"),
        (["--watch", "--port", "99999"], "--port: 99999: 0 to 65535"),
        (["--watch", "--port", "-1"], "--port: -1: 0 to 65535"),
    ],
)
def test_where_it_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], seen: str) -> None:
    fake_run(tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    with pytest.raises(SystemExit) as stop:
        report.main([str(tmp_path / "run"), *(each.replace("{folder}", str(tmp_path)) for each in arguments)])
    assert stop.value.code == 2 and seen.replace("{folder}", str(tmp_path)) in capsys.readouterr().err
    assert sorted((tmp_path / "run").iterdir()) == before


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("summary.json", '{"steps": 1', "not JSON"),
        ("timeline.json", "[]", "holds no JSON object"),
        ("config.yaml", "run: {", "not YAML"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, problem: str) -> None:
    fake_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stop:
        report.main([str(tmp_path)])
    assert stop.value.code == 2
    assert f"{tmp_path / name}: {problem}" in (seen := capsys.readouterr().err) and "remedy: " in seen


def test_watched_report_is_up_to_date_on_the_loopback_until_ctrl_c(tmp_path: Path) -> None:
    fake_run(tmp_path)
    command = [*COMMAND, str(tmp_path), "--watch", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]

        def get(path: str) -> str:
            return str(urllib.request.urlopen(address + path, timeout=60).read().decode())

        try:
            page, state = get("/"), get("/state")
            assert f'data-state="{state}"' in page and "/state" in page
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "reward/mean": 9.0}\n')
            assert get("/state") != state
            other = [*command[:-1], address.rpartition(":")[2]]
            taken = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, check=False)
            assert taken.returncode == 2 and "write --port 0" in taken.stderr
            deadline = time.monotonic() + 60  # the page is written again every few seconds at most
            while curves_of(get("/"))["reward/mean"]["y"][-1] != 9.0 and time.monotonic() < deadline:
                time.sleep(0.2)
            assert f'data-state="{get("/state")}"' in get("/")
            elsewhere = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            elsewhere.request("GET", "/", headers={"Host": "example.org:80"})
            assert elsewhere.getresponse().status == 403
            elsewhere.close()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    assert not (tmp_path / "report.html").exists()
