"""Fields of config.json whose values the engine or vLLM would compute wrongly: a table of rules. No torch in here.

vLLM 0.32 gives a window to all layers of a model or to none, but for gemma3_text, gpt_oss and olmo3
(engine/arg_utils.py:create_engine_config, model_executor/models/qwen2.py:Qwen2Model); with windows in some layers it would
generate with another model than the engine trains. Leaves out what a window is (engine/attention/windows.py), types
(declared.py), sizes and files (folder.py).

    unsupported(shape, fields)          # None, or the first field that is refused, with its value and why
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from engine.attention.windows import DELTA_NET, FULL, OF_ALL_LAYERS, SLIDING, SWITCHED, layer_types, window
from engine.attention.windows import FAMILIES as WINDOWED
from engine.config import (
    BIASED_ROUTERS,
    BY_LAYER_TYPE,
    DELTA_NET_FAMILIES,
    FAMILIES,
    GEMMA,
    GPT_OSS,
    LATENT_FAMILIES,
    LIKE,
    MOE_FAMILIES,
    OLMO3,
    ROPE_BY_LAYER_TYPE,
    ROPE_TYPES,
    SMOLLM3,
)
from megasync.models.declared import declared_fields
from megasync.models.model_shape import ModelShape

ROPE_NUMBERS = {  # numbers without a default, by the type of rope scaling
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
YARN_OF_GPT_OSS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")  # vLLM has no defaults
DEFAULTS = ("n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace", "max_position_embeddings")  # transformers'
PARTIAL_ROTARY = ("glm4_moe", *DELTA_NET_FAMILIES)  # families with it, also where config.json says nothing of the factor
SHARED_EXPERT = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")  # families with a shared expert of a size of its own
WHOLE_HEADS = ("llama", GEMMA)  # hidden_size must be a multiple of the heads, also beside a head_dim
SCORED_EXPERTS = 2  # of each group: transformers 5.19, Glm4MoeTopkRouter; megatron-core 0.16.1, moe_utils.py:group_limited_topk
UNTIED = (*BIASED_ROUTERS, GPT_OSS)
WITH_BIAS = ("qwen2", "glm4_moe", "seed_oss", GPT_OSS)
LITE = "glm4_moe_lite"
DEEPSEEK = ("deepseek_v3", "kimi_k2")  # vLLM reads of their folders how routers score
QWEN2 = ("qwen2", "qwen2_moe")  # vLLM's qwen2.py:150 and qwen2_moe.py:225 read no head_dim, which transformers does
OF_TRANSFORMERS = (OLMO3, "seed_oss", SMOLLM3)  # whose layers vLLM 0.32 has from transformers (models/transformers/)
VLLM_ALONE: dict[str, tuple[str, ...]] = {  # fields that vLLM 0.32 reads of these families, and transformers does not
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "kv_lora_rank"), OF_TRANSFORMERS),
    "bias": ("llama", "mistral"),
    "dual_chunk_attention_config": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    "head_dtype": FAMILIES,
    "layer_scale": DELTA_NET_FAMILIES,
    "llama_4_scaling": LATENT_FAMILIES,
    "qk_norm": ("qwen2",),
    "qkv_bias": DELTA_NET_FAMILIES,
}
OLMO3_THETA = 500000  # transformers 5.19, Olmo3Config.default_theta
OTHER_MODEL = "take a model without it"
ONE_ROPE = "take out of config.json the one that the model was not trained with"
CAUSAL = "where the weights are a language model's, write its family's class that ends with ForCausalLM"
CONVERT = "convert its weights to bfloat16, and leave this out of config.json"
TEXT_ALONE = "take it out of config.json, or take the whole folder of the vision-language model"
WRITE_DENSE = "write first_k_dense_replace, the number of dense layers before those with experts, into config.json"
WRITE_ROPES = f"write rope_parameters with rope_type and rope_theta for {FULL} and for {SLIDING} into config.json, in its place"
BIASES = "if it was trained so, write topk_method noaux_tc and scoring_func sigmoid into config.json"


class Unsupported(NamedTuple):
    """A field of config.json, its value, and why it is refused."""

    field: str
    value: Any
    why: str
    remedy: str


@dataclass(frozen=True)
class Model:
    """A config.json, types and sizes already checked."""

    shape: ModelShape
    fields: dict[str, Any]

    @property
    def family(self) -> str:
        return self.shape.model_type

    @cached_property
    def has_plain_heads(self) -> bool:
        return not self.shape.kv_lora_rank

    @cached_property
    def head_dim(self) -> int:
        return self.shape.head_dim or self.shape.hidden_size // self.shape.num_attention_heads

    @cached_property
    def window(self) -> int:
        return window(self.fields)

    @cached_property
    def layer_types(self) -> list[str]:
        return layer_types(self.fields)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or transformers' default for DEFAULTS."""
        if name in DEFAULTS and name not in self.fields:
            declared = declared_fields(self.family)
            return declared[name].default if name in declared else default
        return self.head_dim if name == "head_dim" and self.fields.get(name) is None else self.fields.get(name, default)

    @cached_property
    def ropes(self) -> list[dict[str, Any]]:
        """Rotary embeddings, in the form of transformers 5 or 4; of BY_LAYER_TYPE those of layers without a window and with one,
        none where they are in another form.
        """
        given = self.fields.get("rope_parameters")
        rope = given or self.fields.get("rope_scaling") or {}
        ropes = [rope]
        if self.family in BY_LAYER_TYPE:
            ropes = [rope.get(kind) or {} for kind in (FULL, SLIDING)] if given is not None else [rope, {}]
            if set(rope) - {FULL, SLIDING} if given is not None else any(isinstance(value, dict) for value in rope.values()):
                ropes = []
            ropes = ropes if all(isinstance(each, dict) for each in ropes) else []
        return [{"partial_rotary_factor": self.fields.get("partial_rotary_factor")} | each for each in ropes]


class Rule(NamedTuple):
    """A condition on a field under which a model is refused, and the reason."""

    field: str
    is_wrong: Callable[[Model], object]
    why: str
    families: tuple[str, ...] = FAMILIES
    remedy: str = OTHER_MODEL


def is_whole(model: Model, name: str, least: int) -> bool:
    value = model.get(name, least)
    return type(value) is int and value >= least


def has_other_class(model: Model) -> bool:
    """Whether `architectures` is there and names others than the family's class, such as Qwen3_5ForCausalLM of qwen3_5_text."""
    own, names = LIKE.get(model.family, model.family).removesuffix("_text").replace("_", ""), model.fields.get("architectures")
    given = [str(name).replace("_", "").lower() for name in names or ("",)]
    return "architectures" in model.fields and any(name != f"{own}forcausallm" for name in given)


def is_list_of_types(model: Model) -> bool:
    given, kinds = model.get("layer_types"), (FULL, DELTA_NET if model.family in DELTA_NET_FAMILIES else SLIDING)
    is_long = isinstance(given, list) and len(given) == model.shape.num_hidden_layers
    return is_long and all(each in kinds for each in given)


def differ(model: Model) -> bool:
    """transformers 5 and 4 write other names; where both are there, transformers 5 reads rope_scaling and ignores the other."""
    given = [model.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    typed = [{"rope_type": each.get("type"), **each} for each in given]
    alike = [{name: value for name, value in each.items() if name not in ("type", "rope_theta")} for each in typed]
    return all(given) and alike[0] != alike[1]


def passes_over_theta(model: Model) -> bool:
    """Whether a `rope_theta` is given that transformers 5 does not read: it takes that of `rope_scaling` or, where there is none,
    `rope_parameters`, else config.json's own, else 1e4.
    """
    parameters, scaling = (model.fields.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    read = (scaling or parameters).get("rope_theta") or model.fields.get("rope_theta") or 1e4
    return any(each.get("rope_theta") not in (None, read) for each in (model.fields, parameters, scaling))


def have_two_types(model: Model) -> bool:
    given = [model.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    return any(each.get("type") and each.get("rope_type") and each["type"] != each["rope_type"] for each in given)


def has_other_groups(model: Model) -> bool:
    """Whether groups of experts are chosen by other than the best SCORED_EXPERTS of each."""
    chosen = model.get("topk_group")
    return model.get("n_group") != 1 and (not chosen or model.get("num_experts_per_tok") // chosen != SCORED_EXPERTS)


def has_small_groups(model: Model) -> bool:
    """Whether experts cannot be divided into `n_group` groups with as many as are scored of each."""
    count: int = model.get("n_group")
    experts = model.shape.num_experts
    return count < 1 or experts % count != 0 or (count > 1 and experts // count < SCORED_EXPERTS)


def has_other_theta(model: Model) -> bool:
    """Whether layers with a window get another `rope_theta` than config.json says, or some layers none (Olmo3Config)."""
    given, ropes = model.get("rope_theta", OLMO3_THETA), model.get("rope_parameters") or {}
    full, sliding = ((ropes.get(kind) or {}).get("rope_theta", given) for kind in (FULL, SLIDING))
    is_said = "rope_theta" in (ropes.get(SLIDING) or {})
    return full is None or sliding is None or (not is_said and given != OLMO3_THETA)


def has_ropes_by_layer(model: Model) -> bool:
    """Whether it is known of each layer if it has a rotary embedding; transformers ignores what comes after the last one."""
    given = model.get("no_rope_layers")
    is_known = given is None or all(type(each) is int and each in (0, 1) for each in given)
    return is_known and (given is None or len(given) >= model.shape.num_hidden_layers)


def every_second(model: Model) -> list[str]:
    return [FULL if number % 2 else SLIDING for number in range(model.shape.num_hidden_layers)]


def is_mxfp4(model: Model) -> bool:
    """gpt-oss as published; nothing but experts is in 4 bits there (transformers 5.19 quantizers/quantizer_mxfp4.py)."""
    given = model.get("quantization_config")
    return model.family == GPT_OSS and isinstance(given, dict) and given.get("quant_method") == "mxfp4"


def dense_layers(model: Model) -> int | None:
    """By `mlp_layer_types`, which transformers reads; without it the first layer is. None: one comes after a sparse one."""
    kinds = model.get("mlp_layer_types") or ["dense"]
    count = sum(kind == "dense" for kind in kinds)
    missing = model.shape.num_hidden_layers - count if model.get("mlp_layer_types") else 0
    return count if kinds == ["dense"] * count + ["sparse"] * missing else None


ALL_LAYERS = "the engine has experts in all layers after the dense ones"
RULES = (
    Rule("architectures", has_other_class, "vLLM takes its class by it, and this is not the family's", remedy=CAUSAL),
    Rule("vision_config", lambda m: m.get("vision_config"), "the family has no vision layers", remedy=TEXT_ALONE),
    Rule("num_attention_heads", lambda m: m.has_plain_heads and m.shape.num_attention_heads % m.shape.num_key_value_heads,
         "no multiple of num_key_value_heads"),
    Rule("hidden_size", lambda m: m.shape.hidden_size % m.shape.num_attention_heads
         and (m.family in WHOLE_HEADS or (m.has_plain_heads and not m.shape.head_dim)), "no multiple of num_attention_heads"),
    Rule("head_dim", lambda m: m.has_plain_heads and m.head_dim % 2, "an odd number"),
    Rule("head_dim", lambda m: m.head_dim * m.shape.num_attention_heads != m.shape.hidden_size,
         "vLLM takes hidden_size / num_attention_heads", (*QWEN2, OLMO3)),
    Rule("head_dim", lambda m: m.fields.get("head_dim", m.head_dim) is None, "transformers computes with the null of config.json",
         (OLMO3, SMOLLM3), "leave it out of config.json"),
    Rule("hidden_act", lambda m: m.get("hidden_act", "silu") != "silu", "the engine has silu only"),
    Rule("attention_bias", lambda m: m.get("attention_bias") and m.family not in WITH_BIAS, "the engine has none"),
    Rule("mlp_bias", lambda m: m.get("mlp_bias"), "the engine has none"),
    Rule("pad_token_id", lambda m: not -m.shape.vocab_size <= (m.get("pad_token_id") or 0) < m.shape.vocab_size,
         "transformers needs one below vocab_size", remedy="write null, or the number of a token, into config.json"),
    Rule("model_max_length", lambda m: (m.get("model_max_length") or 0) > (m.get("max_position_embeddings") or math.inf),
         "vLLM takes it for the positions, and has rotary embeddings for max_position_embeddings",
         remedy="leave it out of config.json"),
    Rule("is_causal", lambda m: not m.get("is_causal", True), "the engine's attention is causal"),
    *(Rule(name, lambda m, name=name: m.get(name) is not None and m.get(name) is not False, "only vLLM reads it", families)  # type: ignore[misc]
      for name, families in VLLM_ALONE.items()),
    Rule("logit_scale", lambda m: m.get("logit_scale", 1) != 1, "only vLLM reads it",
         ("llama", "mistral", *OF_TRANSFORMERS)),
    Rule("quantization_config", lambda m: m.get("quantization_config") and not is_mxfp4(m),
         "the engine reads no quantised weights", remedy=CONVERT),
    Rule("compression_config", lambda m: m.get("compression_config"), "the engine reads no quantised weights", remedy=CONVERT),
    # rotary embeddings; more in _rope
    Rule("rope_scaling", differ, "differs from rope_parameters", remedy=ONE_ROPE),
    Rule("rope_theta", passes_over_theta, "differs from that of rope_parameters or rope_scaling", remedy=ONE_ROPE),
    Rule("rope_scaling", have_two_types, "rope_type is another than type", remedy=ONE_ROPE),
    Rule("rope_parameters", lambda m: not m.ropes, f"an object for {FULL} and one for {SLIDING} is expected", BY_LAYER_TYPE),
    Rule("rope_parameters", lambda m: m.family not in BY_LAYER_TYPE
         and any(isinstance(value, dict) for value in m.ropes[0].values()),
         f"only {', '.join(BY_LAYER_TYPE)} have rotary embeddings by layer type"),
    Rule("rope_theta", has_other_theta, f"for layers with a window transformers takes {OLMO3_THETA}", (OLMO3,), WRITE_ROPES),
    Rule("rope_scaling", lambda m: m.get("rope_scaling") and "rope_type" not in m.get("rope_scaling"),
         "transformers reads no type here, a rope_type is expected", (OLMO3,), WRITE_ROPES),
    Rule("no_rope_layers", lambda m: not has_ropes_by_layer(m), "null, or a 0 or 1 for each layer is expected", (SMOLLM3,)),
    Rule("no_rope_layer_interval", lambda m: not is_whole(m, "no_rope_layer_interval", 1),
         "a whole number of at least 1 is expected", (SMOLLM3,)),
    # windows
    Rule("use_sliding_window", lambda m: m.get("use_sliding_window"), "the engine has none in this family's layers", (SMOLLM3,)),
    Rule("sliding_window", lambda m: m.get("sliding_window") is not None and not is_whole(m, "sliding_window", 0),
         "a whole number of at least 0 is expected"),
    Rule("max_window_layers", lambda m: not is_whole(m, "max_window_layers", 0), "a whole number of at least 0 is expected"),
    Rule("sliding_window_pattern", lambda m: not is_whole(m, "sliding_window_pattern", 1),
         "a whole number of at least 1 is expected"),
    Rule("layer_types", lambda m: m.get("layer_types") is not None and not is_list_of_types(m),
         f"{FULL} or {SLIDING} for each layer is expected, of Qwen 3.5 {FULL} or {DELTA_NET}"),
    Rule("sliding_window", lambda m: m.family not in WINDOWED and m.get("sliding_window"), "only vLLM reads it for this family"),
    Rule("use_sliding_window", lambda m: m.get("use_sliding_window") and not m.window, "there is no sliding_window", SWITCHED),
    Rule("layer_types", lambda m: SLIDING in m.layer_types and not m.window, "there is no sliding_window"),
    Rule("layer_types", lambda m: "layer_types" in m.fields, "transformers takes such a mistral for ministral", ("mistral",)),
    Rule("layer_types", lambda m: m.get("layer_types") not in (None, m.layer_types)
         and (m.family not in WINDOWED or m.family in OF_ALL_LAYERS), "only vLLM reads it for this family"),
    Rule("layer_types", lambda m: len(set(m.layer_types)) > 1 and m.family not in (*BY_LAYER_TYPE, GPT_OSS, *DELTA_NET_FAMILIES),
         "with max_window_layers, windows are in some of the layers: vLLM leaves them out"),
    Rule("sliding_window", lambda m: SLIDING not in m.layer_types and m.window,
         "by layer_types and max_window_layers no layer has a window, vLLM up to 0.26 gives it to all"),
    # Gemma 3
    Rule("hidden_activation", lambda m: m.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
         "the engine has gelu_pytorch_tanh only", (GEMMA,)),
    *(Rule(name, lambda m, name=name: m.get(name), "the engine does not compute it", (GEMMA,))  # type: ignore[misc]
      for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")),
    Rule("query_pre_attn_scalar", lambda m: m.get("query_pre_attn_scalar", 1) < 1, "at least 1 is expected", (GEMMA,)),
    # mixtures of experts
    Rule("num_experts_per_tok", lambda m: m.get("num_experts_per_tok") == 1, "routers choose at least two", MOE_FAMILIES),
    Rule("mlp_only_layers", lambda m: m.get("mlp_only_layers"), ALL_LAYERS, MOE_FAMILIES),
    Rule("decoder_sparse_step", lambda m: m.get("decoder_sparse_step", 1) != 1, ALL_LAYERS, MOE_FAMILIES),
    Rule("shared_expert_intermediate_size", lambda m: bool(m.shape.shared_expert_intermediate_size
                                                    or m.get("shared_expert_intermediate_size")) != (m.family in SHARED_EXPERT),
         f"the engine has a shared expert of this size for {', '.join(SHARED_EXPERT)} only", MOE_FAMILIES),
    Rule("qkv_bias", lambda m: not m.get("qkv_bias", True), "the engine has attention with biases only", ("qwen2_moe",)),
    Rule("output_router_logits", lambda m: m.get("output_router_logits"), "write algorithm.load_balancing instead", MOE_FAMILIES),
    Rule("router_jitter_noise", lambda m: m.get("router_jitter_noise"), "the engine adds no noise", MOE_FAMILIES),
    Rule("tie_word_embeddings", lambda m: m.get("tie_word_embeddings"), "vLLM ignores it for this family", UNTIED),
    Rule("norm_topk_prob", lambda m: not m.get("norm_topk_prob", True), "the engine normalises the weights",
         (*BIASED_ROUTERS, "qwen3_5_moe_text")),
    Rule("n_group", lambda m: not m.get("n_group"), "a whole number of at least 1 is expected", BIASED_ROUTERS),
    Rule("n_group", has_small_groups, f"equal groups of at least {SCORED_EXPERTS} experts are expected", BIASED_ROUTERS),
    Rule("topk_group", lambda m: not 1 <= (m.get("topk_group") or 0) <= m.get("n_group"),
         "a whole number from 1 to n_group is expected", BIASED_ROUTERS),
    Rule("n_group", has_other_groups, f"num_experts_per_tok // topk_group = {SCORED_EXPERTS} is expected", BIASED_ROUTERS),
    Rule("n_shared_experts", lambda m: not m.get("n_shared_experts", 1), "the engine needs a shared expert", BIASED_ROUTERS),
    Rule("first_k_dense_replace", lambda m: (m.get("first_k_dense_replace") or 0) >= m.shape.num_hidden_layers,
         "no layer has experts", BIASED_ROUTERS),
    Rule("attention_bias", lambda m: not m.get("attention_bias", True), "the engine has biases here", ("seed_oss",)),
    Rule("attention_out_bias", lambda m: m.get("attention_out_bias"), "the engine has none", ("seed_oss",)),
    # gpt-oss; vLLM reads none of these fields
    Rule("attention_bias", lambda m: not m.get("attention_bias", True), "vLLM has attention with biases only", (GPT_OSS,)),
    Rule("layer_types", lambda m: m.layer_types != every_second(m), "vLLM has windows in every second layer", (GPT_OSS,)),
    Rule("swiglu_alpha", lambda m: m.get("swiglu_alpha", 1.702) != 1.702, "vLLM has 1.702", (GPT_OSS,)),
    Rule("swiglu_limit", lambda m: m.get("swiglu_limit", 7.0) != 7.0, "vLLM has 7.0", (GPT_OSS,)),
    # gated delta nets
    Rule("attn_output_gate", lambda m: not m.get("attn_output_gate", True), "the engine has attention with a gate only",
         DELTA_NET_FAMILIES),
    Rule("layer_types", lambda m: FULL not in m.layer_types, "the engine needs a layer with attention", DELTA_NET_FAMILIES),
    Rule("full_attention_interval", lambda m: not is_whole(m, "full_attention_interval", 1),
         "a whole number of at least 1 is expected", DELTA_NET_FAMILIES),
    Rule("linear_num_value_heads", lambda m: m.shape.linear_num_value_heads % m.shape.linear_num_key_heads,
         "no multiple of linear_num_key_heads", DELTA_NET_FAMILIES),
    # multi-latent attention; vLLM and transformers read most of these fields differently
    Rule("num_key_value_heads", lambda m: m.get("num_key_value_heads") not in (None, m.shape.num_attention_heads),
         "num_attention_heads is expected", LATENT_FAMILIES),
    Rule("rope_interleave", lambda m: m.get("rope_interleave") is False, "vLLM ignores it", LATENT_FAMILIES),
    Rule("qk_rope_head_dim", lambda m: m.shape.qk_rope_head_dim % 2, "an odd number", LATENT_FAMILIES),
    Rule("v_head_dim", lambda m: m.shape.v_head_dim > m.shape.qk_nope_head_dim + m.shape.qk_rope_head_dim,
         "more than qk_nope_head_dim + qk_rope_head_dim", LATENT_FAMILIES),
    Rule("topk_method", lambda m: m.get("topk_method") != "noaux_tc", "vLLM loads no router bias", DEEPSEEK, BIASES),
    Rule("scoring_func", lambda m: m.get("scoring_func") != "sigmoid", "vLLM loads no router bias", DEEPSEEK, BIASES),
    Rule("first_k_dense_replace", lambda m: m.shape.first_k_dense_replace != dense_layers(m),
         "vLLM needs the number of dense layers here, as mlp_layer_types has them", (LITE,), WRITE_DENSE),
    Rule("head_dim", lambda m: m.fields.get("head_dim") not in (None, m.shape.qk_rope_head_dim),
         "transformers takes it for qk_rope_head_dim", (LITE,), "leave it out of config.json"),
    Rule("moe_layer_freq", lambda m: m.get("moe_layer_freq", 1) != 1, ALL_LAYERS, LATENT_FAMILIES),
    Rule("index_topk", lambda m: m.get("index_topk") is not None, "the engine has no sparse attention", LATENT_FAMILIES),
)  # fmt: skip


def unsupported(shape: ModelShape, fields: dict[str, Any]) -> Unsupported | None:
    """The first field that is refused; the rules rely on those before them."""
    model = Model(shape, fields)
    for rule in RULES:
        if model.family in rule.families and rule.is_wrong(model):
            return Unsupported(rule.field, model.get(rule.field), rule.why, rule.remedy)
    return next((found for number, rope in enumerate(model.ropes) for found in _rope(model, rope, number)), None)


def _rope(model: Model, rope: dict[str, Any], number: int) -> Iterator[Unsupported]:
    """Problems of one set of rotary embeddings. `number`: 1 for layers with a window, where these have a set of their own."""
    kind, partial, is_latent = _rope_type(rope), rope["partial_rotary_factor"], model.family in LATENT_FAMILIES
    kinds: tuple[str, ...] = ("default", "yarn") if is_latent else ROPE_TYPES
    kinds = ROPE_BY_LAYER_TYPE if model.family == GEMMA or number else kinds
    kinds = ("default",) if model.family in DELTA_NET_FAMILIES else ("yarn",) if model.family == GPT_OSS else kinds
    if kind not in kinds:
        yield Unsupported("rope_type", kind, f"engine and vLLM have {', '.join(kinds)} for {model.family}", OTHER_MODEL)
    yield from _rope_numbers(kind, rope, YARN_OF_GPT_OSS if model.family == GPT_OSS else ROPE_NUMBERS.get(kind, ()))
    if kind == "yarn":
        # vLLM and transformers read these differently; of latent attention the pair of mscale needs both numbers, or none
        for name in ("attention_factor", "truncate") if is_latent else ("attention_factor", "mscale", "mscale_all_dim"):
            is_default = name == "attention_factor" and not is_latent and _is_default_factor(rope)
            if rope.get(name) is not None and not is_default:
                yield Unsupported(name, rope[name], "transformers and vLLM read it differently for yarn", OTHER_MODEL)
        pair = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
        if is_latent and pair != [None, None] and not all(pair):
            yield Unsupported("mscale", pair[0], f"with mscale_all_dim = {pair[1]} transformers and vLLM differ", OTHER_MODEL)
        if model.family in PARTIAL_ROTARY and partial not in (1, 1.0):  # null stands for a half
            yield Unsupported("rope_type", kind, f"the engine has no yarn with partial_rotary_factor = {partial}", OTHER_MODEL)
    if partial not in (None, 1, 1.0):
        is_share = type(partial) is float and 0 < partial < 1 and int(model.head_dim * partial) % 2 == 0
        if model.family not in PARTIAL_ROTARY or not is_share:
            yield Unsupported("partial_rotary_factor", partial, "the engine cannot rotate this part of a head", OTHER_MODEL)


def _is_default_factor(rope: dict[str, Any]) -> bool:
    """Whether yarn's `attention_factor` is what both compute of `factor` where there is none."""
    given = rope.get("attention_factor")
    return isinstance(given, int | float) and math.isclose(given, 1 + 0.1 * math.log(max(1, rope["factor"])), rel_tol=1e-6)


def _rope_numbers(kind: str, rope: dict[str, Any], numbers: tuple[str, ...]) -> Iterator[Unsupported]:
    factor, low, high = (rope.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    for name in numbers:
        if type(rope.get(name)) not in (int, float):
            yield Unsupported(name, rope.get(name), f"the rope type {kind} needs a number", OTHER_MODEL)
    if kind != "default" and isinstance(factor, int | float) and factor <= 0:
        yield Unsupported("factor", factor, "a number above 0 is expected", OTHER_MODEL)
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        yield Unsupported("low_freq_factor", low, f"not below high_freq_factor = {high}", OTHER_MODEL)


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"
