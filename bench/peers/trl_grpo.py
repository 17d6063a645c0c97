"""TRL's GRPOTrainer on a run of ours: its model, data, batch, sampling, reward and learning rate, on one GPU, vLLM colocated.

    python3 bench/peers/trl_grpo.py configs/smollm2.yaml --to OUT/trl0 [--steps 60] [--seconds 170] [key=value ...]

TRL 1.16 (pip install --no-deps trl==1.16.0) beside locks/gpu.txt; it takes vLLM 0.22 to 0.31. What the config says goes to TRL
under its own names (`settings`), the rest is as TRL's documentation has it: importance sampling correction by sequence_mask, no
sleep mode, micro-batches as large as fit. Two things are set beyond that. Weights are float32 under bfloat16 autocast, since TRL
would train the folder's bfloat16 as it is, and small steps are lost in its rounding. And vLLM gets the config's
rollout.engine_arguments, for which TRL has no key: `colocated` hands them to the LLM that TRL makes.

Writes TO/metrics.jsonl, a line a step, and TO/evaluations.jsonl, the mean reward of greedy responses to data.eval, at the start and
every `--evaluate-every` steps, by the same vLLM after a sync: under the names of a run of ours, so that bench/run_figures.py reads
both. Evaluations are not counted in the seconds. bench/peers/run.sh runs it beside ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl.generation.vllm_generation
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.rewards.functions import RewardInput, reasoning_gym

Lines = list[dict[str, Any]]


class Clock(TrainerCallback):
    """Seconds of each step, from the end of the one before, and of its parts; stops the run after so many."""

    def __init__(self, to: Path, evaluate: Callable[[], float], given: argparse.Namespace) -> None:
        self._to, self._evaluate, self._given = to, evaluate, given
        self._parts: dict[str, float] = {}
        self._rewards: list[float] = []
        self._tokens = 0
        self._begin = self._used = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.synchronize()
                self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

        return functools.wraps(function)(call)

    def rewarded(self, rewards: list[float], tokens: int) -> None:
        self._rewards += rewards
        self._tokens += tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._begin
        self._used += seconds
        figures = {"step": state.global_step, "step/seconds": seconds, "train/response_tokens": self._tokens}
        figures |= {f"{part}/seconds": taken for part, taken in self._parts.items()}
        self._write("metrics.jsonl", figures | {"reward/mean": statistics.fmean(self._rewards)})
        last = state.global_step >= args.max_steps or self._used >= self._given.seconds
        if last or state.global_step % self._given.evaluate_every == 0:
            self._evaluated(state.global_step)
        control.should_training_stop = last
        self._parts, self._rewards, self._tokens, self._begin = {}, [], 0, time.perf_counter()

    def _evaluated(self, step: int) -> None:
        self._write("evaluations.jsonl", {"step": step, "eval/reward": self._evaluate()})
        self._parts, self._begin = {}, time.perf_counter()

    def _write(self, name: str, figures: dict[str, Any]) -> None:
        with (self._to / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        print(figures, flush=True)


def settings(given: argparse.Namespace, config: Config) -> GRPOConfig:
    """The config as TRL's settings."""
    rollout, optimizer, algorithm = config.rollout, config.engine.optimizer, config.algorithm
    samples = config.data.batch_size * rollout.group_size
    microbatch = min(given.microbatch, samples)
    return GRPOConfig(
        output_dir=str(given.to / "trl"),
        seed=config.run.seed,
        max_steps=given.steps,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.epsilon,
        max_grad_norm=optimizer.clip_grad_norm,
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=samples // microbatch,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=1.0,
        beta=algorithm.kl_coefficient,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=rollout.gpu_memory_utilization,
        vllm_max_model_length=rollout.max_model_len,
        logging_steps=given.steps,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )


def colocated(config: Config) -> None:
    """The LLM that TRL makes gets what the config adds."""
    llm = functools.partial(trl.generation.vllm_generation.LLM, **config.rollout.engine_arguments)
    trl.generation.vllm_generation.LLM = llm  # type: ignore[misc]


def read(path: str, config: Config) -> Lines:
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []
    prompt, answer = config.data.prompt_key, config.data.answer_key
    return [
        {"prompt": [*system, {"role": "user", "content": line[prompt]}], "answer": line[answer], "entry": line["entry"]}
        for line in lines
    ]


def score(text: str, answer: str, entry: str) -> float:
    return reasoning_gym(RewardInput("", text, answer, 0, 0, {"entry": entry}))


def greedy(trainer: GRPOTrainer, lines: Lines, config: Config) -> list[str]:
    """Responses by what generates in training, with the weights of now."""
    tokenizer, most = trainer.processing_class, config.rollout.max_new_tokens
    prompts = [tokenizer.apply_chat_template(line["prompt"], add_generation_prompt=True, tokenize=False) for line in lines]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    from vllm import SamplingParams  # after TRL, which has set what vLLM reads

    trainer.vllm_generation.sync_weights.__wrapped__()
    sampling = SamplingParams(temperature=0.0, max_tokens=most)
    asked = [{"prompt_token_ids": prompt} for prompt in ids]
    responses = [out.outputs[0].token_ids for out in trainer.vllm_generation.llm.generate(asked, sampling, use_tqdm=False)]
    return [tokenizer.decode(response, skip_special_tokens=True) for response in responses]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so many of training")
    parser.add_argument("--evaluate-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--microbatch", type=int, default=256, metavar="SAMPLES")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    given = parser.parse_intermixed_args()
    config = load_config(given.config, given.overrides)
    given.to.mkdir(parents=True)
    held_out = read(str(config.data.eval), config)

    def evaluate() -> float:
        texts = greedy(trainer, held_out, config)
        return statistics.fmean(score(text, line["answer"], line["entry"]) for text, line in zip(texts, held_out, strict=True))

    clock = Clock(given.to, evaluate, given)

    def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        given_back = zip(completions, columns["answer"], columns["entry"], strict=True)
        rewards = [score(reply[0]["content"], answer, entry) for reply, answer, entry in given_back]
        clock.rewarded(rewards, sum(map(len, completion_ids)))
        return rewards

    colocated(config)
    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=clock.timed("reward", reward),
        args=settings(given, config),
        train_dataset=Dataset.from_list(read(str(config.data.train), config)),
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
        callbacks=[clock],
    )
    inside = trainer.vllm_generation
    inside.sync_weights, inside.generate = clock.timed("sync", inside.sync_weights), clock.timed("rollout", inside.generate)
    trainer.train()


if __name__ == "__main__":
    main()
