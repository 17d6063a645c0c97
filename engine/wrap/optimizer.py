"""Adam, clipping, the loss scale of float16 and the learning-rate schedule: megatron-core's own, from an OptimizerConfig.

Leaves out gradients' reduction (table.py). Sources: megatron-core 0.16.1 optimizer/, optimizer_param_scheduler.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.runtime import workarounds
from engine.config import OptimizerConfig
from engine.runtime.megatron import OptimizerConfig as MegatronOptimizerConfig
from engine.runtime.megatron import OptimizerParamScheduler, clip_grad_by_total_norm_fp32, get_megatron_optimizer


def build_optimizer(config: OptimizerConfig, chunks: list[torch.nn.Module], dtype: torch.dtype, use_fused: bool = False) -> Any:
    """megatron-core's optimizer over the wrapped chunks; fp32 main weights when `dtype` has 16 bits.

    With `use_fused`, Adam is one kernel and so is clipping.
    """
    ddp_config: Any = chunks[0].ddp_config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=config.name,
            lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad_norm,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            initial_loss_scale=config.loss_scale,
            min_loss_scale=1.0,
            hysteresis=1,  # each overflow costs a batch of rollouts, so that the scale falls at once
            params_dtype=dtype,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
        ),
        chunks,
    )
    workarounds.use_gradient_norm_in_float64()
    workarounds.unscale_gradients_wherever_they_are()
    if use_fused:
        workarounds.use_foreach_clipping()
        for group in (group for inner in inner_optimizers(optimizer) for group in inner.param_groups):
            group["fused"] = True  # get_megatron_optimizer has no argument for it; adam.py:163 reads it at every step
    return optimizer


def build_schedule(config: OptimizerConfig, optimizer: Any, num_optimizer_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine decay. Called with `step(1)` before each optimizer step.

    The rate is at its highest in optimizer step `warmup_steps` (the first without warm-up), and at its minimum after
    `decay_steps`: the last of them still trains.
    """
    warmup_steps = max(config.warmup_steps, 1)  # the scheduler counts this step too, so that one step of warm-up is none
    decay_steps = max(config.decay_steps or num_optimizer_steps, warmup_steps) + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows the current config, for example with more steps
    )


def gradient_norm(optimizer: Any) -> float:
    """Norm of all gradients, the same on every rank, infinite where float16's have overflowed. Call before `apply_gradients`.

    It does not change them, but for taking float16's loss scale out, which is changed for the next step.
    """
    if optimizer.prepare_grads():
        return math.inf
    return float(optimizer.get_grad_norm())


def loss_scale(optimizer: Any) -> float:
    """The current scale of float16's loss; 0 in other dtypes."""
    scaler = _scaler(optimizer)
    return 0.0 if scaler is None else float(scaler.scale)


def scaler_state(optimizer: Any) -> dict[str, float] | None:
    """The state of float16's loss scale for a checkpoint; None in other dtypes."""
    scaler = _scaler(optimizer)
    return None if scaler is None else {name: float(value) for name, value in scaler.state_dict().items()}


def load_scaler_state(optimizer: Any, state: dict[str, float]) -> None:
    """Put back what `scaler_state` gave."""
    scale = torch.tensor([state["scale"]])
    _scaler(optimizer).load_state_dict({**{name: int(value) for name, value in state.items()}, "scale": scale})


def _scaler(optimizer: Any) -> Any:
    """megatron-core's DynamicGradScaler. There is one: the optimizer of experts would have its own (rules.py refuses them)."""
    scalers = [member.grad_scaler for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    assert len(scalers) == 1 or not any(scalers)
    return scalers[0] if scalers else None


def apply_gradients(optimizer: Any, norm: float) -> None:
    """Clip by `norm`, that of `gradient_norm`, and step: the second half of ChainedOptimizer.step (optimizer.py:1308)."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if member.config.clip_grad > 0 and not member.is_stub_optimizer:
            clip_grad_by_total_norm_fp32(member.get_parameters(), member.config.clip_grad, norm)
    optimizer.step_with_ready_grads()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers under megatron-core's chain, in order."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member.optimizer for member in chained if member.optimizer is not None]


def local(value: Any) -> torch.Tensor:
    """This rank's part of a DTensor; anything else as it is."""
    return getattr(value, "_local_tensor", value)  # type: ignore[no-any-return]
