"""What test_families.py runs on its ranks (see ranks.py): a family by one engine, against transformers and its folder."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bridge.export.source import whole_tensors
from engine.checkpoint.hf_folder import Share, finish_folder, save_weights
from model_folder.layout import places, read_folder_layout
from engine.model.build import gpt_model
from engine.engine import Engine
from engine.sample import Sample
from mbridge.core.bridge import Bridge
from tests.engine.engine_cases import engine, everywhere, exporter, hf_log_probs, log_probs, random_samples

EMBEDDINGS, PADDING = "model.embed_tokens.weight", "padding"
NUM_STEPS = 2
OPTIMIZER = {"epsilon": 1e-3}  # Adam would make steps of what is noise, such as the gradients of key biases


def against_folder(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: the largest log-prob difference to transformers, tensors whose export differs from the disk
    (before training), those that training left in another shape, by how much it moved biases of routers, and (loss, gradient
    norm, entropy) of some steps."""
    results = []
    for case in cases:
        case = dict(case)
        path, samples = case.pop("path"), random_samples(6, seed=5)
        with engine(path, name="grpo", optimizer=OPTIMIZER, **case) as built:
            source, raw = exporter(built), load_file(Path(path) / "model.safetensors")
            own = places({key: tensor.shape for key, tensor in raw.items()}, read_folder_layout(Path(path)))
            disk = {name: place.of(raw[place.key]) for name, place in own.items()}
            mine = log_probs(built, samples)
            exported = {name: tensor.clone().cpu() for name, tensor in whole_tensors(source)}
            history = []
            for step in range(NUM_STEPS):
                metrics = built.update(built.prepare(random_samples(8, seed=step)))
                history.append([metrics[name] for name in ("loss/total", "grad_norm", "entropy/mean")])
            after = {name: tensor.clone().cpu() for name, tensor in whole_tensors(source)}
            padding = _padding(built.chunks[-1], built.mbridge)
        pairs = zip(mine, hf_log_probs(path, samples), strict=True)
        results.append(
            {
                "worst": max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs),
                "names": sorted(exported),
                "disk": sorted(disk),
                "differing": [name for name, tensor in exported.items() if not torch.equal(tensor, disk[name])],
                "reshaped": [name for name, tensor in after.items() if tensor.shape != disk[name].shape],
                "biases": [
                    number
                    for name in exported
                    if name.endswith("e_score_correction_bias")
                    for number in (after[name] - exported[name]).tolist()
                ],
                "history": history,
                "padding": padding,
            }
        )
    return results


def gradients_against_hf(paths: list[str], samples: list[Sample]) -> list[dict[str, Any]]:
    """Of each folder on one rank: of each gradient the largest difference to transformers, over its largest value; the norms of
    that of the padding token's embedding and of all others together.
    """
    results = []
    for path in paths:
        with engine(path, name="sft", optimizer={"learning_rate": 0.0, "clip_grad_norm": 0.0}) as built:
            built.update(built.prepare(samples))
            for parameter in built.chunks[0].parameters():
                parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
            found = by_itself({name: tensor.clone() for name, tensor in everywhere(built)})
        expected = by_itself(hf_gradients(path, samples))
        assert sorted(found) == sorted(expected)
        worst = {name: float((found[name] - each).abs().max() / each.abs().max()) for name, each in expected.items()}
        padding = float(found.pop(PADDING).norm())
        others = float(torch.cat([tensor.flatten() for tensor in found.values()]).norm())
        results.append({"worst": worst, "padding": padding, "others": others})
    return results


def by_itself(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The padding token's row of the embeddings becomes a separate tensor: beside it the others would be small."""
    padding, others = gradients[EMBEDDINGS].split([1, len(gradients[EMBEDDINGS]) - 1])
    return {**gradients, EMBEDDINGS: others, PADDING: padding}


def hf_gradients(path: str, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Of the mean of the response tokens' losses, by the names of `path`, also of the padding token's embedding."""
    from tests.support.tiny_models import load_model

    model = load_model(path)
    model.get_input_embeddings().padding_idx = None  # else its row has no gradient
    num_tokens = sum(len(sample.response_ids) for sample in samples)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        values, first = torch.log_softmax(model(ids).logits[0], -1), len(sample.prompt_ids)
        (-values[first - 1 : -1].gather(-1, ids[0, first:, None]).sum() / num_tokens).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # of vision layers
    with tempfile.TemporaryDirectory() as folder:  # in a folder's names and shapes
        model.save_pretrained(folder)
        raw = load_file(Path(folder) / "model.safetensors")
        own = places({key: tensor.shape for key, tensor in raw.items()}, read_folder_layout(Path(path)))
    return {name: place.of(raw[place.key]) for name, place in own.items()}


def _padding(chunk: torch.nn.Module, mbridge: Any) -> tuple[int, float]:
    """Rows of this rank's output layer that stand for no token, where it has them whole, and the sum of what is in them."""
    model = gpt_model(chunk)
    layer = getattr(model, "output_layer", None)
    if layer is None or mbridge.padded_vocab_size == mbridge.vocab_size:
        return 0, 0.0
    weight = layer.weight if layer.weight is not None else model.embedding.word_embeddings.weight
    if hasattr(weight, "_local_tensor"):
        return 0, 0.0
    first = layer.tp_group.rank() * weight.shape[0]
    rows = weight.detach()[max(0, mbridge.vocab_size - first) :]
    return len(rows), float(rows.abs().sum())


def exported_folder(path: str, plain: str, folder: str, **case: Any) -> dict[str, Any]:
    """Writes the untrained model's folder; the tensors that are others than those of `plain`."""
    with engine(path, name="grpo", dtype="bfloat16", **case) as built:
        disk = load_file(Path(plain) / "model.safetensors")
        weights = {name: tensor.clone().cpu() for name, tensor in whole_tensors(exporter(built))}
        target = Path(folder)
        target.mkdir(exist_ok=True)
        save_weights(target, weights.items(), Share.of(built.layout))
        dist.barrier()
        if dist.get_rank() == 0:
            finish_folder(target, Path(path))
        dist.barrier()
    return {"differing": [name for name, tensor in weights.items() if not torch.equal(tensor, disk[name])]}


def resumed_elsewhere(path: str, root: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case, a layout and another one: losses and gradient norms of four steps in the first, and of the last two after
    resuming in the other; how far the two end apart in log-probs, and the end from transformers.
    """
    from engine import checkpoint

    results, steps, samples = [], 4, random_samples(6, seed=99)
    for number, (first, other) in enumerate(cases):
        folder, options = Path(root) / str(number), {"name": "grpo", "optimizer": OPTIMIZER, "num_steps": steps}

        def run(built: Engine, steps: range) -> list[tuple[float, float]]:
            history = [built.update(built.prepare(random_samples(16, seed=step))) for step in steps]
            return [(metrics["loss/total"], metrics["grad_norm"]) for metrics in history]

        with engine(path, **options, **first) as built:
            whole = run(built, range(steps // 2))
            checkpoint.save(folder, steps // 2, built, everywhere(built), Path(path), keep=2).wait()
            whole, end = whole + run(built, range(steps // 2, steps)), log_probs(built, samples)
        saved = checkpoint.newest(folder)
        assert saved is not None
        with engine(path, **checkpoint.engine_arguments(saved), **options, **other) as built:
            checkpoint.restore(saved, built)
            rest, again = run(built, range(steps // 2, steps)), log_probs(built, samples)
            checkpoint.save(folder, steps, built, everywhere(built), Path(path), keep=2).wait()
        last = folder / f"step_{steps:08d}" / "hf"
        reference = hf_log_probs(str(last), samples) if last.is_dir() else again
        apart = {"apart": _apart(end, again), "worst": _apart(again, reference)}
        results.append({"whole": whole[steps // 2 :], "rest": rest, **apart})
    return results


def _apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(some, others, strict=True))


def state_dicts_of_a_load(path: str) -> tuple[int, int, list[str]]:
    """How often the state of a model is collected while its folder is read by mbridge's own function and by ours, and the
    parameters that differ."""
    with engine(path) as built:
        (chunk,) = built.chunks
        model, bridge = gpt_model(chunk), built.mbridge
        collect, loaded, counts = model.state_dict, {}, []
        for name, load in (("mbridge", partial(Bridge.load_weights, bridge)), ("own", bridge.load_weights)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
                model.state_dict = counted = Mock(side_effect=collect)
                load([model], path)
                del model.state_dict
            counts.append(counted.call_count)
            loaded[name] = {key: tensor.clone() for key, tensor in collect().items() if isinstance(tensor, torch.Tensor)}
    differing = [key for key, tensor in loaded["own"].items() if not torch.equal(tensor, loaded["mbridge"][key])]
    return counts[0], counts[1], differing


def load_of_another_shape(path: str) -> str:
    """The error where the folder's last norm has one number, which would fit by broadcasting."""
    file = Path(path) / "model.safetensors"
    with engine(path) as built:
        save_file({**load_file(file), "model.norm.weight": torch.ones(1)}, file, {"format": "pt"})
        with torch.no_grad(), pytest.raises(ValueError, match="shape") as caught:
            built.mbridge.load_weights([gpt_model(built.chunks[0])], path)
    return str(caught.value)
