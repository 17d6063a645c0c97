"""Mixture of experts in the local layer spec: mbridge's names for one module an expert, and a router as Hugging Face computes it.

Each rank has all experts (expert-parallel size 1); with tensor parallelism every expert is split as a dense layer is, over the
same ranks. Leaves out expert parallelism, grouped kernels (the experts of a layer run one after another) and the
load-balancing loss. Source of the router: transformers 5.19, models/qwen3_moe/modeling_qwen3_moe.py:Qwen3MoeTopKRouter.
"""

from __future__ import annotations

import re
from typing import Any

from engine import upstream
from engine.config import MOE_FAMILIES, EngineConfig

_OF_ONE_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class ExpertNames:
    """Mixed in before an mbridge bridge of a mixture-of-experts family.

    mbridge 0.15.1 (qwen2moe.py:_weight_name_mapping_mlp) knows the names of TransformerEngine's grouped experts only:
    experts.linear_fc1.weight3 in place of experts.local_experts.3.linear_fc1.weight. What else it does with an expert's
    weight goes by `linear_fc1.weight` and the parameter's own attributes.
    """

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        names: list[str] = super()._weight_name_mapping_mlp(_OF_ONE_EXPERT.sub(r".\2.weight\1", name))  # type: ignore[misc]
        return names


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args; none for a dense model.

    Softmax over all experts, then the best of them, normalised (norm_topk_prob), is softmax over the best of them.
    """
    if hf_config.model_type not in MOE_FAMILIES:
        return {}
    upstream.use_torch_in_router()
    return {
        "moe_grouped_gemm": False,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def check(hf_config: Any, engine: EngineConfig) -> None:
    """ValueError for what does not go with experts: megasync/config/check.py says the same before anything starts."""
    if hf_config.model_type not in MOE_FAMILIES:
        return
    if engine.parallel.expert > 1:
        message = f"engine.parallel.expert = {engine.parallel.expert}: each rank has all experts"
        raise ValueError(f"{message}; write engine.parallel.expert=1")
    if engine.parallel.tensor > 1 and not engine.parallel.sequence:
        raise ValueError(
            f"engine.parallel.sequence = false with engine.parallel.tensor = {engine.parallel.tensor}: megatron-core trains "
            "mixtures of experts under tensor parallelism with sequence parallelism only; write engine.parallel.sequence=true"
        )
