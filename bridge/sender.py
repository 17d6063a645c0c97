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


class Writer(Protocol):
    """The sending side of a transport: transport/shm.py or transport/nccl.py. All but `abort` raise TransportError."""

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

    A source with a method `lasting_tensors` that gives the tensors of the whole stage, in memory that stays (see
    export.Exporter), is packed from there: a bucket is one torch._foreach_copy_, over views that are made once.
    """

    def __init__(
        self, source: WeightSource, manifest: Manifest, bucket_bytes: int, writer: Writer | None, *, verify: str
    ) -> None:
        self.source, self.manifest, self.writer, self._verify = source, manifest, writer, verify
        self._packings: dict[tuple[int, int], Packing] = {}
        self._packed_tensors: list[torch.Tensor] | None = None
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
        lasting = getattr(self.source, "lasting_tensors", lambda: None)() if self._verify != "readback" else None
        if lasting is not None:
            pass_.send_lasting(lasting)
            pass_.finish()
            return pass_.result
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
        pass_.finish()
        return pass_.result

    def packing(self, bucket: Bucket, buffer: torch.Tensor, tensors: list[torch.Tensor]) -> Packing:
        """How a bucket is filled from lasting tensors; kept as long as buffer and tensors are the same."""
        if self._packed_tensors is not tensors:
            self._packings, self._packed_tensors = {}, tensors
        key = (bucket.index, buffer.data_ptr())
        if key not in self._packings:
            self._packings[key] = Packing(bucket, buffer, tensors)
        return self._packings[key]

    def send_piece(self, buffer: torch.Tensor, spec: TensorSpec, piece: Piece, tensor: torch.Tensor) -> None:
        """Copy a piece into the bucket: one copy, none in between, unless the tensor is both split and strided."""
        target = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
        if piece.num_bytes == spec.num_bytes:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            target.copy_(as_bytes(tensor)[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])


class Packing:
    """A bucket's pieces as views: those that foreach copies in one kernel, and the rest.

    A source may be strided and of another shape than its tensor, as long as its elements are in the tensor's order. Of one
    that is both strided and cut by the bucket's border a contiguous copy is made at each pass.
    """

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self._dense: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cut: list[tuple[torch.Tensor, torch.Tensor, slice]] = []
        for piece in bucket.pieces:
            tensor = tensors[piece.tensor]
            target = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].view(tensor.dtype)
            start = piece.tensor_offset // tensor.element_size()
            part = slice(start, start + target.numel())
            if tensor.is_contiguous():
                targets, sources = self._dense.setdefault(tensor.dtype, ([], []))
                targets.append(target)
                sources.append(tensor.view(-1)[part])
            elif target.numel() == tensor.numel():
                self._strided.append((target.view(tensor.shape), tensor))
            else:
                self._cut.append((target, tensor, part))

    @torch.no_grad()
    def run(self) -> None:
        for targets, sources in self._dense.values():
            torch._foreach_copy_(targets, sources)
        for target, source in self._strided:
            target.copy_(source)
        for target, source, part in self._cut:
            target.copy_(source.reshape(-1)[part])


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

    def send_lasting(self, tensors: list[torch.Tensor]) -> None:
        """All buckets from tensors that stay where they are."""
        writer, verify = self._stream.writer, self._stream._verify != "none"
        if writer is None or self.result.problem is not None:
            return
        try:
            for bucket in self._stream.buckets:
                self._account("gather")
                buffer = writer.acquire(self._deadline, self._check)
                self._account("wait")
                self._stream.packing(bucket, buffer, tensors).run()
                writer.publish(bucket.num_bytes, verify=verify)
                self._account("pack")
                self._close_spans()
        except RuntimeError as error:
            self.fail(str(error))

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
        if self._stream._verify == "readback":
            self.result.digests.append(digest_value(tensor))
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
