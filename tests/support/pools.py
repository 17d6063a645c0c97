"""A replica in this process, for tests of a sync without Ray and vLLM."""

from __future__ import annotations

import threading

import torch

from bridge.layout.bucket import SyncPlan
from bridge.layout.manifest import Manifest
from bridge.messages import BeginSync
from bridge.processes import host_identity
from bridge.transport.open import open_reader
from tests.support.manifests import soon


class ReadingPool:
    """One replica of one worker. It reads all buckets and then holds `held`, by name, digests of tensors.

    Where it does not end it has read all and still loads.
    """

    reader_names, reader_numbers, members = ("replica 0 worker 0",), (0,), (0,)

    def __init__(self, held: dict[str, int], *, ends: bool = True) -> None:
        self.held, self.ends, self.messages, self.version = held, ends, list[BeginSync](), -1

    def reader_hosts(self) -> list[str]:
        return [host_identity()]

    def pause(self, slot: int = 0) -> None:
        """It has nothing to do."""

    def begin(self, _message: BeginSync) -> list[str]:
        return []

    def receive(self, message: BeginSync) -> list[threading.Thread]:
        self.messages.append(message)
        reader = threading.Thread(target=self._read, args=(message,))
        reader.start()
        return [reader]

    def _read(self, message: BeginSync) -> None:
        (stage,) = SyncPlan(Manifest.from_json(message.manifest_json), message.stage_sizes, message.bucket_bytes).stages
        reader = open_reader(message.endpoints[0], 0, 1, torch.device("cpu"))
        assert list(reader.buckets(stage, message.sync_index, soon(), verify=message.verify))
        reader.close()

    def raise_if_failed(self, refs: list[threading.Thread], seconds: float = 0.0) -> list[int]:
        refs[0].join(seconds)
        return [0] if refs[0].is_alive() or not self.ends else []

    def commit(self, version: int, timeout: float) -> None:
        self.version = version

    def loader_fallback(self) -> dict[str, str]:
        return {}

    def read_digests(self, _timeout: float, _replicas: list[int] | None = None) -> dict[int, dict[str, int]]:
        return {0: self.held}

    def resume(self) -> None:
        """It has nothing to do."""

    def abort(self, timeout: float) -> tuple[list[int], list[int]]:
        return [0], []
