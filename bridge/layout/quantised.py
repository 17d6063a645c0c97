"""Which tensors `rollout.dtype: fp8` quantises, and what a sync carries in their place. No torch in here.

A weight [out, in] becomes float8_e4m3fn of the same name and shape and, right behind it, float32 scales [out, 1] of the name with
SCALE. Leaves out the numbers (export/fp8.py).
"""

from __future__ import annotations

import re
from dataclasses import replace

from bridge.layout.manifest import Manifest, TensorSpec

DTYPE, SCALE = "float8_e4m3fn", "_scale"
MOST = 448.0  # the largest number of the format
SMALLEST = 2.0**-60  # of the scales: rows of zeros have one, too
LINEAR = re.compile(r"model\.layers\.\d+\..*(_proj|\.experts\.\d+\.w[123])\.weight")


def is_quantised(name: str) -> bool:
    """Whether Hugging Face's tensor of this name is the weight of a linear of a layer, or of one of its experts."""
    return LINEAR.fullmatch(name) is not None


def quantised_manifest(manifest: Manifest) -> Manifest:
    """The manifest of a source whose tensors are quantised; `manifest` has the same tensors before that."""
    return Manifest(tuple(spec for each in manifest.tensors for spec in _specs(each)))


def _specs(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    if not is_quantised(spec.name):
        return (spec,)
    return replace(spec, dtype=DTYPE), TensorSpec(spec.name + SCALE, "float32", (spec.shape[0], 1))
