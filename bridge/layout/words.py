"""A tensor's memory on the CPU as numpy's whole numbers, without what Tensor.numpy() does to the storage.

    words(tensor)[places] += differences    # in the tensor's own memory

Leaves out computations on them (digest.py, bridge/versions/weight_delta.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.unsignedinteger]


class _Memory:
    """numpy's array interface of a tensor, which it keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept = tensor
        of_numpy = {"shape": (tensor.numel(),), "typestr": f"<u{tensor.element_size()}", "version": 3}
        self.__array_interface__ = of_numpy | {"data": (tensor.data_ptr(), False)}


def words(tensor: torch.Tensor) -> Words:
    """The elements as unsigned numbers of their width [n], in the tensor's own memory, which is contiguous and on the CPU.

    Tensor.numpy() would forbid for good that the storage is resized (torch/csrc/utils/tensor_numpy.cpp: set_resizable), which
    Megatron-FSDP does.
    """
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(0, f"<u{tensor.element_size()}")
