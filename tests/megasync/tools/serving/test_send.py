"""The weights that replicas are sent, out of folders that have the same tensors in other files.

python -m pytest tests/megasync/tools/serving/test_send.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bridge.export.source import whole_tensors
from megasync.tools.serving.send import FolderSource

Files = list[list[str]]
SHAPES = {"a": (2, 3), "b": (4,), "c": (3, 2), "d": (5,)}


def write_folder(folder: Path, files: Files, value: float) -> Path:
    """Tensors of `value`, each of `files` with those that it names."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{stage:03d}-00000.safetensors" for stage in range(len(files))]
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensors in zip(names, files, strict=True):
        save_file({tensor: torch.full(SHAPES[tensor], value) for tensor in tensors}, folder / name)
    return folder


def test_folders_one_after_the_other_may_have_other_files(tmp_path: Path) -> None:
    """A run in two stages has two files in its checkpoints, and one in what its log gives; resumed it may have other stages."""
    folders: list[Files] = [[["a", "b", "c", "d"]], [["a", "b"], ["c", "d"]], [["d", "a", "c"], ["b"]]]
    for first in range(len(folders)):
        source = FolderSource()
        source.folder = write_folder(tmp_path / f"first_{first}", folders[first], 0.0)
        manifest, passes = source.manifest(), []
        for number, files in enumerate(folders):
            source.folder = write_folder(tmp_path / f"{first}_{number}", files, float(number))
            tensors = dict(whole_tensors(source))
            assert list(tensors) == [spec.name for spec in manifest.tensors], "in the order of the first folder"
            assert all(torch.equal(tensors[name], torch.full(SHAPES[name], float(number))) for name in tensors)
            passes.append([part.copies for part in source.parts()])
        assert passes[0] == passes[1] == passes[2]
