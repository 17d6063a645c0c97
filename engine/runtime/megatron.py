"""The names that the engine uses of megatron-core, imported after the device layer. Other modules import them from here.

Leaves out changes to it (workarounds.py) and Megatron-FSDP, which wrap/table.py imports where it is chosen.
"""

from __future__ import annotations

import logging
import sys
import types
import warnings
from unittest import mock

import torch

from engine.runtime import device, fake_cuda

fake_cuda.install()
# megatron-core warns about optional kernels (apex, TransformerEngine) once a rank; the choice is printed by the engine
warnings.filterwarnings("ignore", module=r"megatron\..*")
warnings.filterwarnings("ignore", module=r"mbridge\..*")
# megatron-fsdp 0.6.1 warns at each step that a gather ran ahead, and waits for it (param_and_grad_buffer.py:4340)
warnings.filterwarnings("ignore", message="There are still pending all-gather tasks")
# the same once a rank of Megatron-FSDP (megatron-fsdp 0.6.1 mixed_precision.py:115), which also calls renamed functions of torch
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
logging.getLogger("megatron").setLevel(logging.ERROR)
# megatron-core 0.16.1 decorates with torch.compile (jit.py:25), which imports for seconds; this one waits for the first call
with mock.patch.object(torch, "compile", device.compiled_late):
    import megatron.core.jit

# mbridge 0.15.1 imports its GLM-4V (models/__init__.py:29), which nothing here uses, and so all that transformers has models of:
# a quarter of a rank's start
_glm4_vl = types.ModuleType("mbridge.models.glm4_vl")
vars(_glm4_vl).update(Glm4VLBridgeMoe=None, Glm4VLBridgeDense=None)
sys.modules.setdefault(_glm4_vl.__name__, _glm4_vl)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.fusions.fused_softmax import SoftmaxOne
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
