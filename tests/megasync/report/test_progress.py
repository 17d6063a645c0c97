"""The line on the terminal: plain where there is none, else as wide as a real one, with nothing cut."""

from __future__ import annotations

import fcntl
import math
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from megasync.report.progress import GAP, figures, fitting, make_progress

PROGRAM = """
from megasync.report.progress import make_progress
progress = make_progress("auto", 10000, 4320)
progress.update(4321, %r)
progress.close()
"""
METRICS = {
    "reward/mean": 0.2285, "loss/policy": -0.00123, "grad_norm": 0.1437, "logprob_gap/max": 0.58, "staleness/max": 1,
    "sync/seconds": 0.028, "rollout/tokens_per_second": 16131.0, "train/tokens_per_second": 5362.0, "step/seconds": 60.0,
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(program: str, columns: int) -> str:
    """What it wrote to a pseudo-terminal of so many columns."""
    own, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **streams):  # type: ignore[call-overload]
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(own, 1 << 16):
                said += chunk
        except OSError:  # the other side has ended
            os.close(own)
    return said.decode()


@pytest.mark.parametrize(("columns", "num_figures"), [(80, 1), (120, 3), (160, 6), (200, 8)])
def test_on_a_terminal_step_bar_and_time_left_are_whole(monkeypatch: pytest.MonkeyPatch, columns: int, num_figures: int) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    said = on_terminal(PROGRAM % METRICS, columns)
    lines = [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", said)) if line.strip()]
    assert all(len(line) <= columns for line in lines)
    step, bar, left, *shown = re.split(" {2,}", lines[-1].strip())
    assert (step, re.sub("[╸╺]", "━", bar)) == ("step 4321/10000", "━" * 20)
    days, clock = re.fullmatch(r"(\d) days, (\d+:\d\d):\d\d left", left).groups()  # type: ignore[union-attr]
    assert (days, clock) in (("3", "22:38"), ("3", "22:39")), "5679 minutes"
    assert shown == figures(METRICS).split(GAP)[:num_figures]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "step 4321/10000  reward 0.229" in on_terminal(PROGRAM % METRICS, 80)


@given(st.lists(st.text("ab数é", min_size=1, max_size=12), max_size=8), st.integers(0, 60))
def test_what_does_not_fit_is_left_out_the_less_important_first(parts: list[str], width: int) -> None:
    shown = fitting(parts, width)
    assert shown == parts[: len(shown)] and (not shown or cell_len(GAP.join(shown)) <= width)
    assert len(shown) == len(parts) or cell_len(GAP.join(parts[: len(shown) + 1])) > width


@pytest.mark.parametrize("columns", range(80, 120, 3))
def test_names_of_double_width_are_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    console = Console(force_terminal=True, width=columns, record=True)
    monkeypatch.setattr("rich._console", console)
    progress = make_progress("rich", num_steps=3, first_step=0)
    progress.update(1, values := {"reward/mean": 0.5, "eval/数学竞赛/avg@4": 0.25, "eval/数学竞赛/pass@4": 0.5})
    progress.close()
    shown = console.export_text().strip().rpartition("left  ")[2]
    assert figures(values).startswith(shown) and figures(values).removeprefix(shown)[:2] in ("", GAP)


def test_plain_progress_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress("auto", num_steps=3, first_step=1)  # captured output is no terminal
    progress.update(2, {"reward/mean": 0.5, "loss/policy": math.nan, "note": "x", "other": 1.0})
    progress.note("a word")
    progress.update(3, {})
    progress.close()
    assert capsys.readouterr().out == "step 2/3  reward 0.500  loss +nan\na word\nstep 3/3\n"


def test_rich_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=160, record=True)
    monkeypatch.setattr("rich._console", console)
    progress = make_progress("rich", num_steps=3, first_step=0)
    progress.update(1, {"reward/mean": 0.5})
    progress.note("[not markup]")
    progress.close()
    text = console.export_text()
    assert "1/3" in text
    assert "reward 0.500" in text
    assert "[not markup]" in text


def test_no_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress("none", num_steps=3, first_step=0)
    progress.update(1, {"reward/mean": 0.5})
    progress.note("a word")
    progress.close()
    assert capsys.readouterr().out == ""
    assert figures({"sync/seconds": 0.1234, "train/tokens_per_second": 12345.6}) == "sync 0.123 s  train 12,346 tok/s"
    of_a_set = {"eval/math/avg@4": 0.25, "eval/math/pass@4": 0.5, "eval/math/truncated": 0, "episode/hits@5": 0.1}
    assert figures(of_a_set) == "math avg@4 0.250  math pass@4 0.500"
