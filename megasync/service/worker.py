"""Worker: clients' calls on every rank: the engine, files of adapters, syncs to the replicas. Methods are collective.

    runs/NAME/service/models/MODEL/weights/NAME/            rank_*.safetensors, spec.json, adapter/ (PEFT)
    runs/NAME/service/models/MODEL/sampler_weights/NAME/    the factors alone
    runs/NAME/service/models/MODEL/external_weights/NAME/   adapter_config.json, adapter_model.safetensors; or a model's folder
    runs/NAME/service/state-N/                              all adapters after N training requests, written by itself

Leaves out requests and their order (work_queue.py), and sampling itself (sampling.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.export.adapter import AdapterSource
from bridge.export.adapter import AdapterSpec as SentAdapter
from bridge.generation import NO_ADAPTER
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from engine.adapters import AdapterSpec, RefusedError
from engine.algorithm import AlgorithmConfig
from engine.driven import AdamParameters, Datum, Driven, Passed, PassRequest
from engine.engine import Engine
from engine.peft import factors
from engine.runtime.tensor_file import save_tensors
from megasync.config.schema import Config
from megasync.run.rank_zero import RankZero, on_rank_zero
from megasync.run.weights import Weights, build_adapter_source, build_exporter, build_publisher
from megasync.service.calls import BASE, SAVES, path_of, saved_in

SPEC = "spec.json"
WRITER = "seq"  # seq_id of the request that wrote a folder


def build_engine(config: Config) -> Engine:
    """Without a loss and a schedule of its own. DDP reduces gradients behind the passes, which several adapters may share."""
    settings = config.engine
    if settings.wrap == "ddp":
        settings = settings.model_copy(update={"overrides": {"overlap_grad_reduce": False, **settings.overrides}})
    return Engine(config.model, settings, AlgorithmConfig(name="sft"), num_steps=1, seed=config.run.seed)


class Worker:
    """One rank's part of the service."""

    def __init__(self, config: Config, engine: Engine, pool: RankZero[ReplicaPool] | None) -> None:
        """`pool`: None where nothing is sampled."""
        self.config, self.engine, self.driven = config, engine, Driven(engine, config.service.shared_clients)
        self.adapters = self.driven.adapters
        self.folder = config.run.folder / "service"
        self._num_syncs = 0
        is_adapter = config.engine.lora.sync == "adapter"
        self._at_start = {BASE: NO_ADAPTER} if is_adapter else dict[str, int]()
        self.present = self._at_start  # versions that the replicas have, with their slots
        self._source = build_adapter_source(engine) if is_adapter else build_exporter(engine, is_in_place=False)
        self._publisher: Publisher | None = None
        if pool is not None:
            self.connect(pool)

    def connect(self, pool: RankZero[ReplicaPool]) -> None:
        """The replicas that `sync` brings to saved weights."""
        self._publisher = build_publisher(self._source, pool.here, self.config)

    # ------------------------------------------------------------------------------------------------ a client's calls

    def create_model(self, model: str, spec: dict[str, Any]) -> dict[str, Any]:
        self._create(model, AdapterSpec(**spec))
        return {"model_id": model, "type": "create_model"}

    def forward_backward(
        self, model: str, data: list[Datum], loss: str, options: dict[str, float], *, has_gradients: bool = True
    ) -> Passed:
        return self.driven.forward_backward(model, data, loss, options, has_gradients=has_gradients)

    def share(self, passes: Sequence[dict[str, Any]]) -> list[Passed | RefusedError]:
        """`forward_backward` of models that differ, by its arguments."""
        return self.driven.share([PassRequest(each["model"], each["data"], each["loss"], each["options"]) for each in passes])

    def optim_step(self, model: str, parameters: dict[str, Any]) -> dict[str, Any]:
        norm = self.driven.optim_step(model, AdamParameters(**parameters))
        return {"metrics": {"grad_norm:mean": norm}}

    def save_weights(self, model: str, name: str, *, overwrite: bool = True, seq: int = 0) -> dict[str, Any]:
        """The whole state; of an adapter PEFT's folder, too.

        Without `overwrite`: RefusedError where another request saved under this name.
        """

        def write(partial: Path) -> None:
            self.adapters.save(model, partial)
            if not self.adapters.is_full:
                on_rank_zero((partial / "adapter").mkdir)
                self._write_peft(model, partial / "adapter")

        return self._save("save_weights", model, name, write, overwrite=overwrite, seq=seq)

    def save_weights_for_sampler(
        self, model: str, name: str, sampler: str | None = None, *, overwrite: bool = True, seq: int = 0
    ) -> dict[str, Any]:
        """Like `save_weights`. Replicas that have weights of this name do not notice that they are overwritten."""

        def write(partial: Path) -> None:
            self.adapters.write(self.adapters.factors(model), partial)

        found = self._save("save_weights_for_sampler", model, name, write, overwrite=overwrite, seq=seq)
        return {"sampling_session_id": sampler, "type": found["type"]} if sampler else found

    def save_weights_external(self, model: str, name: str, *, overwrite: bool = True, seq: int = 0) -> dict[str, Any]:
        """PEFT's folder alone, or the whole model's of Hugging Face. As `save_weights`."""

        def write(partial: Path) -> None:
            if self.adapters.is_full:
                self.adapters.activate(model)
                Weights(self.config, self.engine).write(partial)
            else:
                self._write_peft(model, partial)

        return self._save("save_weights_external", model, name, write, overwrite=overwrite, seq=seq)

    def load_weights(self, model: str, path: str, *, with_optimizer: bool, is_new: bool) -> dict[str, Any]:
        folder = self.folder_of(path, "weights")
        spec, tensors = self._spec(folder, path), self.adapters.read(folder)
        if is_new:
            self._create(model, spec)
        self._check_model(model)
        own = self.adapters.specs[model]
        if (own.rank, own.targets) != (spec.rank, spec.targets):
            raise RefusedError(f"path = {path!r}: it has {spec}, the model {own}")
        self.adapters.load(model, tensors, with_optimizer=with_optimizer)
        return {"path": path, "model_id": model, "type": "load_weights"}

    def delete_checkpoint(self, path: str) -> dict[str, Any]:
        """Nothing where it is gone already: a request that is repeated after a kill has deleted it before."""
        folder = self.folder_of(path)
        on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
        self.present = {version: slot for version, slot in self.present.items() if version != path}  # it may be saved again
        return {}

    def finish_session(self, session: str) -> dict[str, Any]:
        """Forget its adapters; saved weights stay."""
        for model in [each for each in self.adapters.specs if each.startswith(f"{session}:")]:
            self.adapters.forget(model)
        return {}

    # ------------------------------------------------------------------------------------------------ the service's own

    def sync(self, version: str, slot: int = 0) -> None:
        """Bring saved weights, or the base model, to the replicas; they replace the version in `slot`.

        Raises:
            RefusedError: there are no such weights.
            SyncError: the sync failed.
        """
        assert self._publisher is not None
        spec, tensors = None, {}
        if version != BASE:
            folder = self.folder_of(version, "sampler_weights")
            spec, tensors = self._spec(folder, version), self.adapters.read(folder)
        self.adapters.show(spec, tensors)
        rank = self.config.engine.lora.rank
        if isinstance(self._source, AdapterSource):
            self._source.spec = SentAdapter(rank, self.adapters.scale(spec or AdapterSpec(rank)))
        others = {each: place for each, place in self.present.items() if place != slot}
        self.present = {}  # after a failure replicas have nothing
        self._num_syncs += 1
        self._publisher.publish(self._num_syncs, slot=slot)
        self.present = others | {version: self._at_start.get(version, slot)}

    def renew_members(self) -> None:
        """The replicas are others than at the last sync."""
        assert self._publisher is not None
        self._publisher.close()
        self.present = self._at_start

    def loses_former(self, kind: str, arguments: dict[str, Any]) -> bool:
        """Whether a request destroys saved weights that a former request may have read or written."""
        if kind == "delete_checkpoint":
            return True
        if not arguments.get("overwrite"):
            return False
        folder = self._saved(arguments["model"], SAVES[kind], arguments["name"])
        return bool(on_rank_zero(folder.exists))

    def checkpoint(self, done: int) -> None:
        """All adapters after `done` training requests; former ones of these go."""

        def write(partial: Path) -> None:
            for number, model in enumerate(self.adapters.specs):
                own = partial / str(number)
                on_rank_zero(own.mkdir)
                self.adapters.save(model, own)

        folder = self.folder / f"state-{done}"
        if on_rank_zero(folder.exists):
            return
        index = {"done": done, "models": {model: asdict(spec) for model, spec in self.adapters.specs.items()}}
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
                self.adapters.create(model, AdapterSpec(**spec))
                self.adapters.load(model, self.adapters.read(folder / str(number)), with_optimizer=True)
        return int(found)

    def folder_of(self, path: str, kind: str = "") -> Path:
        """The folder of the weights of this path, whether or not it exists. `kind`: the kind that is wanted."""
        return self._saved(*saved_in(path, kind))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _create(self, model: str, spec: AdapterSpec) -> None:
        section = self.config.service
        if len(self.adapters.specs) >= section.num_models:
            key = "full_parameters = true" if section.full_parameters else f"max_models = {section.max_models}"
            raise RefusedError(f"service.{key}: there is no room for another model; finish a session")
        self.adapters.create(model, spec)

    def _save(
        self, kind: str, model: str, name: str, write: Callable[[Path], None], *, overwrite: bool, seq: int
    ) -> dict[str, Any]:
        self._check_model(model)
        folder = self._saved(model, SAVES[kind], name)
        if not overwrite:
            self._check_free(
                folder, seq, "pass overwrite=True, or another name" if kind == "save_weights" else "pass another name"
            )
        self._write(folder, write, asdict(self.adapters.specs[model]), seq)
        return {"path": path_of(model, SAVES[kind], name), "type": kind}

    def _check_model(self, model: str) -> None:
        if model not in self.adapters.specs:
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

    def _write_peft(self, model: str, folder: Path) -> None:
        """Every stage writes its part of PEFT's folder."""
        name, tensors = self.adapters.save_peft(model)
        if tensors:
            save_tensors(tensors, folder / name)
        config = self.adapters.lora_config(self.adapters.specs[model])
        on_rank_zero(lambda: None)  # every stage has written its part
        on_rank_zero(lambda: factors.finish_folder(folder, config, Path(self.config.model.path).resolve()))

    def _write(self, folder: Path, write: Callable[[Path], None], index: dict[str, Any], seq: int = 0) -> None:
        """First under a temporary name, so that `folder` is always whole."""
        partial = folder.with_name(f".partial_{folder.name}")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def finish() -> None:
            (partial / SPEC).write_text(json.dumps(index))
            (partial / WRITER).write_text(str(seq))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

        on_rank_zero(begin)
        write(partial)
        on_rank_zero(lambda: None)  # every rank has written its file
        on_rank_zero(finish)
