"""Driven beside plain torch on transformers, on the ranks of test_driven.py."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.config import LORA_TARGETS
from engine.adapters import AdapterSpec
from engine.driven import Datum
from engine.objective.token_losses import TOKEN_LOSSES
from engine.peft.folder import PREFIX
from tests.engine.driven_cases import ADAM, ALPHA, adapter_of, build, difference, leaves_groups, make_data, same, train, whole


LOSSES = tuple(TOKEN_LOSSES)


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
    path: str,
    rank: int,
    parallel: dict[str, int],
    targets: Sequence[str] = LORA_TARGETS,
    losses: Sequence[str] = LOSSES,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """For each loss the largest relative differences, over two optimizer steps of two accumulated passes each."""
    driven, found = build(path, parallel=parallel, targets=targets, **options), {}
    for number, loss in enumerate(losses):
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
        driven.adapters.load(name, driven.adapters.read(Path(folder)), with_optimizer=True)
        driven.adapters.show(None, {})
        shown = same(whole(driven), base)
        resumed = train(driven, name, range(2)) == after
        driven.adapters.show(driven.adapters.specs[name], sent)
        return {**worst, "base": shown, "resumed": resumed, "saved": same(whole(driven), tensors)}


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
