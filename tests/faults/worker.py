"""What a fault run adds to a vLLM worker: a signal when a given bucket has arrived. Imported by vLLM alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.receive.receiver import WorkerExtension
from tests.faults import orders


class FaultyWorkerExtension(WorkerExtension):
    """Methods that vLLM mixes into its worker class."""

    def megasync_receive_version(self, version: int) -> None:
        engine, case = self.weight_transfer_engine, orders.read_case()
        sync, reader = engine._sync, engine._reader
        assert sync is not None
        assert reader is not None
        if not orders.is_due(case, sync.replica, "receiving", version):
            return super().megasync_receive_version(version)
        plain = reader.buckets

        def buckets(*arguments: Any, **options: Any) -> Iterator[Any]:
            for bucket, data in plain(*arguments, **options):
                if bucket.index == case.bucket:
                    orders.signal_replica(case)
                yield bucket, data

        reader.buckets = buckets  # type: ignore[method-assign] # of this reader, whose process has not long to live
        return super().megasync_receive_version(version)
