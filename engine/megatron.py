"""What the engine uses of megatron-core, imported once the device layer is in place. The other modules import it from here.

Leaves out what is changed in it (upstream.py) and Megatron-FSDP, which wrap.py imports where it is chosen.
"""

from __future__ import annotations

from engine import stand_in

stand_in.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "RowParallelLinear",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "get_megatron_optimizer",
    "parallel_state",
    "tensor_parallel",
]
