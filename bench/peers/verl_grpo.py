"""verl's GRPO on a run of ours: its model, data, batch, sampling, reward and learning rate, FSDP2, vLLM on the trainer's GPUs.

    python3 bench/peers/verl_grpo.py configs/smollm2.yaml --to OUT/verl0 [--gpus 1] [--steps 60] [--seconds 170] [key=value ...]

verl 0.9.1 (pip install --no-deps, as for TRL) and what it needs, beside locks/gpu.txt. What the config says goes to verl under
its own names, the rest is as verl's documentation has it: packed sequences, micro-batches by tokens, the old policy's log-probs
from a pass of their own. `--verl "key=value ..."` adds more of verl's.

Where data.chat_template is off, verl gets a folder of links to the model's files, with a template that leaves texts as they are
and a tokenizer with a character for every id: verl lets vLLM sample no other ids.

Writes TO/metrics.jsonl, a line a step, under the names of a run of ours for bench/run_figures.py, and under verl's. A step's
seconds are those since the line before it, of the first step verl's. Stops after `--seconds`, the start included.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.rewards import functions
from megasync.rewards.functions import RewardInput

PARTS = {"rollout": "gen", "log_probs": "old_log_prob", "train": "update_actor", "sync": "update_weights"}
AS_IT_IS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OPTIONS = "tokenizer_config.json"
OF_QWEN = ("\n", "<|im_end|>")  # verl looks them up


def score(solution_str: str, ground_truth: str, extra_info: dict[str, Any], reward: str, max_tokens: int, **_: Any) -> float:
    """verl calls this for each response. Tokens are counted as characters."""
    line = json.loads(extra_info["line"])
    return getattr(functions, reward)(RewardInput("", solution_str, ground_truth, len(solution_str), max_tokens, line))


def write_table(path: Path, config: Config) -> None:
    data, rows = config.data, []
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    for text in Path(str(data.train)).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        prompt, truth = [*system, {"role": "user", "content": line[data.prompt_key]}], {"ground_truth": line[data.answer_key]}
        rows.append({"data_source": "", "prompt": prompt, "reward_model": truth, "extra_info": {"line": text}})
    parquet.write_table(pa.Table.from_pylist(rows), path)


def write_model(folder: Path, source: Path) -> Path:
    folder.mkdir()
    files = {path.name: path for path in source.resolve().iterdir()}
    tokenizer, options = (json.loads(files.pop(name).read_text(encoding="utf-8")) for name in ("tokenizer.json", OPTIONS))
    ids, size = tokenizer["model"]["vocab"], json.loads(files["config.json"].read_text(encoding="utf-8"))["vocab_size"]
    ids |= zip((*OF_QWEN, *map(chr, range(0x10000, 0x10000 + size))), range(len(ids), size), strict=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / OPTIONS).write_text(json.dumps(options | {"chat_template": AS_IT_IS}), encoding="utf-8")
    for name, path in files.items():
        (folder / name).symlink_to(path)
    return folder


def overrides(given: argparse.Namespace, config: Config, model: Path, table: Path) -> list[str]:
    """The config's settings under verl's names."""
    batch, rollout, engine, algorithm = config.data.batch_size, config.rollout, config.engine, config.algorithm
    optimizer, actor, vllm = engine.optimizer, "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    words = f"""
        data.train_files={table} data.val_files={table} data.train_batch_size={batch} data.seed={config.run.seed}
        data.max_prompt_length={rollout.max_model_len - rollout.max_new_tokens} data.max_response_length={rollout.max_new_tokens}
        data.dataloader_num_workers=0 algorithm.adv_estimator=grpo actor_rollout_ref.model.path={model} {actor}.strategy=fsdp2
        actor_rollout_ref.model.enable_gradient_checkpointing={engine.recompute != "none"} {actor}.use_dynamic_bsz=True
        {actor}.ppo_mini_batch_size={batch} {actor}.ppo_max_token_len_per_gpu={engine.tokens_per_microbatch}
        {actor}.clip_ratio_low={algorithm.clip_low} {actor}.clip_ratio_high={algorithm.clip_high}
        {actor}.optim.lr={optimizer.learning_rate} {actor}.optim.lr_warmup_steps={optimizer.warmup_steps}
        {actor}.optim.weight_decay={optimizer.weight_decay} {actor}.optim.betas=[{optimizer.beta1},{optimizer.beta2}]
        {actor}.optim.clip_grad={optimizer.clip_grad_norm} {vllm}.name=vllm {vllm}.n={rollout.group_size}
        {vllm}.temperature={rollout.temperature} {vllm}.seed={config.run.seed} {vllm}.enforce_eager={rollout.enforce_eager}
        {vllm}.tensor_model_parallel_size={rollout.tensor_parallel} {vllm}.gpu_memory_utilization={rollout.gpu_memory_utilization}
        {vllm}.max_model_len={rollout.max_model_len} {vllm}.max_num_seqs={rollout.max_num_seqs}
        reward.custom_reward_function.path={Path(__file__).resolve()} reward.custom_reward_function.name=score
        +reward.custom_reward_function.reward_kwargs={{reward:{rollout.reward},max_tokens:{rollout.max_new_tokens}}}
        trainer.total_training_steps={given.steps} trainer.total_epochs={given.steps} trainer.n_gpus_per_node={given.gpus}
        trainer.logger=[console,file] trainer.val_before_train=False trainer.resume_mode=disable hydra.run.dir={given.to}/hydra
        algorithm.rollout_correction.rollout_is={"token" if algorithm.importance_correction == "tis" else "null"}
        +ray_kwargs.ray_init.include_dashboard=False""".split()
    words += [f"+{vllm}.engine_kwargs.vllm.{key}='{json.dumps(value)}'" for key, value in rollout.engine_arguments.items()]
    return words + shlex.split(given.verl)


def figures(line: dict[str, Any], seconds: float, samples: int) -> dict[str, Any]:
    own = line["data"]
    ours = {f"{part}/seconds": own[f"timing_s/{name}"] for part, name in PARTS.items() if f"timing_s/{name}" in own}
    ours |= {"step": line["step"], "step/seconds": seconds or own["timing_s/step"], "reward/mean": own["critic/score/mean"]}
    return ours | {"train/response_tokens": own["response_length/mean"] * samples} | own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--to", type=lambda path: Path(path).resolve(), required=True, metavar="FOLDER")
    for name, kind, default in (("--gpus", int, 1), ("--steps", int, 60), ("--seconds", float, 600.0), ("--verl", str, "")):
        parser.add_argument(name, type=kind, default=default)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    given = parser.parse_intermixed_args()
    config, end = load_config(given.config, given.overrides), time.monotonic() + given.seconds
    samples = config.data.batch_size * config.rollout.group_size
    given.to.mkdir(parents=True)
    model, table, lines = Path(config.model.path).resolve(), given.to / "train.parquet", given.to / "verl.jsonl"
    write_table(table, config)
    model = model if config.data.chat_template else write_model(given.to / "model", model)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(given, config, model, table)]
    process = subprocess.Popen(command, env={**os.environ, "VERL_FILE_LOGGER_PATH": str(lines)}, start_new_session=True)
    arrived, is_running = list[float](), True
    while is_running:
        time.sleep(0.1)
        is_running = process.poll() is None and time.monotonic() < end
        texts = lines.read_text(encoding="utf-8").splitlines(keepends=True) if lines.is_file() else []
        for text in [text for text in texts[len(arrived) :] if text.endswith("\n")]:
            arrived.append(time.monotonic())
            step = figures(json.loads(text), arrived[-1] - arrived[-2] if len(arrived) > 1 else 0.0, samples)
            with (given.to / "metrics.jsonl").open("a", encoding="utf-8") as file:
                print(json.dumps(step), file=file)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
