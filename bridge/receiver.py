"""The receiving side inside each vLLM worker: buckets become tensors and go through vLLM's own weight loader.

A WeightTransferEngine plug-in (vllm/distributed/weight_transfer/base.py, the part of that API that has stayed the same
since 0.26). One sync is begin (through WorkerExtension), start_weight_update, one update_weights, and
finish_weight_update. Leaves out the RPCs (replica.py) and the bytes' way (transport/).
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from bridge import vllm_adapter, vllm_api, vllm_readback
from bridge.bucket import Bucket, Piece, buffer_bytes, plan_buckets
from bridge.manifest import Manifest, TensorSpec, find_differences, read_folder_manifest
from bridge.messages import BeginSync
from bridge.transport.shm import ShmReader, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # mypy does not follow vLLM
    """Nothing: segments are named at each begin."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that was begun."""

    version: int


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes the whole stream of a sync in one `receive_weights`, checks it, and finishes vLLM's reload.

    Memory besides vLLM's own: the mapped buffers, and copies of the tensors at their borders: of one that lies in
    several buckets, and of those of a layer that is not complete when its bucket ends (vLLM keeps what it is given till
    then).
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = vllm_api.loadable_parameters(self.model)
        self._held: Manifest | None = None
        self._manifest: Manifest | None = None
        self._reader: ShmReader | None = None
        self._sync: BeginSync | None = None
        self._adapter_tensors: dict[str, torch.Tensor] = {}
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
        if message.adapter is not None or self.lora_manager is not None:
            reasons = self._find_adapter_problems(message, manifest)
        else:
            reasons = self._find_differences(manifest) if message.manifest_json is not None else []
        if reasons:
            self._manifest = None
            return reasons
        worker = self.parallel_config.rank
        if self._reader is None or self._reader.paths != message.segments:
            self._close_reader()
            self._reader = ShmReader(message.segments, message.first_reader + worker)
        self._sync = message
        return []

    def _find_differences(self, manifest: Manifest) -> list[str]:
        if self._held is None:
            self._held = read_folder_manifest(Path(self.model_config.model))
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        return find_differences(manifest, self._held, dtype, tied=vllm_api.is_tied(self.model))

    def _find_adapter_problems(self, message: BeginSync, manifest: Manifest) -> list[str]:
        """An adapter needs a replica that was started for adapters; its base weights never change."""
        if message.adapter is None:
            return ["the replica serves an adapter on its folder's weights and takes no others (engine.lora.sync=adapter)"]
        if self.lora_manager is None:
            return ["the replica was started without adapters; its weights may have one merged into them already"]
        unable = vllm_adapter.unservable_adapters(self.lora_manager, manifest.by_name)
        return [f"vLLM cannot serve {name} as an adapter; write engine.lora.sync=merged" for name in unable]

    def start_weight_update(self) -> None:
        if self._sync is None or self._sync.adapter is None:
            vllm_api.begin_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the stream. On any error all sides are told, through the segments.

        Raises:
            RuntimeError: a bucket is late or damaged, or the model did not get all of its parameters.
        """
        sync, reader = self._sync, self._reader
        if sync is None or reader is None or sync.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} was not begun")
        try:
            self._load(sync, reader)
        except BaseException as error:
            reader.abort(f"{self._name(sync)}: {error}")
            raise

    def _load(self, sync: BeginSync, reader: ShmReader) -> None:
        assert self._manifest is not None
        arrived: set[str] = set()
        stream = _receive(sync, self._manifest, reader, self.device, arrived)
        if sync.adapter is not None:
            self._adapter_tensors = {name: tensor.clone() for name, tensor in stream}  # the bucket's memory is only lent
            return
        loaded = vllm_api.load_stream(self.model, stream)
        for _ in stream:  # a loader that left early: take the rest, so that no one waits for us
            pass
        problems = [f"{name} never arrived" for name in self._manifest.by_name if name not in arrived]
        if loaded is not None:
            problems += [f"vLLM loaded nothing into {name}" for name in sorted(self._parameters - loaded)]
        problems += vllm_api.unloaded_layers(self.model)
        if problems:
            raise RuntimeError("not covered: " + "; ".join(problems))

    def finish_weight_update(self) -> None:
        if self._sync is None or self._sync.adapter is None:
            vllm_api.finish_reload(self.model, self.model_config)
            self._sync = None

    def load_adapter(self) -> None:
        """The adapter that was received, after vLLM's own finish, which drops all adapters (worker/gpu_worker.py:1604)."""
        sync, self._sync = self._sync, None
        assert sync is not None
        assert sync.adapter is not None
        vllm_adapter.load_adapter(self.lora_manager, self._adapter_tensors, sync.adapter)
        self._adapter_tensors = {}

    def read_shards(self, names: list[str] | None) -> list[tuple[Any, ...]]:
        """The fields of a verify.Shard for each slice held here: of the adapter where one is served, else of the weights."""
        if self.lora_manager is None:
            return vllm_readback.read_shards(self.model, names)
        return vllm_adapter.read_shards(self.lora_manager, self._sent_names, names)

    def read_digests(self) -> dict[str, int]:
        """verify.digest_value of the same by name, for a worker that holds all of it."""
        if self.lora_manager is None:
            return vllm_readback.read_digests(self.model)
        return vllm_adapter.read_digests(self.lora_manager, self._sent_names)

    @property
    def _sent_names(self) -> list[str]:
        assert self._manifest is not None
        return list(self._manifest.by_name)

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26 (distributed/weight_transfer/base.py) and gone since 0.28; the Publisher sends."""
        raise NotImplementedError("weights are sent by bridge.publish.Publisher")

    def shutdown(self) -> None:
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _name(self, sync: BeginSync) -> str:
        return f"replica {sync.replica} worker {self.parallel_config.rank}"


def _receive(
    sync: BeginSync, manifest: Manifest, reader: ShmReader, device: torch.device, arrived: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of all stages in order; their names gather in `arrived`."""
    first = 0
    for stage, size in enumerate(sync.stage_sizes):
        part = Manifest(manifest.tensors[first : first + size])
        first += size
        if buffer_bytes(part, sync.bucket_bytes) != reader.buffer_bytes(stage):
            raise TransportError(f"stage {stage}: buffers and bucket size do not fit together")
        for name, tensor in _receive_stage(sync, stage, part, reader):
            arrived.add(name)
            yield name, tensor.to(device)


def _receive_stage(
    sync: BeginSync, stage: int, manifest: Manifest, reader: ShmReader
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that lies in one bucket is lent: a view, which gets memory of its own when the bucket is given back."""
    tensor = torch.empty(0)
    for bucket, data in _read_ahead(sync, stage, manifest, reader):
        lent: list[_Lent] = []
        for piece in bucket.pieces:
            spec = manifest.tensors[piece.tensor]
            if 0 < piece.num_bytes == spec.num_bytes:
                tensor = _lend(data, spec, piece, lent)
            else:
                if piece.tensor_offset == 0:
                    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                _copy_piece(tensor, data, piece)
            if _is_complete(spec, piece):
                yield spec.name, tensor
        _take_back(lent)
        reader.release(stage)


def _read_ahead(
    sync: BeginSync, stage: int, manifest: Manifest, reader: ShmReader
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """The stage's buckets in order. A thread waits for the next one and checks its digest while this one is loaded."""
    buckets = plan_buckets(manifest, sync.bucket_bytes)

    def read(bucket: Bucket) -> torch.Tensor:
        sequence = sync.sync_index * len(buckets) + bucket.index
        try:
            return reader.read(stage, sequence, bucket.num_bytes, sync.deadline, verify=sync.verify)
        except TransportError as error:
            raise TransportError(f"{describe_bucket(bucket, len(buckets), stage, manifest)} {error}") from error

    thread = ThreadPoolExecutor(1, thread_name_prefix="megasync-read")
    try:
        coming = [thread.submit(read, bucket) for bucket in buckets[:1]]
        for bucket in buckets:
            data = coming.pop().result()
            coming = [thread.submit(read, following) for following in buckets[bucket.index + 1 : bucket.index + 2]]
            yield bucket, data
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class _Lent(NamedTuple):
    """A tensor that was given to the loader as a view of a bucket; `memory` lives as long as any view of it does."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    memory: weakref.ref[Any]


def _lend(data: torch.Tensor, spec: TensorSpec, piece: Piece, lent: list[_Lent]) -> torch.Tensor:
    memory = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].numpy()
    tensor = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype))
    tensor.resize_(spec.shape)  # and no view, which would keep its base, and so the memory, alive
    lent.append(_Lent(spec.name, weakref.ref(tensor), weakref.ref(memory)))
    return tensor


def _take_back(lent: list[_Lent]) -> None:
    """Before a bucket's memory is used again: what is still held, by a layer that is not complete, moves out of it."""
    for name, held, memory in lent:
        tensor = held()
        if tensor is not None:
            tensor.data = tensor.clone()
        del tensor
        if memory() is not None:
            raise TransportError(f"vLLM's loader keeps a part of {name}, whose memory is needed for the next bucket")


def _copy_piece(tensor: torch.Tensor, data: torch.Tensor, piece: Piece) -> None:
    target = tensor.view(-1).view(torch.uint8)
    source = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
    target[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].copy_(source)


def _is_complete(spec: TensorSpec, piece: Piece) -> bool:
    return piece.tensor_offset + piece.num_bytes == spec.num_bytes


def describe_bucket(bucket: Bucket, num_buckets: int, stage: int, manifest: Manifest) -> str:
    """For people: which bucket, and the tensors in it."""
    first, last = (manifest.tensors[bucket.pieces[end].tensor].name for end in (0, -1))
    tensors = first if first == last else f"{first} to {last}"
    return f"bucket {bucket.index} of {num_buckets} of stage {stage} ({tensors})"


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    weight_transfer_engine: BucketReceiver
    model_runner: Any

    def megasync_begin(self, fields: dict[str, Any]) -> list[str]:
        self.weight_transfer_engine.lora_manager = getattr(self.model_runner, "lora_manager", None)
        return self.weight_transfer_engine.begin(BeginSync.from_dict(fields))

    def megasync_load_adapter(self) -> None:
        self.weight_transfer_engine.load_adapter()

    def megasync_read_shards(self, names: list[str] | None) -> list[tuple[Any, ...]]:
        return self.weight_transfer_engine.read_shards(names)

    def megasync_read_digests(self) -> dict[str, int]:
        return self.weight_transfer_engine.read_digests()
