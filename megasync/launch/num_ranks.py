"""How many trainer ranks a run gets on this machine when nobody says. No torch in here.

python -m megasync.launch.num_ranks CONFIG.yaml [key=value ...]      # prints the number
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megasync.config.errors import ConfigError, main_errors
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices

NUM_CPU_RANKS = 2


def num_replica_gpus(config: Config) -> int:
    """GPUs that the config's vLLM replicas need beside the trainer's."""
    if config.algorithm.name == "sft" or config.rollout.is_colocated:
        return 0
    return config.rollout.replicas * config.rollout.tensor_parallel


def num_teacher_gpus(config: Config) -> int:
    """GPUs that replicas of teachers and judges need, which share none."""
    judges = config.pooled_judges.values() if config.algorithm.name != "sft" else ()
    of_judges = sum(judge.replicas * judge.tensor_parallel for judge in judges)
    return num_teacher_replicas(config) * config.teacher.tensor_parallel + of_judges


def num_teacher_replicas(config: Config) -> int:
    """vLLM engines of all teachers that have a folder and are asked in the rollout."""
    teacher = config.teacher
    return len(teacher.paths) * teacher.replicas if teacher.is_served and config.algorithm.name != "sft" else 0


def replica_gpus_of_node(config: Config, num_nodes: int) -> int:
    """The largest share of these that one of `num_nodes` nodes has."""
    teachers = -(-num_teacher_gpus(config) // num_nodes)
    if not num_replica_gpus(config):
        return teachers
    return -(-config.rollout.replicas // num_nodes) * config.rollout.tensor_parallel + teachers


def default_num_ranks(config: Config, gpus: int) -> int:
    """2 ranks without GPUs, else all of `gpus` but the replicas' own.

    Raises:
        ConfigError: the replicas leave no GPU for the trainer.
    """
    if gpus == 0:
        return NUM_CPU_RANKS
    teachers = num_teacher_gpus(config)
    left = gpus - num_replica_gpus(config) - teachers
    if left < 1:
        key = "teacher.replicas" if teachers else "rollout.replicas"
        number = config.teacher.replicas if teachers else config.rollout.replicas
        raise ConfigError(
            f"{key} = {number}: the replicas leave no GPU for the trainer",
            GPUs=str(gpus),
            **({"teachers": f"{teachers} GPUs"} if teachers else {}),
            remedy=f"lower {key} or its tensor_parallel, or use a machine with more GPUs",
        )
    return left


def main(arguments: Sequence[str]) -> int:
    """Print the number for a config."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    with main_errors():
        print(default_num_ranks(load_config(arguments[0], arguments[1:]), len(visible_devices())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
