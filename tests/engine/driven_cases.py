"""Cases of test_driven.py, each on real ranks."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from bench.equivalence.measure import leave_groups
from bridge.export.source import whole_tensors
from engine.config import LORA_TARGETS, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from engine.algorithm import AlgorithmConfig
from engine import shared
from engine.adapters import AdapterSpec, RefusedError
from engine.driven import AdamParameters, Datum, Driven, Passed, PassRequest, response_datum
from engine.engine import Engine
from engine.model import lora_linears
from engine.objective.token_losses import TOKEN_LOSSES
from engine.peft import factors
from engine.peft.folder import PREFIX
from engine.runtime import parallel
from engine.sample import Sample
from megasync.run.weights import build_exporter
from tests.engine.engine_cases import random_samples
from tests.engine.model.lora_cases import peft_log_probs, worst_difference

LOSSES = tuple(TOKEN_LOSSES)
ADAM = AdamParameters(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, grad_clip_norm=1.0)
ALPHA, RANK = 16.0, 8


def build(path: str, **options: Any) -> Driven:
    split = ParallelConfig(**options.pop("parallel", {}))
    parallel.initialize(split, seed=0)
    lora = LoraConfig(rank=options.pop("rank", RANK), alpha=ALPHA, targets=options.pop("targets", LORA_TARGETS))
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


class Reference:
    """The same in plain torch on transformers: fused linears share their A, as they do in the engine."""

    def __init__(self, path: str, tensors: dict[str, torch.Tensor], rank: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model.requires_grad_(not rank)
        self.model.get_input_embeddings().padding_idx = None  # else the padding token's row gets no gradient
        self.parameters: dict[str, torch.nn.Parameter] = {}
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        for key in tensors:
            linear = key.removeprefix(PREFIX).rpartition(".lora_")[0]
            if key.endswith("lora_A.weight"):
                _, _, last = linear.rpartition(".")
                owner = key.replace(last, shared.get(last, last))
                if owner not in self.parameters:
                    self.parameters[owner] = torch.nn.Parameter(tensors[owner].clone())
                b_key = key.replace("lora_A", "lora_B")
                self.parameters[b_key] = torch.nn.Parameter(tensors[b_key].clone())
                self._adapt(self.model.get_submodule(linear), self.parameters[owner], self.parameters[b_key], ALPHA / rank)
        if not rank:  # all parameters are trained; those of one dimension do not decay
            self.parameters = dict(self.model.named_parameters())
        groups = [{"params": [each for each in self.parameters.values() if each.dim() > 1]}]
        groups += [{"params": [each for each in self.parameters.values() if each.dim() == 1], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=ADAM.learning_rate,
            betas=(ADAM.beta1, ADAM.beta2),
            eps=ADAM.eps,
            weight_decay=ADAM.weight_decay,
        )

    @staticmethod
    def _adapt(module: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        plain = module.forward
        module.forward = lambda x: plain(x) + scale * F.linear(F.linear(x, a), b)  # type: ignore[method-assign]

    def pass_(self, data: list[Datum], name: str, options: dict[str, float]) -> tuple[list[torch.Tensor], float]:
        total, found = torch.zeros(()), []
        for each in data:
            logits = self.model(torch.from_numpy(each.tokens).long()[None]).logits[0]
            p = logits.log_softmax(-1).gather(1, torch.from_numpy(each.targets)[:, None])[:, 0]
            v = {key: torch.from_numpy(value) for key, value in each.values.items()}
            found.append(p.detach())
            total = total + loss_by_hand(name, p, v, options)
        total.backward()
        return found, float(total)

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), ADAM.grad_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def loss_by_hand(name: str, p: torch.Tensor, v: dict[str, torch.Tensor], options: dict[str, float]) -> torch.Tensor:
    if name == "cross_entropy":
        return -(p * v["weights"]).sum()
    ratio, a = (p - v["logprobs"]).exp(), v["advantages"]
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "gspo":
        kept = v["sequence_ratio_mask"] != 0
        mean = (p.detach() - v["logprobs"])[kept].mean() if kept.any() else torch.zeros(())
        ratio = (mean + p - p.detach()).exp()
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    if name in ("ppo", "gspo"):
        return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(low, high) * p * a).sum()
    return -(p * a - 0.5 * options.get("beta", 0.05) * (p - v["logprobs"]) ** 2).sum()


@leaves_groups
def against_torch(
    path: str, rank: int, parallel: dict[str, int], targets: Sequence[str] = LORA_TARGETS, **options: Any
) -> dict[str, dict[str, float]]:
    """For each loss the largest relative differences, over two optimizer steps of two accumulated passes each."""
    driven, found = build(path, parallel=parallel, targets=targets, **options), {}
    for number, loss in enumerate(LOSSES):
        driven.adapters.create(loss, AdapterSpec(rank=rank, seed=number))
        reference = Reference(path, adapter_of(driven, loss), rank)
        options = {"clip_low_threshold": 0.7} if loss == "ppo" else {}
        worst = dict.fromkeys(("log_probs", "loss", "norm", "weights"), 0.0)
        for step in range(2):
            for part in range(2):
                data = make_data(100 * number + 10 * step + part)
                passed = driven.forward_backward(loss, data, loss, options)
                log_probs, total = reference.pass_(data, loss, options)
                for own, other in zip(passed.log_probs, log_probs, strict=True):
                    worst["log_probs"] = max(worst["log_probs"], difference(torch.from_numpy(own), other))
                worst["loss"] = max(worst["loss"], abs(passed.loss - total) / max(1.0, abs(total)))
            driven.forward_backward(loss, data, loss, options, has_gradients=False)  # leaves shards gathered
            norm, other_norm = driven.optim_step(loss, ADAM), reference.step()
            worst["norm"] = max(worst["norm"], abs(norm - other_norm) / other_norm)
        tensors = adapter_of(driven, loss)
        for key, parameter in reference.parameters.items():
            worst["weights"] = max(worst["weights"], difference(tensors[key], parameter.detach()))
        found[loss] = worst
    return found


@leaves_groups
def all_parameters(path: str, parallel: dict[str, int], **options: Any) -> dict[str, float | bool]:
    """Against torch as above, in all parameters; and bits after a base model was shown, and of a state that was saved and loaded.

    Weights are those of this rank's stage.
    """
    driven, name = build(path, rank=0, parallel=parallel, **options), "ppo"
    base = whole(driven)
    driven.adapters.create(name, AdapterSpec(rank=0))
    reference = Reference(path, {}, 0)
    worst = dict.fromkeys(("log_probs", "loss", "norm", "weights"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(3):
            data = make_data(step)
            passed = driven.forward_backward(name, data, name, {})
            log_probs, total = reference.pass_(data, name, {})
            for own, other in zip(passed.log_probs, log_probs, strict=True):
                worst["log_probs"] = max(worst["log_probs"], difference(torch.from_numpy(own), other))
            worst["loss"] = max(worst["loss"], abs(passed.loss - total) / max(1.0, abs(total)))
            driven.forward_backward(name, data, name, {}, has_gradients=False)  # leaves shards gathered
            norm, other_norm = driven.optim_step(name, ADAM), reference.step()
            worst["norm"] = max(worst["norm"], abs(norm - other_norm) / other_norm)
        tensors, wanted = whole(driven), reference.model.state_dict()
        worst["weights"] = max(difference(tensor, of_transformers(wanted, key)) for key, tensor in tensors.items())
        driven.adapters.save(name, Path(folder))
        sent = driven.adapters.factors(name)
        after = train(driven, name, range(2))
        driven.adapters.load(name, Path(folder), with_optimizer=True)
        driven.adapters.show(None, {})
        shown = same(whole(driven), base)
        resumed = train(driven, name, range(2)) == after
        driven.adapters.show(driven.adapters.specs[name], sent)
        return {**worst, "base": shown, "resumed": resumed, "saved": same(whole(driven), tensors)}


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


def of_transformers(tensors: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """One tensor of a folder from the state of a model, which stacks experts."""
    if key in tensors:
        return tensors[key]
    parent, _, kind = key.removesuffix(".weight").rpartition(".")
    experts, _, number = parent.rpartition(".")
    if kind == "down_proj":
        return tensors[f"{experts}.down_proj"][int(number)]
    gate, up = tensors[f"{experts}.gate_up_proj"][int(number)].chunk(2)
    return gate if kind == "gate_proj" else up


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
        alone[name] = (train(driven, name, range(4)), adapter_of(driven, name))
        driven.adapters.forget(name)
    values: dict[str, list[float]] = {name: [] for name in specs}
    for name, spec in specs.items():
        driven.adapters.create(name, spec)
    for step in range(4):
        for name in specs:
            values[name] += train(driven, name, range(step, step + 1))
        driven.adapters.show(None, {})  # as a sync of the base model does
    equal = {name: values[name] == alone[name][0] for name in specs}
    for name in specs:
        equal[f"{name}'s weights"] = same(adapter_of(driven, name), alone[name][1])
    with tempfile.TemporaryDirectory() as folder:
        driven.adapters.save("two", Path(folder))
        after = train(driven, "two", range(4, 6))
        driven.adapters.load("two", Path(folder), with_optimizer=True)
        equal["resumed"] = train(driven, "two", range(4, 6)) == after
    return equal


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
def together(path: str, losses: tuple[str, ...], **options: Any) -> dict[str, bool]:
    """Whether adapters whose passes are one have the bits of each alone, also beside one whose loss is not finite."""
    driven = build(path, **options)
    broken = make_data(0, 2)
    broken[0].values["weights"][:] = math.inf

    def request(step: int, number: int) -> PassRequest:
        """Of other data for each, of other lengths."""
        is_broken = (step, number) == (2, 0)
        return PassRequest(losses[number], broken if is_broken else make_data(10 * step + number, 1 + 3 * number), losses[number])

    def in_turns(requests: Sequence[PassRequest]) -> list[Passed | RefusedError]:
        return [found for each in requests for found in driven.share([each])]

    def results(share: Callable[[Sequence[PassRequest]], list[Passed | RefusedError]]) -> list[list[Any]]:
        """By adapter, the weights at the end, too."""
        found: list[list[Any]] = [[] for _ in losses]
        for number, name in enumerate(losses):
            driven.adapters.create(name, AdapterSpec(rank=1 + number, train_mlp=number != 1, seed=number))
        for step in range(4):
            for own, passed in zip(found, share([request(step, number) for number in range(len(losses))]), strict=True):
                own.append(str(passed) if isinstance(passed, RefusedError) else [passed.loss, *map(bytes, passed.log_probs)])
            for own, name in zip(found, losses, strict=True):
                own.append(driven.optim_step(name, ADAM) if step % 2 else None)
        for own, name in zip(found, losses, strict=True):
            own += [tensor.float().numpy().tobytes() for tensor in adapter_of(driven, name).values()]
            driven.adapters.forget(name)
        return found

    turns, shared = results(in_turns), results(driven.share)
    assert "is inf" in turns[0][4]
    equal = dict(zip(losses, (own == other for own, other in zip(turns, shared, strict=True)), strict=True))
    return {**equal, "shared": driven.shares}


@leaves_groups
def grouped(path: str) -> dict[str, Any]:
    """The largest relative difference of log-probs and of gradients between adapters alone and in one pass whose products are
    those of GPUs, and how many of these there were.
    """
    driven, names, products = build(path, tokens_per_microbatch=512), ("one", "two", "three"), list[bool]()
    for number, name in enumerate(names):
        driven.adapters.create(name, AdapterSpec(rank=2 + 3 * number, seed=number))
        driven.share([PassRequest(name, make_data(9, 2), "cross_entropy")])
        driven.optim_step(name, ADAM)  # B is not zero any more
    requests = [PassRequest(name, make_data(number, 2 + number), "cross_entropy") for number, name in enumerate(names)]

    def results(share: Callable[[Sequence[PassRequest]], list[Passed | RefusedError]]) -> list[torch.Tensor]:
        found = []
        for name, passed in zip(names, share(requests), strict=True):
            assert isinstance(passed, Passed)
            driven.adapters.activate(name)
            found += [torch.from_numpy(np.concatenate(passed.log_probs)), *(each.clone() for each in driven.adapters.added())]
            for each in driven.adapters.added():
                each.zero_()
        return found

    alone = results(lambda given: [found for each in given for found in driven.share([each])])
    of_groups = lora_linears.GroupedProduct.product

    def counted(self: lora_linears.GroupedProduct, *given: Any, **named: Any) -> torch.Tensor:
        products.append(True)
        return of_groups(self, *given, **named)

    fits = mock.patch.object(shared, "fits_grouped_product", return_value=True)
    with fits, mock.patch.object(lora_linears.GroupedProduct, "product", counted):
        together = results(driven.share)
    return {"products": len(products), "difference": max(difference(a, b) for a, b in zip(alone, together, strict=True))}


class UnstableProducts(TorchDispatchMode):
    """Products of many rows differ in the last bit, on one rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and len(found) > 64 and dist.get_rank() == dist.get_world_size() - 1:
            return torch.nextafter(found, torch.zeros(()))
        return found


@leaves_groups
def unstable(path: str) -> dict[str, Any]:
    """As `together` on a machine where the rows beside a row change its bits; and the lines that say so."""
    lines = io.StringIO()
    with UnstableProducts(), redirect_stderr(lines):
        equal = together.__wrapped__(path, ("cross_entropy", "ppo"), tokens_per_microbatch=512)  # type: ignore[attr-defined]
    return {**equal, "lines": len([line for line in lines.getvalue().splitlines() if "take turns" in line])}


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
