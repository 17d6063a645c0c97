"""One trainer rank's pass over its weight source: gather, pack into buckets, hand over; or drain.

Every rank iterates its source to the end, whatever happened, because iterating runs collectives in which the other
ranks of its stage take part. Leaves out agreement between ranks (publish.py).
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from bridge.layout.bucket import Bucket, Piece, align, gaps, plan_buckets
from bridge.layout.copies import BucketCopies
from bridge.layout.digest import as_bytes, digest_value
from bridge.messages import StageSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.export.source import Part, WeightSource
    from bridge.layout.digest import BucketDigests
    from bridge.layout.manifest import Manifest, TensorSpec


class Writer(Protocol):
    """The sending side of a transport: transport/shm.py, nccl.py or ipc.py. All methods but `abort` raise TransportError.

    `digests`: to which copies into a bucket may add its digest; None where `publish` takes it in any case.
    """

    @property
    def digests(self) -> BucketDigests | None: ...

    @property
    def endpoint(self) -> str: ...

    def start(self, deadline: float, check: Callable[[], None]) -> None: ...

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor: ...

    def publish(self, num_bytes: int, *, verify: bool) -> None: ...

    def finish(self, deadline: float, check: Callable[[], None]) -> None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class StageStream:
    """Streams one pass of a source. `writer` is None on ranks that send nothing.

    A source that gives parts is packed from there: by copies that are worked out once.
    """

    def __init__(
        self, source: WeightSource, manifest: Manifest, bucket_bytes: int, writer: Writer | None, *, verify: str
    ) -> None:
        self.source, self.manifest, self.writer, self.verify = source, manifest, writer, verify
        self._copies: dict[tuple[int, ...], BucketCopies] = {}
        self._dtypes = [spec.dtype for spec in manifest.tensors]
        self._steps: dict[tuple[int, int], list[Step]] = {}  # by first and number of a part's tensors
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
        pass_.start()
        try:
            parts = self.source.parts() if self.verify != "readback" else None  # digests of tensors need tensors
            if parts is not None:
                for part in parts:
                    pass_.take_part(part)
                pass_.expect_all()
            else:
                self._take_tensors(pass_)
        except Exception as error:  # noqa: BLE001 # whatever the source raises has to reach all ranks
            pass_.fail(f"stage {self.source.stage}: the weight source failed: {type(error).__name__}: {error}")
        pass_.finish()
        return pass_.result

    def _take_tensors(self, pass_: _Pass) -> None:
        stream = iter(self.source)
        for spec in self.manifest.tensors:
            pass_.take(spec, next(stream, None))
        extra = next(stream, None)
        if extra is not None:
            pass_.fail(f"stage {self.source.stage}: the weight source gave {extra[0]}, which its manifest lacks")
        for _ in stream:
            pass

    def steps(self, first_tensor: int, num_tensors: int) -> list[Step]:
        """What is to be done with a run of tensors, bucket by bucket."""
        if (first_tensor, num_tensors) in self._steps:
            return self._steps[first_tensor, num_tensors]
        places = [place for tensor in self._places[first_tensor : first_tensor + num_tensors] for place in tensor]
        steps = []
        for bucket, group in itertools.groupby(places, key=lambda place: place[0]):
            pieces = [piece for _, piece in group]
            steps.append(Step(bucket, pieces, pieces[0] is bucket.pieces[0], pieces[-1] is bucket.pieces[-1]))
        self._steps[first_tensor, num_tensors] = steps
        return steps

    def pack(
        self, step: Step, buffer: torch.Tensor, first_tensor: int, part: Part, digests: BucketDigests | None = None
    ) -> None:
        """Copy a part's tensors of one bucket into it."""
        key = (step.bucket.index, first_tensor, len(part.copies))
        if key not in self._copies:
            copies, last = dict(enumerate(part.copies, first_tensor)), step.pieces[-1]
            end = step.bucket.num_bytes if step.ends else align(last.bucket_offset + last.num_bytes)
            self._copies[key] = BucketCopies(step.pieces, end, self._dtypes, copies, into_bucket=True)
        self._copies[key].run(part.memory, buffer[: step.bucket.num_bytes], digests)

    def send_piece(self, buffer: torch.Tensor, spec: TensorSpec, piece: Piece, tensor: torch.Tensor) -> None:
        """Copy a piece into the bucket: one copy, none in between, unless the tensor is both split and strided."""
        target = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
        if piece.num_bytes == spec.num_bytes:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            target.copy_(as_bytes(tensor)[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])


class Step(NamedTuple):
    """The pieces of one bucket that come at once, and whether the bucket begins and ends with them."""

    bucket: Bucket
    pieces: list[Piece]
    begins: bool
    ends: bool


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
                self._stream.writer.abort(problem)

    def start(self) -> None:
        """Join the readers; at the first pass that waits for them."""
        try:
            if self._stream.writer is not None:
                self._stream.writer.start(self._deadline, self._check)
        except RuntimeError as error:
            self.fail(str(error))
        self._account("wait")

    def take_part(self, part: Part) -> None:
        """The next tensors of the stream, as a part of memory."""
        self._account("gather")
        first, self._index = self._index, self._index + len(part.copies)
        if self.result.problem is not None or self._stream.writer is None:
            return
        try:
            self._check()
            for step in self._stream.steps(first, len(part.copies)):
                self._send_step(self._stream.writer, step, first, part)
        except RuntimeError as error:
            self.fail(str(error))

    def expect_all(self) -> None:
        """After the last part."""
        tensors = self._stream.manifest.tensors
        if self._stream.writer is not None and self.result.problem is None and self._index != len(tensors):
            self.fail(f"the weight source gave {self._index} of {len(tensors)} tensors")

    def _send_step(self, writer: Writer, step: Step, first_tensor: int, part: Part) -> None:
        if step.begins:
            self._begin_bucket(writer, step.bucket)
        verify = self._stream.verify != "none"
        self._stream.pack(step, self._buffer, first_tensor, part, writer.digests if verify else None)
        if step.ends:
            writer.publish(step.bucket.num_bytes, verify=verify)
        self._account("pack")
        if step.ends:
            self._close_spans()

    def _begin_bucket(self, writer: Writer, bucket: Bucket) -> None:
        self._buffer = writer.acquire(self._deadline, self._check)
        self._account("wait")
        for start, end in gaps(bucket) if writer.digests is not None else ():  # as their digests need it
            self._buffer[start:end].zero_()

    def finish(self) -> None:
        """Until all is sent."""
        writer = self._stream.writer
        if writer is not None and self.result.problem is None:
            try:
                writer.finish(self._deadline, self._check)
            except RuntimeError as error:
                self.fail(str(error))
            self._account("wait")
        self._close_spans()

    def _send(self, writer: Writer, index: int, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if self._stream.verify == "readback":
            self.result.digests.append(digest_value(tensor))
        for bucket, piece in self._stream._places[index]:
            if piece is bucket.pieces[0]:
                self._account("pack")
                self._begin_bucket(writer, bucket)
            self._stream.send_piece(self._buffer, spec, piece, tensor)
            if piece is bucket.pieces[-1]:
                writer.publish(bucket.num_bytes, verify=self._stream.verify != "none")
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
