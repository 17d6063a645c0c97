"""Schedulers for vLLM's engine core in which tokens of a request wait until it ends, and which tell how many each has.

vLLM's core tells the front end of each token as it comes (v1/core/sched/scheduler.py:update_from_output), also where the front
end gives one output at the end. Where a request asks for its final output alone, and the core decides by itself when it ends,
nobody needs them earlier. Leaves out requests with stop strings: the front end looks for those. The engine core alone imports it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from bridge.notes import note
from bridge.vllm.serving.plain_tokens import COMPARED, TOLD, HeldTokens, source_digest, take_plain_tokens

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


class HoldingScheduler(Scheduler):  # type: ignore[misc] # mypy does not follow vLLM
    """For steps one after another; plain tokens go a short way where vLLM's own was compared with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = Held()
        self._is_compared = source_digest() in COMPARED
        if not self._is_compared:
            note("this vLLM's scheduler was not compared with ours: all tokens go by its own")

    def update_from_output(self, scheduled: Any, ran: Any) -> dict[int, Any]:
        """As upstream's, without outputs that are held."""
        if self._is_compared:
            scheduled = take_plain_tokens(self, scheduled, ran, self._held.tokens)
        by_client: dict[int, Any] = super().update_from_output(scheduled, ran)
        limit = self.max_model_len
        for told in by_client.values():
            told.outputs = [each for each in told.outputs if self._held.pass_on(each, self.requests.get(each.request_id), limit)]
        self._held.forget(self.requests)
        return {client: told for client, told in by_client.items() if _says_something(told)}

    def __call__(self) -> dict[str, int]:
        """How many tokens each request has that has not ended: vLLM's core calls what it has by the name of a utility, such as
        its `scheduler` (v1/engine/core.py:_handle_client_request).
        """
        return {name: request.num_output_tokens for name, request in self.requests.items() if not request.is_finished()}


class AsyncHoldingScheduler(HoldingScheduler, AsyncScheduler):  # type: ignore[misc]
    """For a core that schedules a step while the one before runs."""


def _says_something(told: Any) -> bool:
    return bool(told.outputs) or any(getattr(told, name) is not None for name in SAID)


def _waits_for_end(request: Any) -> bool:
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
