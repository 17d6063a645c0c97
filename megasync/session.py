"""Session: engine, weight bridge, rollouts and log of one rank, put together from a Config; the words that loop.py speaks.

Every public method is collective unless it says otherwise. Leaves out the order of things, which is the loop's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bridge.adapter import AdapterSource, AdapterSpec
from bridge.config import ReplicaConfig
from bridge.export import Exporter
from bridge.messages import SyncError
from bridge.pool import ReplicaPool
from bridge.publish import Publisher
from engine import checkpoint, parallel
from engine.engine import Engine
from engine.sample import Sample
from megasync.config import Config
from megasync.data import PromptOrder, load_examples
from megasync.log import RunLog, read_evaluations
from megasync.prompts import Prompts
from megasync.report import write_report
from megasync.reward import resolve_reward
from megasync.rollout import RolloutBatch, Rollouts, from_rank_zero

MERGE_ERROR_NOTE = 0.5


class Session:
    """What a run holds on one rank. Built by train.py; `close` in any case."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.begin_seconds = time.time()
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self.checkpoints = config.run.folder / "checkpoints"
        resume = config.checkpoint.resume == "auto"
        self.last_checkpoint = from_rank_zero(self._on_zero(lambda: checkpoint.newest(self.checkpoints) if resume else None))
        self.first_step = checkpoint.step_of(self.last_checkpoint) if self.last_checkpoint else 0
        self.step = self.first_step
        self.engine = Engine(
            config.model,
            config.engine,
            config.algorithm,
            num_steps=config.run.steps,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            **(checkpoint.start(self.last_checkpoint) if self.last_checkpoint else {}),
        )
        if self.last_checkpoint:
            checkpoint.restore(self.last_checkpoint, self.engine)
        self.exporter = build_exporter(self.engine)
        self.prompts = Prompts(config.model.path, config.data.chat_template)
        self.examples = load_examples(config.data.train, config.data.prompt_key, config.data.answer_key)
        held_out = config.data.eval
        self.held_out = load_examples(held_out, config.data.prompt_key, config.data.answer_key) if held_out else []
        self.log = RunLog(config, first_step=self.first_step, write=self.layout.rank == 0)
        self.pool: ReplicaPool | None = None
        self.rollouts: Rollouts | None = None
        self.publisher: Publisher | None = None
        self.owns_ray = False
        self.accuracies: dict[int, float] = {}
        self.syncs: list[dict[str, float]] = []
        self.noted_merge_error = False

    # ------------------------------------------------------------------------------------------------ steps and log

    def steps(self) -> Iterator[int]:
        """The steps that are left; times them."""
        for step in range(self.first_step, self.config.run.steps):
            self.step = step
            self.step_begin_seconds = time.time()
            yield step

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the step for timeline.json. Not collective."""
        begin = time.time()
        yield
        self.log.timeline.add(name, "trainer", begin, time.time(), {"step": self.step})

    def log_step(self, metrics: dict[str, float]) -> None:
        """Write the step's line. Not collective; rank 0 writes."""
        seconds = time.time() - self.step_begin_seconds
        tokens = metrics.get("train/response_tokens", 0.0)
        times = {"step/seconds": seconds, "train/tokens_per_second": tokens / seconds}
        self.log.step(self.step, {"version": self.step + 1, **metrics, **times})

    # ------------------------------------------------------------------------------------------------ data

    def supervised_batch(self, step: int) -> list[Sample]:
        """The supervised examples of a step, the same on every rank. Not collective."""
        data = self.config.data
        order = PromptOrder(len(self.examples), data.batch_size, self.config.run.seed, data.shuffle)
        return [self.prompts.supervised(self.examples[index]) for index in order.indices(step)]

    def start_replicas(self) -> None:
        """Bring vLLM up through Ray, on rank 0, and connect the weight bridge."""
        reward = resolve_reward(self.config.rollout.reward)
        from_rank_zero(self._on_zero(self._start_pool))
        self.publisher = self._build_publisher()
        if self.pool is not None:
            self.rollouts = Rollouts(
                self.config, self.pool, self.prompts, self.examples, reward, self.log.timeline, self.first_step
            )

    def start_rollouts(self, until: int) -> None:
        """Let the batches up to that of step `until` begin to generate."""
        from_rank_zero(self._on_zero(lambda: self._rollouts.start_until(until)))

    def take_rollout(self, step: int) -> RolloutBatch:
        """The batch of `step`, waiting for it if need be."""
        batch: RolloutBatch = from_rank_zero(self._on_zero(lambda: self._rollouts.take(step)))
        return batch

    # ------------------------------------------------------------------------------------------------ weights

    def publish(self, version: int) -> dict[str, float]:
        """Bring every replica to the trainer's weights as `version`; a replica that failed is restarted, once.

        Raises:
            SyncError: the sync was refused, or failed twice.
        """
        assert self.publisher is not None
        try:
            report = self.publisher.publish(version)
        except SyncError as error:
            if error.refused or not error.failed_replicas:
                raise
            failed = error.failed_replicas
            self.log.note(f"{error}; restarting {len(failed)} replica(s)")
            from_rank_zero(self._on_zero(lambda: self._pool.restart(*failed)))
            report = self.publisher.publish(version)
        for stage in report.stages:
            self.log.timeline.add(stage.name, "sync", stage.start, stage.end, {"version": version})
        metrics = {
            "sync/seconds": report.seconds,
            "sync/bytes": float(report.num_bytes),
            "sync/gb_per_second": report.gb_per_second,
            "sync/pause_seconds": report.pause_seconds,
            "sync/verified": float(report.verified),
        }
        if self.config.engine.lora.rank and not self._sends_adapters:
            metrics["lora/merge_error"] = self._merge_error()
        self.syncs.append(metrics)
        return metrics

    def checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint after every `checkpoint.every_steps` steps, and after the last one."""
        every = self.config.checkpoint.every_steps
        if every and (step % every == 0 or step == self.config.run.steps):
            begin = time.time()
            self.last_checkpoint = checkpoint.save(
                self.checkpoints, step, self.engine, self.exporter, Path(self.config.model.path), self.config.checkpoint.keep
            )
            self.log.timeline.add("checkpoint", "trainer", begin, time.time(), {"step": step})

    # ------------------------------------------------------------------------------------------------ held-out accuracy

    def evaluate(self, step: int) -> float | None:
        """Greedy accuracy on the held-out file after `step` steps, None without one."""
        if not self.held_out:
            return None
        if self.config.algorithm.name == "sft":
            samples = [self.prompts.supervised(example) for example in self.held_out]
            self.accuracies[step] = statistics.fmean(self.engine.greedy_matches(samples))
        else:
            work = self._on_zero(lambda: self._rollouts.evaluate(self.held_out))
            self.accuracies[step] = from_rank_zero(work)
        self.log.evaluation(step, self.accuracies[step])
        return self.accuracies[step]

    def evaluate_if_due(self, step: int) -> float | None:
        """Evaluate after every `rollout.evaluate_every_steps` steps."""
        every = self.config.rollout.evaluate_every_steps
        return self.evaluate(step) if every and step % every == 0 else None

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The last evaluation, the Hugging Face folder if asked for, summary.json and report.html."""
        done = self.step + 1 if self.config.run.steps > self.first_step else self.first_step
        if done not in self.accuracies:
            self.evaluate(done)
        folder = self.config.run.folder / "hf"
        if self.config.run.export_hf:
            self._export(folder)
        if self.layout.rank != 0:
            return
        accuracies = {line["step"]: line["eval/accuracy"] for line in read_evaluations(self.config.run.folder)}
        summary: dict[str, Any] = {
            "name": self.config.run.name,
            "steps": done,
            "accuracy_before": accuracies[min(accuracies)] if accuracies else None,
            "accuracy_after": accuracies[max(accuracies)] if accuracies else None,
            "num_syncs": len(self.syncs),
            "sync_seconds_median": statistics.median(s["sync/seconds"] for s in self.syncs) if self.syncs else None,
            "sync_bytes": int(self.syncs[-1]["sync/bytes"]) if self.syncs else None,
            "seconds_total": time.time() - self.begin_seconds,
            "hf_folder": str(folder) if self.config.run.export_hf else None,
            "report": str(self.config.run.folder / "report.html"),
        }
        self.log.summary(summary)
        self.log.timeline.write()
        write_report(self.config.run.folder)

    def close(self) -> None:
        """Take replicas and a Ray of our own down, and close the log. Not collective; safe after any failure."""
        if self.pool is not None:
            self.pool.close()
        if self.owns_ray:
            import ray

            ray.shutdown()
        self.log.close()

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _pool(self) -> ReplicaPool:
        assert self.pool is not None
        return self.pool

    @property
    def _rollouts(self) -> Rollouts:
        assert self.rollouts is not None
        return self.rollouts

    def _merge_error(self) -> float:
        """How much of the adapters' update the last merge lost; a note once it is more than MERGE_ERROR_NOTE."""
        error = self.exporter.merge_error()
        if error > MERGE_ERROR_NOTE and not self.noted_merge_error:
            self.noted_merge_error = True
            dtype = self.config.model.dtype
            self.log.note(
                f"lora/merge_error is {error:.2f}: rounding W + B A to {dtype} loses that share of the update, so that vLLM "
                "samples from nearly the base model; raise engine.optimizer.learning_rate or engine.lora.alpha"
            )
        return error

    def _on_zero(self, work: Any) -> Any:
        return work if self.layout.rank == 0 else None

    def _build_publisher(self) -> Publisher:
        """Of whole weights, with adapters merged, or of the adapters alone."""
        lora, layout = self.config.engine.lora, self.layout
        if not self._sends_adapters:
            return Publisher(self.exporter, self.pool, self.config.sync)
        source = AdapterSource(
            self.engine.adapter_tensors,
            stage=layout.pipeline_rank,
            num_stages=layout.pipeline_size,
            is_sender=layout.is_sender,
        )
        spec = AdapterSpec(lora.rank, lora.alpha, lora.rslora)
        return Publisher(source, self.pool, self.config.sync, adapter=spec)

    @property
    def _sends_adapters(self) -> bool:
        lora = self.config.engine.lora
        return lora.rank > 0 and lora.sync == "adapter"

    def _start_pool(self) -> None:
        import ray

        rollout = self.config.rollout
        if not ray.is_initialized():
            self.owns_ray = True
            address = None if rollout.ray_address == "local" else rollout.ray_address
            options: dict[str, Any] = {"address": address}
            if address is None:
                options = {"num_cpus": max(os.cpu_count() or 1, 4), "include_dashboard": False}
                options["object_store_memory"] = 200 * 2**20  # weights never travel through Ray
                leave_gpus_to_ray(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        replica = ReplicaConfig(
            model_path=str(Path(self.config.model.path).resolve()),
            dtype=self.config.model.dtype,
            tensor_parallel=rollout.tensor_parallel,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_bytes=rollout.kv_cache_bytes,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            seed=self.config.run.seed,
            adapter_rank=self.config.engine.lora.rank if self._sends_adapters else 0,
        )
        self.pool = ReplicaPool.start(replica, rollout.replicas)

    def _export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder: whole, under a temporary name first."""
        import shutil

        partial = folder.with_name(f".partial_{folder.name}")
        if self.layout.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        from_rank_zero(self._on_zero(lambda: None))
        checkpoint.save_weights(partial, self.layout.pipeline_rank, self.exporter)
        from_rank_zero(self._on_zero(lambda: None))
        if self.layout.rank == 0:
            checkpoint.finish_folder(partial, Path(self.config.model.path))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)


def build_exporter(engine: Engine) -> Exporter:
    """The weights of this rank's pipeline stage as Hugging Face tensors."""
    return Exporter(
        engine.whole_parameters,
        engine.hf_bridge,
        tensor_group=engine.hf_bridge.mpu.tp_group,
        stage=engine.layout.pipeline_rank,
        num_stages=engine.layout.pipeline_size,
        data_rank=engine.layout.data_rank,
        stays=engine.config.wrap == "ddp",
    )


def leave_gpus_to_ray(num_trainer_gpus: int) -> None:
    """Let a Ray that this process starts see only the GPUs behind those of the trainer ranks of this machine."""
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = visible if visible != [""] else [str(index) for index in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[num_trainer_gpus:])
