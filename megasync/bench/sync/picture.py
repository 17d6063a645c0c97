"""What `bench sync` measured as a picture: how long each method took, and where the time of ours went.

python -m megasync.bench.sync.picture SYNC.json [MORE.json ...] --to FILE.svg      # a row for each file; .png and .pdf, too
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.bench.sync.report import OURS
from megasync.config.errors import ConfigError, explain, main_errors, refuse_if

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

OURS_COLOUR, OTHERS_COLOUR, FLOOR_COLOUR = "#2a6fbb", "#b9bec6", "#333333"
STAGE_COLOURS = {
    "begin": "#8c6bb1", "gather": "#2a6fbb", "pack": "#5aa5dd", "wait": "#d9dde3", "load": "#e6944c", "commit": "#6aa84f",
    "readback": "#999999",
}  # fmt: skip
FORMATS = (".svg", ".png", ".pdf")


def draw_sync(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """A row of axes for each of `measured`, which are `bench sync`'s results, as an image at `path`.

    Raises:
        ConfigError: no image can be written there, or one of them is not a sync's.
    """
    for results in measured:
        check_picture(str(results.get("bench")), path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    heights = [len(results["summary"]) for results in measured]
    mpl.rcParams["svg.hashsalt"] = "megasync"  # the same figures give the same file
    figure = Figure(figsize=(12, sum(0.33 * height + 1.1 for height in heights)), layout="constrained")
    rows = figure.subplots(len(measured), 2, squeeze=False, height_ratios=heights, width_ratios=(3, 2))
    for (methods, stages), results in zip(rows, measured, strict=True):
        _draw_methods(methods, results)
        _draw_stages(stages, results)
    for axes in rows.flat:
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    drawn = {label: handle for _, axes in rows for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower right", ncols=len(drawn), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)


def check_picture(verb: str, path: Path) -> None:
    """ConfigError where there is no picture of what is measured, an image cannot have this name, or nothing can draw it."""
    message = f"bench {verb}: there is no picture of it"
    refuse_if(verb != "sync", message, choices="bench sync", remedy="leave --picture out")
    message, remedy = f"{path}: the name of an image is expected", f"write {path.with_suffix('.svg')}"
    refuse_if(path.suffix not in FORMATS, message, choices=", ".join(FORMATS), remedy=remedy)
    is_missing = importlib.util.find_spec("matplotlib") is None
    refuse_if(is_missing, f"{path}: matplotlib draws it, and is not there", remedy="run: pip install matplotlib")


def _draw_methods(axes: Axes, results: dict[str, Any]) -> None:
    summary: dict[str, dict[str, Any]] = results["summary"]
    names = list(summary)
    kinds = ("seconds_median", "seconds_least", "seconds_most")
    median, lowest, highest = ([1000 * figures[kind] for figures in summary.values()] for kind in kinds)
    spread = [[m - x for m, x in zip(median, lowest, strict=True)], [x - m for m, x in zip(median, highest, strict=True)]]
    colours = [FLOOR_COLOUR if name == "floor" else OURS_COLOUR if name in OURS else OTHERS_COLOUR for name in names]
    axes.barh(names, median, color=colours, xerr=spread, error_kw={"elinewidth": 1, "ecolor": "#777777"})
    for place, (name, figures) in enumerate(summary.items()):
        floors = f", {figures['times_floor']:.2f} x floor" if "times_floor" in figures and name != "floor" else ""
        text, end = f"{median[place]:.1f} ms{floors}", (highest[place], place)
        axes.annotate(text, end, xytext=(4, 0), textcoords="offset points", va="center")
    if "floor" in summary:
        axes.axvline(median[names.index("floor")], color=FLOOR_COLOUR, linewidth=0.8, linestyle="dashed")
    axes.set_xlim(0, 1.35 * max(highest))
    axes.set_xlabel("ms a sync: median, least to most")
    axes.set_title(describe(results), loc="left", fontsize=10)


def _draw_stages(axes: Axes, results: dict[str, Any]) -> None:
    by_method: dict[str, dict[str, float]] = results["stage_seconds_median"]
    methods, left = list(by_method), [0.0] * len(by_method)
    for stage, colour in STAGE_COLOURS.items():
        widths = [1000 * by_method[name].get(stage, 0.0) for name in methods]
        if any(widths):
            axes.barh(methods, widths, left=left, color=colour, label=stage)
            left = [x + width for x, width in zip(left, widths, strict=True)]
    axes.set_xlabel("ms of ours by stage, on trainer rank 0")


def describe(results: dict[str, Any]) -> str:
    """What went where, in a line."""
    config, model = results["config"], results["model"]
    bench, engine, rollout = config["bench"], config["engine"], config["rollout"]
    gpus, ranks = results["machine"]["gpus"], f"{bench['num_ranks']} trainer rank{'s' * (bench['num_ranks'] > 1)}"
    return (
        f"{model['parameters'] / 1e9:.2f} B parameters, {model['bytes'] / 1e9:.2f} GB: {ranks} ({engine['wrap']}, "
        f"TP {engine['parallel']['tensor']}) to {rollout['replicas']} x vLLM TP {rollout['tensor_parallel']}, "
        f"{rollout['placement']}; {gpus[0] if gpus else 'CPU'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.sync.picture", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="SYNC.json", help="what bench sync --json wrote")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help=f"the image: {', '.join(FORMATS)}")
    given = parser.parse_args()
    with main_errors():
        draw_sync([_read(path) for path in given.results], given.to)


def _read(path: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "name a file that bench sync --json wrote"
        raise ConfigError(explain(f"{path}: cannot be read: {error}", remedy=remedy)) from error
    return results


if __name__ == "__main__":
    main()
