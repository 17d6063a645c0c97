"""The YAML keys `model` and `engine`. No torch in here: configs are checked without it.

Leaves out `algorithm` (algorithm.py), loading (megasync/config/load.py) and what depends on the model and the number of ranks
(megasync/checks/check.py).
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt
from pydantic import PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

NAME_BYTES, PATH_BYTES = 255, 3800  # Linux' NAME_MAX, and PATH_MAX less what lies below a folder of ours
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a number in each `model.dtype`
EXPERT_ROW_BYTES = 16  # rows of experts' weights are multiples of it, as torch's grouped_mm wants
DELTA_NET_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # gated delta nets in most layers, else gated attention
LIKE = {"kimi_k2": "deepseek_v3"}  # families with another's config.json and tensors
LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite", "kimi_k2")  # multi-latent attention
BIASED_ROUTERS = ("glm4_moe", *LATENT_FAMILIES)  # sigmoid scores, to which a bias is added for the choice alone
GPT_OSS = "gpt_oss"  # biases, sinks and experts of its own (families/gpt_oss.py)
MOE_FAMILIES = (*BIASED_ROUTERS, GPT_OSS, "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next")  # with experts
GEMMA = "gemma3_text"  # its layers differ from the others' (families/gemma.py)
OLMO3 = "olmo3"  # its layers differ, too (families/olmo3.py)
SMOLLM3 = "smollm3"  # some of its layers have no rotary embedding (rope.py)
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", GEMMA, OLMO3, SMOLLM3),
    *MOE_FAMILIES,
)  # of `model_type`
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")  # of config.json: layers of multi-token prediction after the others
PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose modules model.exact and megasync bisect know one by one
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of `rope_type` in config.json
ROPE_BY_LAYER_TYPE = ("default", "linear")  # of them where layers have other frequencies by their type
BY_LAYER_TYPE = (GEMMA, OLMO3)  # families whose layers with a window have rotary frequencies of their own


class Section(BaseModel):
    """Keys of one YAML mapping: frozen, types taken as they are (true is no 1), no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _with_home(value: str) -> str:
    """`~` and `~user` at the start stand for home folders, as in a shell."""
    path = os.path.expanduser(value)  # noqa: PTH111 # a Path would change values that are no paths, such as an empty text
    if path.startswith("~"):
        lines = {"choices": "~ and ~USER for home folders that there are", "example": f"./{value}"}
        raise PydanticCustomError("home", "there is no such home folder", lines)
    if max(map(_num_bytes, path.split("/"))) > NAME_BYTES or _num_bytes(path) > PATH_BYTES:
        limits = f"names of up to {NAME_BYTES} bytes, up to {PATH_BYTES} together"
        raise PydanticCustomError("long_path", "no file has so long a name", {"choices": limits, "example": "./FOLDER"})
    return path


def named_or_own(names: Sequence[str], kind: str = "function") -> AfterValidator:
    """One of `names`, or `package.module:name` of the user's own, which is looked up later (megasync/config/named.py)."""

    def check(value: str) -> str:
        if value in names or ":" in value:
            return value
        near = difflib.get_close_matches(value, names, 1) or [f"my_package.my_module:my_{kind}"]
        lines = {"choices": ", ".join(filter(None, [*names, f"package.module:{kind}"])), "example": near[0]}
        raise PydanticCustomError("named", "not one of the choices", lines)

    return AfterValidator(check)


def is_own(name: str) -> bool:
    """Whether it names something of the user's own."""
    return ":" in name


def _num_bytes(name: str) -> int:
    return len(name.encode(errors="surrogatepass"))


FilePath = Annotated[str, AfterValidator(_with_home)]
OneOrMore = (BeforeValidator(_as_tuple), Field(min_length=1))  # of a tuple: YAML has a list, or one text alone
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The model that is trained."""

    path: FilePath = ""
    """A Hugging Face folder: config.json, *.safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights and activations, whatever the folder's. float16 rounds eight times as finely as bfloat16, in a smaller range:
    its loss is scaled (arXiv:2510.26788)."""
    exact: bool = False
    """Trainer and vLLM compute every log-prob to the same bits: slower, in bfloat16 on Hopper GPUs, in float32 on CPUs."""


class ParallelConfig(Section):
    """Sizes of the parallel groups; data parallelism takes the rest of the world size."""

    tensor: PositiveInt = 1
    """Ranks that share every layer."""
    pipeline: PositiveInt = 1
    """Stages of consecutive layers."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers that each stage has; more of them leave stages idle for less time, for more messages."""
    pipeline_layers: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] | None = None
    """Layers of each chunk in the model's order; null: the same of each, or by cost where they do not divide."""
    context: PositiveInt = 1
    """Ranks that share a sequence."""
    context_attention: Literal["allgather", "ulysses"] = "allgather"
    """Across them: K and V of all tokens are gathered, or tokens are exchanged for heads, where the KV heads divide."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a layer."""
    sequence: bool = False
    """Shard activations between tensor-parallel linears over the sequence."""


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay, global-norm clipping, linear warm-up and a decay."""

    name: Literal["adam"] = "adam"
    learning_rate: NonNegativeFloat = 1e-6
    """After the warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where linear and cosine decay end."""
    weight_decay: NonNegativeFloat = 0.1
    beta1: FractionBelowOne = 0.9
    beta2: FractionBelowOne = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_grad_norm: NonNegativeFloat = 1.0
    """Largest norm of all gradients together; 0 switches clipping off."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate's course after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps until the rate is at its minimum; null: all of the run."""
    loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    """model.dtype=float16: the factor of the loss at the start, so that small gradients do not vanish. Halved, and the
    step skipped, where gradients overflow; doubled after 1000 steps without that."""
    offload: bool = False
    """State and main weights lie in host memory except in the optimizer step: room for activations, at a copy both ways."""


LatentTarget = Literal["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
DeltaNetTarget = Literal["in_proj", "out_proj"]
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"] | LatentTarget | DeltaNetTarget
LORA_TARGETS: tuple[LoraTarget, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT_TARGETS: tuple[LoraTarget, ...] = ("linear_proj", *get_args(LatentTarget))  # of multi-latent attention
DELTA_NET_TARGETS: tuple[LoraTarget, ...] = get_args(DeltaNetTarget)  # of gated delta nets, beside the first four
ALL_TARGETS: tuple[LoraTarget, ...] = (*LORA_TARGETS, *get_args(LatentTarget), *DELTA_NET_TARGETS)
TARGET_OF: dict[str, LoraTarget] = {  # Hugging Face's linears, by the megatron-core linear that they are fused into
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), "in_proj"),
    "out_proj": "out_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
OTHER_TARGETS: dict[str, LoraTarget] = {  # and vLLM's, Mixtral's, and those of adapters that fuse nothing (Megatron-Bridge)
    **TARGET_OF,
    **dict.fromkeys(("qkv_proj", "linear_q", "linear_k", "linear_v", "linear_q_proj", "linear_kv_proj"), LORA_TARGETS[0]),
    **dict.fromkeys(("gate_up_proj", "linear_fc1_gate", "linear_fc1_up", "fc1", "w1", "w3"), LORA_TARGETS[2]),
    **dict.fromkeys(("fc2", "w2"), LORA_TARGETS[3]),
}


def _by_own_names(value: object) -> object:
    """A list with names of other libraries is refused with the same list in ours."""
    given = _as_tuple(value)
    names = [name for name in given if isinstance(name, str)] if isinstance(given, tuple) else []
    takes_all = bool({"all", "all-linear"} & set(names))
    own = {name: name if name in ALL_TARGETS else OTHER_TARGETS.get(name.rpartition(".")[2]) for name in names}
    others = [f"{name} lies in {own[name]}" for name in names if own[name] not in (name, None)]
    if not takes_all and not others:
        return value
    problem = "all linears are the default; leave it out" if takes_all else "; ".join(others)
    example = LORA_TARGETS if takes_all else tuple(dict.fromkeys(filter(None, own.values())))
    lines = {"problem": problem, "choices": ", ".join(ALL_TARGETS), "example": f"[{','.join(example)}]"}
    raise PydanticCustomError("lora_targets", "linears are named as in megatron-core: {problem}", lines)


def _without_guess(name: object) -> object:
    """Suggests no nearest name for a name unlike ours, such as c_proj for o_proj."""
    if not isinstance(name, str) or name in ALL_TARGETS or name.startswith("linear_"):
        return name
    lines = {"choices": ", ".join(ALL_TARGETS), "example": f"[{','.join(LORA_TARGETS)}]"}
    raise PydanticCustomError("lora_target", "no linear of megatron-core's layers", lines)


class LoraConfig(Section):
    """Low-rank adapters beside frozen linears (LoRA, arXiv:2106.09685)."""

    rank: NonNegativeInt = 0
    """0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by alpha / rank."""
    dropout: FractionBelowOne = 0.0
    """Of the adapters' inputs, in training and for the old log-probs, with the same masks."""
    targets: Annotated[
        tuple[Annotated[LoraTarget, BeforeValidator(_without_guess)], ...], *OneOrMore, BeforeValidator(_by_own_names)
    ] = LORA_TARGETS
    """Linears of megatron-core's layers: linear_qkv is Hugging Face's q_proj, k_proj and v_proj; linear_proj o_proj; linear_fc1
    gate_proj and up_proj; linear_fc2 down_proj; of gated delta nets in_proj all that begins so, and out_proj."""
    rslora: bool = False
    """Rank-stabilised (arXiv:2312.03732): alpha / sqrt(rank) in place of alpha / rank."""
    sync: Literal["merged", "adapter"] = "merged"
    """merged: whole weights, W + scale B A, travel to the replicas; adapter: A and B alone."""
    adapter_path: FilePath = ""
    """A PEFT folder to start from; empty: B is zero, so that training starts at the base model."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


OffloadKind = Literal["parameters", "gradients", "optimizer"]
OFFLOAD_KINDS: tuple[OffloadKind, ...] = get_args(OffloadKind)


RecomputeModule = Literal["layernorm", "core_attn", "mlp", "moe", "mlp_act"]


class EngineConfig(Section):
    """How the model is wrapped, sharded and stepped."""

    wrap: Literal["megatron_fsdp", "ddp"] = "megatron_fsdp"
    """Megatron-FSDP (optim_grads_params) or DDP with the distributed optimizer: the one flag."""
    parallel: ParallelConfig = ParallelConfig()
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Tried fields of megatron-core's DistributedDataParallelConfig, by name."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of gradients, added up over micro-batches and reduced over ranks. With model.dtype=bfloat16, bfloat16 halves their memory
    and traffic, but sums lose small addends: an error of 1 % after a hundred micro-batches."""
    tokens_per_microbatch: PositiveInt = 16384
    """Most tokens of one forward pass, over all context ranks together."""
    balance: Literal["tokens", "cost"] = "tokens"
    """tokens: all micro-batches have as many; cost: data-parallel ranks have as many FLOPs, attention's with them."""
    head_dtype: Literal["model", "float32"] = "model"
    """Of the product of the output layer, and so of logits, here and in vLLM: that of the model, or float32."""
    logits_chunk_tokens: PositiveInt = 8192
    """Of a micro-batch of more tokens the logits are computed and read in chunks of up to so many, for less memory."""
    recompute: Literal["none", "selective", "full"] = "none"
    """For less memory activations are computed again in the backward pass: full, whole layers; selective, recompute_modules."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], *OneOrMore] = ("layernorm", "mlp_act")
    """selective: norms, core attention, the MLP (or mixture of experts, moe), or what lies between its linears (mlp_act)."""
    recompute_inputs: Literal["device", "host"] = "device"
    """full: where the inputs of layers wait for the backward pass; host: in pinned host memory, for longer contexts."""
    fusions: Literal["auto", "all", "none"] = "auto"
    """One kernel for each memory-bound piece of a step; auto: with CUDA."""
    kernels: Literal["auto", "torch", "te", "fla"] = "auto"
    """auto: FlashAttention 3 and, with ddp, apex's or TransformerEngine's product for weight gradients, where they are installed;
    torch: neither; te: TransformerEngine's Adam, too; fla: as auto, with flash-linear-attention for gated delta nets."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
