"""Checks that all ranks start from the same model: each reads the folder on its own node, and no step notices other weights.

After loading, and before the chunks are wrapped, a digest of each parameter is compared over the ranks that hold the same of it:
the data- and context-parallel ones, also the tensor-parallel ones where it is not sharded, and the two pipeline stages that hold
tied embeddings. A tensor that only one node holds cannot be compared; for these, samples of the folder's tensors are. Leaves out
later changes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_folder.files import read_header, weight_files
from engine.model.build import global_name, gpt_model
from engine.model.lora import adapted_linears
from engine.moe import router_bias
from engine.runtime import parallel
from engine.runtime.megatron import parallel_state as mpu

CHUNK = {"cpu": 2**16, "cuda": 2**22}  # numbers at a time: they stay in a core's cache, or keep a GPU busy
GAMMA, MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd, as are their powers: SplitMix64's, in two's complement
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLE_BYTES = 4096
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")  # where they are tied the same values


class DifferentRanksError(ValueError):
    """Ranks start from different models; the same text on every rank."""


def check_config(hf_config: Any, path: str | Path) -> None:
    """DifferentRanksError where the ranks read different fields in the config.json of `path`. Collective over all ranks."""
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "_name_or_path"}
    _compare({name: json.dumps(value, sort_keys=True, default=str) for name, value in fields.items()}, Path(path) / "config.json")


def check_weights(chunks: Sequence[torch.nn.Module], *folders: str | Path) -> None:
    """DifferentRanksError names nodes, ranks and the first tensor that differs. Collective over all ranks.

    Args:
        chunks: not yet wrapped.
        folders: what they were loaded from, the model's first; empty ones count for nothing.
    """
    differing = [_differing(group, tensors) for group, tensors in _groups(chunks)]
    everyone = _from_all([(names, ranks) for names, ranks in differing if names])
    names = dict.fromkeys(name for found in everyone for names, _ in found for name in names)
    ranks = set[int]().union(*(ranks for found in everyone for _, ranks in found))
    _refuse(list(names), ranks, ", ".join(str(folder) for folder in folders if folder))
    layout = parallel.layout()
    if max(layout.tensor_size, layout.pipeline_size, layout.expert_size) > 1:  # some parameters are on one node alone
        _compare(_samples(Path(folders[0])), Path(folders[0]))


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [], of the values' bits and their positions: one value that differs changes it, others escape by chance alone."""
    words = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
    length = CHUNK[words.device.type]
    keys = torch.arange(1, min(length, len(words)) + 1, device=words.device) * GAMMA
    keys = ((keys ^ (keys >> 29)) * MIX) | 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in torch.split(words, length):
        total = total * GAMMA + (keys[: len(part)] * part).sum()
    return total


def _groups(chunks: Sequence[torch.nn.Module]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """A process group, and by name the tensors that are the same on all its ranks."""
    of_experts, sharded, whole, tied = (dict[str, torch.Tensor]() for _ in range(4))
    for chunk in chunks:
        for name, tensor, parameter in _named(chunk):
            is_sharded = getattr(parameter, "tensor_model_parallel", False)
            (of_experts if hasattr(parameter, "num_local_experts") else sharded if is_sharded else whole)[name] = tensor
        for name, parameter in chunk.named_parameters():
            if gpt_model(chunk).share_embeddings_and_output_weights and name.endswith(EMBEDDINGS):
                tied[EMBEDDINGS[0]] = parameter
    groups = [
        (mpu.get_expert_data_parallel_group(), of_experts),
        (mpu.get_data_parallel_group(with_context_parallel=True), sharded),
        (mpu.get_tensor_and_data_parallel_group(with_context_parallel=True), whole),
    ]
    is_apart = tied and parallel.layout().pipeline_size > 1
    return [*groups, (mpu.get_embedding_group(), tied)] if is_apart else groups


def _named(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, values and layout of parameters, routers' biases and, where kept, the start model's adapters."""
    for name, tensor in (*chunk.named_parameters(), *router_bias.named(chunk)):
        yield global_name(chunk, name), tensor, tensor
    for name, linear in adapted_linears([chunk]):
        for kept in linear.lora_kept.values():
            for kind, tensor in zip(("lora_a", "lora_b"), kept, strict=True):
                yield f"{name}.{kind} of the start model", tensor, getattr(linear, kind)


def _differing(group: Any, tensors: dict[str, torch.Tensor]) -> tuple[list[str], set[int]]:
    """The names of tensors that differ in the group, and the ranks in the minority; in a tie, those after the first rank."""
    if not tensors or group.size() == 1:
        return [], set()
    own = torch.stack([digest(tensor) for tensor in tensors.values()])
    gathered = own.new_empty(group.size() * len(own))
    dist.all_gather_into_tensor(gathered, own, group=group)
    rows: list[list[int]] = gathered.view(group.size(), -1).T.tolist()
    ranks = dist.get_process_group_ranks(group)
    names, others = [], set[int]()
    for name, row in zip(tensors, rows, strict=True):
        if len(set(row)) > 1:
            usual = max(row, key=row.count)  # the first of several
            names.append(name)
            others |= {rank for rank, value in zip(ranks, row, strict=True) if value != usual}
    return names, others


def _samples(folder: Path) -> dict[str, str]:
    """A digest of some bytes in the middle of each tensor of a model's folder."""
    found: dict[str, str] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            for tensor in read_header(path)[0]:
                file.seek((tensor.begin + tensor.end) // 2)
                sample = file.read(min(SAMPLE_BYTES, (tensor.end - tensor.begin + 1) // 2))
                found[tensor.key] = hashlib.sha256(sample).hexdigest()
    return found


def _compare(own: dict[str, str], path: Path) -> None:
    """DifferentRanksError where a value differs over the ranks; those of all are brought together only then."""
    texts = _from_all(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
    if len(set(texts)) > 1:
        usual, everyone = max(texts, key=texts.count), _from_all(own)
        names = [name for name in dict.fromkeys(itertools.chain(*everyone)) if len({each.get(name) for each in everyone}) > 1]
        _refuse(names, {rank for rank, text in enumerate(texts) if text != usual}, str(path))


def _refuse(names: Sequence[str], ranks: set[int], where: str) -> None:
    """DifferentRanksError where `names` differ, on these of the ranks; nothing where there are none. Collective."""
    hosts = _from_all(socket.gethostname())
    if names:
        others, rest = _places(hosts, ranks)
        more = f", and so do {len(names) - 1} more" if len(names) > 1 else ""
        message = f"ranks have read different models: {names[0]} differs between {others} and {rest}{more}"
        raise DifferentRanksError(f"{message}. Remedy: put the same files on every node: {where}")


def _from_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _places(hosts: Sequence[str], ranks: set[int]) -> tuple[str, str]:
    """Node by node these ranks, and all others."""
    others, rest = dict[str, list[int]](), dict[str, list[int]]()
    for rank, host in enumerate(hosts):
        (others if rank in ranks else rest).setdefault(host, []).append(rank)
    return _on_nodes(others), _on_nodes(rest)


def _on_nodes(ranks: dict[str, list[int]]) -> str:
    return " and ".join(f"rank {', '.join(map(str, of_host))} on node {host}" for host, of_host in ranks.items())
