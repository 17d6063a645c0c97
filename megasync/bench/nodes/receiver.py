"""A worker's side of a sync without vLLM: the bridge's reader, buckets and load plan, into parameters that nothing computes with.

Takes calls of pool.py, one at a time, as a process on its first GPU or on a CPU. Leaves out vLLM's loaders, and so what layers
cost that need them.

    python -m megasync.bench.nodes.receiver 10.82.0.5 7000
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Listener
from typing import Any

import psutil
import torch

from bridge.layout.bucket import SyncPlan
from bridge.layout.digest import digest_value
from bridge.layout.lanes import LanePlan
from bridge.layout.manifest import Manifest
from bridge.layout.plan import LoadPlan
from bridge.layout.regions import Copy, contiguous
from bridge.messages import BeginSync
from bridge.processes import host_identity
from bridge.receive.unpack import Unpacker
from bridge.transport.open import open_reader, own_device
from bridge.transport.protocol import Reader

KEY = b"megasync bench"
INTERFACE = "eth0"


def link_bytes() -> tuple[int, int]:
    """Received and sent by this node's link to the others, by the kernel's count."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)[INTERFACE]
    return counted.bytes_recv, counted.bytes_sent


class Receiver:
    """What pool.py calls by name."""

    host = staticmethod(host_identity)
    link_bytes = staticmethod(link_bytes)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[tuple[str, ...], tuple[Reader, Unpacker]] = {}  # by endpoints: publishers take turns
        self._parameters: dict[str, torch.Tensor] = {}

    def begin(self, message: BeginSync) -> None:
        """As BucketReceiver does, with a load plan that takes every tensor whole."""
        assert message.manifest_json is not None
        manifest = Manifest.from_json(message.manifest_json)
        if not self._parameters:
            dtypes = {spec.name: getattr(torch, spec.dtype) for spec in manifest.tensors}
            self._parameters = {s.name: torch.zeros(s.shape, dtype=dtypes[s.name], device=self._device) for s in manifest.tensors}
        copies: list[tuple[Copy, ...] | None] = [
            (Copy(contiguous(each.numel()), name, contiguous(each.numel())),) for name, each in self._parameters.items()
        ]
        plan = SyncPlan(manifest, message.stage_sizes, message.bucket_bytes)
        unpacker = Unpacker(plan, LoadPlan(manifest, self._parameters, copies, {}, []), self._device)
        lanes = LanePlan.from_json(message.lanes_json) if message.lanes_json is not None else None
        reader = open_reader(message.endpoints[0], message.first_reader, message.num_readers, self._device, lanes)
        self._readers[message.endpoints[0]] = reader, unpacker

    def receive(self, message: BeginSync) -> None:
        reader, unpacker = self._readers[message.endpoints[0]]
        try:
            for _ in unpacker.tensors(message, reader):
                pass
        except BaseException as error:
            reader.abort(f"replica {message.replica} worker 0: {error}")
            raise

    def leave(self) -> None:
        """The publishers of now have ended."""
        for reader, _ in self._readers.values():
            reader.close()
        self._readers = {}

    def read_digests(self) -> dict[str, int]:
        return {name: digest_value(parameter) for name, parameter in self._parameters.items()}


def serve(listener: Listener, device: torch.device) -> None:
    """Call after call, until one is empty."""
    receiver = Receiver(device)
    with listener, listener.accept() as caller:
        while (call := caller.recv()) is not None:
            name, arguments = call
            try:
                value: Any = getattr(receiver, name)(*arguments)
            except Exception as error:  # noqa: BLE001 # told to who called
                traceback.print_exc()
                caller.send((str(error) or type(error).__name__, None))
            else:
                caller.send(("", value))


def main(arguments: Sequence[str]) -> int:
    address, port = arguments
    serve(Listener((address, int(port)), authkey=KEY), own_device())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
