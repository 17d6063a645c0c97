"""The weights of other folders for replicas that run: sent to them as a run sends its own, bucket by bucket and verified.

Through shared memory, from the files of a Hugging Face folder. Leaves out replicas on other machines.

    with sender(config, pool) as send:
        send(12, Path("runs/rl/checkpoints/step_00000012/hf"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.config.schema import Config

if TYPE_CHECKING:
    import torch

    from bridge.export.source import Part
    from bridge.layout.manifest import Manifest
    from bridge.layout.regions import Copy
    from bridge.replicas.pool import ReplicaPool


@contextmanager
def sender(config: Config, pool: ReplicaPool) -> Iterator[Callable[[int, Path], None]]:
    """What brings all replicas to the weights of a folder, as a version.

    Raises:
        SyncError: of bridge.send.publish, when it is called: the folder's tensors are others, or a replica failed.
    """
    from bridge.send.publish import Publisher

    source = FolderSource()
    publisher = Publisher(source, pool, config.sync.model_copy(update={"transport": "shm", "verify": "digest"}))

    def send(version: int, folder: Path) -> None:
        source.folder = folder
        publisher.publish(version)

    try:
        yield send
    finally:
        publisher.close()


class FolderSource:
    """Tensors of the safetensors files of `folder`, a file a part. The folders that it has one after the other have the same."""

    stage, num_stages, is_sender, has_tensors = 0, 1, True, True

    def __init__(self) -> None:
        self.folder = Path()
        self._copies: dict[int, list[tuple[Copy, ...]]] = {}

    def manifest(self) -> Manifest:
        from bridge.layout.manifest import Manifest, TensorSpec

        tensors = [pair for of_file in self._files() for pair in of_file.items()]
        return Manifest(tuple(TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors))

    def parts(self) -> Iterator[Part]:
        from bridge.export.source import Part
        from bridge.layout.regions import Copy, contiguous

        for number, tensors in enumerate(self._files()):
            flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
            sizes = {name: contiguous(tensor.numel()) for name, tensor in flat.items()}
            yield Part(self._copies.setdefault(number, [(Copy(size, name, size),) for name, size in sizes.items()]), flat)

    def _files(self) -> Iterator[dict[str, torch.Tensor]]:
        from safetensors.torch import load_file

        from bridge.layout.manifest import weight_files

        return map(load_file, weight_files(self.folder))
