"""What tests do to the modules of a replica, in its worker. Imports vLLM, so that the worker alone imports it."""

from __future__ import annotations

from typing import Any

import torch

from bridge.receive.receiver import WorkerExtension


class FaultyWorkerExtension(WorkerExtension):
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    def tests_scale(self, name: str, factor: float, element: int | None = None) -> None:
        """A parameter, or one element of it."""
        data = dict(self.model_runner.get_model().named_parameters())[name].data
        (data if element is None else data[element : element + 1]).mul_(factor)

    def tests_set(self, module: str, attribute: str, value: Any) -> Any:
        """The value that it had."""
        found = self.model_runner.get_model().get_submodule(module)
        former = getattr(found, attribute)
        setattr(found, attribute, value)
        return former

    def tests_turn(self, theta: float) -> None:
        """The rotary embedding of all layers by another theta."""
        rotary = self.model_runner.get_model().model.layers[0].self_attn.rotary_emb
        size = rotary.head_size
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float) / size)
        angles = torch.outer(torch.arange(len(rotary.cos_sin_cache)).float(), frequencies)
        rotary.cos_sin_cache.copy_(torch.cat([angles.cos(), angles.sin()], -1))

    def tests_forget_temperature(self, on: bool) -> None:
        sampler = self.model_runner.sampler
        if on:
            sampler.apply_temperature = lambda logits, *_: logits
        else:
            del sampler.apply_temperature

    def tests_skip(self, number: int, on: bool) -> None:
        """A layer gives what it got."""
        layer = self.model_runner.get_model().model.layers[number]
        if on:
            layer.forward = lambda positions, hidden_states, residual: (hidden_states, residual)
        else:
            del layer.forward
