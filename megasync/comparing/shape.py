"""What a folder says that a model computes: its modules in order, their parameters in float64, its rotary frequencies.

Leaves out the computing (reference.py). Imported with torch; families are those of engine.trace.

    shape = Shape.of(Path("models/SmolLM2-135M-Instruct"))
    shape.sites[:3]     # model.embed_tokens, model.layers.0.input_layernorm:in, model.layers.0.input_layernorm
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bridge.layout.manifest import weight_files
from engine.attention.windows import layer_windows

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OF_LAYER = (
    *("input_layernorm:in", "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm"),
    *("self_attn.k_norm", "self_attn.rotary_emb.q", "self_attn.rotary_emb.k", "self_attn.attn", "self_attn.o_proj"),
    *("post_attention_layernorm:in", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj"),
)


@dataclass(frozen=True)
class Shape:
    """Of a dense decoder, by its config.json as transformers reads it."""

    num_layers: int
    num_heads: int
    num_groups: int
    head_size: int
    eps: float
    frequencies: torch.Tensor  # float64 [head_size / 2], on the CPU
    rope_scale: float  # of cosine and sine
    rope_theta: float
    windows: tuple[int, ...]  # of each layer; 0: none
    has_head_norms: bool
    is_tied: bool

    @classmethod
    def of(cls, folder: Path) -> Shape:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {})
        theta = float(rope.get("rope_theta", 0) or getattr(config, "rope_theta", 10000.0))
        frequencies, scale = _frequencies(config, rope.get("rope_type", "default"), theta, size)
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_groups=config.num_key_value_heads,
            head_size=size,
            eps=config.rms_norm_eps,
            frequencies=frequencies,
            rope_scale=scale,
            rope_theta=theta,
            windows=layer_windows(config.to_dict()),
            has_head_norms=config.model_type == "qwen3",
            is_tied=bool(config.tie_word_embeddings),
        )

    @cached_property
    def sites(self) -> list[str]:
        """All that is compared, in the order in which it is computed."""
        of_layer = [name for name in OF_LAYER if self.has_head_norms or not name.endswith(("q_norm", "k_norm"))]
        layers = [f"model.layers.{number}.{name}" for number in range(self.num_layers) for name in of_layer]
        return ["model.embed_tokens", *layers, "model.norm:in", "model.norm", "lm_head", "log_probs"]

    def window(self, site: str) -> int:
        number = layer_of(site)
        assert number is not None
        return self.windows[number]


def _frequencies(config: Any, rope_type: str, theta: float, size: int) -> tuple[torch.Tensor, float]:
    if rope_type == "default":
        return theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return found.double(), float(scale)


def layer_of(site: str) -> int | None:
    match = LAYER.match(site)
    return int(match[1]) if match else None


class Parameters:
    """The tensors of a folder in float64, rounded to the dtype that they are computed in; read when they are asked for.

    `adapter`: low-rank updates by linear, each (A, B, scale), which one side adds unmerged. `keep_bytes`: so much of what was
    read stays on the device, in `dtype`.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        adapter: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]] | None = None,
        keep_bytes: int = 0,
    ) -> None:
        self.dtype, self.device, self.adapter = dtype, device, dict(adapter or {})
        self._file_of: dict[str, Path] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._keep_bytes = keep_bytes  # that are left
        self._layer: int | None = None  # whose parameters are given for any layer's
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def as_if_all_were(self, layer: int) -> Parameters:
        """With the parameters of one layer in the place of each other's."""
        found = copy.copy(self)
        found._layer = layer
        return found

    def __contains__(self, name: str) -> bool:
        return self._place(name) in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._place(name)
        return (self._kept[place] if place in self._kept else self._read(place)).double()

    def read_ahead(self) -> None:
        """As much as is to stay on the device."""
        for place in self._file_of:
            if self._keep_bytes <= 0:
                return
            self._read(place)

    def _read(self, place: str) -> torch.Tensor:
        with safe_open(self._file_of[place], framework="pt") as file:
            found: torch.Tensor = file.get_tensor(place).to(self.device).to(self.dtype)
        if found.nbytes <= self._keep_bytes:
            self._kept[place] = found
            self._keep_bytes -= found.nbytes
        return found

    def factors(self, linear: str) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """A and B in float64, and the scale."""
        found = self.adapter.get(self._place(linear))
        return None if found is None else (self._rounded(found[0]), self._rounded(found[1]), found[2])

    def _place(self, name: str) -> str:
        return name if self._layer is None else LAYER.sub(rf"model.layers.{self._layer}.\2", name)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device).to(self.dtype).double()
