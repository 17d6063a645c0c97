"""What tests/engine/model/test_lora.py runs of experts' adapters (see ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.engine import Engine
from engine.sample import Sample
from tests.engine.engine_cases import engine, everywhere, log_probs, random_samples
from tests.engine.moe.expert_cases import GRADIENT_STEP
from tests.engine.model.lora_cases import peft_log_probs, save_adapter, worst_difference

HUNDREDFOLD_STEP = {**GRADIENT_STEP, "learning_rate": 1e7, "epsilon": 1e5}  # subtracts a hundred times the gradient


def experts_against_peft(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Of one unclipped step from an adapter, on one rank, against PEFT: largest differences of log-probs, loss and gradients.

    Of gradients over the largest of their factor; and names of tensors that are written, or merged, with other values than alone.
    """
    results, samples = [], random_samples(8, seed=5)
    for number, case in enumerate(cases):
        case = dict(case)
        path, adapter = case.pop("path"), case["lora"]["adapter_path"]
        with engine(path, name="sft", optimizer=HUNDREDFOLD_STEP, **case) as built:
            own = log_probs(built, samples)
            save_adapter(built, Path(folder) / str(number), path)
            merged = {name: tensor.clone() for name, tensor in everywhere(built)}
            before = adapter_tensors(built)
            loss = built.update(built.prepare(samples))["loss/sft"]
            found = {name: (before[name] - tensor) / 100 for name, tensor in adapter_tensors(built).items()}
        expected, expected_loss = peft_gradients(path, adapter, samples)
        written = Path(folder) / str(number)
        again, given = (load_file(Path(at) / "adapter_model.safetensors") for at in (written, adapter))
        unmerged = [name for name, tensor in merged.items() if not torch.equal(tensor, straight_merge(path, given, name))]
        results.append(
            {
                "log_probs": worst_difference(own, peft_log_probs(path, adapter, samples)),
                "again": worst_difference(own, peft_log_probs(path, str(written), samples)),
                "loss": abs(loss - expected_loss),
                "gradients": max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected),
                "compared": sorted(expected),
                "rewritten": sorted(name for name in given if not torch.equal(given[name], again[name])),
                "unmerged": unmerged,
            }
        )
    return results


def adapter_tensors(built: Engine) -> dict[str, torch.Tensor]:
    """By PEFT's names, on one rank."""
    factors = {f"{each.name}.lora_{kind}": getattr(each, kind.lower()) for each in built.adapter_tensors() for kind in "AB"}
    return {f"{name}.weight": tensor.flatten(0, -2).clone() for name, tensor in factors.items()}


def peft_gradients(path: str, adapter: str, samples: list[Sample]) -> tuple[dict[str, torch.Tensor], float]:
    """Of the mean of the response tokens' losses, of the factors that are one linear's in PEFT and here; and the loss."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        values, first = torch.log_softmax(model(ids).logits[0].float(), -1), len(sample.prompt_ids)
        total = total - values[first - 1 : -1].gather(-1, ids[0, first:, None]).sum()
    loss = total / sum(len(sample.response_ids) for sample in samples)
    loss.backward()
    named = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    fused = tuple(f"{name}_proj.lora_A" for name in ("q", "k", "v", "gate", "up"))
    return {name: gradient for name, gradient in named.items() if not any(part in name for part in fused)}, float(loss.detach())


def straight_merge(path: str, factors: dict[str, torch.Tensor], name: str, scale: float = 2.0) -> torch.Tensor:
    """The folder's tensor `name` with what PEFT's `factors` add to it."""
    weight: torch.Tensor = load_file(Path(path) / "model.safetensors")[name]
    linear = name.replace("block_sparse_moe", "mlp").removesuffix(".weight")
    for of_mixtral, kind in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        linear = linear.replace(f".{of_mixtral}", f".{kind}")
    parent, _, kind = linear.rpartition(".")
    if ".experts." not in parent:
        a, b = (factors.get(f"base_model.model.{linear}.lora_{each}.weight") for each in "AB")
        return weight if a is None or b is None else torch.addmm(weight, b, a, alpha=scale)
    experts, _, number = parent.rpartition(".")
    both = f"base_model.model.{experts}.base_layer.lora_A.weight" in factors
    module = f"base_model.model.{experts}" + (".base_layer" if both and kind != "down_proj" else "")
    a, b = (factors[f"{module}.lora_{each}.weight"] for each in "AB")
    if not both and a.shape[1] != weight.shape[1]:
        return weight
    count, rank = a.shape[0] // 4, 4
    b = b.view(len(b), rank, count)[:, :, int(number)]
    halves = {"gate_proj": slice(None, len(b) // 2), "up_proj": slice(len(b) // 2, None), "down_proj": slice(None)}
    return torch.addmm(weight, b[halves[kind]], a.view(count, rank, -1)[int(number)], alpha=scale)
