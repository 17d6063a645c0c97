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

if TYPE_CHECKING:
    from bridge.export.source import Part
    from bridge.layout.manifest import Manifest, TensorSpec
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
    """Tensors of `folder`, a part those of a file of the first one. The folders that it has one after the other have the same
    tensors, in whatever files: a checkpoint has one of each pipeline stage, a version of a log a single one.
    """

    stage, num_stages, is_sender, has_tensors = 0, 1, True, True

    def __init__(self) -> None:
        self.folder = Path()
        self._of_files: list[list[TensorSpec]] = []
        self._copies: list[list[tuple[Copy, ...]]] = []

    def manifest(self) -> Manifest:
        from bridge.layout.manifest import Manifest, read_safetensors_header, weight_files
        from bridge.layout.regions import Copy, contiguous

        if not self._of_files:
            self._of_files = [read_safetensors_header(path) for path in weight_files(self.folder)]
            wholes = [[(spec.name, contiguous(math.prod(spec.shape))) for spec in of_file] for of_file in self._of_files]
            self._copies = [[(Copy(whole, name, whole),) for name, whole in of_file] for of_file in wholes]
        return Manifest(tuple(spec for of_file in self._of_files for spec in of_file))

    def parts(self) -> Iterator[Part]:
        from safetensors import safe_open

        from bridge.export.source import Part
        from bridge.layout.manifest import weight_files

        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in weight_files(self.folder)]
            file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - the file is no dict
            for specs, copies in zip(self._of_files, self._copies, strict=True):
                yield Part(copies, {spec.name: file_of[spec.name].get_tensor(spec.name).reshape(-1) for spec in specs})
