"""Memory of a load: tensors lent out of a bucket get their own before it is used again."""

from __future__ import annotations

import pytest
import torch

from bridge.bucket import plan_buckets
from bridge.manifest import Manifest, TensorSpec
from bridge.unpack import _Lent, _lend, _take_back
from bridge.transport.shm import TransportError

SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,)), TensorSpec("c", "float32", (1,)))


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def lent(request: pytest.FixtureRequest) -> tuple[torch.Tensor, list[torch.Tensor], list[_Lent]]:
    """A bucket full of bytes, its tensors, and the receiver's notes about them; in either mode of vLLM's workers."""
    (bucket,) = plan_buckets(Manifest(SPECS), 4096)
    with request.param():
        data = torch.arange(bucket.num_bytes, dtype=torch.uint8)
        notes: list[_Lent] = []
        return data, [_lend(data, SPECS[piece.tensor], piece, notes) for piece in bucket.pieces], notes


def test_a_lent_tensor_is_a_view_until_it_is_taken_back(lent) -> None:
    data, tensors, notes = lent
    assert [(t.shape, t.dtype) for t in tensors] == [
        ((2, 3), torch.float32),
        ((4,), torch.bfloat16),
        ((1,), torch.float32),
    ]
    assert torch.equal(tensors[0].view(-1).view(torch.uint8), data[:24])
    start = data.data_ptr()
    assert [t.data_ptr() - start for t in tensors] == [0, 64, 128]
    held = {"held by a loader": tensors[0]}
    before = tensors[0].clone()
    del tensors
    _take_back(notes)
    assert not start <= held["held by a loader"].data_ptr() < start + data.numel()
    with torch.inference_mode():
        data.fill_(0)
    assert torch.equal(held["held by a loader"], before)


def test_a_part_that_is_kept_is_refused(lent) -> None:
    _, tensors, notes = lent
    part = tensors[0][1]
    with pytest.raises(TransportError, match="keeps a part of a, whose memory"):
        _take_back(notes)
    del part
    _take_back(notes)
