"""What ranks write into the log of versions while they train; run on ranks (tests/support/ranks.py)."""

from __future__ import annotations

from pathlib import Path

import torch

from bridge.export.source import whole_tensors
from megasync.config.load import load_config
from megasync.run.versions import VersionLog
from megasync.run.weights import build_exporter
from tests.engine.engine_cases import engine, random_samples

Weights = dict[str, torch.Tensor]


def train_and_log(path: str, config: str, overrides: list[str], layout: dict[str, object], versions: int) -> dict[str, object]:
    """Weights of this rank's stage at each version, where it is the sender, and the metrics of each; the last one twice."""
    own, metrics = dict[int, Weights](), []
    with engine(path, dtype="bfloat16", optimizer={"learning_rate": 1e-4, "warmup_steps": 0}, **layout) as built:
        exporter = build_exporter(built)
        log = VersionLog(load_config(config, overrides), exporter)
        for version in range(1, versions + 1):
            metrics.append(log.write(version))
            log.prune()
            own[version] = {name: tensor.clone() for name, tensor in whole_tensors(exporter)}
            built.update(built.prepare(random_samples(8, seed=version)))
        again = log.write(versions)
        return {"weights": own if exporter.is_sender else {}, "metrics": metrics, "again": again}


def fail_to_log(path: str, config: str, overrides: list[str], folder: str) -> str:
    """What both ranks say where the stage of one cannot write."""
    with engine(path, pipeline=2) as built:
        log = VersionLog(load_config(config, overrides), build_exporter(built))
        if built.layout.pipeline_rank == 1 and log.writer is not None:
            log.writer.folder = Path(folder) / "file"
            log.writer.folder.write_text("")
        try:
            log.write(1)
        except RuntimeError as error:
            return str(error)
    return ""
