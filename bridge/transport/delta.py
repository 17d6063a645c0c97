"""Buckets as what changed in them since the last sync, for slow links: over gloo, out of host memory on both sides.

The sender of a stage and all vLLM workers keep the bytes of every bucket. A pass begins with an offer: what the sender has kept,
by its digest. A worker that has just that says so; one that lacks it, such as a replica that was started anew, makes it out of
the run's log of versions, where the offer names one that it can read (versions/). Where one cannot, all get whole buckets; so
travels a bucket whose delta would be larger. Each bucket's digest is compared after its delta was applied, before it is loaded.
Leaves out what a bucket means, and lanes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bridge.layout.bucket import Bucket, StagePlan, gaps
from bridge.layout.digest import BucketDigests, digest_bytes
from bridge.transport.channel import Channel, Channels
from bridge.transport.protocol import DamagedError, TransportError
from bridge.versions import delta
from bridge.versions.file import VersionLogError
from bridge.versions.reader import VersionReader

SCHEME = "delta:"
CPU = torch.device("cpu")
ENCODINGS = (*delta.ENCODINGS, "whole")
LOG_BYTES_PER_SECOND = 300e6  # of weights, for each file of a chain (docs/bisect.md)
HAVE, LACK = b"have", b"lack"


class Kept:
    """A stage's buckets as of the last pass that was whole."""

    def __init__(self, stage: StagePlan) -> None:
        self.plan = json.dumps([stage.manifest.digest, [bucket.num_bytes for bucket in stage.buckets]])
        self.buckets = [torch.empty(0, dtype=torch.uint8)] * len(stage.buckets)
        self.state = ""  # equal on two sides where all bytes are; empty: of no use

    def close_pass(self, digests: list[int]) -> None:
        self.state = hashlib.sha256(json.dumps([self.plan, digests]).encode()).hexdigest()


Store = dict[int, Kept]  # by stage
SENDERS_STORE: Store = {}  # of this process: connections come and go with the members
READERS_STORE: Store = {}


def kept_of(store: Store, stage: StagePlan) -> Kept:
    """What there is of this plan."""
    fresh = Kept(stage)
    if stage.index not in store or store[stage.index].plan != fresh.plan:
        store[stage.index] = fresh
    return store[stage.index]


class DeltaWriter:
    """The sending side of one stage. `sent_bytes`: of the last pass, headers left out."""

    digests: BucketDigests | None = None

    def __init__(
        self, stage: StagePlan, num_readers: int, device: torch.device, log: Path | None, store: Store = SENDERS_STORE
    ) -> None:
        """`log`: the run's log of versions, of which the newest is what was sent last."""
        self._stage, self._num_readers, self._log = stage, num_readers, log
        self._channel, address = Channel.listen(1 + num_readers, CPU)
        self.endpoint = f"{SCHEME}{address}"
        self._buffer = torch.zeros(stage.buffer_bytes, dtype=torch.uint8, device=device)
        self._kept = kept_of(store, stage)
        self._digests: list[int] = []
        self._num_passes, self._has_base, self.sent_bytes = 0, False, 0
        self._deadline, self._check = 0.0, _nothing

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        self._deadline, self._check = deadline, check
        self._digests, self.sent_bytes = [], 0
        self._channel.meet(deadline, check)
        offer = {"state": self._kept.state, "log": str(self._log) if self._log is not None else ""}
        self._channel.tell(f"offer {self._num_passes}", json.dumps(offer).encode())
        what = "a worker to say what it has kept"
        keys = [f"answer {self._num_passes} {reader}" for reader in range(self._num_readers)]
        answers = [self._channel.ask(key, deadline, what, check) for key in keys]
        self._has_base = bool(self._kept.state) and all(answer == HAVE for answer in answers)
        self._kept.state = ""

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """What was published has left."""
        check()
        return self._buffer

    def publish(self, num_bytes: int, *, verify: bool) -> None:  # a delta of other bytes would be worth nothing
        index = len(self._digests)
        bucket, data = self._stage.buckets[index], self._buffer[:num_bytes]
        for start, end in gaps(bucket):  # which no tensor fills, nor the log
            data[start:end].zero_()
        digest = digest_bytes(data)
        former = self._kept.buckets[index] if self._has_base else None
        encoding, payload, self._kept.buckets[index] = encode(data, former)
        signed = digest - (1 << 64) if digest >= 1 << 63 else digest
        self._send(torch.tensor([ENCODINGS.index(encoding), len(payload), signed]).view(torch.uint8))
        if len(payload):
            self._send(payload)
        self.sent_bytes += len(payload)
        self._digests.append(digest)

    def finish(self, deadline: float, check: Callable[[], None]) -> None:  # all has been waited for
        self._kept.close_pass(self._digests)
        self._num_passes += 1

    def _send(self, data: torch.Tensor) -> None:
        sent = self._channel.broadcast(data, self._deadline)
        what = f"the workers to take bucket {len(self._digests)} of stage {self._stage.index}"
        self._channel.wait(sent, self._deadline, what, self._check)

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()


class DeltaReader:
    """One vLLM worker's side of all stages; `reader` is its index among the `num_readers` workers of all replicas."""

    interleaves = lends_memory = False

    def __init__(
        self, endpoints: tuple[str, ...], reader: int, num_readers: int, device: torch.device, store: Store = READERS_STORE
    ) -> None:
        self.endpoints, self._reader, self._device, self._store = endpoints, reader, device, store
        self._channels = Channels([endpoint.removeprefix(SCHEME) for endpoint in endpoints], reader, num_readers, CPU)

    def digests(self, stage: int) -> BucketDigests | None:  # they are compared before a bucket is given
        return None

    def buckets(
        self, stage: StagePlan, sync_index: int, deadline: float, *, verify: bool  # always
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        channel, kept = self._channels.join(stage.index, deadline), kept_of(self._store, stage)
        offer = json.loads(channel.ask(f"offer {sync_index}", deadline, f"the sender of stage {stage.index}"))
        has_base = bool(offer["state"]) and (kept.state == offer["state"] or self._is_of_log(stage, kept, offer, deadline))
        channel.tell(f"answer {sync_index} {self._reader}", HAVE if has_base else LACK)
        kept.state, digests = "", list[int]()
        for index, bucket in enumerate(stage.buckets):
            data, digest = self._take(channel, stage, bucket, kept, index, deadline)
            digests.append(digest)
            yield bucket, data
        kept.close_pass(digests)

    def _take(
        self, channel: Channel, stage: StagePlan, bucket: Bucket, kept: Kept, index: int, deadline: float
    ) -> tuple[torch.Tensor, int]:
        """The bucket on this worker's device, and its digest; its bytes are in `kept`, too."""

        def receive(num_bytes: int) -> torch.Tensor:
            data = torch.empty(num_bytes, dtype=torch.uint8)
            channel.wait(channel.broadcast(data, deadline), deadline, stage.describe(bucket))
            return data

        code, num_bytes, signed = receive(24).view(torch.int64).tolist()
        payload = receive(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        try:
            kept.buckets[index] = decode(ENCODINGS[code], payload, kept.buckets[index])
        except delta.DamagedError as error:
            raise TransportError(f"{stage.describe(bucket)}: {error}") from error
        data = kept.buckets[index].to(self._device)
        digest = digest_bytes(data)
        if digest != signed % (1 << 64):
            raise DamagedError(stage, [index])
        return data, digest

    def _is_of_log(self, stage: StagePlan, kept: Kept, offer: dict[str, str], deadline: float) -> bool:
        """Whether the newest version of the log is what the sender has kept; it is in `kept` then."""
        if not offer["log"]:
            return False
        try:
            found = from_log(Path(offer["log"]), stage, (deadline - time.monotonic()) / 2)
        except (VersionLogError, OSError) as error:
            logging.getLogger(__name__).warning("whole weights are asked for: %s", error)
            return False
        if found is None:
            return False
        kept.buckets = found
        kept.close_pass([digest_bytes(data) for data in found])
        return kept.state == offer["state"]

    def abort(self, reason: str) -> None:
        self._channels.abort(reason)

    def close(self) -> None:
        self._channels.close()


def _nothing() -> None:
    pass


def encode(data: torch.Tensor, former: torch.Tensor | None) -> tuple[str, torch.Tensor, torch.Tensor]:
    """What travels of a bucket [n] uint8 on any device, in the shorter of its two forms, and the bucket in host memory.

    `former`: as all readers have it, in host memory; it becomes the bucket.
    """
    if former is not None and former.numel() == data.numel():
        encoding, found = delta.advance(_words(former), _words(data))
        if len(found) < data.numel() or encoding == "same":
            return encoding, torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else former[:0], former
        return "whole", former, former
    whole = data.to(CPU, copy=True)
    return "whole", whole, whole


def decode(encoding: str, payload: torch.Tensor, former: torch.Tensor) -> torch.Tensor:
    """The bucket; `former` becomes it, but for a whole one.

    Raises:
        delta.DamagedError: the bytes are none of a delta of this bucket.
    """
    if encoding == "whole":
        return payload
    delta.apply(_words(former), encoding, payload.numpy().tobytes())
    return former


def _words(data: torch.Tensor) -> torch.Tensor:
    """By two bytes: of bfloat16 the elements, of float32 the halves, of which the upper one changes less."""
    return data.view(torch.int16) if data.numel() % 2 == 0 else data


def from_log(folder: Path, stage: StagePlan, seconds: float) -> list[torch.Tensor] | None:
    """A stage's buckets as of the newest version; None where the log has another model, or reading takes longer than that.

    Raises:
        VersionLogError: the log is torn, damaged, or lacks a version that the newest is made of.
    """
    log = VersionReader(folder)
    if not log.versions:
        return None
    chain, sizes = log.chain(log.versions[-1], stage.index), [spec.num_bytes for spec in stage.manifest.tensors]
    if len(chain) * sum(sizes) / LOG_BYTES_PER_SECOND > seconds:
        return None
    tensors = log.of_stage(log.versions[-1], stage.index)
    flat = [tensors[spec.name].view(-1).view(torch.uint8) for spec in stage.manifest.tensors if spec.name in tensors]
    if [tensor.numel() for tensor in flat] != sizes:
        return None
    found = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in stage.buckets]
    for data, bucket in zip(found, stage.buckets, strict=True):
        for piece in bucket.pieces:
            part = flat[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = part
    return found
