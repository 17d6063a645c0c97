"""What `run.py` found as Markdown tables, below the text of docs/equivalence.md that people write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megasync.bench.equivalence import judge
from megasync.bench.equivalence.cases import LAYOUTS
from megasync.config.files import write_atomically

MARKER = "<!-- below: python -m megasync.bench equivalence --to -->\n"
Results = dict[str, Any]


def write_document(results: Results, path: Path) -> None:
    """Replace what is below the marker; the whole file where there is none."""
    text = path.read_text(encoding="utf-8").partition(MARKER)[0] if path.is_file() else ""
    wraps = dict.fromkeys(each["wrap"] for each in results["cases"].values())
    parts = [_summary(results), *(_of_wrap(results, wrap) for wrap in wraps), _unsupported(results), _of_families(results)]
    write_atomically(path, text + MARKER + "\n" + "\n".join(parts))


def _summary(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    failed = [f"- {name}: {'; '.join(each['problems'])}" for name, each in results["cases"].items() if each["problems"]]
    counts = f"{len(results['cases'])} cases, {len(failed)} not within bounds; {len(results['unsupported'])} unsupported"
    differences = [each["differences"] for each in results["cases"].values()]
    names = ("loss", "grad_norm", *judge.LOG_PROBS)
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
        worst = [f"{max((each['differences'][name] for each in done), default=float('nan')):.1e}" for name in judge.LOG_PROBS]
        equal = [f"{sum(not judge.is_unequal(each[name]) for each in done)} of {len(done)}" for name in judge.EXPORTS]
        found = results["vllm"].get(family, {"error": "not asked"})
        tensors = ", ".join(f"{wrap} {each['tensors']}" for wrap, each in found.items() if wrap != "error")
        rows.append((family, *worst, *equal, str(found.get("error", tensors)).partition("\n")[0]))
    titles = ("family", "log-probs, loaded", "trained", "export = folder, loaded", "trained", "tensors equal in vLLM")
    return "## Transformers, folders and vLLM\n\n" + _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"
