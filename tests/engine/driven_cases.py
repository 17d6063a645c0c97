"""Cases of test_driven.py, each on real ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench.equivalence.measure import leave_groups
from bridge.export.source import whole_tensors
from engine.config import LORA_TARGETS, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.algorithm import AlgorithmConfig
from engine.adapters import AdapterSpec, RefusedError
from engine.driven import AdamParameters, Datum, Driven, response_datum
from engine.engine import Engine
from engine.peft import factors
from engine.runtime import parallel
from engine.sample import Sample
from megasync.run.weights import build_exporter
from tests.engine.engine_cases import random_samples
from tests.engine.model.lora_cases import peft_log_probs, worst_difference


ADAM = AdamParameters(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, grad_clip_norm=1.0)
ALPHA, RANK = 16.0, 8


def build(path: str, **options: Any) -> Driven:
    split = ParallelConfig(**options.pop("parallel", {}))
    parallel.initialize(split, seed=0)
    rank, targets = options.pop("rank", RANK), options.pop("targets", LORA_TARGETS)
    lora = LoraConfig(rank=rank, alpha=options.pop("alpha", ALPHA), targets=targets)
    model = ModelConfig(path=path, dtype=options.pop("dtype", "float32"))
    wrap, tokens = options.pop("wrap", "ddp"), {"tokens_per_microbatch": 40, **options}
    engine = EngineConfig(wrap=wrap, parallel=split, lora=lora, **tokens)
    return Driven(Engine(model, engine, AlgorithmConfig(name="sft"), num_steps=1))


def leaves_groups(case: Callable[..., Any]) -> Callable[..., Any]:
    """These ranks take other cases later."""

    @wraps(case)
    def run(**arguments: Any) -> Any:
        found = case(**arguments)
        leave_groups()
        return found

    return run


def make_data(seed: int, count: int = 6) -> list[Datum]:
    random = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(random.integers(1, 24))
        floats = {name: random.normal(size=length).astype(np.float32) for name in ("weights", "advantages")}
        floats["sequence_ratio_mask"] = (random.random(length) < 0.7).astype(np.float32)
        values = {**floats, "logprobs": (-3 + 0.5 * random.normal(size=length)).astype(np.float32)}
        tokens, targets = (random.integers(0, 128, length) for _ in range(2))
        data.append(Datum(tokens.astype(np.int32), targets.astype(np.int64), values))
    return data


def adapter_of(driven: Driven, name: str) -> dict[str, torch.Tensor]:
    """Of all stages, on every rank: each tensor is one rank's to write."""
    own = {key: tensor.cpu() for key, tensor in driven.adapters.save_peft(name)[1].items()}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return {key: tensor for part in parts for key, tensor in part.items()}


@leaves_groups
def shown(path: str, parallel: dict[str, int], **options: Any) -> dict[str, bool]:
    """Whether adapters of several ranks, whose scales differ, leave one exporter as they leave one of their own."""
    driven, equal = build(path, parallel=parallel, **options), {}
    exporter = build_exporter(driven.engine, is_in_place=False, on_all_ranks=True)
    for number, rank in enumerate((RANK, 3, 1)):
        driven.adapters.create(name := f"rank {rank}", AdapterSpec(rank=rank, seed=number))
        train(driven, name, range(1))
        driven.adapters.show(driven.adapters.specs[name], driven.adapters.factors(name))
        equal[name] = same({key: tensor.clone() for key, tensor in whole_tensors(exporter)}, whole(driven))
    return equal


def whole(driven: Driven) -> dict[str, torch.Tensor]:
    """Copies of the tensors of this rank's stage, by the names of Hugging Face."""
    exporter = build_exporter(driven.engine, on_all_ranks=True)
    return {name: tensor.clone() for name, tensor in whole_tensors(exporter)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) if a.numel() else 0.0


@leaves_groups
def as_grpo(path: str) -> dict[str, float]:
    """The same samples through the product's GRPO and through the four calls: largest relative differences over three steps."""
    optimizer = OptimizerConfig(
        learning_rate=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-2, weight_decay=0.1, clip_grad_norm=1.0, warmup_steps=0
    )
    driven = build(path)
    driven.adapters.create("mine", AdapterSpec(rank=RANK))
    config = EngineConfig(wrap="ddp", lora=LoraConfig(rank=RANK, alpha=ALPHA), tokens_per_microbatch=40, optimizer=optimizer)
    product = Engine(ModelConfig(path=path, dtype="float32"), config, AlgorithmConfig(name="grpo"), num_steps=3)
    worst = dict.fromkeys(("loss", "norm", "weights"), 0.0)
    for step in range(3):
        samples = rollouts(driven, step)
        metrics = product.update(product.prepare(samples))
        passed = driven.forward_backward("mine", as_data(samples), "importance_sampling", {})
        norm = driven.optim_step("mine", ADAM)
        worst["loss"] = max(worst["loss"], abs(passed.loss - metrics["loss/total"]))
        worst["norm"] = max(worst["norm"], abs(norm - metrics["grad_norm"]) / norm)
    own, other = adapter_of(driven, "mine"), factors.stage_file(0, product.adapter_tensors())[1]
    worst["weights"] = max(difference(own[key], other[key].detach().cpu()) for key in own)
    return worst


def rollouts(driven: Driven, step: int, num_groups: int = 3, group_size: int = 4) -> list[Sample]:
    """Random responses with rewards, and log-probs nearly those of the adapter, as another engine's would be."""
    random = np.random.default_rng(step)
    samples = []
    for group in range(num_groups):
        prompt = random.integers(0, 128, int(random.integers(1, 6))).astype(np.int32)
        for _ in range(group_size):
            response = random.integers(0, 128, int(random.integers(1, 9))).astype(np.int32)
            tokens = np.concatenate([prompt, response])
            ones = {"weights": np.ones(len(tokens) - 1, np.float32)}
            datum = Datum(tokens[:-1], tokens[1:].astype(np.int64), ones)
            (log_probs,) = driven.forward_backward("mine", [datum], "cross_entropy", {}, has_gradients=False).log_probs
            near = log_probs[len(prompt) - 1 :] + random.normal(0, 0.05, len(response)).astype(np.float32)
            versions = np.full(len(response), step, np.int32)
            samples.append(Sample(prompt, response, near, versions, reward=float(random.random()), group=group))
    return samples


def as_data(samples: list[Sample]) -> list[Datum]:
    """GRPO's advantages over the number of all response tokens, as examples/grpo_by_four_calls.py has them."""
    num_tokens = sum(len(each.response_ids) for each in samples)
    data = []
    for each in samples:
        rewards = np.array([other.reward for other in samples if other.group == each.group])
        advantage = (each.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) / num_tokens
        data.append(response_datum(each.prompt_ids, each.response_ids, each.rollout_log_probs, advantage))
    return data


def train(driven: Driven, name: str, steps: range) -> list[float]:
    return [
        value
        for step in steps
        for value in (
            driven.forward_backward(name, make_data(step), "ppo", {}).loss,
            driven.forward_backward(name, make_data(step), "cross_entropy", {}, has_gradients=False).loss,
            driven.forward_backward(name, make_data(1000 + step), "cross_entropy", {}).loss,
            driven.optim_step(name, ADAM),
        )
    ]


@leaves_groups
def in_turns(path: str, parallel: dict[str, int], targets: Sequence[str] = LORA_TARGETS, **options: Any) -> dict[str, bool]:
    """Whether two adapters that take turns, one of them saved and loaded on the way, have the bits of each alone."""
    specs = {"one": AdapterSpec(rank=RANK), "two": AdapterSpec(rank=3, train_mlp=False, seed=5)}
    driven = build(path, parallel=parallel, targets=targets, **options)
    alone = {}
    for name, spec in specs.items():
        driven.adapters.create(name, spec)
        alone[name] = (train(driven, name, range(3)), adapter_of(driven, name))
        driven.adapters.forget(name)
    values: dict[str, list[float]] = {name: [] for name in specs}
    for name, spec in specs.items():
        driven.adapters.create(name, spec)
    for step in range(3):
        for name in specs:
            values[name] += train(driven, name, range(step, step + 1))
        driven.adapters.show(None, {})  # as a sync of the base model does
    equal = {name: values[name] == alone[name][0] for name in specs}
    for name in specs:
        equal[f"{name}'s weights"] = same(adapter_of(driven, name), alone[name][1])
    with tempfile.TemporaryDirectory() as folder:
        driven.adapters.save("two", Path(folder))
        after = train(driven, "two", range(3, 5))
        driven.adapters.load("two", driven.adapters.read(Path(folder)), with_optimizer=True)
        equal["resumed"] = train(driven, "two", range(3, 5)) == after
    return equal


@leaves_groups
def read_by_others(path: str, folder: str, others: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What an engine says to an adapter that one on all ranks' data parallelism has saved, by how it is another engine."""
    driven = build(path)
    driven.adapters.create("mine", AdapterSpec(rank=RANK))
    driven.adapters.save("mine", Path(folder))
    said, own = {}, Path(folder) / driven.adapters.file
    for name, options in others.items():
        leave_groups()
        if name.startswith("former"):  # versions of this, which have saved no settings
            save_file(load_file(own), own)
        try:
            build(**{"path": path, **options}).adapters.read(Path(folder))
        except RefusedError as error:
            said[name] = str(error)
    return said


@leaves_groups
def of_experts(path: str, folder: str, parallel: dict[str, int], **options: Any) -> dict[str, Any]:
    """An adapter of fewer ranks than the engine's as it starts and after two steps, and how far PEFT is from it on one rank."""
    driven = build(path, parallel=parallel, **options)
    driven.adapters.create("mine", AdapterSpec(rank=3, seed=7))
    start = adapter_of(driven, "mine")
    train(driven, "mine", range(2))
    found = {"start": start, "end": adapter_of(driven, "mine")}
    if dist.get_world_size() > 1:
        return found
    samples = random_samples(6, seed=5)
    data = [response_datum(each.prompt_ids, each.response_ids, each.rollout_log_probs, 1.0) for each in samples]
    passed = driven.forward_backward("mine", data, "importance_sampling", {}, has_gradients=False)
    own = [torch.from_numpy(each[-len(sample.response_ids) :]) for each, sample in zip(passed.log_probs, samples, strict=True)]
    save_file(found["end"], Path(folder) / "stage-000.safetensors")
    factors.finish_folder(Path(folder), driven.adapters.lora_config(driven.adapters.specs["mine"]), Path(path))
    return {**found, "peft": worst_difference(own, peft_log_probs(path, folder, samples))}


@leaves_groups
def refusals(path: str) -> dict[str, str]:
    driven = build(path)
    found = {}

    def expect(key: str, call: Any) -> None:
        try:
            call()
        except RefusedError as error:
            found[key] = str(error)

    expect("rank", lambda: driven.adapters.create("a", AdapterSpec(rank=RANK + 1)))
    driven.adapters.create("a", AdapterSpec(rank=2))
    before = adapter_of(driven, "a")
    expect("twice", lambda: driven.adapters.create("a", AdapterSpec(rank=2)))
    expect("nothing", lambda: driven.adapters.create("b", AdapterSpec(rank=2, train_attn=False, train_mlp=False)))
    expect("unknown", lambda: driven.optim_step("c", ADAM))
    (datum,) = make_data(0, 1)
    broken = Datum(datum.tokens, datum.targets, {**datum.values, "weights": np.full(len(datum.tokens), math.inf, np.float32)})
    expect("loss", lambda: driven.forward_backward("a", [broken], "cross_entropy", {}))
    found["norm"] = str(driven.optim_step("a", ADAM))
    after = adapter_of(driven, "a")
    decay = 1 - ADAM.learning_rate * ADAM.weight_decay
    found["only decayed"] = str(all(torch.allclose(before[key] * decay, after[key]) for key in before))
    return found
