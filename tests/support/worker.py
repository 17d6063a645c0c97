"""What tests add to a vLLM worker. Imported by vLLM's processes alone."""

from __future__ import annotations

from typing import Any

import torch

from bridge.receive.receiver import WorkerExtension


class OpenWorkerExtension(WorkerExtension):
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    def tests_read_shards(self, names: list[str] | None) -> list[tuple[Any, ...]]:
        """(HF name, offsets, shape, dtype, bytes) of what is held here of these tensors, or of all."""
        from tests.support.shards import pack

        wanted = None if names is None else frozenset(names)
        return [pack(*each) for each in self.weight_transfer_engine.held_slices(wanted) if wanted is None or each[0] in wanted]

    def tests_damage(self, name: str) -> None:
        """Write other values into a parameter, as a stray kernel would."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        parameters[name].data.mul_(1.5)

    def tests_num_threads(self) -> int:
        """Of OpenMP, in kernels that this process calls."""
        return torch.get_num_threads()
