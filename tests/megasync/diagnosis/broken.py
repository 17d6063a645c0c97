"""Machines and folders that are broken on purpose: what the table's rows hand to the checks."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from megasync.assets import build_tokenizer
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.diagnosis.gpus import Gpu
from tests.support.config_files import write_model, write_runnable

SMI_LINE = "{index}, NVIDIA H100 80GB HBM3, GPU-{index}a, 81559, {used}, {capability}, {mode}, {mig}, {driver}"
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \t{link}\tPIX\t0-15\t0\nGPU1\t{link}\t X \tPIX\t0-15\t0\n"
)
PEERS = " \tGPU0\tGPU1\t\n GPU0\tX\t{state}\t\n GPU1\t{state}\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"


def smi(index: int = 0, used: int = 4, **fields: str) -> str:
    """A line as nvidia-smi prints it for the fields that gpus.py asks for."""
    told = {"capability": "9.0", "mode": "Default", "mig": "Disabled", "driver": "580.65.06", **fields}
    return SMI_LINE.format(index=index, used=used, **told)


def gpu(index: int = 0, **fields: Any) -> Gpu:
    sound: dict[str, Any] = {"name": "NVIDIA H100", "uuid": f"GPU-{index}a", "total": 81559, "used": 4, "capability": (9, 0)}
    return Gpu(index, **{**sound, "driver": "580.65.06", **fields})


def fake_smi(folder: Path, script: str) -> str:
    """A PATH whose nvidia-smi is this script."""
    folder.mkdir(exist_ok=True)
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


def package(folder: Path, name: str, version: str, *files: str) -> Path:
    """A folder of site-packages in which a package is installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in files:
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).touch()
    return folder


def config(folder: Path, *overrides: str) -> Config:
    """One that can run, in a folder of its own; the overrides break it."""
    return load_config(write_runnable(folder), overrides)


def sharded(folder: Path) -> Path:
    """A model of two files with an index."""
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"model-{int('embed' in name)}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    build_tokenizer().save_pretrained(folder)
    return folder


def pointer(file: Path) -> None:
    """What a clone without Git LFS has in the place of the file."""
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n")


def cut_off(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 100)


def closed_port() -> int:
    """On which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
