"""The program: puts engine, bridge, Ray and vLLM together. Every entry is a verb of `megasync`.

cli.py     the command: which verbs there are
train.py   starts a run on this machine, or is one rank of it
submit.py  the same program through Ray's job API
nodes.py   the same program on several nodes, by the same command on each

Each room imports only from those above it:

config/    all keys, as pydantic models; loading and errors
models/    Hugging Face model folders, read without torch
launch/    torchrun, several nodes, Ray jobs, a Ray of a run's own, processes, which GPUs each gets
report/    logs, metrics, the report's page
data/      examples and prompts, from files to tokens
workers/   processes that run functions of users: time limits, restarts, blame
served/    models beside the policy that never sync: pools of replicas, endpoints
rewards/   rewards of responses, in workers
episodes/  many turns, in workers: segments of sampled and given tokens
rollouts/  batches: a stream of groups, generated and rewarded
checks/    whether a config can run here
run/       a run on one rank: session, loop, weights
service/   the engine for clients that write the loop: a server, and the same calls in process
tools/     verbs beside training, a room each; no room above imports them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasync.config.own_packages import find_ours_first

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from megasync.service.trainer import Trainer

find_ours_first()


def open(config: str | Path, *overrides: str) -> AbstractContextManager[Trainer]:  # noqa: A001 # megasync.open
    """The calls forward_backward, optim_step, sample, save and load in this process: see megasync/service/trainer.py."""
    from megasync.service.trainer import open_trainer

    return open_trainer(config, *overrides)
