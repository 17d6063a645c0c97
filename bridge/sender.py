"""One trainer rank's pass over its weight source: gather, pack into buckets, hand over; or drain.

Every rank iterates its source to the end, whatever happened, because iterating runs collectives in which the other
ranks of its stage take part. Leaves out agreement between ranks (publish.py).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from bridge.bucket import Bucket, Piece, plan_buckets
from bridge.messages import StageSpan
from bridge.transport.shm import ShmWriter
from bridge.verify import as_bytes, digest_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.manifest import Manifest, TensorSpec


class WeightSource(Protocol):
    """What the trainer gives: the weights of one pipeline stage in Hugging Face names and shapes.

    Iterating is a fresh pass in the manifest's order and may run collectives: all ranks of a stage iterate in lockstep
    and to the end. One rank a stage, the sender, needs the tensors' contents; a tensor is only used until the next.
    """

    @property
    def stage(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def is_sender(self) -> bool: ...

    def manifest(self) -> Manifest:
        """This stage's tensors, known without any transfer."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class StageStream:
    """Streams one pass of a source. `writer` is None on ranks that send nothing."""

    def __init__(
        self, source: WeightSource, manifest: Manifest, bucket_bytes: int, writer: ShmWriter | None, *, verify: str
    ) -> None:
        self.source, self.manifest, self.writer, self._verify = source, manifest, writer, verify
        self.buckets = plan_buckets(manifest, bucket_bytes)
        self._places: list[list[tuple[Bucket, Piece]]] = [[] for _ in manifest.tensors]
        for bucket in self.buckets:
            for piece in bucket.pieces:
                self._places[piece.tensor].append((bucket, piece))

    def run(self, deadline: float, check: Callable[[], None]) -> StreamResult:
        """One pass. `check` is called often and raises when another side failed.

        The result holds the first error, if any; an error stops the sending, not the pass.
        """
        pass_ = _Pass(self, deadline, check)
        stream = iter(self.source)
        try:
            for spec in self.manifest.tensors:
                pass_.take(spec, next(stream, None))
            extra = next(stream, None)
            if extra is not None:
                pass_.fail(f"stage {self.source.stage}: the weight source gave {extra[0]}, which its manifest lacks")
            for _ in stream:
                pass
        except Exception as error:  # noqa: BLE001 # whatever the source raises has to reach all ranks
            pass_.fail(f"stage {self.source.stage}: the weight source failed: {type(error).__name__}: {error}")
        return pass_.result

    def send_piece(self, buffer: torch.Tensor, spec: TensorSpec, piece: Piece, tensor: torch.Tensor) -> None:
        """Copy a piece into the bucket: one copy, none in between, unless the tensor is both split and strided."""
        target = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
        if piece.num_bytes == spec.num_bytes:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            target.copy_(as_bytes(tensor)[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])


class StreamResult:
    """What a pass left: `problem`, spans for the timeline, and with verify=readback a digest a tensor."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.spans: list[StageSpan] = []
        self.digests: list[int] = []


class _Pass:
    """The moving parts of one pass."""

    def __init__(self, stream: StageStream, deadline: float, check: Callable[[], None]) -> None:
        self._stream, self._deadline, self._check = stream, deadline, check
        self.result = StreamResult()
        self._index = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._clock = time.time()  # until when time is accounted for
        self._spent = {"gather": 0.0, "pack": 0.0, "wait": 0.0}
        self._span_start = self._clock

    def take(self, spec: TensorSpec, given: tuple[str, torch.Tensor] | None) -> None:
        """The next tensor of the stream."""
        self._account("gather")
        index, self._index = self._index, self._index + 1
        if self.result.problem is not None:
            return
        try:
            self._check()
            if self._stream.writer is not None:
                self._send(self._stream.writer, index, spec, _validated(spec, given))
        except RuntimeError as error:
            self.fail(str(error))
        if index == len(self._stream.manifest.tensors) - 1:
            self._close_spans()

    def fail(self, problem: str) -> None:
        """Keep the first problem and wake the readers up."""
        if self.result.problem is None:
            self.result.problem = problem
            if self._stream.writer is not None:
                self._stream.writer.segment.abort(problem)

    def _send(self, writer: ShmWriter, index: int, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if self._stream._verify == "readback":
            self.result.digests.append(digest_value(tensor.cpu()))
        for bucket, piece in self._stream._places[index]:
            if piece is bucket.pieces[0]:
                self._account("pack")
                self._buffer = writer.acquire(self._deadline, self._check)
                self._account("wait")
            self._stream.send_piece(self._buffer, spec, piece, tensor)
            if piece is bucket.pieces[-1]:
                writer.publish(bucket.num_bytes, verify=self._stream._verify != "none")
                self._account("pack")
                self._close_spans()
        self._account("pack")

    def _account(self, name: str) -> None:
        now = time.time()
        self._spent[name] += now - self._clock
        self._clock = now

    def _close_spans(self) -> None:
        """Lay what was spent since the last bucket end to end."""
        start = self._span_start
        for name, seconds in self._spent.items():
            if seconds > 0:
                self.result.spans.append(StageSpan(name, start, start + seconds))
            start += seconds
            self._spent[name] = 0.0
        self._span_start = self._clock


def _validated(spec: TensorSpec, given: tuple[str, torch.Tensor] | None) -> torch.Tensor:
    """Raises RuntimeError when the source does not keep to its manifest."""
    if given is None:
        raise RuntimeError(f"the weight source ended before {spec.name}")
    name, tensor = given
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (name, dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
        raise RuntimeError(f"the weight source gave {name} {dtype}{list(tensor.shape)} where its manifest has {spec}")
    return tensor
