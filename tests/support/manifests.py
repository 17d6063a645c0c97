"""Manifests of any tensors, for property tests, and what streams of them are given."""

from __future__ import annotations

import time

from hypothesis import strategies as st

from bridge.layout.bucket import StagePlan, SyncPlan
from bridge.layout.manifest import Manifest, TensorSpec

SPECS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.lists(st.integers(0, 40), max_size=3)), max_size=12
)


def make_manifest(specs: list[tuple[str, list[int]]]) -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(specs)))


def stage_of(manifest: Manifest, bucket_bytes: int) -> StagePlan:
    """Of a manifest of one pipeline stage."""
    return SyncPlan(manifest, (len(manifest.tensors),), bucket_bytes).stages[0]


def soon(seconds: float = 60.0) -> float:
    """A deadline, of time.monotonic()."""
    return time.monotonic() + seconds
