"""One trainer rank's pass over its weight source: gather, pack into buckets, hand over; or drain.

Every rank iterates its source to the end, whatever happened, because iterating runs collectives in which the other
ranks of its stage take part. Leaves out agreement between ranks (publish.py).
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
    gaps: list[tuple[int, int]]  # bytes of the bucket, where it begins, that belong to no tensor


@dataclass
class PassResult:
    """What a pass left: the first problem, spans for the timeline, and with verify=readback a digest a tensor."""

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
        self._deadline, self._check, self._verify = deadline, check, verify
        self._result, self._clock = PassResult(), _Clock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        first_tensor, num_tensors = 0, len(self.stage.manifest.tensors)
        with self._catching():
            if self.writer is not None:
                self.writer.start(deadline, check)
        self._clock.account("wait")
        with self._catching(f"stage {self.stage.index}: the weight source failed: "):
            for part in self.source.parts():
                self._clock.account("gather")
                self._send(part, first_tensor)
                first_tensor += len(part.copies)
        self._clock.account("gather")
        with self._catching():
            if self.source.has_tensors and first_tensor != num_tensors:
                raise RuntimeError(f"the weight source gave {first_tensor} of {num_tensors} tensors")
            if self.writer is not None and self._result.problem is None:
                self.writer.finish(deadline, check)
        self._clock.account("wait")
        self._clock.close_bucket()
        self._result.spans = self._clock.spans
        return self._result

    def _send(self, part: Part, first_tensor: int) -> None:
        """Pack a part, whose first tensor is this one of the stage, and hand over the buckets that are full."""
        if self._result.problem is not None:
            return
        with self._catching():
            self._check()
            if self._verify == "readback" and self.source.is_sender:
                specs = self.stage.manifest.tensors[first_tensor : first_tensor + len(part.copies)]
                self._result.digests += [digest_value(part.tensor(index, spec)) for index, spec in enumerate(specs)]
            verify, writer = self._verify != "none", self.writer
            if writer is None:
                return
            # A source that takes another's place, as in a bench, may cut parts elsewhere, and name their memory otherwise.
            key = first_tensor, len(part.copies), tuple(part.memory)
            if key not in self._steps:
                self._steps[key] = list(self._plan_steps(part, first_tensor))
            for step in self._steps[key]:
                if step.begins:
                    self._begin_bucket(writer, step)
                data = self._buffer[: step.bucket.num_bytes]
                step.copies.run(part.memory, data, writer.digests if verify else None)
                if step.ends:
                    writer.publish(step.bucket.num_bytes, verify=verify)
                self._clock.account("pack")
                if step.ends:
                    self._clock.close_bucket()

    def _begin_bucket(self, writer: Writer, step: Step) -> None:
        self._buffer = writer.acquire(self._deadline, self._check)
        self._clock.account("wait")
        for start, end in step.gaps if writer.digests is not None else ():  # as their digests need it
            self._buffer[start:end].zero_()

    def _plan_steps(self, part: Part, first_tensor: int) -> Iterator[Step]:
        end_tensor, tensors = first_tensor + len(part.copies), self.stage.manifest.tensors
        for spec, copies in zip(tensors[first_tensor:end_tensor], part.copies, strict=False):
            num_elements = sum(copy.tensor_region.num_rows * copy.tensor_region.num_columns for copy in copies)
            dtypes = {str(part.memory[copy.buffer].dtype).removeprefix("torch.") for copy in copies}
            if num_elements != math.prod(spec.shape) or not dtypes <= {spec.dtype}:
                raise RuntimeError(f"the weight source gave {num_elements} elements of {', '.join(dtypes)} for {spec}")
        copies_of = dict(enumerate(part.copies, first_tensor))
        dtypes_of = [spec.dtype for spec in tensors]
        begin, end = (bisect_left(self._pieces, tensor, key=lambda pair: pair[1].tensor) for tensor in (first_tensor, end_tensor))
        for bucket, group in itertools.groupby(self._pieces[begin:end], key=lambda pair: pair[0]):
            pieces = [piece for _, piece in group]
            begins, ends = pieces[0] is bucket.pieces[0], pieces[-1] is bucket.pieces[-1]
            last = pieces[-1].bucket_offset + pieces[-1].num_bytes
            copies_end = bucket.num_bytes if ends else align(last)
            bucket_copies = BucketCopies(pieces, copies_end, dtypes_of, copies_of, into_bucket=True)
            yield Step(bucket, bucket_copies, begins, ends, gaps(bucket) if begins else [])

    @contextmanager
    def _catching(self, where: str = "") -> Iterator[None]:
        """Keep the first problem and wake the readers up; the pass goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 # whatever it is has to reach all ranks
            if self._result.problem is None:
                is_told = isinstance(error, RuntimeError) and not where
                self._result.problem = str(error) if is_told else f"{where}{type(error).__name__}: {error}"
                if self.writer is not None:
                    self.writer.abort(self._result.problem)


class _Clock:
    """Accounts for a pass's time by what it went to; in `spans` a bucket's gather, pack and wait are laid end to end."""

    def __init__(self) -> None:
        self.spans: list[StageSpan] = []
        self._start = self._until = time.time()
        self._spent = dict.fromkeys(("gather", "pack", "wait"), 0.0)

    def account(self, name: str) -> None:
        """Since the last call it was this."""
        now = time.time()
        self._spent[name] += now - self._until
        self._until = now

    def close_bucket(self) -> None:
        for name, seconds in self._spent.items():
            if seconds > 0:
                self.spans.append(StageSpan(name, self._start, self._start + seconds))
            self._start += seconds
            self._spent[name] = 0.0
