"""Manifests of any tensors, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from bridge.layout.manifest import Manifest, TensorSpec

SPECS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.lists(st.integers(0, 40), max_size=3)), max_size=12
)


def make_manifest(specs: list[tuple[str, list[int]]]) -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(specs)))
