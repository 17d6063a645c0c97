"""A replica in whose modules tests put faults, by methods of bisect_worker.py."""

from __future__ import annotations

from typing import Any

from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import Replica


class FaultyReplica(Replica):
    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        (answer,) = await self._engine.collective_rpc(method, args=arguments)
        return answer


class FaultyPool(ReplicaPool):
    replica_class = FaultyReplica

    def call(self, method: str, *arguments: Any) -> Any:
        (answer,) = self._call(lambda actor: actor.call.remote(method, arguments), 60.0)
        return answer
