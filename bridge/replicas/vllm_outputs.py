"""Tokens of a request wait in vLLM's engine core until it ends.

vLLM's core tells the front end of each token as it comes (v1/core/sched/scheduler.py:update_from_output), also where the front
end gives one output at the end. Where a request asks for its final output alone, and the core decides by itself when it ends,
nobody needs them earlier. Leaves out requests with stop strings: the front end looks for those.

    hold_outputs()                        # in the process of the engine core, before it is built
    await num_tokens(engine)              # by request, while generation is paused
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from bridge.replicas.vllm_plain_tokens import COMPARED, TOLD, HeldTokens, source_digest, take_plain_tokens

HOLDS = "MEGASYNC_HOLDS_OUTPUTS"  # set in a replica's actor, inherited by its engine core
COUNT = "megasync_num_tokens"
JOINED = ("request_id", "new_token_ids", "new_logprobs", "routed_experts")
SAID = ("scheduler_stats", "finished_requests", "wave_complete", "start_wave")  # by EngineCoreOutputs, beside outputs


class Held:
    """What one scheduler holds back, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, HeldTokens] = {}

    def pass_on(self, output: Any, request: Any, max_model_len: int) -> bool:
        """Whether the output is to go to the front end now, with all that was held of its request put into it.

        `output`: an EngineCoreOutput; `request`: the scheduler's Request, None once it has ended.
        """
        if request is not None and _waits_for_end(request) and _has_tokens_alone(output):
            held = self.tokens.get(output.request_id)
            if held is None or held.request is not request:
                self.tokens[output.request_id] = HeldTokens(output, request, max_model_len)
            else:
                held.add(output)
            return False
        if (held := self.tokens.pop(output.request_id, None)) is not None:
            held.move_to(output)
        return True

    def forget(self, requests: dict[str, Any]) -> None:
        """Drop what is held of requests that are not among the scheduler's: they were aborted."""
        for name in self.tokens.keys() - requests.keys():
            del self.tokens[name]


def hold_outputs() -> None:
    """In a process with vLLM's engine core, else nothing. Safe to repeat."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None or hasattr(core.EngineCore, COUNT):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    setattr(core.EngineCore, COUNT, _count)
    is_compared = source_digest() in COMPARED
    if not is_compared:
        logging.getLogger("vllm.megasync").warning("this vLLM's scheduler was not compared with ours: all tokens go by its own")
    Scheduler.update_from_output = _holding(Scheduler.update_from_output, is_compared)


async def num_tokens(engine: Any) -> dict[str, int]:
    """How many tokens each request has that has not ended in the core; asked while generation is paused."""
    counts: dict[str, int] = await engine.engine_core.call_utility_async(COUNT)
    return counts


def _count(core: Any) -> dict[str, int]:
    return {name: request.num_output_tokens for name, request in core.scheduler.requests.items() if not request.is_finished()}


def _holding(update: Callable[..., dict[int, Any]], is_compared: bool) -> Callable[..., dict[int, Any]]:
    """The same method, with outputs left out that are held, and plain tokens taken before it if its source `is_compared`."""

    @functools.wraps(update)
    def update_from_output(self: Any, scheduled: Any, ran: Any) -> dict[int, Any]:
        held: Held = self.__dict__.setdefault("_megasync_held", Held())
        if is_compared:
            scheduled = take_plain_tokens(self, scheduled, ran, held.tokens)
        by_client = update(self, scheduled, ran)
        limit = self.max_model_len
        for told in by_client.values():
            told.outputs = [each for each in told.outputs if held.pass_on(each, self.requests.get(each.request_id), limit)]
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
