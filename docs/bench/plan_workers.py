"""`megasync plan` beside what GRPO runs took on GPUs: docs/bench/plan_workers.py FILE_OR_FOLDER ... [--json FILE]

Of each JSON file the plan is made again from the config that it holds, and compared by process. Of what was measured the plan reads
the memory that a GPU has in all, and how long responses were. `plan_workers.sh` runs the cases; it calls

    docs/bench/plan_workers.py --model SHAPES --to FOLDER              # a random model, and sums to answer; with --like one
                                                                       # that is there, with other lengths
    docs/bench/plan_workers.py --take RUN --shapes SHAPES --json FILE  # of a run's folder: its config, and what it took
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megasync.config.schema import Config
from megasync.hf.model_shape import SHAPES
from megasync.planning.hardware import hardware, with_memory
from megasync.planning.lengths import mean_response_tokens
from megasync.planning.record import PLAN_FILE, actual
from megasync.planning.shapes import Request
from megasync.reporting.log import TIMELINE_FILE, read_metrics, read_summary

SHAPES["30b-a3b-3"] = SHAPES["30b-a3b"]._replace(num_hidden_layers=3)
RESPONSE_TOKENS = 64  # on average
STEPS = ("step/seconds", "rollout/seconds", "sync/seconds", "response/tokens_mean")  # of each step
LENGTH = 4096  # that a model allows


def write_model(shapes: str, folder: Path) -> None:
    from megasync.assets import write_assets

    write_assets(folder, seed=0, dtype="bfloat16", shapes=shapes, mean_response_tokens=RESPONSE_TOKENS)


def write_variant(like: Path, folder: Path, shapes: str, responses: int, prompts: int) -> None:
    """The model of `like` by links, and sums in a row of `prompts` tokens in all (0: one sum), whose responses have `responses`."""
    if (folder / "model").exists():
        return
    (folder / "model").mkdir(parents=True)
    for path in (like / "model").iterdir():
        os.symlink(path.resolve(), folder / "model" / path.name)
    path = folder / "model" / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    settings["eos_token_id"] = list(range(min(settings["eos_token_id"]), SHAPES[shapes].vocab_size, responses))
    path.write_text(json.dumps(settings), encoding="utf-8")
    if not prompts:
        shutil.copy(like / "train.jsonl", folder)
        return
    lines = [json.loads(line) for line in (like / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    questions = [line["question"] for line in lines] * 2
    for index, line in enumerate(lines):
        line["question"] = "".join(questions[index : index + prompts])[:prompts]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def taken(run: Path, shapes: str) -> dict[str, Any]:
    """Of a run that has ended."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for section, key in (("run", "dir"), ("model", "path"), ("data", "train")):
        del config[section][key]
    plan, steps = json.loads((run / PLAN_FILE).read_text(encoding="utf-8")), read_metrics(run)
    known = Config.model_validate_json(json.dumps(config))
    return {
        "shapes": shapes,
        "gpu": plan["hardware"],
        "num_ranks": plan["num_ranks"],
        "device_total_bytes": steps[-1].get("memory/device_total_bytes"),
        "prompt_tokens": plan["prompt_tokens"],
        "mean_response_tokens": mean_response_tokens(known, None, run),
        "measured": actual(run, read_summary(run)),
        "spans": spans_of(run),
        "steps": {name: [step[name] for step in steps if name in step] for name in STEPS},
        "config": config,
    }


def spans_of(run: Path) -> dict[str, tuple[int, float]]:
    """Of the timeline's spans by name: how many there were, and their median seconds."""
    events = json.loads((run / TIMELINE_FILE).read_text(encoding="utf-8"))["traceEvents"]
    found: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event["dur"] / 1e6)
    return {name: (len(seconds), round(statistics.median(seconds), 5)) for name, seconds in sorted(found.items())}


def planned(results: dict[str, Any], folder: Path) -> dict[str, float | None]:
    """What the plan predicts; `folder` is for a config.json."""
    from megasync.planning.make import make_plan

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES[results["shapes"]].hf_config(LENGTH), "torch_dtype": "bfloat16"}))
    config = Config.model_validate_json(json.dumps(results["config"]))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    known = hardware(results["gpu"])
    if total := results["device_total_bytes"]:
        known = with_memory(known, int(total))
    request = Request(results["num_ranks"], known, results["mean_response_tokens"], results["prompt_tokens"])
    predicted: dict[str, float | None] = make_plan(config, request).as_dict()["predicted"]
    return predicted


def rows_of(path: Path, folder: Path) -> list[dict[str, Any]]:
    """One of each number that was planned and measured."""
    results = json.loads(path.read_text(encoding="utf-8"))
    measured = results["measured"]
    return [
        {"case": path.stem, "gpu": results["gpu"], "what": name, "planned": value, "measured": measured[name]}
        for name, value in planned(results, folder).items()
        if value and measured.get(name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", choices=SHAPES)
    parser.add_argument("--to", type=Path, metavar="FOLDER")
    parser.add_argument("--like", type=Path, metavar="FOLDER")
    parser.add_argument("--responses", type=int, default=RESPONSE_TOKENS)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--take", type=Path, metavar="RUN")
    parser.add_argument("--shapes", choices=SHAPES)
    given = parser.parse_args()
    if given.model:
        if given.like:
            write_variant(given.like, given.to, given.model, given.responses, given.prompts)
        else:
            write_model(given.model, given.to)
        return
    if given.take:
        given.json.write_text(json.dumps(taken(given.take, given.shapes), indent=1) + "\n", encoding="utf-8")
        return
    files = [file for path in given.paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for number, file in enumerate(files) for row in rows_of(file, Path(folder) / str(number))]
    for name in dict.fromkeys(row["what"] for row in rows):
        print(name)
        ratios = []
        for row in (each for each in rows if each["what"] == name):
            unit, scale = ("GiB", 2**30) if name.endswith("bytes") else ("s", 1)
            ratios.append(row["planned"] / row["measured"])
            sizes = f"{row['planned'] / scale:8.3f} of {row['measured'] / scale:8.3f} {unit}"
            print(f"  {row['case']:<20} {row['gpu']:<5} {sizes}  {ratios[-1]:.3f}")
        errors = [abs(ratio - 1) for ratio in ratios]
        print(f"  median error {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
