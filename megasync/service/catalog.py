"""Answers to clients' questions about models and saved weights, from the adapters in memory and the folders on the disk.

Folders appear and go whole (worker.py), so that nothing here waits for a request. Leaves out routes (http.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.adapters import AdapterSpec
from megasync.service.calls import SAVES, path_of, saved_in

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
OWN_FILES = ("spec.json", "seq")  # of ours, beside those of PEFT
Found = dict[str, Any]


class Catalog:
    """`folder` of all models' saved weights; `specs` of the adapters in memory."""

    def __init__(self, folder: Path, base_model: str, model_path: str, specs: Mapping[str, AdapterSpec]) -> None:
        self._folder, self._base, self._specs = folder, base_model, specs
        self._tokenizer = str(Path(model_path).resolve())

    def specs(self) -> dict[str, AdapterSpec]:
        """Specs of the adapters in memory, by model."""
        return dict(self._specs)

    def model(self, name: str) -> Found | None:
        spec = self._specs.get(name)
        if spec is None:
            return None
        data = {"model_name": self._base, "tokenizer_id": self._tokenizer}
        found = {"type": "get_info", "model_id": name, "model_data": data, "model_name": self._base}
        return {**found, **_kind_of(spec)}

    def weights(self, path: str) -> Found | None:
        """BadRequestError: it is no path of saved weights."""
        spec = _spec_in(self.folder_of(path))
        if spec is None:
            return None
        trained = {"train_attn": spec.train_attn, "train_mlp": spec.train_mlp, "train_unembed": not spec.rank}
        return {"base_model": self._base, **_kind_of(spec), **trained}

    def folder_of(self, path: str) -> Path:
        """BadRequestError: it is no path of saved weights."""
        model, kind, name = saved_in(path)
        return self._folder / model.replace(":", "_") / kind / name

    def files(self, path: str) -> list[str]:
        """Names of PEFT's files in external weights; empty where there are none."""
        folder = self.folder_of(path)
        return sorted(each.name for each in folder.glob("*") if each.name not in OWN_FILES) if _spec_in(folder) else []

    def checkpoints(self, model: str = "") -> list[Found]:
        """Checkpoints of one model or of all, the newest first."""
        models = [model] if model else [each.name.replace("_", ":") for each in self._folder.glob("*")]
        found = [each for name in models for kind in SAVES.values() for each in self._saved(name, kind)]
        return sorted(found, key=lambda each: str(each["time"]), reverse=True)

    def training_runs(self) -> list[Found]:
        """All models that are in memory or have saved weights, by name."""
        saved = {each.name.replace("_", ":") for each in self._folder.glob("*")}
        return [found for name in sorted(saved | set(self._specs)) if (found := self.training_run(name)) is not None]

    def training_run(self, name: str) -> Found | None:
        """The client wants the time of the last request: that of the last save is known."""
        saved = self.checkpoints(name)
        spec = self._specs.get(name) or (_spec_in(self.folder_of(saved[0]["tinker_path"])) if saved else None)
        if spec is None:
            return None
        last = {kind: next((each for each in saved if each["checkpoint_type"] == kind), None) for kind in TYPES.values()}
        return {
            "training_run_id": name,
            "base_model": self._base,
            "model_owner": "local",
            **_kind_of(spec),
            "last_request_time": saved[0]["time"] if saved else datetime.now(UTC).isoformat(),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
        }

    def _saved(self, model: str, kind: str) -> Iterator[Found]:
        for folder in (self._folder / model.replace(":", "_") / kind).glob("[!.]*"):
            try:
                sizes = [each.stat().st_size for each in folder.rglob("*") if each.is_file()]
                time = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
            except FileNotFoundError:  # it is deleted at this moment
                continue
            found = {"checkpoint_id": f"{kind}/{folder.name}", "checkpoint_type": TYPES[kind], "time": time.isoformat()}
            yield {**found, "tinker_path": path_of(model, kind, folder.name), "size_bytes": sum(sizes)}


def _kind_of(spec: AdapterSpec) -> Found:
    return {"is_lora": spec.rank > 0, "lora_rank": spec.rank or None}


def _spec_in(folder: Path) -> AdapterSpec | None:
    try:
        return AdapterSpec(**json.loads((folder / "spec.json").read_text()))
    except FileNotFoundError:
        return None
