"""The receiving side inside each vLLM worker: a sync's tensors reach the parameters, by a load plan or by vLLM's own loader.

Its part of the states in messages.py, with the calls that lead from one to the next:

    PAUSED --begin--> PAUSED --start_weight_update--> RECEIVING --receive_weights--> RECEIVED --finish_weight_update--> COMMITTED
       ^                                                  |                              |
       |                                                  +--------- break_off ----------+----> STALE --begin of another sync-->
       +-- refused, or error: nothing has changed

A WeightTransferEngine plug-in (vllm/distributed/weight_transfer/base.py, the part of that API that has stayed the same
since 0.26); vLLM's `update_weights` calls receive_weights. Leaves out the RPCs (replica.py), how buckets become tensors
(unpack.py) and the plan (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from bridge.layout.bucket import PlanKey, SyncPlan
from bridge.layout.lanes import LanePlan
from bridge.layout.manifest import Manifest, find_differences, read_folder_manifest, without_predictors
from bridge.layout.plan import LoadPlan
from bridge.layout.quantised import quantised_manifest
from bridge.messages import BeginSync
from bridge.receive.bake import bake
from bridge.receive.unpack import Unpacker
from bridge.transport.open import abort_endpoints, open_reader
from bridge.transport.protocol import Reader
from bridge.vllm.exact import register as exact
from bridge.vllm.serving import routing, text_alone
from bridge.vllm.serving.trace import Tracing
from bridge.vllm.weights import adapter, fp8, gpt_oss, latent, readback, reload

SLEPT_BESIDE_OTHERS = "Memory usage increased after sleeping."


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # mypy does not follow vLLM
    """Empty: endpoints come with each begin."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`version`: of the sync that has begun."""

    version: int


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes the whole stream of a sync in one `receive_weights`, checks it, and finishes vLLM's reload.

    Memory besides vLLM's own: the buffers. For layers without a plan also copies of tensors: of each that lies in several
    buckets, and of those of a layer that is incomplete when its bucket ends (vLLM keeps them until it is complete); where the
    transport lends no memory, of all of them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = {name for name, _ in self.model.named_parameters()}  # a tied head counts as the embedding
        self._held: Manifest | None = None
        self._manifest: Manifest | None = None
        self._slot = 0  # of the last sync
        self._unpackers: dict[int, Unpacker] = {}  # by slot, as the plans
        self._load_plans: dict[int, LoadPlan | None] = {}
        self._reader: Reader | None = None
        self._sync: BeginSync | None = None
        self.lora_manager: Any = None  # vLLM's, where the replica was started for adapters

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up before the first begin."""

    def begin(self, message: BeginSync) -> list[str]:
        """Prepare for this sync. Returns the reasons of a refusal; then nothing has changed. Any error aborts all sides.

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
            self._load_plans, self._unpackers = {}, {}  # until an adapter is in its slot
        self._slot = message.slot
        if reasons:
            self._manifest = None
            return reasons
        rank = self.parallel_config.rank
        if self._reader is None or self._reader.endpoints != message.endpoints[rank]:
            self._close_reader()
            lanes = LanePlan.from_json(message.lanes_json) if message.lanes_json is not None else None
            own = message.endpoints[rank], message.first_reader + rank, message.num_readers
            exact.restore_nccl()
            self._reader = open_reader(*own, self.device, lanes)
        self._make_plans(PlanKey(manifest.digest, message.stage_sizes, message.bucket_bytes), manifest, message)
        self._sync = message
        return []

    def _make_plans(self, key: PlanKey, manifest: Manifest, message: BeginSync) -> None:
        """Keep the plans of the last sync where their key is equal and the parameters have not moved; else make new ones."""
        plan = self._load_plan
        unpacker = self._unpackers.get(self._slot)
        if message.adapter is None and (plan is None or plan.manifest.digest != key.manifest_digest or not plan.is_current):
            self._load_plans[self._slot] = self._bake(manifest)
            unpacker = None
        if unpacker is None or unpacker.plan.key != key:
            unpacker = Unpacker(SyncPlan(manifest, key.stage_sizes, key.bucket_bytes), self._load_plan, self.device)
        self._unpackers[self._slot] = unpacker

    def _bake(self, manifest: Manifest) -> LoadPlan:
        with reload.config_scope(self.vllm_config), fp8.original_parameters(self.model):
            transformed, load = reload.transformation(self.model), self.model.load_weights
            plan = bake(manifest, self.model, load, transformed, latent.is_derived)
        plan.parameters = {name: self.model.get_parameter(name) for name in plan.parameters}  # not those of `original_parameters`
        return plan

    @property
    def _load_plan(self) -> LoadPlan | None:
        """The load plan of the slot of the last sync."""
        return self._load_plans.get(self._slot)

    def loader_fallback(self) -> dict[str, str]:
        """The layers that are not planned, and why."""
        return dict(self._load_plan.loader_fallback) if self._load_plan is not None else {}

    def _find_problems(self, message: BeginSync, manifest: Manifest) -> list[str]:
        """An adapter needs a replica that was started for adapters; its base weights never change."""
        if message.adapter is None and self.lora_manager is not None:
            return ["the replica serves an adapter on its folder's weights and takes no others (engine.lora.sync=adapter)"]
        if message.adapter is not None and self.lora_manager is None:
            return ["the replica was started without adapters; its weights may have one merged into them already"]
        if message.manifest_json is None:  # the manifest was checked before
            return []
        if message.adapter is None:
            return self._find_differences(manifest)
        unable = adapter.unservable_adapters(self.lora_manager, manifest.by_name)
        return [f"vLLM cannot serve {name} as an adapter; write engine.lora.sync=merged" for name in unable]

    def _find_differences(self, manifest: Manifest) -> list[str]:
        if self._held is None:
            layers = self.model_config.hf_text_config.num_hidden_layers
            held = gpt_oss.unpacked_manifest(read_folder_manifest(Path(self.model_config.model)))
            held = without_predictors(text_alone.own_manifest(self.model, held), layers)
            self._held = quantised_manifest(held) if self.model_config.quantization == fp8.METHOD else held
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
        """Load the stream. Any error aborts all sides, through the transport.

        Raises:
            RuntimeError: a bucket is late or damaged, or some parameters were not loaded.
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
        slot, unpacker = self._slot, self._unpackers[self._slot]
        plan, stream = self._load_plan, unpacker.tensors(sync, reader)
        if plan is None:
            assert sync.adapter is not None
            arrived = {name: tensor.clone() for name, tensor in stream}
            adapter.load_adapter(self.lora_manager, arrived, self._manifest, sync.adapter, slot)
            self._load_plans[slot] = adapter.plan_adapter(self.lora_manager, self._manifest, slot)
            self._unpackers[slot] = Unpacker(unpacker.plan, self._load_plans[slot], self.device)
            return
        loaded = reload.load_stream(self.model, stream) if not plan.is_whole else set()
        for _ in stream:  # a loader may return early: read the rest, so that no sender waits
            pass
        problems = [f"{spec.name} never arrived" for spec in self._manifest.tensors[unpacker.num_arrived :]]
        if plan.loader_fallback:
            expected = {name for name in self._parameters if name.rpartition(".")[0] in plan.loader_fallback}
            missing = sorted(expected - loaded) if loaded is not None else []  # not reported as loaded by vLLM's loader
            problems += [*(f"vLLM loaded nothing into {name}" for name in missing), *reload.unloaded_layers(self.model)]
        if problems:
            raise RuntimeError("not covered: " + "; ".join(problems))

    @property
    def _fallback_layers(self) -> list[torch.nn.Module]:
        """The layers to reload; without a plan the whole model."""
        return self._load_plan.fallback_layers if self._load_plan is not None else [self.model]

    def finish_weight_update(self) -> None:
        with reload.config_scope(self.vllm_config):
            reload.finish_reload(self._fallback_layers, self.model, self.model_config)
        self._sync = None

    def break_off(self) -> None:
        """Leave a sync that did not arrive completely, so that another can begin; until then the weights are invalid."""
        if self._sync is not None and not self.takes_adapter:
            self.finish_weight_update()
        self._sync = None

    def read_digests(self) -> dict[str, int]:
        """vllm/weights/readback.digest_whole of what the workers hold. Collective over them."""
        return readback.digest_whole(self.held_slices(None), readback.tensor_group())

    def held_slices(self, names: frozenset[str] | None) -> Iterator[readback.Slice]:
        """All of the adapter of the last sync where adapters are served; else at least the weights of these names."""
        if self.lora_manager is None:
            slices = readback.hf_slices(self.model, lambda name: names is None or name in names)
            return readback.in_dtypes(slices, self._manifest.by_name if self._manifest is not None else {})
        assert self._manifest is not None
        return adapter.held_slices(self.lora_manager, self._manifest.by_name, self._slot)

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26 (distributed/weight_transfer/base.py) and gone since 0.28; the Publisher sends."""
        raise NotImplementedError("weights are sent by bridge.send.publish.Publisher")

    def shutdown(self) -> None:
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader, self._unpackers = None, {}  # with their views of the buffers


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    weight_transfer_engine: BucketReceiver
    model_runner: Any
    _capture: routing.Capture  # from megasync_capture_experts on
    _tracing: Tracing  # from megasync_begin_trace to megasync_end_trace
    start_weight_update: Callable[[], None]  # vLLM's worker has these (v1/worker/gpu_worker.py:1507, :1550)
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    sleep: Callable[[int], None]
    wake_up: Callable[[list[str]], None]
    _draft: dict[str, torch.Tensor] | None = None  # in host memory, since the first sleep at level 2

    def megasync_begin(self, fields: dict[str, Any]) -> tuple[list[str], str]:
        """The reasons of a refusal, and the text of an error, or "".

        Never raises: with several workers vLLM would leave the answers of the others unread, and return them for the next call
        (v1/executor/multiproc_executor.py:collective_rpc).
        """
        try:
            self.weight_transfer_engine.lora_manager = getattr(self.model_runner, "lora_manager", None)
            return self.weight_transfer_engine.begin(BeginSync.from_dict(fields)), ""
        except Exception as error:  # noqa: BLE001 # whatever it is
            return [], str(error) or type(error).__name__

    def megasync_receive(self, fields: dict[str, Any]) -> str:
        """begin, then AsyncLLM's start_weight_update and update_weights, in one call. Returns the text of an error, or ""."""
        reasons, problem = self.megasync_begin(fields)
        if reasons or problem:
            return problem or "refused: " + "; ".join(reasons)
        try:
            self.megasync_receive_version(fields["version"])
        except Exception as error:  # noqa: BLE001 # whatever it is
            return str(error) or type(error).__name__
        return ""

    def megasync_receive_version(self, version: int) -> None:
        """For an adapter without vLLM's start and finish, which drops all adapters (v1/worker/gpu_worker.py:1604)."""
        if self.weight_transfer_engine.takes_adapter:
            self.weight_transfer_engine.receive_weights(UpdateInfo(version=version))
            return
        self.start_weight_update()
        self.update_weights({"version": version})

    def megasync_break_off(self) -> None:
        """Also where this worker has received all of a sync that failed elsewhere (v1/worker/gpu_worker.py:1591)."""
        if getattr(self, "_weight_update_active", False) and not self.weight_transfer_engine.takes_adapter:
            self.finish_weight_update()
        self.weight_transfer_engine.break_off()

    def megasync_sleep(self, level: int) -> None:
        """The worker's `sleep` without its last check. That compares the GPU's free memory before and after, and raises where
        another process has allocated some meanwhile, when all is already released (v1/worker/gpu_worker.py:325, 0.26 and 0.32).
        """
        if level == 2 and self._draft is None:  # no sync brings the weights of a draft model
            self._draft = {name: tensor.cpu() for name, tensor in self._draft_tensors().items()}
        try:
            self.sleep(level)
        except AssertionError as error:
            if str(error) != SLEPT_BESIDE_OTHERS:
                raise

    def megasync_wake(self, kinds: list[str]) -> None:
        """The worker's `wake_up`; a draft model gets the weights that vLLM dropped."""
        self.wake_up(kinds)
        if self._draft and "weights" in kinds:
            for name, tensor in self._draft_tensors().items():
                tensor.copy_(self._draft[name])

    def _draft_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the draft model, if there is one."""
        draft = self.model_runner.get_draft_model()
        own = (*draft.named_parameters(), *draft.named_buffers()) if draft is not None else ()
        return {name: tensor.detach() for name, tensor in own}

    def megasync_capture_experts(self) -> None:
        self._capture = routing.Capture(self.model_runner)

    def megasync_take_experts(self, request_ids: list[str]) -> Any:
        return [self._capture.take(request_id) for request_id in request_ids]

    def megasync_begin_trace(self, token_ids: list[int], num_prompt: int) -> None:
        self._tracing = Tracing(self.model_runner, token_ids, num_prompt)

    def megasync_end_trace(self, path: str) -> int:
        """Write the trace to `path`, unless that is empty; returns the number of tokens."""
        return self._tracing.finish(Path(path)) if path else self._tracing.leave()

    def megasync_loader_fallback(self) -> dict[str, str]:
        return self.weight_transfer_engine.loader_fallback()

    def megasync_memory_bytes(self) -> tuple[int, int]:
        """This process's peak resident memory on the host, and the memory in use on its GPU by all processes, 0 without one."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return int(lines["VmHWM"].split()[0]) * 1024, total - free

    def megasync_read_digests(self) -> dict[str, int]:
        return self.weight_transfer_engine.read_digests()
