"""`megasync plan` beside what `bench train` measured: docs/bench/plan_cases.py FILE_OR_FOLDER ... [--json FILE]

Of each variant in each JSON file the plan is made again from the config that the file holds, and peak bytes and seconds a step are
compared. The plan reads nothing of what was measured. `plan_cases.sh` runs the cases on one GPU of 80 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}

from engine.config import EngineConfig, ModelConfig
from megasync.bench.config import VARIANTS
from megasync.config.schema import Config, DataConfig
from megasync.hf.model_shape import SHAPES
from megasync.planning.hardware import hardware, kind_of
from megasync.planning.make import Plan, make_plan
from megasync.planning.shapes import Request

EXPERTS = re.compile(r"plan-moe(\d+)$")  # plan_cases.sh: the folder of a model with so many layers
Row = dict[str, Any]


def plan_of(results: dict[str, Any], variant: str, kind: str, folder: Path) -> Plan:
    """The plan of one variant of a `bench train` file; `folder` is for a config.json."""
    config, bench = results["config"], results["config"]["bench_train"]
    chosen, length = VARIANTS[variant], bench["sequence_length"]  # type: ignore[index]
    known = {name: value for name, value in config["engine"].items() if name in EngineConfig.model_fields}
    if chosen.wrap == "megatron_fsdp" and "gradient_dtype" not in known:
        known["gradient_dtype"] = "bfloat16"  # what Megatron-FSDP had before there was this key
    engine = EngineConfig.model_validate(known).model_copy(
        update={
            "wrap": chosen.wrap,
            "fusions": config["engine"]["fusions"] if chosen.fusions else "none",
            "tokens_per_microbatch": bench["num_sequences"] * length,
        }
    )
    path = folder / "config.json"
    shapes = SHAPES[bench["shapes"]]
    if cut := EXPERTS.search(config["model"]["path"]):
        shapes = SHAPES["30b-a3b"]._replace(num_hidden_layers=int(cut[1]))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**shapes.hf_config(length), "torch_dtype": config["model"]["dtype"]}))
    split = engine.parallel.tensor * engine.parallel.pipeline * engine.parallel.context
    samples = bench["num_ranks"] // split * bench["num_microbatches"] * bench["num_sequences"]
    whole = Config(
        model=ModelConfig(path=str(folder), dtype=config["model"]["dtype"]),
        engine=engine,
        algorithm=Config().algorithm.model_copy(update={"name": "sft"}),
        data=DataConfig(batch_size=samples),
    )
    request = Request(bench["num_ranks"], hardware(kind), length - 1, prompt_tokens=1, lengths=(length - 1,))
    return make_plan(whole, request)


def rows_of(path: Path, folder: Path) -> list[Row]:
    """One of each variant that was measured or did not fit."""
    results = json.loads(path.read_text(encoding="utf-8"))
    kind, found = kind_of(json.dumps(results.get("machine"))) or ("h200" if "h200" in path.stem else "cpu"), []
    for variant, measured in results["variants"].items():
        if variant.endswith("dot_product"):
            continue
        plan = plan_of(results, variant, kind, folder)
        memory = plan.largest.memory
        row: Row = {"case": f"{path.stem} {variant}", "gpu": kind, "fits": plan.fits, "planned_peak": memory.tensors_peak}
        if "peak_bytes" not in measured:
            found.append(
                {
                    **row,
                    "ran_out_of_memory": "OutOfMemory" in measured.get("error", "")
                    or "out of memory" in measured.get("error", ""),
                }
            )
            continue
        peak = measured.get("step_peak_bytes") or measured["peak_bytes"]
        row |= {"peak": peak, "peak_ratio": memory.tensors_peak / peak}
        if measured.get("device_bytes"):
            row |= {"planned_device": memory.device, "device": measured["device_bytes"]}
            row |= {"reserved_over_peak": measured["reserved_bytes"] / measured["peak_bytes"]}
            row |= {
                "outside": measured["device_bytes"] - measured["reserved_bytes"],
                "device_ratio": memory.device / measured["device_bytes"],
            }
        seconds = plan.seconds.train + plan.seconds.optimizer
        timed = measured["steps"][results["config"]["bench_train"]["warm_up_steps"] :]
        taken = statistics.median(step["update_seconds"] for step in timed)
        row |= {"planned_seconds": seconds, "seconds": taken}
        found.append(
            {
                **row,
                "seconds_ratio": seconds / taken,
                "state": measured.get("state_bytes"),
                "parts": memory.parts,
            }
        )
    return found


def errors(rows: list[Row], name: str) -> str:
    """Median and worst distance of a ratio from 1."""
    values = [abs(row[name] - 1) for row in rows if name in row]
    return f"{name}: median error {statistics.median(values):.1%}, worst {max(values):.1%} of {len(values)}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    files = [file for path in given.paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for number, file in enumerate(files) for row in rows_of(file, Path(folder) / str(number))]
    for row in rows:
        if "peak" not in row:
            print(f"{row['case']:<44} plan: {'fits' if row['fits'] else 'too large'}; out of memory: {row['ran_out_of_memory']}")
            continue
        sizes = f"peak {row['planned_peak'] / 2**30:6.2f} of {row['peak'] / 2**30:6.2f} GiB, {row['peak_ratio']:.3f}"
        print(f"{row['case']:<44} {sizes}; {row['planned_seconds']:.3f} of {row['seconds']:.3f} s, {row['seconds_ratio']:.3f}")
    for name in ("peak_ratio", "device_ratio", "seconds_ratio"):
        print(errors(rows, name))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
