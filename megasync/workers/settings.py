"""The settings of a pool of workers, and its error."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.workers.protocol import Start


class WorkersError(RuntimeError):
    """No worker can be started, or the pool was closed."""


@dataclass(frozen=True)
class PoolSettings:
    """`name`: of a worker in messages; `limit_key`: the config key of `limit_seconds`. The others as in Start and Hosts."""

    name: str
    start: Start
    limit_key: str
    limit_seconds: float
    max_workers: int
    concurrency: int = 1
    is_on_cluster: bool = False
    answer_timeout_seconds: float = 60.0
