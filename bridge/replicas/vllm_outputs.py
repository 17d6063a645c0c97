"""Tokens of a request wait in vLLM's engine core until it ends.

vLLM's core tells the front end of each token as it comes (v1/core/sched/scheduler.py:update_from_output), also where the front
end gives one output at the end: about 40 us of Python a token there, so that 256 running requests keep a core busy for as long
as a GPU takes for their next tokens. Where a request asks for its final output alone, and the core decides by itself when it
ends, nobody needs them earlier. Leaves out requests with stop strings: the front end looks for those.

    hold_outputs()                        # in the process of the engine core, before it is built
    await num_tokens(engine)              # by request, while generation is paused
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

HOLDS = "MEGASYNC_HOLDS_OUTPUTS"  # set in a replica's actor, inherited by its engine core
COUNT = "megasync_num_tokens"
JOINED = ("request_id", "new_token_ids", "new_logprobs", "routed_experts")
TOLD = ("events", "prefill_stats", "num_cached_tokens", "num_external_computed_tokens", "trace_headers")  # some with the first
SAID = ("scheduler_stats", "finished_requests", "wave_complete", "start_wave")  # by EngineCoreOutputs, beside outputs


class Held:
    """What one scheduler holds back: outputs by request."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[Any]] = {}

    def pass_on(self, output: Any, request: Any) -> bool:
        """Whether the output is to go to the front end now, with all that was held of its request put into it.

        `output`: an EngineCoreOutput; `request`: the scheduler's Request, None once it has ended.
        """
        if request is not None and _waits_for_end(request) and _has_tokens_alone(output):
            if output.routed_experts is not None:
                output.routed_experts = output.routed_experts.copy()  # a view of those of all requests of the step
            self._outputs.setdefault(output.request_id, []).append(output)
            return False
        if former := self._outputs.pop(output.request_id, None):
            _join(former, output)
        return True

    def forget(self, requests: dict[str, Any]) -> None:
        """Drop what is held of requests that are not among the scheduler's: they were aborted."""
        if len(self._outputs) > len(requests):
            self._outputs = {name: outputs for name, outputs in self._outputs.items() if name in requests}


def hold_outputs() -> None:
    """In a process with vLLM's engine core, else nothing. Safe to repeat."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None or hasattr(core.EngineCore, COUNT):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    setattr(core.EngineCore, COUNT, _count)
    Scheduler.update_from_output = _holding(Scheduler.update_from_output)


async def num_tokens(engine: Any) -> dict[str, int]:
    """How many tokens each request has that has not ended in the core; asked while generation is paused."""
    counts: dict[str, int] = await engine.engine_core.call_utility_async(COUNT)
    return counts


def _count(core: Any) -> dict[str, int]:
    return {name: request.num_output_tokens for name, request in core.scheduler.requests.items() if not request.is_finished()}


def _holding(update: Callable[..., dict[int, Any]]) -> Callable[..., dict[int, Any]]:
    """The same method, with outputs left out that are held."""

    @functools.wraps(update)
    def update_from_output(self: Any, *arguments: Any, **options: Any) -> dict[int, Any]:
        by_client = update(self, *arguments, **options)
        held: Held = self.__dict__.setdefault("_megasync_held", Held())
        for told in by_client.values():
            told.outputs = [output for output in told.outputs if held.pass_on(output, self.requests.get(output.request_id))]
        held.forget(self.requests)
        return {client: told for client, told in by_client.items() if _says_something(told)}

    return update_from_output


def _says_something(told: Any) -> bool:
    return bool(told.outputs) or any(getattr(told, name) is not None for name in SAID)


def _waits_for_end(request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    parameters = request.sampling_params
    return parameters is not None and parameters.output_kind == RequestOutputKind.FINAL_ONLY and not parameters.detokenize


def _has_tokens_alone(output: Any) -> bool:
    if output.finish_reason is not None:
        return False
    return all(getattr(output, name) is None for name in _other_fields(output.__class__))


@functools.cache
def _other_fields(kind: Any) -> tuple[str, ...]:
    """Of EngineCoreOutput, those that are None where an output brings tokens and nothing else."""
    defaults = zip(kind.__struct_fields__[-len(kind.__struct_defaults__) :], kind.__struct_defaults__, strict=True)
    return tuple(name for name, default in defaults if default is None and name not in (*JOINED, *TOLD))


def _join(former: list[Any], output: Any) -> None:
    """Put tokens, log-probs and experts of earlier outputs before those of `output`; what only an earlier one told stays told."""
    every = [*former, output]
    output.new_token_ids = [token for each in every for token in each.new_token_ids]
    if parts := [each.new_logprobs for each in every if each.new_logprobs is not None]:
        columns = zip(*(part[:3] for part in parts), strict=True)
        output.new_logprobs = type(parts[0])(*map(np.concatenate, columns))
    if experts := [each.routed_experts for each in every if each.routed_experts is not None]:
        output.routed_experts = np.concatenate(experts)
    for name in TOLD:
        if hasattr(output, name) and not getattr(output, name):
            setattr(output, name, next((value for each in former if (value := getattr(each, name))), getattr(output, name)))
