"""The Triton kernels of the bridge: interpreted on the CPU, compiled with `-m gpu`.

python -m pytest tests/bridge/layout/test_kernels.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bridge.layout.digest import BucketDigests, digest_bytes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_do_what_they_stand_for(device) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, "-m", "tests.bridge.layout.kernel_cases", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_digests_of_buckets_are_those_of_their_bytes(device) -> None:
    sizes = [2**18 + 24, 11, 0, 3 * 2**18 + 45]
    digests = BucketDigests(len(sizes), torch.device(device))
    for num_buckets in (len(sizes), 2, len(sizes)):  # passes
        buckets = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for size in sizes[:num_buckets]]
        for bucket in buckets:
            digests.finish(bucket)
        assert [value % 2**64 for value in digests.join().tolist()] == [digest_bytes(bucket.cpu()) for bucket in buckets]
        assert [digest_bytes(bucket) for bucket in buckets] == [digest_bytes(bucket.cpu()) for bucket in buckets]
