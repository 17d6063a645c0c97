"""A rank without a launcher's list of warnings (`megasync train` has one) leaves out the warnings of other packages."""

from __future__ import annotations

import os
import subprocess
import sys

# The first lines are a rank's imports; a group of one rank calls what Megatron-FSDP calls at each step.
RANK = """
import engine.runtime.megatron
import megatron_fsdp
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_gather_into_tensor(torch.zeros(2), torch.ones(2))
dist.destroy_process_group()
"""


def test_a_rank_says_nothing_of_optional_kernels_and_renamed_collectives() -> None:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", RANK], env=own, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
