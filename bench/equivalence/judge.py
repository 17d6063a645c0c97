"""How far a case is from its reference, transformers and its folder, and whether that is within bounds; all of it as Markdown.

The tables go below the text of docs/bench/equivalence.md. No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.common.results import Results
from bench.equivalence.cases import LAYOUTS
from engine.config import MOE_FAMILIES
from megasync.config.files import write_atomically

MARKER = "<!-- below: python -m bench equivalence --to -->\n"

MAX_STEP_DIFFERENCE, MAX_STEP_DIFFERENCE_OF_EXPERTS = 1e-5, 1e-4  # of losses and gradient norms
MAX_LOG_PROB_DIFFERENCE = 1e-4
LEAST_SCALES = {"loss": 1.0, "balance": 1.0, "grad_norm": 1e-2}  # a smaller norm is rounding: all is masked, and KL just begins
STEPS = ("loss", "grad_norm", "balance")
LOG_PROBS = ("log_probs", "log_probs_trained")
EXPORTS = ("export_before", "export_after")
EXPORT_PROBLEMS = ("differing", "missing", "twice")


def bound_of(name: str, family: str) -> float:
    """The largest difference of this name that is accepted."""
    if name in LOG_PROBS:
        return MAX_LOG_PROB_DIFFERENCE
    return MAX_STEP_DIFFERENCE_OF_EXPERTS if family in MOE_FAMILIES else MAX_STEP_DIFFERENCE


def differences(found: Results, reference: Results, transformers: tuple[list[float], list[float]]) -> dict[str, float]:
    """The largest, by name. Losses and gradient norms: relative to the reference's, or LEAST_SCALES; log-probs: absolute.

    `transformers`: its log-probs with the model's folder and with the folder that the case left.
    """
    worst: dict[str, float] = {}
    by_step = list(zip(found["history"], reference["history"], strict=True))
    for name in STEPS:
        pairs = [(own[name], other[name]) for own, other in by_step if name in other]
        if pairs:
            worst[name] = _largest(abs(own - other) / max(LEAST_SCALES[name], abs(other)) for own, other in pairs)
    for name, own, other in zip(LOG_PROBS, found["log_probs"], transformers, strict=True):
        worst[name] = _largest(abs(mine - theirs) for mine, theirs in zip(own, other, strict=True))
    return worst


def _largest(values: Iterable[float]) -> float:
    """The largest value; NaN if one is NaN, unlike max."""
    return float(np.max(list(values)))


def problems(found: Results, worst: dict[str, float], family: str, micro_batches: int) -> list[str]:
    """The faults of a case, as text. `micro_batches`: the number that each rank must run in each step."""
    bounds = {name: bound_of(name, family) for name in worst}
    wrong = [f"{name} {value:.1e}, above {bounds[name]:g}" for name, value in worst.items() if not value <= bounds[name]]
    for name in EXPORTS:
        for what in EXPORT_PROBLEMS:
            names = found[name][what]
            wrong += [f"{name}: {len(names)} tensors {what}, first {names[0]}"] if names else []
    if found["micro_batches"][0] < micro_batches:
        wrong.append(f"steps of {found['micro_batches'][0]} micro-batches")
    return wrong


def is_unequal(export: Results) -> bool:
    return any(export[what] for what in EXPORT_PROBLEMS)


def write_document(results: Results, path: Path) -> None:
    """Replace the text below the marker, or the whole file where there is no marker."""
    text = path.read_text(encoding="utf-8").partition(MARKER)[0] if path.is_file() else ""
    wraps = dict.fromkeys(each["wrap"] for each in results["cases"].values())
    parts = [_summary(results), *(_of_wrap(results, wrap) for wrap in wraps), _unsupported(results), _of_families(results)]
    write_atomically(path, text + MARKER + "\n" + "\n".join(parts))


def _summary(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    failed = [f"- {name}: {'; '.join(each['problems'])}" for name, each in results["cases"].items() if each["problems"]]
    counts = f"{len(results['cases'])} cases, {len(failed)} not within bounds; {len(results['unsupported'])} unsupported"
    differences = [each["differences"] for each in results["cases"].values()]
    names = ("loss", "grad_norm", *LOG_PROBS)
    shown = ", ".join(f"{name} {max((each.get(name, 0.0) for each in differences), default=0.0):.1e}" for name in names)
    return "\n".join([f"Commit {results['commit']}, {versions}: {counts}. Largest differences: {shown}.", *failed, ""])


def _of_wrap(results: Results, wrap: str) -> str:
    """Families by layouts."""
    cells = {(each["family"], each["layout"]): _cell(each) for each in results["cases"].values() if each["wrap"] == wrap}
    cells |= {(each["family"], each["layout"]): "-" for each in results["unsupported"].values() if each["wrap"] == wrap}
    layouts = [name for name in LAYOUTS if any(layout == name for _, layout in cells)]
    families = dict.fromkeys(family for family, _ in cells)
    rows = [(family, *(cells.get((family, layout), "") for layout in layouts)) for family in families]
    title = f"## Loss / gradient norm against one rank: `{wrap}`\n\n"
    return title + _table(("family", *(LAYOUTS[layout].title for layout in layouts)), rows)


def _cell(each: Results) -> str:
    worst = [f"{each['differences'][name]:.0e}" for name in ("loss", "grad_norm") if name in each["differences"]]
    shown = " / ".join(worst).replace("0e+00", "0")
    return f"**{shown or 'failed'}**" if each["problems"] else shown


def _unsupported(results: Results) -> str:
    layouts: dict[tuple[str, str], dict[str, None]] = {}
    for each in results["unsupported"].values():
        layouts.setdefault((each["family"], each["reason"]), {})[LAYOUTS[each["layout"]].title] = None
    rows = [(family, ", ".join(titles), reason) for (family, reason), titles in layouts.items()]
    return "## Unsupported\n\n" + _table(("family", "layouts", "what the config's check says"), rows)


def _of_families(results: Results) -> str:
    """Transformers, exports and vLLM, a row a family."""
    rows = []
    for family in dict.fromkeys(each["family"] for each in results["cases"].values()):
        done = [each for each in results["cases"].values() if each["family"] == family and each["differences"]]
        worst = [f"{max((each['differences'][name] for each in done), default=float('nan')):.1e}" for name in LOG_PROBS]
        equal = [f"{sum(not is_unequal(each[name]) for each in done)} of {len(done)}" for name in EXPORTS]
        found = results["vllm"].get(family, {"error": "not asked"})
        tensors = ", ".join(f"{wrap} {each['tensors']}" for wrap, each in found.items() if wrap != "error")
        rows.append((family, *worst, *equal, str(found.get("error", tensors)).partition("\n")[0]))
    titles = ("family", "log-probs, loaded", "trained", "export = folder, loaded", "trained", "tensors equal in vLLM")
    return "## Transformers, folders and vLLM\n\n" + _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"
