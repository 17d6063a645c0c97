"""When a run's sync connects again and when it is repeated: a rank without a trainer, a replica without vLLM.

python -m pytest tests/megasync/run/test_weight_sync.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks


def publish(changes: list[bool], num_losses: int = 0) -> dict[str, Any]:
    """Publishes a version for each of `changes`, before which members have changed or not; the first syncs lose the replica.

    Returns version and index of each sync that the replica took part in, and the replicas that were replaced.
    """
    from bridge.config import SyncConfig
    from bridge.messages import BeginSync
    from bridge.send.publish import Publisher
    from engine.config import ParallelConfig
    from engine.runtime import parallel
    from megasync.config.schema import Config
    from megasync.report.log import RunLog
    from megasync.run.placement import DeviceSharing
    from megasync.run.rank_zero import RankZero
    from megasync.run.sync import WeightSync
    from tests.support.pools import ReadingPool
    from tests.support.sources import DictSource

    class ChangingPool(ReadingPool):
        def __init__(self) -> None:
            super().__init__({})
            self.changes, self.num_losses, self.replaced = list(changes), num_losses, list[int]()

        def rejoin(self, _at_least: int, _seconds: float) -> bool:
            return bool(self.replaced) if not self.changes else self.changes.pop(0)

        def drain_notes(self) -> list[str]:
            return []

        def receive(self, message: BeginSync) -> Any:
            self.num_losses -= 1
            if self.num_losses >= 0:
                raise RuntimeError("replica 0 is lost")
            return super().receive(message)

        def replace(self, *replicas: int) -> None:
            self.replaced += replicas

    parallel.initialize(ParallelConfig(), seed=0)
    config, pool = Config(), ChangingPool()
    log = RunLog(config, first_step=0, write=False)
    here: Any = RankZero(lambda: pool)
    publisher = Publisher(DictSource({"t": torch.ones(8)}), pool, SyncConfig(transport="shm"))
    sharing = DeviceSharing(config, None, here, log.timeline)
    sync = WeightSync(config, None, log, None, publisher, here, sharing, None, None, None)
    metrics = [sync.publish(version) for version in range(len(changes))]
    publisher.close()
    parallel.shutdown()
    assert all(each["sync/replicas"] == 1 and each["sync/bytes"] == 32 for each in metrics)
    return {"syncs": [(each.version, each.sync_index) for each in pool.messages], "replaced": pool.replaced}


@pytest.mark.parametrize(("changes", "indices"), [([True, False, False], [0, 1, 2]), ([True, False, True], [0, 1, 0])])
def test_a_sync_connects_again_where_members_have_changed(changes: list[bool], indices: list[int]) -> None:
    (found,) = run_ranks(1, "tests.megasync.run.test_weight_sync:publish", {"changes": changes})
    assert found == {"syncs": list(enumerate(indices)), "replaced": []}


def test_a_sync_that_lost_its_replica_is_repeated_with_the_restarted_one() -> None:
    (found,) = run_ranks(1, "tests.megasync.run.test_weight_sync:publish", {"changes": [True], "num_losses": 2})
    assert found == {"syncs": [(0, 0)], "replaced": [0, 0]}
