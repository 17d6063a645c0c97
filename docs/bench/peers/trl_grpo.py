"""TRL's GRPOTrainer on the model, data, reward and sampling of configs/smollm2.yaml: seconds and tokens a step, seconds of its sync.

    pip install --no-deps trl==1.16.0 pandas    # beside locks/gpu.txt; TRL 1.16 takes vLLM 0.22 to 0.31
    python docs/bench/peers/trl_grpo.py --assets smollm2 --to trl0 --seed 0 [--steps 100] [--save-every 10] [--no-vllm]

Writes TO/steps.jsonl, a line a step, and TO/step_N, Hugging Face folders for `megasync evaluate`, which scores both sides alike.
Settings that are not the task's are what TRL's documentation recommends for vLLM on the trainer's own GPU: colocated, importance
sampling correction on, no KL term. `--no-vllm` is for a try on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.rewards.functions import RewardInput, reasoning_gym

ROOT = Path(__file__).resolve().parents[3]


class Clock(TrainerCallback):
    """Seconds of each step by what was done in it. Saving is not counted."""

    def __init__(self, to: Path, save_every: int) -> None:
        self.to, self.save_every = to, save_every
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self.trainer: Any = None
        self.begin = self.used = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        return call

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds, self.tokens, self.begin = {}, 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.begin
        self.used += seconds
        line = {"step": state.global_step, "seconds": seconds, "seconds_in_all": self.used, "tokens": self.tokens, **self.seconds}
        with (self.to / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        if state.global_step % self.save_every == 0:
            self.trainer.save_model(str(self.to / f"step_{state.global_step}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on the task of configs/smollm2.yaml.")
    parser.add_argument("--assets", type=Path, required=True, help="what `megasync assets --to` wrote")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, help="default: the config's")
    parser.add_argument("--prompts", type=int, help="a step; default: the config's")
    parser.add_argument("--no-vllm", action="store_true")
    given = parser.parse_args()
    given.to.mkdir(parents=True)
    config = load_config(ROOT / "configs/smollm2.yaml")
    rollout, prompts = config.rollout, given.prompts or config.data.batch_size
    clock = Clock(given.to, given.save_every)
    arguments = settings(given, config, prompts)

    def reward(completions: list[Any], completion_ids: list[list[int]], entry: list[str], answer: list[str], **_: Any) -> list[float]:
        clock.tokens += sum(map(len, completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        return [
            reasoning_gym(RewardInput("", text, right, len(ids), rollout.max_new_tokens, {"entry": one}))
            for text, ids, one, right in zip(texts, completion_ids, entry, answer, strict=True)
        ]

    trainer = GRPOTrainer(
        model=str(given.assets / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(examples(given.assets / "train.jsonl", config.data.system_prompt)),
        processing_class=AutoTokenizer.from_pretrained(given.assets / "model"),
        callbacks=[clock],
    )
    clock.trainer = trainer
    if not given.no_vllm:
        trainer.vllm_generation.sync_weights = clock.timed("sync", trainer.vllm_generation.sync_weights)
        trainer.vllm_generation.generate = clock.timed("generate and sync", trainer.vllm_generation.generate)
    trainer.train()


def settings(given: argparse.Namespace, config: Config, prompts: int) -> GRPOConfig:
    """What the config says, in TRL's words; the rest as its documentation recommends."""
    rollout = config.rollout
    return GRPOConfig(
        output_dir=str(given.to / "trl"),
        seed=given.seed,
        max_steps=given.steps,
        learning_rate=given.learning_rate or config.engine.optimizer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.engine.optimizer.warmup_steps,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=not given.no_vllm,
        use_cpu=given.no_vllm,
        gradient_checkpointing=False,
        per_device_train_batch_size=min(256, prompts * rollout.group_size),
        gradient_accumulation_steps=max(1, prompts * rollout.group_size // 256),
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=1.0,
        beta=0.0,
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        use_vllm=not given.no_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=rollout.max_model_len,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )


def examples(path: Path, system_prompt: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [
        {"prompt": [*system, {"role": "user", "content": line["question"]}], "answer": line["answer"], "entry": line["entry"]}
        for line in lines
    ]


if __name__ == "__main__":
    main()
