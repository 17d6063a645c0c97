"""One sequence through the trainer's model, with every module's result kept by the name of that module in transformers.

    forward = Forward(config.model, config.engine, temperature=1.0)
    tensors = forward.trace(prompt_ids, response_ids)
    tensors["model.layers.0.self_attn.q_proj"]     # [tokens, heads, head size], wherever fused linears have it
    forward.score(samples, 4096)                   # log-probs alone, packed as in training

A model of one rank, neither wrapped nor trained: its parameters alone are in memory. Rows are the tokens of the sequence but its
last; those of `lm_head` and `log_probs` are the response's. `NAME:in` is the residual stream before a norm. Leaves out experts,
multi-latent attention, Gemma 3 and the use of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import delta_net, flash, fused, rope
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import plan_microbatches
from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.models import build_model
from engine.model import lora
from engine.model.exact import ExactAttention
from engine.model.build import build_mbridge, gpt_model
from engine.objective.logits import LogProbs
from engine.passes import PipelineRunner
from engine.peft import factors
from engine.runtime import device
from engine.sample import Sample
from exact import rotary

Tensors = dict[str, torch.Tensor]
Replace = Callable[[str, Tensors], torch.Tensor | None]  # of a name whose tensor is kept: one that replaces it
ALL_LOGITS = 1 << 40  # tokens: the logits of all are read at once


class Forward:
    """The policy of a run, for forward passes alone. Process groups of one rank are built before (parallel.initialize)."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        temperature: float,
        weights_path: str | Path | None = None,
        adapter_path: str | Path | None = None,
    ) -> None:
        """The folders as Engine takes them; `engine.parallel` has no effect."""
        engine = engine.model_copy(update={"parallel": ParallelConfig()})
        self.mbridge = build_mbridge(model, engine)
        flash.choose(engine.kernels, self.mbridge.config)
        delta_net.choose_kernels(engine.kernels, self.mbridge.config)
        self.chunks = build_model(self.mbridge, engine, weights_path or model.path)
        if engine.lora.rank:
            lora.add_adapters(self.chunks, engine.lora, seed=0)
            adapter = adapter_path or engine.lora.adapter_path
            if adapter:
                factors.load_adapter(self.chunks, Path(adapter), engine.lora, self.mbridge, Path(model.path))
        self.temperature, self.use_fused = temperature, fused.is_enabled(engine.fusions)
        scaled = rope.scaling(self.mbridge.hf_config)
        self._rope_factor = scaled[1] if scaled is not None else 1.0
        self._runner = PipelineRunner(self.mbridge, ALL_LOGITS, use_fused=self.use_fused)

    @property
    def model(self) -> Any:
        """megatron-core's GPTModel."""
        return gpt_model(self.chunks[0])

    @torch.no_grad()
    def trace(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replace: Replace | None = None) -> Tensors:
        """On the device of the model, in the dtypes that it computes in; `log_probs` at the temperature."""
        micro = self._microbatch(prompt_ids, response_ids)
        first, length = len(prompt_ids) - 1, len(prompt_ids) + len(response_ids) - 1
        read = LogProbs(self.temperature, self.use_fused, is_exact=self.mbridge.is_exact)
        with _recording(self.model, replace, self._rope_factor) as found:
            ((log_probs,),) = self._run(micro, read)
        tensors = {name: tensor[:length] for name, tensor in found.items()}
        tensors["lm_head"] = tensors["lm_head"][first:]
        tensors["log_probs"] = log_probs[first:length]
        other = replace("log_probs", tensors) if replace is not None else None
        return tensors if other is None else {**tensors, "log_probs": other.to(log_probs.dtype)}

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], tokens_per_microbatch: int) -> list[npt.NDArray[np.float32]]:
        """Natural log-probs of all tokens of each response, at the temperature."""
        table = SampleTable.from_samples(samples)
        read = LogProbs(self.temperature, self.use_fused, is_exact=self.mbridge.is_exact)
        found = [np.empty(0, np.float32)] * len(samples)
        (bins,) = plan_microbatches(table.lengths, 1, tokens_per_microbatch) if len(samples) else ([],)
        for indices in filter(None, bins):
            micro = pack(table, indices, 1, device.compute_device())
            ((values,),) = self._run(micro, read)
            flat = values.float().cpu().numpy()
            for index, start in zip(micro.samples, micro.starts, strict=True):
                prompt, answer = int(table.prompt_lengths[index]), int(table.response_lengths[index])
                found[index] = flat[start + prompt - 1 : start + prompt + answer - 1].copy()
        return found

    def _run(self, micro: MicroBatch, read: LogProbs) -> list[Any]:
        self._runner.set_rotary([micro], self.chunks[0])
        return self._runner.run([micro], self.chunks, read)

    def _microbatch(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> MicroBatch:
        sample = Sample(np.array(prompt_ids, np.int32), np.array(response_ids, np.int32))
        return pack(SampleTable.from_samples([sample]), [0], 1, device.compute_device())


class _Recorder:
    """Keeps the results of modules, and lets `replace` change them."""

    def __init__(self, replace: Replace | None) -> None:
        self.found: Tensors = {}
        self._replace = replace

    def keep(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """[tokens, ...]; returns the tensor that the model continues with."""
        self.found[name] = value.clone()
        other = self._replace(name, self.found) if self._replace is not None else None
        if other is None:
            return value
        self.found[name] = other.to(value.dtype)
        return self.found[name].clone()


@contextmanager
def _recording(model: Any, replace: Replace | None, rope_factor: float) -> Iterator[Tensors]:
    recorder = _Recorder(replace)
    with ExitStack() as stack:

        def after(module: Any, name: str, split: Split | None = None) -> None:
            stack.callback(module.register_forward_hook(_hook(recorder, split or Split.of_one(name))).remove)

        def before(module: Any, name: str) -> None:
            def keep(_module: Any, inputs: Any) -> Any:
                return (_like(recorder.keep(name, _tokens_first(inputs[0])), inputs[0]), *inputs[1:])

            stack.callback(module.register_forward_pre_hook(keep).remove)

        after(model.embedding, "model.embed_tokens")
        for layer in model.decoder.layers:
            name = f"model.layers.{layer.layer_number - 1}"
            _record_layer(layer, name, before, after)
            _record_rotated(recorder, layer.self_attention.core_attention, f"{name}.self_attn", rope_factor, stack)
        before(model.decoder.final_layernorm, "model.norm:in")
        after(model.decoder.final_layernorm, "model.norm")
        after(model.output_layer, "lm_head")
        yield recorder.found


def _record_layer(layer: Any, name: str, before: Any, after: Any) -> None:
    attention, mlp = layer.self_attention, layer.mlp
    for norm, called in ((layer.input_layernorm, "input_layernorm"), (layer.pre_mlp_layernorm, "post_attention_layernorm")):
        before(norm, f"{name}.{called}:in")
        after(norm, f"{name}.{called}")
    of_attention = f"{name}.self_attn"
    names = tuple(f"{of_attention}.{part}_proj" for part in "qkv")
    after(attention.linear_qkv, of_attention, Split.of_heads(names, layer.config))
    for norm, called in ((attention.q_layernorm, "q_norm"), (attention.k_layernorm, "k_norm")):
        if getattr(norm, "weight", None) is not None:
            after(norm, f"{of_attention}.{called}")
    heads = (layer.config.num_attention_heads, layer.config.kv_channels)
    after(attention.core_attention, f"{of_attention}.attn", Split.of_one(f"{of_attention}.attn", heads))
    after(attention.linear_proj, f"{of_attention}.o_proj")
    after(mlp.linear_fc1, f"{name}.mlp", Split.of_halves((f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")))
    before(mlp.linear_fc2, f"{name}.mlp.act_fn")
    after(mlp.linear_fc2, f"{name}.mlp.down_proj")


def _record_rotated(recorder: _Recorder, core: Any, name: str, factor: float, stack: ExitStack) -> None:
    """Queries and keys as attention gets them, turned by the rotary embedding: by it or before it.

    `factor`: of cosine and sine, which the engine leaves to the scale of the scores (rope.py).
    """
    if isinstance(core, ExactAttention):
        _record_exactly_rotated(recorder, core, name, stack)
        return
    packed = core._packed

    def kept(called: str, tensor: torch.Tensor) -> torch.Tensor:
        if factor == 1:
            return recorder.keep(f"{name}.rotary_emb.{called}", tensor)
        return recorder.keep(f"{name}.rotary_emb.{called}", tensor * factor) / factor

    def keep(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
        return packed(kept("q", query), kept("k", key), value, *rest)  # type: ignore[no-any-return]

    core._packed = keep
    stack.callback(delattr, core, "_packed")  # and the class's own is used again


def _record_exactly_rotated(recorder: _Recorder, core: Any, name: str, stack: ExitStack) -> None:
    """Record queries and keys as the attention's own forward pass rotates them; none is replaced."""

    def before(_module: Any, inputs: Any, options: Any) -> None:
        for called, tensor in zip("qk", inputs, strict=False):
            recorder.keep(f"{name}.rotary_emb.{called}", rotary.rotate(tensor, *options["packed_seq_params"].rotary))

    stack.callback(core.register_forward_pre_hook(before, with_kwargs=True).remove)


class Split:
    """How the output of a module, [tokens, columns], is that of several of a folder's modules: views by name, and back."""

    def __init__(self, apart: Callable[[torch.Tensor], Tensors], together: Callable[[Tensors], torch.Tensor]) -> None:
        self.apart, self.together = apart, together

    @classmethod
    def of_one(cls, name: str, shape: tuple[int, ...] = ()) -> Split:
        """`shape`: of a token."""

        def apart(x: torch.Tensor) -> Tensors:
            return {name: x.view(len(x), *shape) if shape else x}

        return cls(apart, lambda parts: parts[name])

    @classmethod
    def of_halves(cls, names: tuple[str, str]) -> Split:
        """Gate and up, one after the other."""
        return cls(lambda x: dict(zip(names, x.chunk(2, -1), strict=True)), lambda parts: torch.cat(list(parts.values()), -1))

    @classmethod
    def of_heads(cls, names: Sequence[str], config: Any) -> Split:
        """Queries, keys and values lie group by group: the queries of its heads, its keys, its values."""
        groups, size = config.num_query_groups, config.kv_channels
        sizes = [config.num_attention_heads // groups, 1, 1]

        def apart(x: torch.Tensor) -> Tensors:
            parts = torch.split(x.view(len(x), groups, sum(sizes), size), sizes, 2)
            return {name: part.flatten(1, 2) for name, part in zip(names, parts, strict=True)}

        def together(parts: Tensors) -> torch.Tensor:
            grouped = [part.view(len(part), groups, -1, size) for part in parts.values()]
            return torch.cat(grouped, 2)

        return cls(apart, together)


def _hook(recorder: _Recorder, split: Split) -> Callable[[Any, Any, Any], Any]:
    def keep(_module: Any, _inputs: Any, output: Any) -> Any:
        whole = output[0] if isinstance(output, tuple) else output
        parts = split.apart(_tokens_first(whole))
        kept = {name: recorder.keep(name, part) for name, part in parts.items()}
        if all(kept[name] is part for name, part in parts.items()):
            return None
        changed = _like(split.together(kept), whole)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return keep


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, 1, ...], a batch of one, as [tokens, ...]."""
    return tensor.squeeze(1) if tensor.ndim > 2 and tensor.shape[1] == 1 else tensor


def _like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(other.shape)
