"""Baked plans: which part of memory each piece of a bucket is, known before a sync.

A vLLM worker scatters buckets straight into its parameters: no Python loaders, no layer-wise reload. Leaves out how a plan is
made (bake.py), the copies (copies.py) and buckets' way (transport/).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bridge.layout.copies import BucketCopies

if TYPE_CHECKING:
    from bridge.layout.bucket import Bucket
    from bridge.layout.digest import BucketDigests
    from bridge.layout.manifest import Manifest
    from bridge.layout.regions import Copy


@dataclass
class Plan:
    """What to do with each tensor of a manifest; `copies` has an entry a tensor, None for the ordinary way."""

    manifest: Manifest
    parameters: dict[str, torch.Tensor]  # the planned ones, as the model computes with them
    copies: list[tuple[Copy, ...] | None]
    ordinary: dict[str, str]  # layer -> why it is not planned
    ordinary_layers: list[torch.nn.Module]
    is_whole: bool = field(init=False)  # all tensors are planned
    _addresses: dict[str, int] = field(init=False)
    _flats: dict[str, torch.Tensor] = field(init=False)  # the parameters' whole memory
    _buckets: dict[tuple[int, int], tuple[Bucket, BucketCopies]] = field(init=False)

    def __post_init__(self) -> None:
        self.is_whole = all(copies is not None for copies in self.copies)
        self._addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self._flats = {name: _flat(parameter) for name, parameter in self.parameters.items()}
        self._buckets = {}

    @property
    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay."""
        return all(self._addresses[name] == parameter.data_ptr() for name, parameter in self.parameters.items())

    def is_planned(self, tensor: int) -> bool:
        return self.copies[tensor] is not None

    def scatter(self, bucket: Bucket, first_tensor: int, data: torch.Tensor, digests: BucketDigests | None = None) -> None:
        """Copy a bucket's planned pieces into the parameters; `first_tensor` is the stage's, `data` its bytes.

        Where that reads the whole bucket once, it adds to `digests`. What to do is worked out once for each Bucket object.
        """
        key = (first_tensor, bucket.index)
        known = self._buckets.get(key)
        if known is None or known[0] is not bucket:  # stages may be cut otherwise than before
            dtypes = {piece.tensor: self.manifest.tensors[first_tensor + piece.tensor].dtype for piece in bucket.pieces}
            planned = {piece.tensor: self.copies[first_tensor + piece.tensor] for piece in bucket.pieces}
            known = bucket, BucketCopies(bucket.pieces, bucket.num_bytes, dtypes, planned, into_bucket=False)
            self._buckets[key] = known
        known[1].run(self._flats, data, digests)


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    size = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.detach().as_strided((size,), (1,), 0)
