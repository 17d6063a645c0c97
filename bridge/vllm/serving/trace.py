"""One sequence through a worker's model as in a rollout, a prefill and then a token at a time, with every module's result kept.

    tracing = Tracing(model_runner, token_ids, num_prompt)      # hooks in the modules, the given tokens in place of sampled ones
    ...                                                         # one request for the rest of the tokens
    tracing.finish(path)                                        # a safetensors file, by the names of Hugging Face's modules

Names and shapes are those of engine/trace.py, with fused linears split; `positions` are those of the rows, which begin after the
cached prefix. Read in vllm 0.32.0, v1/sample/sampler.py and model_executor/models/{llama,qwen2,qwen3}.py, the same in
0.26. Hooks need modules that are called one by one: an eager engine of one worker. Leaves out other families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SECOND_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"  # the one of the model runner that 0.26 has for dense models on GPUs
DEVICE_BYTES = 2**28  # of copies that wait on the device: one by one, some ten thousand a pass, each would be waited for


class Tracing:
    """In one worker, of one request at a time."""

    def __init__(self, model_runner: Any, token_ids: Sequence[int], num_prompt: int) -> None:
        self._tokens, self._num_prompt = list(token_ids), num_prompt
        self._found: dict[str, list[torch.Tensor]] = {}  # in host memory
        self._recent: dict[str, list[torch.Tensor]] = {}  # where they were computed
        self._recent_bytes = 0
        self._handles: list[Any] = []
        self._next = 0  # the position that is computed next
        self._sampler = model_runner.sampler
        model = model_runner.get_model()
        inner = model.model
        self._after(inner.embed_tokens, lambda out, _: self._keep("model.embed_tokens", out))
        self._after(inner.layers[0].self_attn.rotary_emb, lambda _, inputs: self._keep_positions(inputs[0]))
        for number, layer in enumerate(inner.layers):
            self._hook_layer(layer, f"model.layers.{number}")
        self._hook_norm(inner.norm, "model.norm")
        self._after(model.logits_processor, lambda out, _: self._keep_logits(out))
        self._plain_sample = self._sampler.sample
        self._sampler.sample = self._sample

    def finish(self, path: Path) -> int:
        """Take the hooks out and write the tensors; returns the number of tokens."""
        from safetensors.torch import save_file

        self.leave()
        self._bring()
        tensors = {name: torch.cat(rows) for name, rows in self._found.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return len(tensors["positions"])

    def leave(self) -> int:
        """Take the hooks out; 0."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sampler.__dict__.pop("sample", None)
        return 0

    # ------------------------------------------------------------------------------------------------ modules

    def _hook_layer(self, layer: Any, name: str) -> None:
        self._hook_norm(layer.input_layernorm, f"{name}.input_layernorm")
        self._hook_attention(layer.self_attn, f"{name}.self_attn")
        self._hook_norm(layer.post_attention_layernorm, f"{name}.post_attention_layernorm")

        def keep_halves(out: Any, _: Any) -> None:
            for called, part in zip(("gate_proj", "up_proj"), out[0].chunk(2, -1), strict=True):
                self._keep(f"{name}.mlp.{called}", part)

        def keep_down(out: Any, inputs: Any) -> None:
            self._keep(f"{name}.mlp.act_fn", inputs[0])
            self._keep(f"{name}.mlp.down_proj", out[0])

        self._after(layer.mlp.gate_up_proj, keep_halves)
        self._after(layer.mlp.down_proj, keep_down)

    def _hook_attention(self, attention: Any, name: str) -> None:
        heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim

        def by_heads(called: str, out: torch.Tensor, number: int) -> None:
            self._keep(f"{name}.{called}", out.reshape(-1, number, size))

        def keep_qkv(out: Any, _: Any) -> None:
            parts = out[0].split([heads * size, groups * size, groups * size], -1)
            for called, part, number in zip("qkv", parts, (heads, groups, groups), strict=True):
                by_heads(f"{called}_proj", part, number)

        def keep_norm(called: str, number: int) -> None:
            if hasattr(attention, called):
                self._after(getattr(attention, called), lambda out, _: by_heads(called, out, number))

        def keep_attended(out: Any, inputs: Any) -> None:
            by_heads("rotary_emb.q", inputs[0], heads)
            by_heads("rotary_emb.k", inputs[1], groups)
            by_heads("attn", out, heads)

        self._after(attention.qkv_proj, keep_qkv)
        keep_norm("q_norm", heads)
        keep_norm("k_norm", groups)
        self._after(attention.attn, keep_attended)
        self._after(attention.o_proj, lambda out, _: self._keep(f"{name}.o_proj", out[0]))

    def _keep_positions(self, positions: torch.Tensor) -> None:
        """Layers may share one rotary embedding: the first call of a pass counts."""
        first = int(positions[0])
        if first >= self._next:
            self._keep("positions", positions)
            self._next = int(positions[-1]) + 1

    def _hook_norm(self, norm: Any, name: str) -> None:
        """The residual stream is added to in here, except before the first layer."""

        def keep(out: Any, inputs: Any) -> None:
            normed, residual = out if isinstance(out, tuple) else (out, inputs[0])
            self._keep(f"{name}:in", residual)
            self._keep(name, normed)

        self._after(norm, keep)

    def _after(self, module: Any, keep: Callable[[Any, Any], None]) -> None:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            keep(output, inputs)

        self._handles.append(module.register_forward_hook(hook))

    def _keep(self, name: str, value: torch.Tensor) -> None:
        """A copy: later operations overwrite many of these."""
        self._recent.setdefault(name, []).append(value.detach().clone(memory_format=torch.contiguous_format))
        self._recent_bytes += value.nbytes
        if self._recent_bytes > DEVICE_BYTES:
            self._bring()

    def _bring(self) -> None:
        """The tensors since the last call into host memory, one copy for each module."""
        for name, rows in self._recent.items():
            self._found.setdefault(name, []).append(torch.cat(rows).cpu())
        self._recent, self._recent_bytes = {}, 0

    # ------------------------------------------------------------------------------------------------ tokens

    def _keep_logits(self, logits: torch.Tensor | None) -> None:
        if logits is not None and self._next >= self._num_prompt:  # else the prefill continues
            self._keep("lm_head", logits[-1:])

    def _sample(self, logits: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Like the sampler's own method, but returns the given token."""
        sampled, values = self._plain_sample(logits, *rest, **options)
        token = self._tokens[min(self._next, len(self._tokens) - 1)]
        if values is not None and self._next >= self._num_prompt:
            self._keep("log_probs", self._log_probs(values[-1:])[:, token])
        return torch.full_like(sampled, token), values

    def _log_probs(self, values: torch.Tensor) -> torch.Tensor:
        """From a sampler's second result: logits over the temperature in vLLM's second model runner, log-probs in its first."""
        return values.float().log_softmax(-1) if type(self._sampler).__module__ == SECOND_SAMPLER else values
