"""The receiving side inside each vLLM worker: a sync's tensors reach the parameters, by plan or by vLLM's own loader.

A WeightTransferEngine plug-in (vllm/distributed/weight_transfer/base.py, the part of that API that has stayed the same
since 0.26). One sync is begin (through WorkerExtension), start_weight_update, one update_weights, and
finish_weight_update. Leaves out the RPCs (replica.py), how buckets become tensors (unpack.py) and the plan (plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from bridge.layout.manifest import Manifest, find_differences, read_folder_manifest
from bridge.messages import BeginSync
from bridge.receive import vllm_adapter, vllm_readback, vllm_reload
from bridge.receive.bake import bake
from bridge.receive.plan import Plan
from bridge.receive.unpack import Reader, Stage, Unpacking, open_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # mypy does not follow vLLM
    """Nothing: segments are named at each begin."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that was begun."""

    version: int


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes the whole stream of a sync in one `receive_weights`, checks it, and finishes vLLM's reload.

    Memory besides vLLM's own: the buffers. Where a layer is not planned also copies of tensors: of one that lies in several
    buckets, and of those of a layer that is not complete when its bucket ends (vLLM keeps what it is given till then); what
    comes through a process group is copied in any case.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = vllm_reload.loadable_parameters(self.model)
        self._held: Manifest | None = None
        self._manifest: Manifest | None = None
        self._stages: tuple[Stage, ...] = ()
        self._stages_key: tuple[object, ...] = ()  # what they are made of
        self._plan: Plan | None = None
        self._reader: Reader | None = None
        self._sync: BeginSync | None = None
        self.lora_manager: Any = None  # vLLM's, where the replica was started for adapters

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up before the first begin."""

    def begin(self, message: BeginSync) -> list[str]:
        """Ready for this sync; or the reasons why not, and then nothing has changed."""
        if message.manifest_json is not None:
            self._manifest = Manifest.from_json(message.manifest_json)
        manifest = self._manifest
        if manifest is None or manifest.digest != message.manifest_digest:
            return ["the manifest of that digest never came"]
        reasons = self._find_problems(message, manifest)
        if message.adapter is not None and message.manifest_json is not None:
            self._plan = None  # until an adapter is in its slot
        if reasons:
            self._manifest = None
            return reasons
        key = (manifest.digest, message.stage_sizes, message.bucket_bytes)
        if self._stages_key != key:
            self._stages, self._stages_key = Stage.cut(manifest, message.stage_sizes, message.bucket_bytes), key
        if self._reader is None or self._reader.endpoints != message.endpoints[self.parallel_config.rank]:
            self._close_reader()
            self._reader = open_reader(message, self.parallel_config.rank, self.device)
        if message.adapter is None and (self._plan is None or self._plan.manifest is not manifest or not self._plan.is_current):
            with vllm_reload.config_scope(self.vllm_config):
                self._plan = bake(manifest, self.model, self.model.load_weights, vllm_reload.transformation(self.model))
        self._sync = message
        return []

    def ordinary(self) -> dict[str, str]:
        """The layers that are not planned, and why."""
        return dict(self._plan.ordinary) if self._plan is not None else {}

    def _find_problems(self, message: BeginSync, manifest: Manifest) -> list[str]:
        """An adapter needs a replica that was started for adapters; its base weights never change."""
        if message.adapter is None and self.lora_manager is not None:
            return ["the replica serves an adapter on its folder's weights and takes no others (engine.lora.sync=adapter)"]
        if message.adapter is not None and self.lora_manager is None:
            return ["the replica was started without adapters; its weights may have one merged into them already"]
        if message.manifest_json is None:  # looked through before
            return []
        if message.adapter is None:
            return self._find_differences(manifest)
        unable = vllm_adapter.unservable_adapters(self.lora_manager, manifest.by_name)
        return [f"vLLM cannot serve {name} as an adapter; write engine.lora.sync=merged" for name in unable]

    def _find_differences(self, manifest: Manifest) -> list[str]:
        if self._held is None:
            self._held = read_folder_manifest(Path(self.model_config.model))
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        return find_differences(manifest, self._held, dtype, tied=vllm_reload.is_tied(self.model))

    @property
    def takes_adapter(self) -> bool:
        """Whether the sync that was begun brings an adapter, and so leaves all weights as they are."""
        return self._sync is not None and self._sync.adapter is not None

    def start_weight_update(self) -> None:
        with vllm_reload.config_scope(self.vllm_config):
            vllm_reload.begin_reload(self._ordinary_layers)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the stream. On any error all sides are told, through the segments.

        Raises:
            RuntimeError: a bucket is late or damaged, or the model did not get all of its parameters.
        """
        sync, reader = self._sync, self._reader
        if sync is None or reader is None or sync.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} was not begun")
        try:
            with vllm_reload.config_scope(self.vllm_config):
                self._load(sync, reader)
        except BaseException as error:
            reader.abort(f"{self._name(sync)}: {error}")
            raise

    def _load(self, sync: BeginSync, reader: Reader) -> None:
        assert self._manifest is not None
        if sync.adapter is not None and self._plan is None:
            tensors = {name: tensor.clone() for name, tensor in Unpacking(sync, self._stages, reader, self.device, None)}
            vllm_adapter.load_adapter(self.lora_manager, tensors, sync.adapter)
            self._plan = vllm_adapter.plan_adapter(self.lora_manager, self._manifest)
            return
        plan = self._plan
        assert plan is not None
        unpacking = Unpacking(sync, self._stages, reader, self.device, plan)
        stream = iter(unpacking)
        loaded: set[str] | None = set()
        if not plan.is_whole:
            loaded = vllm_reload.load_stream(self.model, stream)
        for _ in stream:  # a loader that left early: take the rest, so that no one waits for us
            pass
        problems = [f"{spec.name} never arrived" for spec in self._manifest.tensors[unpacking.num_arrived :]]
        if plan.ordinary:
            problems += self._find_unloaded(plan, loaded)
        if problems:
            raise RuntimeError("not covered: " + "; ".join(problems))

    def _find_unloaded(self, plan: Plan, loaded: set[str] | None) -> list[str]:
        """What vLLM's loader, which says that it `loaded` so much, left out."""
        left_out = sorted(self._left_to_loader(plan) - loaded) if loaded is not None else []
        return [*(f"vLLM loaded nothing into {name}" for name in left_out), *vllm_reload.unloaded_layers(self.model)]

    def _left_to_loader(self, plan: Plan) -> set[str]:
        """Parameters of the layers that are not planned."""
        return {name for name in self._parameters if name.rpartition(".")[0] in plan.ordinary}

    @property
    def _ordinary_layers(self) -> list[torch.nn.Module]:
        """What is reloaded: without a plan the whole model."""
        return self._plan.ordinary_layers if self._plan is not None else [self.model]

    def finish_weight_update(self) -> None:
        with vllm_reload.config_scope(self.vllm_config):
            vllm_reload.finish_reload(self._ordinary_layers, self.model, self.model_config)
        self._sync = None

    def read_shards(self, names: list[str] | None) -> list[tuple[Any, ...]]:
        """vllm_readback.pack_shards of what is held here."""
        wanted = None if names is None else frozenset(names)
        return vllm_readback.pack_shards(self._held_slices(wanted), wanted)

    def read_digests(self) -> dict[str, int]:
        """vllm_readback.digest_whole of what the workers hold. Collective over them."""
        return vllm_readback.digest_whole(self._held_slices(None), vllm_readback.tensor_group())

    def _held_slices(self, names: frozenset[str] | None) -> Iterator[vllm_readback.Slice]:
        """Of the adapter where one is served, all; else of the weights, those of these names at least."""
        if self.lora_manager is None:
            return vllm_readback.hf_slices(self.model, lambda name: names is None or name in names)
        assert self._manifest is not None
        return vllm_adapter.held_slices(self.lora_manager, self._manifest.by_name)

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26 (distributed/weight_transfer/base.py) and gone since 0.28; the Publisher sends."""
        raise NotImplementedError("weights are sent by bridge.send.publish.Publisher")

    def shutdown(self) -> None:
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _name(self, sync: BeginSync) -> str:
        return f"replica {sync.replica} worker {self.parallel_config.rank}"


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    weight_transfer_engine: BucketReceiver
    model_runner: Any
    start_weight_update: Callable[[], None]  # vLLM's worker has these (v1/worker/gpu_worker.py:1507, :1550)
    update_weights: Callable[[dict[str, Any]], None]

    def megasync_begin(self, fields: dict[str, Any]) -> list[str]:
        self.weight_transfer_engine.lora_manager = getattr(self.model_runner, "lora_manager", None)
        return self.weight_transfer_engine.begin(BeginSync.from_dict(fields))

    def megasync_receive(self, version: int, fields: dict[str, Any] | None = None) -> None:
        """AsyncLLM's start_weight_update and update_weights in one call, with `fields` after a begin.

        Not for an adapter: vLLM's finish would drop all adapters (v1/worker/gpu_worker.py:1604).
        """
        if fields is not None and (reasons := self.megasync_begin(fields)):
            raise RuntimeError("refused: " + "; ".join(reasons))
        if self.weight_transfer_engine.takes_adapter:
            self.weight_transfer_engine.receive_weights(UpdateInfo(version=version))
            return
        self.start_weight_update()
        self.update_weights({"version": version})

    def megasync_ordinary(self) -> dict[str, str]:
        return self.weight_transfer_engine.ordinary()

    def megasync_read_shards(self, names: list[str] | None) -> list[tuple[Any, ...]]:
        return self.weight_transfer_engine.read_shards(names)

    def megasync_read_digests(self) -> dict[str, int]:
        return self.weight_transfer_engine.read_digests()
