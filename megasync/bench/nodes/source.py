"""Random weights of a Qwen3 of about 100 M parameters, in Hugging Face names, as a trainer rank under DDP holds them: in place.

Leaves out megatron-core: what is measured is how weights travel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bridge.export.source import Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, contiguous

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 768, 2048, 12, 12, 4, 64, 32768


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Of one layer, by name within it."""
    return {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


class RandomSource:
    """All of a model, the same on every rank that makes one."""

    stage, num_stages, has_tensors = 0, 1, True

    def __init__(self, *, is_sender: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.is_sender = is_sender
        generator = torch.Generator().manual_seed(0)
        shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
        for index in range(LAYERS):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes().items()}
        self.tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        self._memory = {name: tensor.view(-1) for name, tensor in self.tensors.items()}
        whole = [contiguous(tensor.numel()) for tensor in self.tensors.values()]
        self._copies = [(Copy(region, name, region),) for name, region in zip(self.tensors, whole, strict=True)]

    def manifest(self) -> Manifest:
        specs = (TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors.items())
        return Manifest(tuple(specs))

    def parts(self) -> Iterator[Part]:
        yield Part(self._copies, self._memory)

    def change(self) -> None:
        """Other weights to bring over, the same on every rank."""
        for tensor in self.tensors.values():
            tensor.neg_()
