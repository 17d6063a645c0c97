"""What the ranks of most tests import, and so the process that they are forked from (tests/support/ranks.py)."""

from __future__ import annotations

import gc

from tests.engine import engine_cases  # noqa: F401  (the device layer comes before megatron-core)
from tests.support import tiny_models  # noqa: F401  (the device layer comes before megatron-core)

import hypothesis  # noqa: F401
import megatron_fsdp  # noqa: F401

gc.collect()
gc.freeze()  # no collection of a rank need look through these
