"""Work-arounds for bugs and gaps of megatron-core 0.16.1, megatron-fsdp 0.6.1 and mbridge 0.15.1, each with its place.

tests/engine/runtime/test_upstream.py fails when one of them is no longer needed. Leaves out the device: see fake_cuda.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any


def use_standalone_fsdp() -> None:
    """Put megatron-fsdp 0.6.1 under megatron-core 0.16.1's adapter.

    The copy inside of megatron-core (0.3.1) gives wrong gradients at one data-parallel rank. Only the adapter's two names are
    set: replacing sys.modules entries keeps the old code silently.
    mcore_fsdp_adapter.py:30 makes TELinear a MagicMock without TransformerEngine, and :184 hands it to isinstance.
    """
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import megatron_fsdp

    adapter.MegatronFSDP = _fsdp_with_policy
    adapter.FSDPDistributedIndex = megatron_fsdp.FSDPDistributedIndex
    adapter._get_dp_tp_mesh = _stage_mesh
    _skip_shard_comparison()
    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function has its name, too
    finalize._allreduce_embedding_grad = _reduce_tied_embeddings
    if not isinstance(adapter.TELinear, type):
        adapter.TELinear = type("NoTELinear", (), {})


def _fsdp_with_policy(module: Any, ddp_config: Any, **options: Any) -> Any:
    """MegatronFSDP that minds `grad_reduce_in_fp32`, which nothing of megatron-fsdp 0.6.1 reads, and holds float32 weights once.

    Gradients are added up and reduced in the weights' dtype (param_and_grad_buffer.py:_resolve_group_grad_dtype) unless a policy
    is given, and mcore_fsdp_adapter.py:105 gives none. A buffer of main weights is made whatever the weights' dtype is (:2685):
    of float32 weights it is a second copy, and without it the optimizer steps on the weights' own shards (:3221).
    """
    import megatron_fsdp
    import torch

    float32 = torch.float32
    holds_main = all(parameter.dtype is float32 for parameter in module.parameters() if parameter.requires_grad)
    policy = megatron_fsdp.MixedPrecisionPolicy(
        main_params_dtype=None if holds_main else float32, main_grads_dtype=float32 if ddp_config.grad_reduce_in_fp32 else None
    )
    return megatron_fsdp.MegatronFSDP(module=module, ddp_config=ddp_config, mixed_precision_policy=policy, **options)


def _stage_mesh(dp_cp_group: Any, tp_group: Any, ep_size: int = 1) -> Any:
    """Ranks [data and context, tensor] of this rank's mesh, for Megatron-FSDP under pipeline parallelism.

    mcore_fsdp_adapter.py:369 lays the mesh over all ranks of the world, which fails with more than one pipeline stage. Ranks are
    ordered tp-cp-ep-dp-pp (parallel_state.py:initialize_model_parallel), so that those of a stage are contiguous.
    """
    import torch
    import torch.distributed as dist

    shape = (dp_cp_group.size(), ep_size, tp_group.size())
    position = dist.get_rank() % math.prod(shape)
    first = dist.get_rank() - position
    ranks = torch.arange(first, first + math.prod(shape)).view(shape)
    return ranks[:, position // shape[2] % ep_size]


def _skip_shard_comparison() -> None:
    """When it starts, megatron-fsdp 0.6.1 lets the ranks compare their shards of each parameter and gather where these begin, by
    collectives of Python objects, one after another (param_and_grad_buffer.py:3250).

    The second is for torch's DCP, which nobody uses here. In the first torch 2.13 compares shards under tensor parallelism with
    what every rank of the world has (distributed/tensor/_collective_utils.py:check_tensor_meta), but the stages of a pipeline
    have other parameters. What ranks hold in common is sent to all of them before (:5115).
    """
    from megatron_fsdp import param_and_grad_buffer

    plain = param_and_grad_buffer.make_fsdp_dtensor
    if hasattr(plain, "compares_shards"):
        return

    def make_fsdp_dtensor(*args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "run_check": False, "update_uneven_dtensor_chunk_meta": False})

    make_fsdp_dtensor.compares_shards = False  # type: ignore[attr-defined]
    param_and_grad_buffer.make_fsdp_dtensor = make_fsdp_dtensor


def _reduce_tied_embeddings(
    chunks: list[Any], group: Any, pipeline_group: Any, weight_of: Callable[[Any], Any], *_: Any, **__: Any
) -> None:
    """Sum the gradients of the first and the last stage's copy of tied embeddings.

    Under Megatron-FSDP finalize_model_grads.py:250 sums the DTensors' local shards, too, but :259 sets the shard as gradient.
    Both stages shard the weight alike, since it has a bucket of its own (megatron-fsdp 0.6.1 param_and_grad_buffer.py:1769).
    """
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.utils import is_pp_first_stage
    from megatron.core.utils import get_attr_wrapped_model

    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    chunk = chunks[0] if is_pp_first_stage(pipeline_group) else chunks[-1]
    weight = weight_of(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))
    gradient = getattr(weight, "main_grad", getattr(weight, "grad", None))  # DDP's, Megatron-FSDP's; None where it is frozen
    if gradient is not None:
        dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=group)


def scale_gradients_once(fsdp: Any) -> None:
    """Scale gradients that only one rank holds when all micro-batches are in. `fsdp`: megatron-fsdp's MegatronFSDP.

    With gradients sharded megatron-fsdp 0.6.1 scales what comes of a micro-batch by 1 / data-parallel size and adds it up. Where
    a group has one rank, as experts have with as many expert-parallel as data-parallel ranks, nothing is sharded and the sum
    itself is scaled, after every micro-batch (param_and_grad_buffer.py:2711, :4070; Megatron-LM issues 6660 and 6773).
    """
    buffer = fsdp.param_and_grad_buffer
    if buffer.bucketing_policy.data_parallel_sharding_strategy in ("no_shard", "optim"):
        return  # these scale once, after the last micro-batch
    gradients = [group.main_grad_buffer for group in buffer.parameter_groups if group.main_grad_buffer is not None]
    whole = [each for each in gradients if not each.is_data_distributed and each.gradient_scaling_factor not in (None, 1.0)]
    factors = [each.gradient_scaling_factor for each in whole]
    attach = fsdp.attach_grad_to_optimizer_state

    def scale_and_attach() -> None:
        for each, factor in zip(whole, factors, strict=True):
            each.data.mul_(factor)
        attach()

    for each in whole:
        each.gradient_scaling_factor = None
    if whole:
        fsdp.attach_grad_to_optimizer_state = scale_and_attach


def add_fsdp_fields(ddp_config: Any) -> None:
    """megatron-fsdp 0.6.1 reads fields that megatron-core 0.16.1's DistributedDataParallelConfig does not have."""
    import megatron_fsdp

    for field in dataclasses.fields(megatron_fsdp.DistributedDataParallelConfig):
        if not hasattr(ddp_config, field.name):
            setattr(ddp_config, field.name, field.default)


def use_foreach_clipping() -> None:
    """Clipping over all tensors at once by torch, whatever is installed.

    megatron-core takes TransformerEngine's or apex's, unasked. Without them utils.py:1212 launches two kernels a tensor.
    """
    import torch
    from megatron.core.optimizer import clip_grads

    def scale(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
        source, target = lists
        if target is not source:
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    clip_grads.multi_tensor_scale_impl = scale


def use_gradient_norm_in_float64() -> None:
    """The norm of all gradients is the same, and with it what clipping does, however they are sharded.

    clip_grads.py:51 adds squares in float32, shard by shard: wraps and layouts then differ at 1e-8, enough for a bfloat16 weight
    to be rounded otherwise. And without TransformerEngine and apex utils.py:1200 brings each tensor's norm to the host by itself.
    A norm whose square is too large for float32 is infinite, as it was: such a step is not to be taken.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.optimizer import clip_grads, optimizer

    from engine.runtime import device

    def gradient_norm(grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
        assert norm_type == 2
        gradients = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
        data_group = None
        for gradient in gradients:
            data_group = clip_grads.get_data_parallel_group_if_dtensor(gradient, data_group)
        local = [part for gradient in gradients if (part := clip_grads.to_local_if_dtensor(gradient)).numel()]
        total = torch.zeros(1, dtype=torch.float64, device=device.compute_device())
        if local:
            total += torch.stack(torch._foreach_norm(local, dtype=torch.float64)).square().sum()
        if data_group:
            dist.all_reduce(total, group=data_group)
        dist.all_reduce(total, group=grad_stats_parallel_group)
        square = float(total.item())
        return math.inf if square > torch.finfo(torch.float32).max else square**0.5

    optimizer.get_grad_norm_fp32 = gradient_norm


def unscale_gradients_wherever_they_are() -> None:
    """float16's loss scale is taken out of the gradients that a rank has, and all ranks learn of an overflow.

    With Megatron-FSDP's shards distrib_optimizer.py:2312 reads gradients of parameters of which a rank has no part (None), and
    optimizer.py:511 reduces the overflow flag over the model-parallel group only, without the data-parallel one.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.optimizer import clip_grads, optimizer

    def unscale_and_check(self: Any) -> bool:
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        gradients = [clip_grads.to_local_if_dtensor(each.grad) for each in parameters if each.grad is not None]
        self.found_inf.fill_(0.0)
        if local := [each for each in gradients if each.numel()]:
            torch._amp_foreach_non_finite_check_and_unscale_(local, self.found_inf, self.grad_scaler.inv_scale)
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX)
        return bool(self.found_inf.item() > 0)

    optimizer.MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = unscale_and_check


def fold_gradients_of_frozen_linears() -> None:
    """A frozen linear's backward pass is one matrix product, whatever the strides of its gradient [tokens, 1, out].

    gpt_model.py:712 transposes the logits, after which the dimension of one has another stride; torch's matmul then folds no
    dimensions, since the weight wants no gradient, and layers.py:351 becomes a batched product of one row for each token. A step
    of LoRA on two micro-batches of 8192 tokens, 3 B parameters and a vocabulary of 151936 took an H100 3.5 s, one of all weights
    0.8 s.
    """
    import torch
    from megatron.core.tensor_parallel import layers

    plain: Any = layers.LinearWithFrozenWeight
    if hasattr(plain, "folds"):
        return

    class LinearWithFrozenWeight(plain):  # type: ignore[misc]
        folds = True

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            of_input, *others = plain.backward(ctx, gradient.reshape(-1, gradient.shape[-1]))
            return of_input.view(*gradient.shape[:-1], -1), *others

    layers.LinearWithFrozenWeight = LinearWithFrozenWeight


def use_adam(library: str) -> None:
    """megatron-core takes TransformerEngine's or apex's Adam wherever one is installed (optimizer/__init__.py:12)."""
    import megatron.core.optimizer as package
    import torch
    from megatron.core.optimizer import distrib_optimizer

    adam: Any = torch.optim.AdamW
    if library != "torch":
        adam = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    vars(package).update(Adam=adam, USING_PYTORCH_OPTIMIZER=library == "torch")
    vars(distrib_optimizer).update(Adam=adam, HAVE_APEX_OR_TE=library != "torch")


class _TransformerEngineProduct:
    """The functions of apex's extension, by the names that layers.py:569 calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Any, gradient: Any, main: Any) -> None:
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        extensions.general_gemm(inputs, gradient, out_dtype=main.dtype, layout="NT", out=main, accumulate=True, grad=True)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def use_weight_gradient_product(library: str) -> None:
    """For `gradient_accumulation_fusion`, whose product megatron-core's linears take from apex's extension only (layers.py)."""
    from megatron.core.tensor_parallel import layers

    is_apex = library == "apex"
    product: Any = importlib.import_module("fused_weight_gradient_mlp_cuda") if is_apex else _TransformerEngineProduct
    vars(layers).update(fused_weight_gradient_mlp_cuda=product, _grad_accum_fusion_available=True)


def weight_gradient_product(main_dtype: Any) -> Callable[[Any, Any, Any], None]:
    """(inputs [T, n], gradient [T, m], main gradient [m, n] of this dtype, added to), as the linears call it (layers.py:567)."""
    import torch
    from megatron.core.tensor_parallel import layers

    product: Any = layers.fused_weight_gradient_mlp_cuda
    call: Callable[[Any, Any, Any], None] = (
        product.wgrad_gemm_accum_fp32 if main_dtype is torch.float32 else product.wgrad_gemm_accum_fp16
    )
    return call


def use_checkpoints_without_fp8() -> None:
    """random.py:636 takes fp8=False, its default, for fp8, and :589 asks TransformerEngine about it, which is not there."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def use_torch_in_router() -> None:
    """Without TransformerEngine moe_utils.py:36 leaves `te_general_gemm` undefined; the router (:1191) compares it with None.

    With it the logits would come of another product, whatever `engine.kernels` says.
    """
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def use_latent_attention_without_te() -> None:
    """multi_latent_attention.py:185 hands TELinear to isinstance, which is a MagicMock without TransformerEngine."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("NoTELinear", (), {})


def rope_theta(hf_config: Any) -> float:
    """mbridge 0.15.1 (llm_bridge.py:_get_gptmodel_args) reads `rope_theta`; transformers 5 keeps it in rope_parameters."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    return float(10000.0 if theta is None else theta)


def head_dim(hf_config: Any) -> int:
    """mbridge 0.15.1 (bridge.py:_weight_to_hf_format) computes with `head_dim` where the config has that field, even if null."""
    size: int = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return size
