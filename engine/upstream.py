"""Work-arounds for bugs and gaps of megatron-core 0.16.1, megatron-fsdp 0.6.1 and mbridge 0.15.1, each with its place.

tests/test_upstream.py fails when one of them is no longer needed. Leaves out the device: see device.py.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from typing import Any

# megatron-core warns about optional kernels (apex, TransformerEngine) once a rank; the choice is printed by the engine
warnings.filterwarnings("ignore", module=r"megatron\..*")
warnings.filterwarnings("ignore", module=r"mbridge\..*")
logging.getLogger("megatron").setLevel(logging.ERROR)


def use_standalone_fsdp() -> None:
    """Put megatron-fsdp 0.6.1 under megatron-core 0.16.1's adapter.

    The copy inside of megatron-core (0.3.1) gives wrong gradients at one data-parallel rank. Only the adapter's two names are
    set: replacing sys.modules entries keeps the old code silently.
    mcore_fsdp_adapter.py:30 makes TELinear a MagicMock without TransformerEngine, and :184 hands it to isinstance.
    """
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import megatron_fsdp

    adapter.MegatronFSDP = megatron_fsdp.MegatronFSDP
    adapter.FSDPDistributedIndex = megatron_fsdp.FSDPDistributedIndex
    if not isinstance(adapter.TELinear, type):
        adapter.TELinear = type("NoTELinear", (), {})


def add_fsdp_fields(ddp_config: Any) -> None:
    """megatron-fsdp 0.6.1 reads fields that megatron-core 0.16.1's DistributedDataParallelConfig does not have."""
    import megatron_fsdp

    for field in dataclasses.fields(megatron_fsdp.DistributedDataParallelConfig):
        if not hasattr(ddp_config, field.name):
            setattr(ddp_config, field.name, field.default)


def use_foreach_clipping() -> None:
    """Gradient norm and clipping over all tensors at once, where megatron-core falls back to its own loops.

    Without TransformerEngine and apex, utils.py:1200 brings each tensor's norm to the host by itself (hundreds of waits a
    step) and :1212 launches two kernels a tensor.
    """
    import torch
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    def l2_norm(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], _each: bool) -> tuple[torch.Tensor, None]:
        tensors = [tensor for tensor in lists[0] if tensor.numel()]
        norms = torch._foreach_norm(tensors) if tensors else [torch.zeros((), device=lists[0][0].device)]
        return torch.linalg.vector_norm(torch.stack(list(norms))).float().view(1), None

    def scale(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
        source, target = lists
        if target is not source:
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def use_torch_in_router() -> None:
    """Without TransformerEngine moe_utils.py:36 leaves `te_general_gemm` undefined; the router (:1191) compares it with None."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def rope_theta(hf_config: Any) -> float:
    """mbridge 0.15.1 (llm_bridge.py:_get_gptmodel_args) reads `rope_theta`; transformers 5 keeps it in rope_parameters."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    return float(10000.0 if theta is None else theta)
