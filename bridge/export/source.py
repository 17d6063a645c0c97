"""What a sync sends: the trainer's weights as Hugging Face tensors, one after the other or as memory to copy them out of.

Leaves out where they come from: export.py, adapter.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bridge.layout.manifest import Manifest
    from bridge.layout.regions import Copy


class WeightSource(Protocol):
    """What the trainer gives: the weights of one pipeline stage in Hugging Face names and shapes.

    Iterating is a fresh pass in the manifest's order and may run collectives: all ranks of a stage iterate in lockstep
    and to the end. One rank a stage is its sender; `gives` says whether a rank's pass has the tensors, as the sender's always
    has. A tensor is only used until the next.
    """

    @property
    def stage(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def is_sender(self) -> bool: ...

    @property
    def gives(self) -> bool: ...

    def manifest(self) -> Manifest:
        """This stage's tensors, known without any transfer."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def parts(self) -> Iterator[Part] | None:
        """The same pass as memory to copy out of; None where there is no such thing."""
        ...


class Part(NamedTuple):
    """Some of a source's tensors, in order: `copies` has for each the parts of `memory` that it is, the same at every pass.

    Copy.source counts the tensor's elements, Copy.target those of the flat memory Copy.parameter. Only used until the next part;
    a `memory` that is the same object as before is at the same place.
    """

    copies: Sequence[tuple[Copy, ...]]
    memory: dict[str, torch.Tensor]
