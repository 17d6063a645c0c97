"""The default number of trainer ranks on this machine, and the GPUs of replicas. No torch in here."""

from __future__ import annotations

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.cluster_room import Pool

NUM_CPU_RANKS = 2


def pools(config: Config) -> tuple[Pool, ...]:
    """vLLM replicas that need GPUs beside the trainer's: the policy's, unless it shares them, then teachers' and judges'."""
    rollout, teacher = config.rollout, config.teacher
    if config.algorithm.name == "sft":
        return ()
    own = [] if rollout.is_colocated else [Pool("rollout", rollout.replicas, rollout.tensor_parallel)]
    folders = teacher.paths if teacher.is_served else ()
    teachers = [Pool("teacher", teacher.replicas, teacher.tensor_parallel) for _ in folders]
    judges = [Pool(f"judges.{name}", each.replicas, each.tensor_parallel) for name, each in config.pooled_judges.items()]
    return (*own, *teachers, *judges)


def num_replica_gpus(config: Config) -> int:
    """GPUs that the policy's vLLM replicas need beside the trainer's."""
    return sum(pool.num_gpus for pool in pools(config) if pool.key == "rollout")


def num_teacher_gpus(config: Config) -> int:
    """GPUs that replicas of teachers and judges need, which share none."""
    return sum(pool.num_gpus for pool in pools(config) if pool.key != "rollout")


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
    all_pools = pools(config)
    left = gpus - sum(pool.num_gpus for pool in all_pools)
    if left < 1:
        last = all_pools[-1]
        raise ConfigError(
            f"{last.key}.replicas = {last.replicas}: the replicas leave no GPU for the trainer",
            GPUs=str(gpus),
            replicas=", ".join(f"{pool.key}: {pool.num_gpus} GPUs" for pool in all_pools),
            remedy=f"lower {last.key}.replicas or its tensor_parallel, or use a machine with more GPUs",
        )
    return left
