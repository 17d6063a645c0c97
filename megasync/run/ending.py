"""How a run ends: the last checkpoint and evaluation, summary.json, a report and the last two lines on the terminal.

Leaves out how a run that failed is taken down (session.py), and what its launcher says of it (launch/exit_summary.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasync.config.files import forget_stop, newest_checkpoint
from megasync.config.schema import Config
from megasync.report.log import SUMMARY_FILE, read_evaluations
from megasync.report.page import REPORT_FILE, advice_lines, write_report, write_unfinished_report
from megasync.run.rank_zero import on_rank_zero
from megasync.run.scaling import forget_request
from megasync.run.session import Session

HELD_OUT = {  # metrics of one file, and in words
    "eval/reward": "held-out reward",
    "eval/accuracy": "held-out accuracy",
    "eval/loss": "held-out loss",
}


def finish(session: Session) -> str:
    """The last checkpoint and evaluation, the Hugging Face folder if asked for, summary and report; the last lines on rank 0.

    Collective.
    """
    config, log = session.config, session.log
    done = session.step + 1 if config.run.steps > session.first_step else session.first_step
    if session.is_stopped:
        return _stop(session, done)
    on_rank_zero(lambda: forget_requests(config.run.folder))
    if session.checkpoints.is_unsaved(done) and config.checkpoint.every_steps:
        session.write_checkpoint(done, waits=True)
    if done not in session.evaluated:
        session.evaluate(done)
    if config.run.export_hf:
        session.export(config.run.folder / "hf")
    if session.layout.rank != 0:
        return ""
    more = session.finish_files()
    found = summary(config, done, session.sync_metrics, session.timer.summary()) | more
    log.timeline.write()
    log.summary(found)
    write_report(config.run.folder)
    for line in advice_lines(config.run.folder):
        log.note(line)
    return closing_lines(config, found)


def _stop(session: Session, done: int) -> str:
    """End on request: write only a checkpoint, as there may be little time."""
    if session.checkpoints.is_unsaved(done):
        session.write_checkpoint(done, waits=True)
    if session.layout.rank != 0:
        return ""
    session.log.timeline.write()
    write_unfinished_report(session.config.run.folder)
    for line in advice_lines(session.config.run.folder)[:1]:
        session.log.note(line)
    return stopped_line(session.config, done, session.checkpoints.last)


def stopped_line(config: Config, done: int, checkpoint: Path | None) -> str:
    """The line of a run that was asked to stop after `done` steps; `checkpoint`: the newest, None: there was nothing to write."""
    if checkpoint is None:
        return "stopped before the first step, as asked; the same command begins again"
    again = "the same command" if config.checkpoint.resumes else "the same command with checkpoint.resume=auto"
    return f"stopped after step {done}, as asked; checkpoint: {checkpoint}; {again} goes on from it"


def forget_requests(folder: Path) -> None:
    """To stop or to scale, once all steps are done."""
    forget_stop(folder)
    forget_request(folder)


def summary(config: Config, steps: int, syncs: Sequence[Mapping[str, float]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The summary of a run that has done so many `steps`; `seconds`: where this process's time went (step_log.py)."""
    folder = config.run.folder
    lines = read_evaluations(folder)
    return {
        "name": config.run.name,
        "steps": steps,
        **_held_out(lines),
        **({key: value for key, value in lines[-1].items() if "@" in key} if lines else {}),
        "num_syncs": len(syncs),
        "sync_seconds_median": statistics.median(sync["sync/seconds"] for sync in syncs) if syncs else None,
        "sync_bytes": int(syncs[-1]["sync/bytes"]) if syncs else None,
        **seconds,
        "hf_folder": str(folder / "hf") if config.run.export_hf else None,
        "report": str(folder / REPORT_FILE),
    }


def _held_out(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """eval_reward_before and _after, by the first and the last evaluation; of supervised steps eval_accuracy_...; or {}."""
    found: dict[str, float] = {}
    for metric in HELD_OUT:
        values = {line["step"]: line[metric] for line in lines if metric in line}
        if values:
            name = metric.replace("/", "_")
            found |= {f"{name}_before": values[min(values)], f"{name}_after": values[max(values)]}
    return found


def _why_early(config: Config, found: Mapping[str, Any]) -> str:
    """Why a run has done fewer than run.steps; empty for a run that has done all."""
    run, accuracy = config.run, found.get("eval_accuracy_after")
    if found["steps"] >= run.steps or accuracy is None:
        return ""
    return f" of {run.steps}, as the held-out accuracy {accuracy:.3f} has reached run.stop_at_accuracy = {run.stop_at_accuracy:g}"


def closing_lines(config: Config, found: Mapping[str, Any]) -> str:
    """Two lines: the outcome, and the folder. `found`: the summary."""
    steps, folder = found["steps"], config.run.folder
    parts = [f"done: {steps} step{'' if steps == 1 else 's'}{_why_early(config, found)}, {found['seconds_total']:.0f} s"]
    for metric, words in HELD_OUT.items():
        name = metric.replace("/", "_")
        if f"{name}_after" in found:
            parts.append(f"{words} {found[f'{name}_before']:.3f} -> {found[f'{name}_after']:.3f}")
    checkpoint = newest_checkpoint(folder)
    places = [f"report: {folder / REPORT_FILE}", f"figures: {folder / SUMMARY_FILE}"]
    places += [f"checkpoint: {checkpoint}"] if checkpoint else []
    places += [f"weights: {folder / 'hf'}"] if config.run.export_hf else []
    return f"{'; '.join(parts)}\n{'; '.join(places)}"
