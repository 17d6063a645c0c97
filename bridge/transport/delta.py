"""Buckets as changes since the last sync, for slow links: over gloo, from host memory to host memory.

The sender of a stage and all vLLM workers cache the bytes of every bucket. A pass begins with an offer: the digest of the
sender's cache. A worker whose cache has the same digest accepts. One that lacks it, such as a restarted replica, rebuilds it from
the run's log of versions (versions/), if the offer names one that it can read. If any worker cannot, all get complete buckets; a
bucket is also sent complete if its delta would be larger. Each bucket's digest is compared before it is loaded.
Leaves out the content of buckets, and lanes.
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
from bridge.versions import weight_delta
from bridge.versions.file import VersionLogError
from bridge.versions.reader import VersionReader

SCHEME = "delta:"
CPU = torch.device("cpu")
ENCODINGS = (*weight_delta.ENCODINGS, "whole")
LOG_BYTES_PER_SECOND = 300e6  # of weights, for each file of a chain (docs/verify.md)
HAVE, LACK = b"have", b"lack"


class BucketCache:
    """A stage's buckets after the last complete pass."""

    def __init__(self, stage: StagePlan) -> None:
        self.plan = json.dumps([stage.manifest.digest, [bucket.num_bytes for bucket in stage.buckets]])
        self.buckets = [torch.empty(0, dtype=torch.uint8)] * len(stage.buckets)
        self.state = ""  # equal on two sides whose bytes are equal; empty: invalid

    def close_pass(self, digests: list[int]) -> None:
        self.state = hashlib.sha256(json.dumps([self.plan, digests]).encode()).hexdigest()


Store = dict[int, BucketCache]  # by stage
SENDERS_STORE: Store = {}  # of this process, since connections change with the members
READERS_STORE: Store = {}


def cache_of(store: Store, stage: StagePlan) -> BucketCache:
    """The cache of a stage; a new one where the plan differs."""
    fresh = BucketCache(stage)
    if stage.index not in store or store[stage.index].plan != fresh.plan:
        store[stage.index] = fresh
    return store[stage.index]


class DeltaWriter:
    """The sending side of one stage. `sent_bytes`: of the last pass, headers left out."""

    digests: BucketDigests | None = None

    def __init__(
        self, stage: StagePlan, num_readers: int, device: torch.device, log: Path | None, store: Store = SENDERS_STORE
    ) -> None:
        """`log`: the run's log of versions. Its newest version is the one that was sent last."""
        self._stage, self._num_readers, self._log = stage, num_readers, log
        self._channel, address = Channel.listen(1 + num_readers, CPU)
        self.endpoint = f"{SCHEME}{address}"
        self._buffer = torch.zeros(stage.buffer_bytes, dtype=torch.uint8, device=device)
        self._cache = cache_of(store, stage)
        self._digests: list[int] = []
        self._num_passes, self._has_base, self.sent_bytes = 0, False, 0
        self._deadline, self._check = 0.0, _nothing

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        self._deadline, self._check = deadline, check
        self._digests, self.sent_bytes = [], 0
        self._channel.meet(deadline, check)
        offer = {"state": self._cache.state, "log": str(self._log) if self._log is not None else ""}
        self._channel.publish(f"offer {self._num_passes}", json.dumps(offer).encode())
        what = "a worker to answer the offer"
        keys = [f"answer {self._num_passes} {reader}" for reader in range(self._num_readers)]
        answers = [self._channel.wait_for(key, deadline, what, check) for key in keys]
        self._has_base = bool(self._cache.state) and all(answer == HAVE for answer in answers)
        self._cache.state = ""

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """Earlier buckets have been sent by now."""
        check()
        return self._buffer

    def publish(self, num_bytes: int, *, verify: bool) -> None:  # always: a delta needs equal bytes
        index = len(self._digests)
        bucket, data = self._stage.buckets[index], self._buffer[:num_bytes]
        for start, end in gaps(bucket):  # which no tensor fills, nor the log
            data[start:end].zero_()
        digest = digest_bytes(data)
        former = self._cache.buckets[index] if self._has_base else None
        encoding, payload, self._cache.buckets[index] = encode(data, former)
        signed = digest - (1 << 64) if digest >= 1 << 63 else digest
        self._send(torch.tensor([ENCODINGS.index(encoding), len(payload), signed]).view(torch.uint8))
        if len(payload):
            self._send(payload)
        self.sent_bytes += len(payload)
        self._digests.append(digest)

    def finish(self, deadline: float, check: Callable[[], None]) -> None:  # all has been waited for
        self._cache.close_pass(self._digests)
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
        channel, cache = self._channels.join(stage.index, deadline), cache_of(self._store, stage)
        offer = json.loads(channel.wait_for(f"offer {sync_index}", deadline, f"the sender of stage {stage.index}"))
        has_base = bool(offer["state"]) and (cache.state == offer["state"] or self._is_of_log(stage, cache, offer, deadline))
        channel.publish(f"answer {sync_index} {self._reader}", HAVE if has_base else LACK)
        cache.state, digests = "", list[int]()
        for index, bucket in enumerate(stage.buckets):
            data, digest = self._take(channel, stage, bucket, cache, index, deadline)
            digests.append(digest)
            yield bucket, data
        cache.close_pass(digests)

    def _take(
        self, channel: Channel, stage: StagePlan, bucket: Bucket, cache: BucketCache, index: int, deadline: float
    ) -> tuple[torch.Tensor, int]:
        """The bucket on this worker's device, and its digest; its bytes are in `cache`, too."""

        def receive(num_bytes: int) -> torch.Tensor:
            data = torch.empty(num_bytes, dtype=torch.uint8)
            channel.wait(channel.broadcast(data, deadline), deadline, stage.describe(bucket))
            return data

        code, num_bytes, signed = receive(24).view(torch.int64).tolist()
        payload = receive(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        try:
            cache.buckets[index] = decode(ENCODINGS[code], payload, cache.buckets[index])
        except weight_delta.DamagedError as error:
            raise TransportError(f"{stage.describe(bucket)}: {error}") from error
        data = cache.buckets[index].to(self._device)
        digest = digest_bytes(data)
        if digest != signed % (1 << 64):
            raise DamagedError(stage, [index])
        return data, digest

    def _is_of_log(self, stage: StagePlan, cache: BucketCache, offer: dict[str, str], deadline: float) -> bool:
        """Whether the newest version of the log equals the sender's cache; then it is in `cache`."""
        if not offer["log"]:
            return False
        try:
            found = from_log(Path(offer["log"]), stage, (deadline - time.monotonic()) / 2)
        except (VersionLogError, OSError) as error:
            logging.getLogger(__name__).warning("whole weights are asked for: %s", error)
            return False
        if found is None:
            return False
        cache.buckets = found
        cache.close_pass([digest_bytes(data) for data in found])
        return cache.state == offer["state"]

    def abort(self, reason: str) -> None:
        self._channels.abort(reason)

    def close(self) -> None:
        self._channels.close()


def _nothing() -> None:
    pass


def encode(data: torch.Tensor, former: torch.Tensor | None) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Encode a bucket [n] uint8 on any device in the shorter of two forms; also returns the bucket in host memory.

    `former`: as all readers have it, in host memory; it becomes the bucket.
    """
    if former is not None and former.numel() == data.numel():
        encoding, found = weight_delta.advance(_words(former), _words(data))
        if len(found) < data.numel() or encoding == "same":
            return encoding, torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else former[:0], former
        return "whole", former, former
    whole = data.to(CPU, copy=True)
    return "whole", whole, whole


def decode(encoding: str, payload: torch.Tensor, former: torch.Tensor) -> torch.Tensor:
    """The bucket; `former` becomes it, but for a whole one.

    Raises:
        weight_delta.DamagedError: the bytes are none of a delta of this bucket.
    """
    if encoding == "whole":
        return payload
    weight_delta.apply(_words(former), encoding, payload.numpy().tobytes())
    return former


def _words(data: torch.Tensor) -> torch.Tensor:
    """A view as 2-byte words: elements of bfloat16, halves of float32, whose upper half changes less often."""
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
