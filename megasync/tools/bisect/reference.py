"""The expected output of each module for its captured inputs: transformers' own module in float64, and the bound of rounding.

So each module of each side is judged by itself, whatever came before it: one beyond its bound is wrong there and nowhere else.

    reference = Reference(Path("models/SmolLM2-135M-Instruct"), torch.bfloat16, torch.device("cpu"), temperature=1.0)
    value, bound = reference.expected(reference.sites["model.layers.0.mlp.act_fn"], side)

A bound is generous: some roundings of the result to its dtype, and of the float32 sums on the way, without cancellation. The
model is on the meta device: a module gets its tensors from the folder when it is called. Read in transformers 5.19 and 5.17,
models/{llama,mistral,qwen2,qwen3}.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from engine.attention.windows import layer_windows
from megasync.tools.bisect.side import Side
from megasync.tools.bisect.sites import Operation, Site, layer_of, sites_of
from model_folder.files import read_header, weight_files

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]  # A, B and the scale of each linear's adapter
RESULT_ROUNDINGS, SUM_ROUNDINGS = 4.0, 16.0
UNIT_FLOAT32 = 2.0**-24
SPREADS = 2.0  # a third pass may differ from either of two by more than they differ from each other
LANES = 8  # float32 numbers that a CPU without AVX512 adds at a time
ROWS = 256  # of queries at a time, whose scores alone are in memory


class Expected(NamedTuple):
    value: torch.Tensor  # float64, shaped as the site's
    bound: torch.Tensor  # of each element's error; broadcasts


class Float64(TorchFunctionMode):
    """Code that asks for float32, as norms, rotary embeddings and softmax do, gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class Weights:
    """The tensors of a folder, rounded to the dtype that they are computed in, as float64."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._files: dict[str, dict[str, Path]] = {}  # of a module's tensors
        self._latest: tuple[str, dict[str, torch.Tensor]] = "", {}  # all sides use a module one after the other
        for path in weight_files(folder):
            for each in read_header(path)[0]:
                module, _, tensor = each.key.rpartition(".")
                self._files.setdefault(module, {})[tensor] = path

    def __contains__(self, module: str) -> bool:
        return module in self._files

    def __getitem__(self, module: str) -> dict[str, torch.Tensor]:
        if self._latest[0] != module:
            names = self._files[module].items()
            self._latest = module, {name: self._read(path, f"{module}.{name}") for name, path in names}
        return self._latest[1]

    def _read(self, path: Path, name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            return self.rounded(file.get_tensor(name))

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device).to(self._dtype).double()


class Reference:
    """The reference of one side: its weights are as that side has them, an adapter merged or not."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, temperature: float, adapter: Factors | None = None
    ) -> None:
        """`adapter`: low-rank updates that this side adds to its linears' results."""
        from transformers import AutoConfig

        self.weights, self.temperature, self.adapter = Weights(folder, dtype, device), temperature, adapter or {}
        self.model = meta_model(folder)
        self.sites = sites_of_model(self.model)
        config = AutoConfig.from_pretrained(folder)
        with Float64(), device:
            self._rotary = type(self.model.model.rotary_emb)(config)
        self._windows = layer_windows(config.to_dict())
        self._code = sys.modules[type(self.model).__module__]  # transformers' file of the family
        self._functions = {
            Operation.EMBEDDING: self._embedding,
            Operation.SUM: self._sum,
            Operation.NORM: self._norm,
            Operation.LINEAR: self._linear,
            Operation.ROTARY: self._rotated,
            Operation.ATTENTION: self._attention,
            Operation.ACTIVATION: self._activation,
            Operation.LOG_PROBS: self._log_probs,
        }

    @torch.no_grad()
    def expected(self, site: Site, side: Side) -> Expected:
        value, slack = self._functions[site.operation](site, side)
        return Expected(value, RESULT_ROUNDINGS * (_unit(site, side) * value.abs() + _spacing(side[site.name])) + slack)

    @torch.no_grad()
    def rounded_norms(self, site: Site, side: Side) -> list[torch.Tensor]:
        """The results of a right norm in the side's dtype: rounded at its end, or before its weights, too."""
        dtype, weight = side[site.name].dtype, self.weights[site.name]["weight"]
        normed = self._call(site.name, side.double(site.inputs[0]), {"weight": torch.ones_like(weight)})
        return [each.to(dtype).double() for each in (normed * weight, normed.to(dtype).double() * weight)]

    def _call(self, name: str, inputs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """transformers' module with these parameters."""
        with Float64():
            found: torch.Tensor = functional_call(self.model.get_submodule(name), tensors, (inputs,))
        return found

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        """An output layer may share the embedding's."""
        is_tied = name == "lm_head" and (self.model.config.tie_word_embeddings or name not in self.weights)
        return self.weights["model.embed_tokens" if is_tied else name]

    # ------------------------------------------------------- by operation: the value, and its error besides the result's rounding

    def _embedding(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        value = self._call(site.name, side.token_ids[side.positions], self.weights[site.name])
        return value, torch.zeros_like(value)

    def _sum(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.stack([side.double(name) for name in site.inputs]).sum(0)
        return value, torch.zeros_like(value)

    def _norm(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        value = self._call(site.name, side.double(site.inputs[0]), self.weights[site.name])
        return value, SUM_ROUNDINGS * UNIT_FLOAT32 * value.abs()

    def _linear(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        x, unit = side.double(site.inputs[0]).flatten(1), _unit(site, side)
        x = x[len(x) - len(side[site.name]) :]  # of the output layer: the response's rows
        tensors = self._tensors(site.name)
        value = self._call(site.name, x, tensors)
        slack = SUM_ROUNDINGS * UNIT_FLOAT32 * torch.outer(x.norm(dim=-1), tensors["weight"].norm(dim=-1))
        if site.name in self.adapter:
            *factors, scale = self.adapter[site.name]
            a, b = map(self.weights.rounded, factors)
            low = scale * (x @ a.t())
            value, slack = value + low @ b.t(), slack + 2 * RESULT_ROUNDINGS * unit * (low.abs() @ b.abs().t())
        slack = slack + RESULT_ROUNDINGS * unit * value.square().mean(-1, keepdim=True).sqrt()
        shape = side[site.name].shape
        return value.view(shape), slack.view(shape)

    def _rotated(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        x = side.double(site.inputs[0])  # [T, heads, size]
        by_head = x.transpose(0, 1)[None]
        with Float64():
            rotated, _ = self._code.apply_rotary_pos_emb(by_head, by_head, *self._rotary(x, side.positions[None]))
        both = x.abs() + torch.roll(x.abs(), x.shape[-1] // 2, -1)
        relative = RESULT_ROUNDINGS * _unit(site, side) + SUM_ROUNDINGS * UNIT_FLOAT32 * (1 + side.positions.double())
        return rotated[0].transpose(0, 1), relative[:, None, None] * both * abs(self._rotary.attention_scaling)

    def _attention(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        query, (key, value) = side.double(site.inputs[0]), map(side.with_earlier, site.inputs[1:])
        out, weighed = self._attend(site, side, query, key, torch.cat([value, value.abs()], -1)).chunk(2, -1)
        scaled = self.model.get_submodule(_parent(site)).scaling * query.norm(dim=-1, keepdim=True)
        largest = scaled * key.norm(dim=-1).max()
        slack = (RESULT_ROUNDINGS * _unit(site, side) + SUM_ROUNDINGS * UNIT_FLOAT32 * (1 + largest)) * weighed
        return out, slack + cached_slack(site, side, scaled, weighed)

    def _attend(self, site: Site, side: Side, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of [T, heads, size] over [positions, groups, size]."""
        module, layer = self.model.get_submodule(_parent(site)), layer_of(site.name)
        assert layer is not None
        distance = side.positions[:, None] - torch.arange(len(key), device=key.device)
        hidden = (distance < 0) | (distance >= (self._windows[layer] or len(key)))
        mask = torch.zeros(hidden.shape, dtype=torch.float64, device=key.device).masked_fill(hidden, -torch.inf)
        keys, values = (each.transpose(0, 1)[None] for each in (key, value))
        found = list[torch.Tensor]()
        for rows, of_rows in zip(torch.split(query, ROWS), torch.split(mask, ROWS), strict=True):
            inputs = rows.transpose(0, 1)[None], keys, values, of_rows[None, None]
            with Float64():
                found.append(self._code.eager_attention_forward(module, *inputs, scaling=module.scaling)[0][0])
        return torch.cat(found)

    def _activation(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = map(side.double, site.inputs)
        value = self._call(site.name, gate, {}) * up
        return value, SUM_ROUNDINGS * UNIT_FLOAT32 * value.abs() + _spacing(side[site.name]) * up.abs()

    def _log_probs(self, site: Site, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        logits = side.double("lm_head")
        scaled = logits / self.temperature
        tokens = side.token_ids[side.num_prompt :][: len(logits)]
        value = scaled.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        # vLLM's second model runner rounds logits over the temperature to their dtype
        unit = torch.finfo(side["lm_head"].dtype).eps if self.temperature != 1 else 0.0
        largest, rounding = scaled.abs().amax(-1), SUM_ROUNDINGS * UNIT_FLOAT32
        return value, rounding + (rounding + unit) * largest + sum_of_exps_bound(scaled)


def meta_model(folder: Path) -> Any:
    """transformers' model for causal language modelling, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    return model.eval()


def sites_of_model(model: Any) -> dict[str, Site]:
    layers = model.model.layers
    return sites_of(len(layers), has_head_norms=hasattr(layers[0].self_attn, "q_norm"))


def _parent(site: Site) -> str:
    return site.name.rpartition(".")[0]


def _unit(site: Site, side: Side) -> float:
    """The largest relative error of one rounding to the site's dtype."""
    return torch.finfo(side[site.name].dtype).eps / 2


def _spacing(tensor: torch.Tensor) -> float:
    """Spacing of the smallest numbers of its dtype: in float16 not far below 1e-7."""
    found = torch.finfo(tensor.dtype)
    return float(found.smallest_normal * found.eps)


def sum_of_exps_bound(logits: torch.Tensor) -> torch.Tensor:
    """[T]: how far rounding may take the log of float32's sum of exp, one addend after the other in each of LANES, as on CPUs.

    An addition is off by half a unit of the sum so far at most, and by the addend where that is less. So the many small addends
    of a large vocabulary may all be lost beside a large one: of SmolLM2's, with 49152 tokens, 2e-5 and more.
    """
    by_addend = logits.softmax(-1).clamp_max(UNIT_FLOAT32).sum(-1)
    return by_addend.clamp_max(logits.shape[-1] / LANES * UNIT_FLOAT32)


def cached_slack(site: Site, side: Side, scaled: torch.Tensor, weighed: torch.Tensor) -> torch.Tensor:
    """[T, heads, size]: the error of attention whose cached keys and values were rounded in another pass.

    `scaled` [T, heads, 1]: norms of the queries times the softmax's scale. `weighed`: attention over |value|. A result is off by
    no more than the values are, and by twice the error of the scores, times |value|.
    """
    _, key, value = site.inputs
    if value not in side.spread:
        return torch.zeros_like(weighed)
    keys, values = (side.spread[name].to(weighed) for name in (key, value))
    heads = weighed.shape[1] // len(keys)  # of a group
    keys, values = (each.repeat_interleave(heads, 0) for each in (keys, values))
    slack: torch.Tensor = SPREADS * (values + 2 * scaled * keys.norm(dim=-1, keepdim=True) * weighed)
    return slack
