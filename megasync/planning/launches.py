"""How long this machine's host takes to launch kernels, beside the one that measured.json's seconds of launches are from.

What launches them is Python and torch's dispatch, so that a small layer in Python on the CPU stands for it (cpu/calls.py: host).
Takes some 50 ms. Leaves out what follows of it (seconds.py).
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from megasync.planning.cpu.calls import host, prepare
from megasync.planning.cpu.together import timed
from megasync.planning.hardware import Hardware, seconds

ROUNDS = 15


def host_layer_seconds() -> float:
    """Of the small layer, in this process; the median of several rounds, the first for warming up."""
    call, share = prepare(host())
    timed(call)
    return statistics.median(timed(call) for _ in range(ROUNDS)) * share


def with_launches(known: Hardware) -> Hardware:
    """With the speed of this machine's host."""
    return replace(known, launch_scale=host_layer_seconds() / seconds("host_layer"))
