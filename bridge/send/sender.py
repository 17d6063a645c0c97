"""One trainer rank's pass over its weight source: gather, pack into buckets, hand over; after a failure iterate without sending.

Every rank iterates its source to the end, even after an error, because iterating runs collectives in which the other ranks of its
stage take part. Leaves out agreement between ranks (publish.py).
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bridge.export.source import Part, WeightSource
from bridge.layout.bucket import Bucket, StagePlan, align, gaps
from bridge.layout.copies import BucketCopies
from bridge.layout.digest import digest_value
from bridge.messages import StageSpan
from bridge.transport.protocol import Writer


class Step(NamedTuple):
    """The copies of a part into one bucket, and whether the bucket begins and ends with them."""

    bucket: Bucket
    copies: BucketCopies
    begins: bool
    ends: bool
    gaps: list[tuple[int, int]]  # byte ranges of the bucket that belong to no tensor; given where it begins


@dataclass
class PassResult:
    """The first problem of a pass, spans for the timeline, and with verify=readback a digest per tensor."""

    problem: str | None = None
    spans: list[StageSpan] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class StageSender:
    """Sends one rank's share of a stage, pass after pass. `writer` is None on ranks that send nothing."""

    def __init__(self, source: WeightSource, stage: StagePlan, writer: Writer | None) -> None:
        self.source, self.stage, self.writer = source, stage, writer
        self._pieces = [(bucket, piece) for bucket in stage.buckets for piece in bucket.pieces]
        self._steps: dict[tuple[int, int, tuple[str, ...]], list[Step]] = {}  # of each part of the source

    def run(self, deadline: float, check: Callable[[], None], verify: str) -> PassResult:
        """One pass. `check` is called often and raises when another side failed.

        The result holds the first error, if any; an error stops the sending, not the pass.
        """
        this = _Pass(self, deadline, check, verify)
        this.start()
        with this.catching(f"stage {self.stage.index}: the weight source failed: "):
            for part in self.source.parts():
                this.send(part)
        return this.finish()

    def steps(self, part: Part, first_tensor: int) -> list[Step]:
        """The steps of a part whose first tensor is this one of the stage. Planned at the first pass."""
        key = first_tensor, len(part.copies), tuple(part.memory)  # `source` may be replaced between passes
        if key not in self._steps:
            self._steps[key] = list(self._plan(part, first_tensor))
        return self._steps[key]

    def _plan(self, part: Part, first_tensor: int) -> Iterator[Step]:
        end_tensor, tensors = first_tensor + len(part.copies), self.stage.manifest.tensors
        for spec, copies in zip(tensors[first_tensor:end_tensor], part.copies, strict=False):
            num_elements = sum(copy.tensor_region.num_rows * copy.tensor_region.num_columns for copy in copies)
            dtypes = {str(part.memory[copy.buffer].dtype).removeprefix("torch.") for copy in copies}
            if num_elements != math.prod(spec.shape) or not dtypes <= {spec.dtype}:
                raise RuntimeError(f"the weight source gave {num_elements} elements of {', '.join(dtypes)} for {spec}")
        copies_of = dict(enumerate(part.copies, first_tensor))
        dtypes_of = {index: spec.dtype for index, spec in enumerate(tensors[first_tensor:end_tensor], first_tensor)}
        begin, end = (bisect_left(self._pieces, tensor, key=lambda pair: pair[1].tensor) for tensor in (first_tensor, end_tensor))
        for bucket, group in itertools.groupby(self._pieces[begin:end], key=lambda pair: pair[0]):
            pieces = [piece for _, piece in group]
            begins, ends = pieces[0] == bucket.pieces[0], pieces[-1] == bucket.pieces[-1]
            last = pieces[-1].bucket_offset + pieces[-1].num_bytes
            copies_end = bucket.num_bytes if ends else align(last)
            bucket_copies = BucketCopies(pieces, copies_end, dtypes_of, copies_of, into_bucket=True)
            yield Step(bucket, bucket_copies, begins, ends, gaps(bucket) if begins else [])


class _Pass:
    """The state of one pass: how far it is, the bucket being filled, its result."""

    def __init__(self, sender: StageSender, deadline: float, check: Callable[[], None], verify: str) -> None:
        self._sender, self._deadline, self._check, self._verify = sender, deadline, check, verify
        self._result, self._clock = PassResult(), _Clock()
        self._bucket = torch.empty(0, dtype=torch.uint8)
        self._num_tensors = 0  # of the parts so far

    def start(self) -> None:
        with self.catching():
            if self._sender.writer is not None:
                self._sender.writer.start(self._deadline, self._check)
        self._clock.account("wait")

    def send(self, part: Part) -> None:
        """Pack the next part, and hand over the buckets that are full."""
        self._clock.account("gather")
        first_tensor = self._num_tensors
        self._num_tensors += len(part.copies)
        if self._result.problem is not None:
            return
        with self.catching():
            self._check()
            source, writer = self._sender.source, self._sender.writer
            if self._verify == "readback" and source.is_sender:
                specs = self._sender.stage.manifest.tensors[first_tensor : self._num_tensors]
                self._result.digests += [digest_value(part.tensor(index, spec)) for index, spec in enumerate(specs)]
            if writer is not None:
                for step in self._sender.steps(part, first_tensor):
                    self._pack(writer, part, step)

    def _pack(self, writer: Writer, part: Part, step: Step) -> None:
        verify = self._verify != "none"
        if step.begins:
            self._bucket = writer.acquire(self._deadline, self._check)
            self._clock.account("wait")
            for start, end in step.gaps if writer.digests is not None else ():  # digests by copies count gaps as zeros
                self._bucket[start:end].zero_()
        data = self._bucket[: step.bucket.num_bytes]
        step.copies.run(part.memory, data, writer.digests if verify else None)
        if step.ends:
            writer.publish(step.bucket.num_bytes, verify=verify)
        self._clock.account("pack")
        if step.ends:
            self._clock.close_bucket()

    def finish(self) -> PassResult:
        self._clock.account("gather")
        writer, expected = self._sender.writer, len(self._sender.stage.manifest.tensors)
        with self.catching():
            if self._sender.source.has_tensors and self._num_tensors != expected:
                raise RuntimeError(f"the weight source gave {self._num_tensors} of {expected} tensors")
            if writer is not None and self._result.problem is None:
                writer.finish(self._deadline, self._check)
        self._clock.account("wait")
        self._clock.close_bucket()
        self._result.spans = self._clock.spans
        return self._result

    @contextmanager
    def catching(self, context: str = "") -> Iterator[None]:
        """Keep the first problem and wake the readers up; the pass continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 # every error has to reach all ranks
            if self._result.problem is None:
                is_whole_text = isinstance(error, RuntimeError) and not context
                self._result.problem = str(error) if is_whole_text else f"{context}{type(error).__name__}: {error}"
                if self._sender.writer is not None:
                    self._sender.writer.abort(self._result.problem)


class _Clock:
    """Sums a pass's time by activity; in `spans` a bucket's gather, pack and wait are laid end to end."""

    def __init__(self) -> None:
        self.spans: list[StageSpan] = []
        self._start = self._until = time.time()
        self._spent = dict.fromkeys(("gather", "pack", "wait"), 0.0)

    def account(self, name: str) -> None:
        """Count the time since the last call as this activity."""
        now = time.time()
        self._spent[name] += now - self._until
        self._until = now

    def close_bucket(self) -> None:
        for name, seconds in self._spent.items():
            if seconds > 0:
                self.spans.append(StageSpan(name, self._start, self._start + seconds))
            self._start += seconds
            self._spent[name] = 0.0
