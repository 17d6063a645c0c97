"""The weights of other folders for replicas that run: sent to them as a run sends its own, bucket by bucket and verified.

Through shared memory, from the files of a Hugging Face folder. Leaves out replicas on other machines.

    with sender(config, pool) as send:
        send(12, Path("runs/rl/checkpoints/step_00000012/hf"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.config.schema import Config
from model_folder.layout import read_places

if TYPE_CHECKING:
    from bridge.export.source import Part
    from bridge.layout.manifest import Manifest
    from bridge.layout.regions import Copy
    from bridge.replicas.pool import ReplicaPool


@contextmanager
def sender(config: Config, pool: ReplicaPool) -> Iterator[Callable[[int, Path], None]]:
    """A function that brings all replicas to the weights of a folder, as a version.

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
    """The tensors of `folder`, a part each, in the order of the first folder. Later folders have the same tensors, in whatever
    files: a checkpoint has one of each pipeline stage, a version of a log a single one.
    """

    stage, num_stages, is_sender, has_tensors = 0, 1, True, True

    def __init__(self) -> None:
        self.folder = Path()
        self._manifest: Manifest | None = None
        self._copies: dict[str, list[tuple[Copy, ...]]] = {}

    def manifest(self) -> Manifest:
        from bridge.layout.manifest import Manifest, TensorSpec, read_folder_manifest
        from bridge.layout.regions import Copy, contiguous

        if self._manifest is None:
            dtypes = {spec.name: spec.dtype for spec in read_folder_manifest(self.folder).tensors}
            own = read_places(self.folder).items()
            self._manifest = Manifest(tuple(TensorSpec(name, dtypes[place.key], place.shape) for name, (_, place) in own))
            wholes = {spec.name: contiguous(math.prod(spec.shape)) for spec in self._manifest.tensors}
            self._copies = {name: [(Copy(whole, name, whole),)] for name, whole in wholes.items()}
        return self._manifest

    def parts(self) -> Iterator[Part]:
        from safetensors import safe_open

        from bridge.export.source import Part

        own = read_places(self.folder)
        with ExitStack() as opened:
            files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in {path for path, _ in own.values()}}
            for name, copies in self._copies.items():
                path, place = own[name]
                yield Part(copies, {name: place.read(files[path]).reshape(-1)})
