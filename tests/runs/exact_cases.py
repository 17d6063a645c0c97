"""Runs under `model.exact` in which sequences are preempted and prompts share what they begin with, and what is compared of them.

    python -m tests.runs.exact_cases --to FOLDER --steps 20     # qwen3 and llama, at staleness 0 and 2: some 300,000 tokens

Prompts are of 1 to 500 tokens, each the beginning of one text; up to 64 responses are generated side by side, and fewer as they
end, in a cache that holds a third of them. Every token is compared with the trainer's log-prob by the weights that sampled it
(`megasync replay --trainer`). Leaves out vLLM's model in chunks of every size (tests/bridge/vllm/).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model_folder.layout import read_own_fields
from tests.runs.train_cases import COMMAND, ROOT, launch, write_config
from tests.support.tiny_models import write_tiny_model

PAGE = 32
TEXT = "1+2+3+5-8*13/21=" * 32


def exact_config(
    folder: Path, family: str, *, lengths: tuple[int, int], tokens: int, pages: int, **sections: dict[str, Any]
) -> Path:
    """A tiny model and a config of groups of four.

    Args:
        lengths: of the shortest and the longest prompt.
        tokens: of a response, at most.
        pages: of the cache.
        sections: laid over the config.
    """
    longest = -(-(lengths[1] + tokens) // PAGE) * PAGE
    sizes_of_model = {"num_hidden_layers": 2, "max_position_embeddings": longest}
    model = write_tiny_model(folder / "model", family, tied=family == "qwen3", **sizes_of_model)
    fields = read_own_fields(model)
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    token_bytes = 2 * 4 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head
    own: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "exact": True},
        "engine": {"wrap": "ddp", "tokens_per_microbatch": max(2000, longest)},
        "rollout": {
            "max_new_tokens": tokens,
            "max_model_len": longest,
            "kv_cache_bytes": pages * PAGE * token_bytes,
            "engine_arguments": {"block_size": PAGE},
        },
        "algorithm": {"num_minibatches": 1},
        "checkpoint": {"every_steps": 0},
    }
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {**own, **sections}}
    config = write_config(folder, **merged)
    shortest, most = lengths
    sizes = [shortest + number * (most - shortest) // 79 for number in range(80)]
    prompts = [f"{TEXT[: max(0, size - 4)]}{size:03d}="[-size:] for size in sizes]
    lines = [{"question": prompt, "answer": "1"} for prompt in prompts]
    (folder / "assets" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


def scored(run: Path) -> dict[str, Any]:
    """What `megasync replay --trainer` finds of all steps, summed up."""
    command = [*COMMAND, "replay", str(run), "--step", "all", "--trainer", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    steps = json.loads(done.stdout)["steps"]
    names = ("tokens", "compared_tokens", "differing_tokens", "later_tokens")
    return {"steps": len(steps), **{name: sum(step[name] for step in steps) for name in names}}


ASYNCHRONOUS = {"max_staleness": 2, "on_update": "continue", "cache_on_update": "recompute"}
KEPT = {"rollout": {"record": "all"}, "sync": {"log": "deltas"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    total = 0
    for family in ("qwen3", "llama"):
        for staleness, own in ((0, {}), (2, ASYNCHRONOUS)):
            folder = given.to / f"{family}_{staleness}"
            config = exact_config(
                folder, family, lengths=(1, 500), tokens=96, pages=100,
                run={"steps": given.steps}, data={"batch_size": 16}, sync=KEPT["sync"],
                rollout={"max_num_seqs": 64, **KEPT["rollout"], **own},
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="exact-", dir="/tmp") as temporary:  # other processes have theirs beside it
                done = launch(config, ranks=1, timeout_seconds=3600, temporary=Path(temporary))
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            found = scored(folder / "runs" / "run")
            total += found["compared_tokens"]
            print(f"{family}, staleness {staleness}: {json.dumps(found)}", flush=True)
    print(f"{total} tokens compared")


if __name__ == "__main__":
    main()
