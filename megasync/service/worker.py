"""Worker: what every rank does of a client's calls: the engine, files of adapters, syncs to the replicas. Methods are collective.

    runs/NAME/service/models/MODEL/weights/NAME/           rank_*.safetensors, spec.json, adapter/ (PEFT)
    runs/NAME/service/models/MODEL/sampler_weights/NAME/   the factors alone
    runs/NAME/service/state-N/                             all adapters after N training requests, written by itself

Leaves out requests and their order (desk.py), and sampling itself (sampling.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bridge.export.adapter import AdapterSource
from bridge.export.adapter import AdapterSpec as SentAdapter
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from engine.config import AlgorithmConfig
from engine.driven import AdamParameters, AdapterSpec, Datum, Driven, Passed, RefusedError
from engine.engine import Engine
from engine.peft import factors
from engine.runtime.tensor_file import save_tensors
from megasync.config.schema import Config
from megasync.run.rank_zero import RankZeroPart, on_rank_zero
from megasync.run.weights import build_adapter_source, build_exporter, build_publisher
from megasync.service.calls import BASE, path_of, saved_in

SPEC = "spec.json"
WRITER = "seq"  # seq_id of the request that wrote a folder


def build_engine(config: Config) -> Engine:
    """Without a loss and a schedule of its own."""
    return Engine(config.model, config.engine, AlgorithmConfig(name="sft"), num_steps=1, seed=config.run.seed)


class Worker:
    """Of one rank."""

    def __init__(self, config: Config, engine: Engine, pool: RankZeroPart[ReplicaPool] | None) -> None:
        """`pool`: None where nothing is sampled."""
        self.config, self.engine, self.driven = config, engine, Driven(engine)
        self.folder = config.run.folder / "service"
        self.present: str | None = None  # the version that the replicas have
        self._num_syncs = 0
        is_adapter = config.engine.lora.sync == "adapter"
        self._source = build_adapter_source(engine) if is_adapter else build_exporter(engine, is_in_place=False)
        self._publisher: Publisher | None = None
        if pool is not None:
            self.connect(pool)

    def connect(self, pool: RankZeroPart[ReplicaPool]) -> None:
        """The replicas that `sync` brings to saved weights."""
        self._publisher = build_publisher(self._source, pool.here, self.config)

    # ------------------------------------------------------------------------------------------------ a client's calls

    def create_model(self, model: str, spec: dict[str, Any]) -> dict[str, Any]:
        self.driven.create(model, AdapterSpec(**spec))
        return {"model_id": model, "type": "create_model"}

    def forward_backward(
        self, model: str, data: list[Datum], loss: str, options: dict[str, float], *, has_gradients: bool = True
    ) -> Passed:
        return self.driven.forward_backward(model, data, loss, options, has_gradients=has_gradients)

    def optim_step(self, model: str, parameters: dict[str, Any]) -> dict[str, Any]:
        norm = self.driven.optim_step(model, AdamParameters(**parameters))
        return {"metrics": {"grad_norm:mean": norm}}

    def save_weights(self, model: str, name: str, *, overwrite: bool = True, seq: int = 0) -> dict[str, Any]:
        """Without `overwrite`: RefusedError where a request of another `seq` saved under this name."""
        folder = self._saved(model, "weights", name)
        if not overwrite:
            self._check_free(folder, seq, "pass overwrite=True, or another name")
        self._write(folder, lambda partial: self._write_state(model, partial), seq=seq)
        return {"path": path_of(model, "weights", name), "type": "save_weights"}

    def save_weights_for_sampler(
        self, model: str, name: str, sampler: str | None = None, *, overwrite: bool = True, seq: int = 0
    ) -> dict[str, Any]:
        """As `save_weights`. Replicas that have weights of this name do not see that they are overwritten."""

        def write(partial: Path) -> None:
            save_tensors(self.driven.factors(model), partial / self._file)

        self._check_model(model)
        folder = self._saved(model, "sampler_weights", name)
        if not overwrite:
            self._check_free(folder, seq, "pass another name")
        self._write(folder, write, self.driven.specs[model], seq=seq)
        found = {"sampling_session_id": sampler} if sampler else {"path": path_of(model, "sampler_weights", name)}
        return {**found, "type": "save_weights_for_sampler"}

    def load_weights(self, model: str, path: str, *, with_optimizer: bool, is_new: bool) -> dict[str, Any]:
        folder = self.folder_of(path, "weights")
        spec = self._spec(folder, path)
        if is_new:
            self.driven.create(model, spec)
        self._check_model(model)
        if self.driven.specs[model] != spec:
            raise RefusedError(f"path = {path!r}: it has {spec}, the model {self.driven.specs[model]}")
        if not (folder / self._file).exists():
            raise RefusedError(f"path = {path!r}: it was saved by another number of ranks")
        self.driven.load(model, folder, with_optimizer=with_optimizer)
        return {"path": path, "model_id": model, "type": "load_weights"}

    # ------------------------------------------------------------------------------------------------ the service's own

    def sync(self, version: str) -> None:
        """Bring the replicas to saved weights, or to the base model.

        Raises:
            RefusedError: there are no such weights.
            SyncError: the sync failed.
        """
        assert self._publisher is not None
        spec, tensors = None, {}
        if version != BASE:
            folder = self.folder_of(version, "sampler_weights")
            spec, tensors = self._spec(folder, version), load_file(folder / self._file)
        self.driven.show(spec, tensors)
        rank = self.config.engine.lora.rank
        if isinstance(self._source, AdapterSource):
            self._source.spec = SentAdapter(rank, self.driven.scale(spec or AdapterSpec(rank)))
        self.present = None
        self._num_syncs += 1
        self._publisher.publish(self._num_syncs)
        self.present = version

    def checkpoint(self, done: int) -> None:
        """All adapters after `done` training requests; former ones of these go."""

        def write(partial: Path) -> None:
            for number, model in enumerate(self.driven.specs):
                own = partial / str(number)
                on_rank_zero(own.mkdir)
                self.driven.save(model, own)

        index = {"done": done, "models": {model: asdict(spec) for model, spec in self.driven.specs.items()}}
        folder = self.folder / f"state-{done}"
        self._write(folder, write, index)

        def drop_former() -> None:
            for each in self.folder.glob("state-*"):
                if each != folder:
                    shutil.rmtree(each)

        on_rank_zero(drop_former)

    def restore(self) -> int:
        """The newest checkpoint, if there is one; returns how many training requests it holds."""
        found = on_rank_zero(lambda: max((int(each.name[6:]) for each in self.folder.glob("state-*")), default=0))
        if found:
            folder = self.folder / f"state-{found}"
            index = json.loads((folder / SPEC).read_text())
            for number, (model, spec) in enumerate(index["models"].items()):
                self.driven.create(model, AdapterSpec(**spec))
                self.driven.load(model, folder / str(number), with_optimizer=True)
        return int(found)

    def saved_spec(self, path: str) -> AdapterSpec | None:
        """Of saved weights of either kind; None where there are none. Not collective."""
        kind = "sampler_weights" if "/sampler_weights/" in path else "weights"
        file = self.folder_of(path, kind) / SPEC
        return AdapterSpec(**json.loads(file.read_text())) if file.exists() else None

    def folder_of(self, path: str, kind: str) -> Path:
        """Where weights of this path are, or would be."""
        model, name = saved_in(path, kind)
        return self._saved(model, kind, name)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _file(self) -> str:
        return self.driven.file

    def _check_model(self, model: str) -> None:
        if model not in self.driven.specs:
            raise RefusedError(f"model_id = {model!r}: there is no such model")

    def _check_free(self, folder: Path, seq: int, remedy: str) -> None:
        """A request that is repeated after a kill may write its own folder again."""
        writer = folder / WRITER
        if on_rank_zero(lambda: folder.exists() and not (writer.exists() and writer.read_text() == str(seq))):
            raise RefusedError(f"path = {folder.name!r}: there are weights of this name; {remedy}")

    def _saved(self, model: str, kind: str, name: str) -> Path:
        return self.folder / "models" / model.replace(":", "_") / kind / name

    def _spec(self, folder: Path, path: str) -> AdapterSpec:
        text = on_rank_zero(lambda: (folder / SPEC).read_text() if (folder / SPEC).exists() else "")
        if not text:
            raise RefusedError(f"path = {path!r}: there are no such weights")
        return AdapterSpec(**json.loads(text))

    def _write_state(self, model: str, partial: Path) -> None:
        """All of the state, and PEFT's folder beside it."""
        self._check_model(model)
        self.driven.save(model, partial)
        peft, spec = partial / "adapter", self.driven.specs[model]
        on_rank_zero(peft.mkdir)
        name, tensors = self.driven.save_peft(model)
        if tensors:
            save_tensors(tensors, peft / name)
        config = self.driven.lora_config(spec)
        on_rank_zero(lambda: None)  # every stage has written its part
        on_rank_zero(lambda: factors.finish_folder(peft, config, Path(self.config.model.path).resolve()))
        on_rank_zero(lambda: (partial / SPEC).write_text(json.dumps(asdict(spec))) and None)

    def _write(self, folder: Path, write: Callable[[Path], None], index: Any = None, seq: int = 0) -> None:
        """First under a temporary name, so that `folder` is always whole."""
        partial = folder.with_name(f".partial_{folder.name}")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def finish() -> None:
            if index is not None:
                (partial / SPEC).write_text(json.dumps(index if isinstance(index, dict) else asdict(index)))
            (partial / WRITER).write_text(str(seq))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

        on_rank_zero(begin)
        write(partial)
        on_rank_zero(lambda: None)  # every rank has written its file
        on_rank_zero(finish)
