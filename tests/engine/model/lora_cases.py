"""What the LoRA tests run on their ranks (see ranks.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.model import lora
from engine.peft import factors
from engine.engine import Engine
from engine.sample import Sample
from bridge.export.source import whole_tensors
from engine.wrap.optimizer import local
from tests.support.tiny_models import load_model
from tests.engine.engine_cases import converted, engine, exporter, interrupted_run, log_probs, random_samples


def write_peft_adapter(
    folder: Path,
    model_path: str,
    rank: int = 4,
    *,
    shared: bool,
    alpha: int = 8,
    modules: tuple[str, ...] | str = (),
    parameters: tuple[str, ...] = (),
    start: str = "",
) -> Path:
    """A PEFT adapter with random A and B on all linears, or `modules` and `parameters`; `shared`: fused linears have one A.

    `start`: another one of PEFT's `init_lora_weights`, in which A and B are random, too.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", *([] if parameters else ["gate_proj", "up_proj", "down_proj"])]
    targets = modules if isinstance(modules, str) else list(modules) or linears
    given = {"target_modules": targets, "target_parameters": list(parameters) or None}
    config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights=start or False, task_type="CAUSAL_LM", **given)
    model = get_peft_model(load_model(model_path), config)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if "lora_" in name and start:
            torch.nn.init.normal_(parameter.data, std=0.1)
        if "lora_A" in name and shared:
            one = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
            parameter.data.copy_(named[one].data)
    model.save_pretrained(folder)
    return folder


def peft_log_probs(model_path: str, adapter: str, samples: list[Sample], *, merged: bool = False) -> list[torch.Tensor]:
    """The same log-probs from transformers with PEFT, one sample at a time."""
    from peft import PeftModel

    base = load_model(model_path)
    model = PeftModel.from_pretrained(base, adapter).eval()
    if merged:
        model = model.merge_and_unload()
    results = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0].float(), -1)
        first = len(sample.prompt_ids)
        results.append(log_probs[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1))
    return results


def worst_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def save_adapter(built: Engine, folder: Path, model_path: str) -> None:
    """As a checkpoint does."""
    if built.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    name, tensors = factors.stage_file(built.layout.pipeline_rank, built.adapter_tensors())
    if tensors:
        save_file(tensors, folder / name)
    torch.distributed.barrier()
    if built.layout.rank == 0:
        factors.finish_folder(folder, built.config.lora, Path(model_path))
    torch.distributed.barrier()


def against_peft(cases: list[dict[str, Any]], folder: str) -> list[dict[str, float]]:
    """Each case starts from an adapter; its log-probs, adapter off, on and written again, against transformers with PEFT."""
    results = []
    samples = random_samples(8, seed=5)
    for number, case in enumerate(cases):
        case = dict(case)
        path, adapter = case.pop("path"), case["lora"]["adapter_path"]
        with engine(path, name="sft", **case) as built:
            on = log_probs(built, samples)
            with lora.reference(built.chunks):
                off = log_probs(built, samples)
            again = Path(folder) / f"again_{number}"
            save_adapter(built, again, path)
        reference = peft_log_probs(path, adapter, samples)
        results.append(
            {
                "on": worst_difference(on, reference),
                "again": worst_difference(peft_log_probs(path, str(again), samples), reference),
                "effect": worst_difference(on, off),
            }
        )
    return results


def by_expert(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As in a folder; transformers 5 holds all experts of a layer in one tensor."""
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts"):
            yield name, tensor
            continue
        parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        for expert, weight in enumerate(tensor):
            yield from zip((f"{prefix}.{expert}.{part}.weight" for part in parts), weight.chunk(len(parts)), strict=True)


def merged_export(path: str, folder: str, case: dict[str, Any], num_steps: int = 3) -> dict[str, Any]:
    """After training: the export against PEFT's merge, and the frozen weights against the folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with engine(path, **case) as built:
        for step in range(num_steps):
            built.update(built.prepare(random_samples(16, seed=step)))
        save_adapter(built, Path(folder), path)
        source = exporter(built)
        names = [spec.name for spec in source.manifest().tensors]
        tensors = {name: tensor.clone() for name, tensor in whole_tensors(source)}
        error = source.merge_error()
        plain = converted(source)
    base = load_file(Path(path) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    merged |= dict(by_expert({name: tensor for name, tensor in merged.items() if name not in base}))
    return {
        "sender": source.is_sender,
        "names": names,
        "in_order": list(tensors) == names or not source.is_sender,
        "worst": max((float((tensors[name].float() - merged[name]).abs().max()) for name in tensors), default=0.0),
        "unmoved": [n for n in tensors if torch.equal(tensors[n], base[n].to(tensors[n].dtype))],
        "merge_error": error,
        "copied": plain.keys() == tensors.keys() and all(torch.equal(plain[name], tensors[name]) for name in tensors),
    }


def repeated_exports(cases: list[dict[str, Any]], times: int) -> list[dict[str, Any]]:
    """At learning rate 0, with an optimizer step now and then: do base or export change a bit?"""
    results = []
    for case in cases:
        case = dict(case)
        path = case.pop("path")
        with engine(path, name="sft", optimizer={"learning_rate": 0.0}, **case) as built:
            source = exporter(built)

            def base(built: Engine = built) -> dict[str, torch.Tensor]:
                return {item.name: item.tensor.detach().clone() for items in built.whole_parameters() for item in items}

            base_before, first = base(), {name: tensor.clone() for name, tensor in whole_tensors(source)}
            changed: set[str] = set()
            for index in range(times):
                changed |= {name for name, tensor in whole_tensors(source) if not torch.equal(tensor, first[name])}
                if index % 250 == 0:
                    built.update(built.prepare(random_samples(8, seed=index)))
            base_after = base()
            drifted = [name for name, tensor in base_before.items() if not torch.equal(tensor, base_after[name])]
            results.append({"changed": sorted(changed), "drifted": drifted, "num_tensors": len(first)})
    return results


def resumed(path: str, root: str, cases: list[dict[str, Any]], steps: int, stop: int) -> list[dict[str, Any]]:
    """Losses of an uninterrupted run and of a resumed one, how far their log-probs are apart, and the checkpoint's files."""
    results = []
    for number, case in enumerate(cases):
        found = interrupted_run(path, Path(root) / str(number), case, steps, stop)
        saved = found["saved"]
        results.append(
            {
                "whole": found["whole"],
                "rest": found["rest"],
                "end": worst_difference(found["end"], found["end_again"]),
                "files": sorted(str(file.relative_to(saved)) for file in saved.rglob("*") if file.is_file()),
                "adapter_bytes": (saved / "adapter" / "adapter_model.safetensors").stat().st_size,
            }
        )
    return results


def trained_state(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Elements of adapters, gradients, main weights and optimizer state, over all ranks."""
    from engine.wrap.optimizer import inner_optimizers

    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), name="sft", **case) as built:
            built.update(built.prepare(random_samples(8, seed=0)))
            items = [item for unit in built.whole_parameters() for item in unit]
            counts = {
                "trained": sum(a.numel() + b.numel() for item in items if item.adapter for a, b, _ in [item.adapter]),
                "frozen": sum(item.tensor.numel() for item in items),
                "gradients": _gradient_elements(built),
                "main": 0,
                "state": 0,
            }
            for optimizer in inner_optimizers(built.optimizer):
                for group in optimizer.param_groups:
                    counts["main"] += sum(local(p).numel() for p in group["params"])
                for state in optimizer.state.values():
                    counts["state"] += sum(local(v).numel() for k, v in state.items() if k != "step")
            results.append(counts)
    return results


def _gradient_elements(built: Engine) -> int:
    wrapped: Any = built.chunks[0]
    if built.config.wrap == "ddp":
        return sum(buffer.grad_data.numel() for buffer in wrapped.buffers)
    buffers = [group.main_grad_buffer for group in wrapped.param_and_grad_buffer.parameter_groups]
    return sum(buffer.data.numel() for buffer in buffers if buffer is not None)


def refusals(path: str, cases: list[dict[str, Any]]) -> list[str]:
    """The words of each case's ValueError."""
    messages = []
    for case in cases:
        try:
            with engine(path, name="sft", lora=case):
                messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages
