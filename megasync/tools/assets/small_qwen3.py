"""A small Qwen3 with random weights, which can be trained in a minute on a CPU. Leaves out its tokenizer (command.py).

write_small_qwen3(Path("runs/quickstart/assets/model"), ("<pad>", "<eos>", "<unk>", "0", "1"), seed=0, dtype="float32")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.models.folder import model_shape
from megasync.models.tensors import EMBEDDINGS, TIED_HEAD, expected_tensors

if TYPE_CHECKING:
    import torch

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
}


def write_small_qwen3(folder: Path, vocabulary: Sequence[str], seed: int, dtype: str, max_position_embeddings: int = 64) -> None:
    """Writes a model folder: about 1 M parameters, tied embeddings, weights drawn from the seed. `vocabulary`: tokens by id.

    Does not use transformers' model classes, which take seconds to import.
    """
    import torch

    from engine.runtime.tensor_file import save_tensors

    ends = {"bos_token_id": None, "eos_token_id": vocabulary.index(EOS), "pad_token_id": vocabulary.index(PAD)}
    sizes = {"vocab_size": len(vocabulary), "max_position_embeddings": max_position_embeddings}
    fields = CONFIG | ends | sizes | {"dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": fields, "generation_config.json": ends}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = _random_weights(folder, fields)
    in_dtype = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_tensors(in_dtype, folder / "model.safetensors", {"format": "pt"})


def _random_weights(folder: Path, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same weights as transformers' Qwen3ForCausalLM(config) in float32: norms are 1; other weights are drawn twice, and the
    second draw counts; the padding token's embedding is 0.
    """
    import torch

    shapes = expected_tensors(model_shape(folder), fields)
    del shapes[TIED_HEAD]
    found = {name: torch.ones(shape) for name, shape in shapes.items()}
    for _ in range(2):
        for tensor in (tensor for tensor in found.values() if tensor.dim() > 1):
            tensor.normal_(0.0, fields["initializer_range"])
    found[EMBEDDINGS][fields["pad_token_id"]] = 0.0
    return found
