"""A run's config on tables of messages, with sampling keys and several evaluation sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from megasync.tools.assets.command import split_sums
from tests.runs.train_cases import write_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if sign is defined %}{{ sign }}{% endif %}"
STOPS = ["?", "5("]
BUFFER = 4
SAMPLED = {"samples": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_new_tokens": 5, "pass_reward": 0.5}


def write_sums(folder: Path) -> Path:
    """A data set as on the hub, with splits, prompts as messages, and answers in a struct."""
    train, held_out = split_sums(seed=0)
    for split, sums in {"train": train[:200], "test": held_out[:12]}.items():
        prompts = [[{"role": "user", "content": one["question"].removesuffix("=")}] for one in sums]
        answers = [{"ground_truth": one["answer"], "style": "rule"} for one in sums]
        rows = [{"messages": prompt, "reward_model": answer} for prompt, answer in zip(prompts, answers, strict=True)]
        (folder / "data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def table_config(folder: Path) -> Path:
    """Prompts are messages with a system prompt; checkpoints after steps 3 and 6."""
    sums = write_sums(folder / "sums")
    lines = [json.dumps({"q": "1+1=", "a": "2"}), json.dumps({"q": "2+2=", "a": "4"})]
    (folder / "small.jsonl").write_text("\n".join(lines))
    data: dict[str, Any] = {
        "train": str(sums),
        "split": "train",
        "prompt_key": "messages",
        "answer_key": "reward_model.ground_truth",
        "chat_template": True,
        "chat_template_arguments": {"sign": "="},
        "system_prompt": "xyz ",
        "eval": {
            "sums": {"path": str(sums), "split": "test", **SAMPLED},
            "small": {"path": str(folder / "small.jsonl"), "prompt_key": "q", "answer_key": "a"},
        },
    }
    rollout = {"top_k": 20, "min_p": 0.01, "stop": STOPS, "evaluate_every_steps": 3, "evaluate_at_start": False}
    rollout["engine_arguments"] = {"max_num_batched_tokens": 512}
    engine = {"optimizer": {"learning_rate": 1e-5}}  # with more, all responses are soon cut off, and equal
    algorithm = {"truncated": "penalise", "overlong_buffer": BUFFER}
    others = {"run": {"log_samples": 8}, "sync": {"log": "deltas", "log_full_every": 4}}
    config = write_config(folder, num_layers=2, engine=engine, rollout=rollout, data=data, algorithm=algorithm, **others)
    tokenizer = folder / "assets" / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": TEMPLATE}))
    return config
