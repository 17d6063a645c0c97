"""What test_families.py runs on its ranks (see ranks.py): a family by one engine, against transformers and its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bridge.export.source import whole_tensors
from engine.model.build import gpt_model
from tests.engine.engine_cases import engine, exporter, hf_log_probs, log_probs, random_samples

NUM_STEPS = 2
OPTIMIZER = {"epsilon": 1e-3}  # Adam would make steps of what is noise, such as the gradients of key biases


def against_folder(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: the largest log-prob difference to transformers, tensors that are exported otherwise than they are on disk
    (before training), those that training left in another shape, by how much it moved biases of routers, and (loss, gradient
    norm, entropy) of some steps."""
    results = []
    for case in cases:
        case = dict(case)
        path, samples = case.pop("path"), random_samples(6, seed=5)
        with engine(path, name="grpo", optimizer=OPTIMIZER, **case) as built:
            source, disk = exporter(built), load_file(Path(path) / "model.safetensors")
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
