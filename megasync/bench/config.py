"""The keys of `bench` and `bench_train` and what they choose from. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

NEED_GPUS = ("packed", "mbridge packed")
WAYS = ("floor", "stream", "unverified", *NEED_GPUS, "per_tensor", "disk", "lora merged", "lora adapter")  # ways.py
CPU_WAYS = ("stream", "per_tensor", "disk", "lora merged", "lora adapter")  # all that are worth it there
GPU_WAYS = tuple(way for way in WAYS if way not in ("per_tensor", "disk"))


@dataclass(frozen=True)
class BenchConfig:
    """What `megasync.bench` measures of sync and rollout. Sizes are those of the Qwen3 that it writes where no model.path is."""

    num_ranks: int = 2  # trainer ranks
    rounds: int = 5  # that count, after one to warm up
    ways: tuple[str, ...] = ("all",)  # of a sync, those that are possible here; stream is always among them
    update: str = "step"  # what changes the weights before each sync: an optimizer step, or negate (all signs; quick, for ddp)
    shapes: str = "none"  # one of SHAPES: random weights, nowhere on the disk, in the place of the sizes below
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    vocabulary_size: int = 32768
    lora_rank: int = 32  # of the adapters in the rows `lora merged` and `lora adapter`, on all linears; 0: without them
    num_prompts: int = 16  # rollout: one completion each, of rollout.max_new_tokens
    prompt_tokens: int = 16


@dataclass(frozen=True)
class TrainBenchConfig:
    """What `python -m megasync.bench train` measures."""

    shapes: str = "3b"  # one of SHAPES, where model.path is empty
    num_ranks: int = 2
    steps: int = 4  # that count
    warm_up_steps: int = 2  # before, kernels are compiled in them
    num_microbatches: int = 4  # of each data-parallel rank in a step
    num_sequences: int = 4  # packed in a micro-batch
    sequence_length: int = 2048
    variants: tuple[str, ...] = ("ddp", "megatron_fsdp", "ddp_no_fusions", "megatron_fsdp_no_fusions", "ddp_dot_product")
    variant_seconds: float = 300.0  # a variant that takes longer is ended
    profile: tuple[str, ...] = ("none",)  # variants that, with CUDA, take one more step to see which kernels take longest
    offload: tuple[str, ...] = ("none",)  # variants whose state is moved to host memory and back at the end, and timed


class Variant(NamedTuple):
    """One way to train."""

    wrap: str
    fusions: bool = True  # as engine.fusions says; else none
    dot_product: bool = False  # megatron-core's DotProductAttention, all activations recomputed: else it does not fit


VARIANTS = {
    "ddp": Variant("ddp"),
    "megatron_fsdp": Variant("megatron_fsdp"),
    "ddp_no_fusions": Variant("ddp", fusions=False),
    "megatron_fsdp_no_fusions": Variant("megatron_fsdp", fusions=False),
    "ddp_dot_product": Variant("ddp", dot_product=True),
    "megatron_fsdp_dot_product": Variant("megatron_fsdp", dot_product=True),
}


class Shapes(NamedTuple):
    """Sizes of a Qwen2.5; with experts, of a Qwen3 mixture of them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    head_dim: int = 0  # this and the rest: 0 without experts
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @classmethod
    def read(cls, hf_config: dict[str, Any]) -> Shapes:
        """Those of a config.json."""
        return cls(**{name: hf_config[name] for name in cls._fields if name in hf_config})

    @property
    def attention_size(self) -> int:
        return self.num_attention_heads * self.head_dim if self.head_dim else self.hidden_size

    def _num_parameters(self, num_experts: int) -> int:
        """With so many experts of those that there are."""
        kv_size = 2 * self.num_key_value_heads * self.attention_size // self.num_attention_heads
        attention = (2 * self.attention_size + kv_size) * self.hidden_size
        if self.num_experts:
            norms = 2 * self.head_dim
            mlp = self.num_experts * self.hidden_size + num_experts * 3 * self.hidden_size * self.moe_intermediate_size
        else:
            norms, mlp = self.hidden_size + kv_size, 3 * self.hidden_size * self.intermediate_size  # not norms, but biases
        layer = attention + norms + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them, tied embeddings once."""
        return self._num_parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets."""
        return self._num_parameters(self.num_experts_per_tok)

    def attention_flops(self, sequence_length: int) -> int:
        """Of the two products with the causal attention matrix, a token, forward and backward."""
        return 6 * self.num_hidden_layers * self.attention_size * (sequence_length + 1)

    def hf_config(self, sequence_length: int) -> dict[str, Any]:
        """A config.json."""
        family: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        if self.num_experts:
            family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        return {
            **family,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "initializer_range": 0.02,
            "max_position_embeddings": sequence_length,
            **{name: value for name, value in self._asdict().items() if value or name == "tie_word_embeddings"},
        }


SHAPES = {
    "3b": Shapes(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shapes(3584, 18944, 28, 28, 4, 152064, False),
    "30b-a3b": Shapes(2048, 6144, 48, 32, 4, 151936, False, 128, 128, 8, 768),
    "tiny": Shapes(128, 256, 2, 4, 2, 512, True),
    "tiny-moe": Shapes(128, 256, 2, 4, 2, 512, False, 32, 4, 2, 64),
}
