"""A run's curves and figures as one HTML file that opens without a network. Leaves out the timeline (timeline.py)."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megasync.config.files import write_atomically
from megasync.reporting.log import CONFIG_FILE, read_evaluations, read_metrics, read_summary

REPORT_FILE = "report.html"
NUM_COLUMNS = 2
STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; display: inline-table; vertical-align: top; margin: 0 2em 1em 0 }
td, th { text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid #ddd; font-weight: normal }
th { color: #666 }
"""


@dataclass(frozen=True)
class Plot:
    """One pair of axes and the metrics that are drawn on it, those that the run has."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    log_scale: bool = False


GAPS = ("logprob_gap/mean", "logprob_gap/max", "logprob_gap/own_experts_mean")
PLOTS = (
    Plot("Reward, sampled and held-out", ("reward/mean", "eval/reward", "eval/accuracy")),
    Plot("Loss", ("loss/policy", "loss/total", "loss/sft")),
    Plot("Load-balancing loss", ("loss/load_balancing",)),
    Plot("Gradient norm", ("grad_norm",)),
    Plot("Log-prob gap, trainer against vLLM", GAPS, "nats", log_scale=True),
    Plot("Policy entropy", ("entropy/mean",), "nats"),
    Plot("Importance weights: effective sample size, masked share", ("importance/ess", "importance/masked_fraction")),
    Plot("Truncated responses", ("response/truncated_fraction",), "share"),
    Plot("Sync time", ("sync/seconds", "sync/pause_seconds"), "s"),
    Plot("Sync size", ("sync/bytes",), "bytes"),
    Plot("Staleness", ("staleness/mean", "staleness/max"), "versions"),
    Plot("Throughput", ("rollout/tokens_per_second", "train/tokens_per_second"), "tokens/s"),
    Plot("Step time", ("step/seconds",), "s"),
    Plot(
        "Memory: this rank's of the host, its whole GPU, its tensors there and their peak",
        ("memory/host_bytes", "memory/device_bytes", "memory/tensors_bytes", "memory/tensors_peak_bytes"),
        "bytes",
    ),
)


def write_report(run_folder: str | Path) -> Path:
    """Writes report.html from metrics.jsonl and, where they are there, the other files of the run. Returns its path.

    Raises ValueError where the folder has no metrics.jsonl.
    """
    folder = Path(run_folder)
    steps, evaluations = read_metrics(folder), read_evaluations(folder)
    config_file = folder / CONFIG_FILE
    config = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    name = (config.get("run") or {}).get("name") or folder.resolve().name
    unfinished = {"steps so far": len(steps), **(steps[-1] if steps else {})}
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(str(name))}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(str(name))}</h1>
{_table("Summary", read_summary(folder) or unfinished)}
{_table("Configuration", _config_figures(config))}
{_plots(steps, evaluations)}
</body></html>
"""
    write_atomically(folder / REPORT_FILE, page)
    return folder / REPORT_FILE


def _config_figures(config: dict[str, Any]) -> dict[str, Any]:
    """The choices that make a run what it is, by full key."""
    keys = (
        "run.seed", "run.steps", "model.path", "model.dtype", "engine.wrap", "engine.parallel.tensor",
        "engine.parallel.pipeline", "engine.optimizer.learning_rate", "algorithm.name", "algorithm.num_minibatches",
        "rollout.replicas", "rollout.max_staleness", "rollout.group_size", "rollout.max_new_tokens", "rollout.reward",
        "data.train", "data.batch_size", "sync.transport", "sync.bucket_bytes", "sync.verify",
    )  # fmt: skip
    figures = {}
    for key in keys:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            figures[key] = value
    return figures


def _table(caption: str, figures: dict[str, Any]) -> str:
    rows = [f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(_shown(value))}</td></tr>" for key, value in figures.items()]
    return f"<table><caption>{caption}</caption>{''.join(rows)}</table>" if rows else ""


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _plots(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """The div of all plots that have points, plotly.js within it."""
    all_plots = (*PLOTS, *_set_plots(evaluations))
    series = {key: _points(key, steps, evaluations) for plot in all_plots for key in plot.keys}
    plots = [plot for plot in all_plots if any(series[key] for key in plot.keys)]
    if not plots:
        return "<p>No step has been logged yet.</p>"
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    num_rows = -(-len(plots) // NUM_COLUMNS)
    titles = [plot.title for plot in plots]
    figure = make_subplots(rows=num_rows, cols=NUM_COLUMNS, subplot_titles=titles, vertical_spacing=0.3 / num_rows)
    for index, plot in enumerate(plots):
        row, col = index // NUM_COLUMNS + 1, index % NUM_COLUMNS + 1
        for key in plot.keys:
            if series[key]:
                x, y = zip(*series[key], strict=True)
                mode = "lines+markers" if len(x) < 50 else "lines"
                figure.add_trace(go.Scatter(x=x, y=y, name=key, mode=mode), row=row, col=col)
        figure.update_xaxes(title_text="step", row=row, col=col)
        scale = "log" if plot.log_scale else "linear"
        figure.update_yaxes(title_text=plot.unit, type=scale, exponentformat="power", row=row, col=col)
    figure.update_layout(height=320 * num_rows, template="plotly_white", margin={"t": 40}, hovermode="x")
    return str(figure.to_html(full_html=False, include_plotlyjs=True))


def _set_plots(evaluations: list[dict[str, Any]]) -> list[Plot]:
    """One for each evaluation set."""
    keys = list(dict.fromkeys(key for line in evaluations for key in line if key.count("/") == 2))
    names = list(dict.fromkeys(key.split("/")[1] for key in keys))
    return [Plot(f"Evaluation set {name}", tuple(key for key in keys if key.split("/")[1] == name)) for name in names]


def _points(key: str, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, value) wherever the metric is a number, in the order of steps."""
    lines = [line for line in (*evaluations, *steps) if isinstance(line.get(key), int | float)]
    return sorted((line["step"], line[key]) for line in lines)
