"""Adapters to and from PEFT's folders: the fused linears' factors are split into Hugging Face's linears and back.

A fused linear has one A; in a folder each of q, k, v (gate, up) has its own. Writing copies it. Reading takes equal ones
as one; different ones are stacked, which takes engine.lora.rank times as many ranks and computes the same.
Leaves out experts (experts.py) and what a folder's config may say (folder.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine.peft import experts
from engine.config import TARGET_OF, LoraConfig
from model_folder.layout import LANGUAGE, read_folder_layout
from engine.moe.experts import ExpertLinear
from engine.attention import delta_net
from engine.attention.delta_net import MIXED, by_key_heads, merge_ranks
from engine.attention.latent import ReplicatedLinear
from engine.model.families import qwen3_next
from engine.model.lora import adapted_linears
from engine.runtime.megatron import ColumnParallelLinear
from engine.runtime.parallel import Layout, expert_group
from engine.runtime.tensor_file import save_tensors
from engine.peft.fields import AdapterError
from engine.peft.folder import CONFIG_FILE, EXPERTS, PREFIX, WEIGHTS_FILE, check_peft_folder, fingerprint, read_fields
from engine.peft.folder import adapted_linears as linears_of_keys
from engine.wrap.items import AdapterItem

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]  # Hugging Face linear -> A [rank, in], B [out, rank]


class PeftFactors(NamedTuple):
    """The whole adapter of one Hugging Face linear."""

    name: str  # the linear's, as PEFT has it
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [*, rank]; flattening * gives its rows
    shares_a: bool = False  # with the linear before it


@dataclass(frozen=True)
class Heads:
    """The layout of query, key and value in a fused linear: for each group its queries, then a key and a value.

    `delta_sizes`: of a model with gated delta nets the rows of in_proj's parts (delta_net.split_sizes); a group's queries are
    then followed by their gates. `num_key_heads`: by which Hugging Face orders these rows (Qwen3-Next); 0: each part is
    whole there.
    """

    num_heads: int
    num_groups: int
    delta_sizes: tuple[int, ...] = ()
    num_key_heads: int = 0

    @classmethod
    def of(cls, mbridge: Any) -> Heads:
        config = mbridge.config
        sizes = delta_net.split_sizes(config) if config.linear_attention_freq else ()
        num_key_heads = config.linear_num_key_heads if mbridge.hf_config.model_type == qwen3_next.NAME else 0
        return cls(config.num_attention_heads, config.num_query_groups, tuple(sizes), num_key_heads)


def split_rows(linear: str, whole: torch.Tensor, heads: Heads, tensor_size: int) -> list[torch.Tensor]:
    """The rows of `whole` [rows, n] that belong to each Hugging Face linear fused into `linear`.

    `whole` is the concatenation of the tensor-parallel shards. Returns [*, n]; flattening * gives a linear's
    rows in order. Views where there is one shard, but of Qwen3-Next's in_proj. Invariant: together they hold each row once.
    """
    if linear.endswith("linear_qkv"):
        gates = 2 if heads.delta_sizes else 1
        queries = heads.num_heads // heads.num_groups * gates
        groups = whole.view(heads.num_groups, queries + 2, -1, whole.shape[1])
        of_queries = torch.unflatten(groups[:, :queries], 1, (gates, -1)).transpose(1, 2)  # a head's gate follows it there
        return [of_queries, groups[:, queries], groups[:, queries + 1]]
    if linear.endswith("in_proj"):
        sizes = heads.delta_sizes
        whole = whole if tensor_size == 1 else merge_ranks(list(whole.chunk(tensor_size)), list(sizes))
        if heads.num_key_heads:
            return by_key_heads(whole, sizes, heads.num_key_heads)
        return list(torch.split(whole, [sum(sizes[:MIXED]), *sizes[MIXED:]]))
    if linear.endswith("linear_fc1"):
        return list(whole.view(tensor_size, 2, -1, whole.shape[1]).unbind(1))
    return [whole]


def hf_linears(mbridge: Any, linear: str) -> list[str]:
    """The Hugging Face names of the weights that are fused into `linear`, in order."""
    names: list[str] = mbridge._weight_name_mapping_mcore_to_hf(f"{linear}.weight")
    return [name.removesuffix(".weight") for name in names]


# -------------------------------------------------------------------------------------------------------------- write


@torch.no_grad()
def adapter_tensors(units: Iterable[list[AdapterItem]], mbridge: Any, layout: Layout) -> Iterator[PeftFactors]:
    """This stage's adapters in layer order; only the stage's sender gets any. Every rank iterates to the end.

    Views of parameters where nothing is gathered. Linears that are fused into one share its A.
    """
    heads, group = Heads.of(mbridge), mbridge.mpu.tp_group
    for unit in units:
        yield from _experts_tensors([item for item in unit if item.num_experts], group, layout)
        items = [item for item in unit if not item.num_experts]
        if layout.copy_rank or not items:
            continue
        factors = _gather(items, group) if layout.tensor_size > 1 else [(each.adapter.a, each.adapter.b) for each in items]
        for item, (a, b) in zip(items, factors if layout.is_sender else [], strict=False):
            whole_a, parts = a.detach(), split_rows(item.linear, b.detach(), heads, layout.tensor_size)
            for index, (name, part) in enumerate(zip(hf_linears(mbridge, item.linear), parts, strict=True)):
                yield PeftFactors(f"{PREFIX}{name}", whole_a, part, shares_a=index > 0)


def _experts_tensors(items: list[AdapterItem], tensor_group: Any, layout: Layout) -> Iterator[PeftFactors]:
    """Adapters of a layer's experts, on the sender; of the ranks that have the same experts, the first takes part."""
    group = expert_group() or (tensor_group if layout.tensor_size > 1 else None)
    for item in items if layout.expert_data_rank == 0 else ():
        a, b = experts.whole_factors(item, group, layout.tensor_size)
        if layout.is_sender:
            name = experts.peft_name(item.linear, [each.linear for each in items])
            yield PeftFactors(f"{PREFIX}{name}", a.detach(), b.detach())


def _gather(items: list[AdapterItem], group: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each item whole over the tensor-parallel `group`; one collective."""
    factors = {item.linear: (item.adapter.a, item.adapter.b) for item in items}
    split = [item for item in items if item.shard_dim is not None]
    if not split:
        return list(factors.values())
    sharded = [item.adapter.b if item.shard_dim == 0 else item.adapter.a for item in split]
    flat = torch.cat([tensor.reshape(-1) for tensor in sharded])
    gathered = flat.new_empty(group.size() * flat.numel())
    dist.all_gather_into_tensor(gathered, flat, group=group)
    shards = torch.split(gathered.view(group.size(), -1), [tensor.numel() for tensor in sharded], dim=1)
    for item, tensor, shard in zip(split, sharded, shards, strict=True):
        whole = torch.cat([part.view(tensor.shape) for part in shard], dim=item.shard_dim or 0)
        factors[item.linear] = (item.adapter.a, whole) if item.shard_dim == 0 else (whole, item.adapter.b)
    return list(factors.values())


def stage_file(stage: int, adapters: Iterable[PeftFactors]) -> tuple[str, dict[str, torch.Tensor]]:
    """Name and tensors, on the CPU, of one stage's part of a folder; none on ranks that write none of it.

    Every rank calls; `finish_folder` follows on rank 0, once all parts are written.
    """
    tensors = {
        f"{each.name}.lora_{kind}.weight": factor.flatten(0, -2).to("cpu", copy=True).contiguous()
        for each in adapters
        for kind, factor in (("A", each.a), ("B", each.b))
    }
    return f"stage-{stage:03d}.safetensors", tensors


def finish_folder(folder: Path, lora: LoraConfig, model_path: Path) -> None:
    """Join the stages' parts, and add the config that `peft.PeftModel.from_pretrained` reads.

    Names are those of the modules of transformers' class for the model's folder.
    """
    parts, modules = sorted(folder.glob("stage-*.safetensors")), read_folder_layout(model_path).modules
    named = ((name, tensor) for part in parts for name, tensor in load_file(part).items())
    tensors = {name.replace(f"{PREFIX}model.", PREFIX + modules, 1): tensor for name, tensor in named}
    metadata = {"format": "pt", "base_fingerprint": fingerprint(model_path)}
    save_tensors(tensors, folder / WEIGHTS_FILE, metadata)
    for part in parts:
        part.unlink()
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_path),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        **_targets(tensors, lora),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=1))


def _targets(names: Iterable[str], lora: LoraConfig) -> dict[str, list[str] | str]:
    """PEFT's fields. Beside a language model vision layers may have linears of the same names.

    With experts it takes linears of shared ones and of layers without any for theirs, unless they are given as parameters
    (0.21.2, transformers_weight_conversion.py:_convert_peft_config_moe).
    """
    linears = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    present = {linear.rpartition(".")[2] for linear in linears}
    modules = [name for name, target in TARGET_OF.items() if target in lora.targets and name in present]
    if any(linear.startswith(LANGUAGE) for linear in linears):
        return {"target_modules": rf"{re.escape(LANGUAGE)}.+\.({'|'.join(sorted(modules))})"}
    if not any(linear.removesuffix(".base_layer").endswith(EXPERTS) for linear in linears):
        return {"target_modules": sorted(modules)}
    parameters = [f"mlp.experts.{experts.PARAMETERS[kind]}" for kind in experts.PARAMETERS if kind in lora.targets]
    shared = {linear[linear.index("mlp.") :] for linear in linears if ".mlp.shared_expert" in linear}
    dense = {linear[linear.index("layers.") :] for linear in linears if re.search(r"\.mlp\.\w+_proj$", linear)}
    attention = [name for name in modules if name not in ("gate_proj", "up_proj", "down_proj")]
    return {
        "target_modules": sorted(attention),
        "target_parameters": parameters + [f"{linear}.weight" for linear in sorted(shared | dense)],
    }


# --------------------------------------------------------------------------------------------------------------- read


@torch.no_grad()
def load_adapter(chunks: list[torch.nn.Module], folder: Path, lora: LoraConfig, mbridge: Any, model_path: Path) -> None:
    """Put the folder's adapter into the adapted linears, before they are wrapped. What it lacks keeps its start.

    Raises:
        AdapterError: the folder does not fit the model or the config.
    """
    check_peft_folder(folder, lora, model_path)
    factors = _read_factors(folder)
    for name, linear in adapted_linears(chunks):
        if isinstance(linear, ExpertLinear):
            if (of_experts := factors.get(experts.linear_name(name))) is not None:
                experts.load(linear, name, *of_experts)
            continue
        members = hf_linears(mbridge, name)
        if any(member in factors for member in members):
            _load_linear(linear, name, [factors.get(member) for member in members], Heads.of(mbridge))


def _read_factors(folder: Path) -> Factors:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    tensors = load_file(folder / WEIGHTS_FILE)
    for key, (linear, kind) in linears_of_keys(folder, read_fields(folder), list(tensors)).items():
        if not bool(torch.isfinite(tensors[key]).all()):
            raise AdapterError(f"{folder}: {key} has values that are not finite", "take another checkpoint of the adapter")
        halves.setdefault(linear, {})[kind] = tensors[key]
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def _load_linear(linear: Any, name: str, members: list[tuple[torch.Tensor, torch.Tensor] | None], heads: Heads) -> None:
    """A and B over all ranks, then this rank's shard of them. Members with one A share it, other A's lie one after another."""
    is_column, is_whole = isinstance(linear, ColumnParallelLinear), isinstance(linear, ReplicatedLinear)
    size, rank = (1, 0) if is_whole else (linear.tp_group.size(), linear.tp_group.rank())
    whole_b = torch.zeros(linear.output_size, linear.lora_a.shape[0])
    numbers = torch.arange(linear.output_size)[:, None]
    rows = [part.flatten() for part in split_rows(name, numbers, heads, size if is_column else 1)]
    present = [(part, *pair) for part, pair in zip(rows, members, strict=True) if pair is not None]
    is_shared = all(torch.equal(a, present[0][1]) for _, a, _ in present)
    stacked: list[torch.Tensor] = []
    for part, a, b in present:
        offset = 0 if is_shared else sum(one.shape[0] for one in stacked)
        whole_b[part, offset : offset + a.shape[0]] = b.float()
        stacked = [a.float()] if is_shared else [*stacked, a.float()]
    whole_a = torch.cat(stacked)
    if is_column:
        whole_b = whole_b.chunk(size)[rank]
    else:
        whole_a = whole_a.chunk(size, dim=1)[rank]
    linear.lora_a[: whole_a.shape[0]].copy_(whole_a)
    linear.lora_b.copy_(whole_b)
