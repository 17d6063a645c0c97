"""Schedulers for vLLM's engine core in which tokens of a request wait until it ends, and which report how many each has.

vLLM's core sends each token to the front end at once (v1/core/sched/scheduler.py:update_from_output), also where the front
end gives one output at the end. Where a request asks for its final output alone, and the core decides by itself when it ends,
nobody needs them earlier. Leaves out requests with stop strings: the front end looks for those. The engine core alone imports it.

Upstream's loop over a step's tokens looks for much that a plain token does not have: on an H200 with 256 running requests of a
3 B model, it and what came with it took 6 ms of a step of 12.8, in which the GPU waited. `take_plain_tokens` appends such tokens
as that loop would, and leaves it the rest: the first and the last token of each request, and all that is not plain. It stands for
the code of the releases in VERIFIED_SOURCES; of others, all tokens go by upstream.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from array import array
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from bridge.generation import Speculation
from bridge.notes import note

VERIFIED_SOURCES = {"b85c5f35d80fb14c": "0.26.0", "fc8ab7a819a5af20": "0.32.0"}  # releases by `source_digest`
# fields of EngineCoreOutput that may come with a request's first output
FIRST_OUTPUT_FIELDS = ("events", "prefill_stats", "num_cached_tokens", "num_external_computed_tokens", "trace_headers")
# what a step's ModelRunnerOutput and a Scheduler may have that upstream's loop brings to each request
FOR_UPSTREAM = (
    (
        *("routed_experts", "prompt_logprobs_dict", "prompt_token_id_logprobs_dict", "pooler_output", "num_nans_in_logits"),
        *("kv_connector_output", "sampling_masks"),
    ),
    ("connector", "aux_output_connector", "is_mm_encoder_only", "perf_metrics"),
)
JOINED = ("request_id", "new_token_ids", "new_logprobs", "routed_experts")
BATCH_FIELDS = ("scheduler_stats", "finished_requests", "wave_complete", "start_wave")  # by EngineCoreOutputs, beside outputs


class HeldTokens:
    """The tokens that one request has generated so far.

    Args:
        output: vLLM's EngineCoreOutput with its first tokens.
        request: The scheduler's Request.
        max_model_len: Of the scheduler, in tokens.
    """

    __slots__ = ("columns", "ends", "experts", "first_fields", "kinds", "last", "request", "tokens", "width")

    def __init__(self, output: Any, request: Any, max_model_len: int) -> None:
        parameters = request.sampling_params
        self.request = request
        self.first_fields = {name: getattr(output, name) for name in FIRST_OUTPUT_FIELDS if getattr(output, name, None)}
        self.tokens: list[int] = []
        # log-probs of a token, of which the batch may have more; None: none; 0: the whole vocabulary's
        self.width: int | None = None if parameters.num_logprobs is None else parameters.num_logprobs + 1
        self.columns: tuple[Any, Any, Any] = (array("q"), array("d"), array("q"))  # LogprobsLists' three, flat
        self.kinds: list[Any] = []
        self.experts: list[np.ndarray] = []
        # a token of these, and one that the limits may make the last, is for upstream to judge
        self.ends = frozenset(parameters.stop_token_ids or ()) | {parameters.eos_token_id}
        self.last = min(request.max_tokens, max_model_len - request.num_prompt_tokens) - 1 if _is_plain(request) else 0
        self.add(output)

    def add(self, output: Any) -> None:
        """The tokens of an output, their log-probs and experts."""
        self.tokens += output.new_token_ids
        if (log_probs := output.new_logprobs) is not None:
            self.kinds = self.kinds or [part.dtype for part in log_probs[:3]]
            for column, part in zip(self.columns, log_probs[:3], strict=True):
                column.extend((part[:, : self.width or None] if part.ndim == 2 else part).ravel().tolist())
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts.copy())  # a view of those of all requests of the step

    def move_to(self, output: Any) -> None:
        """Put all held values before those of `output`; fields that only an earlier output had are kept."""
        self.add(output)
        output.new_token_ids = self.tokens
        if self.kinds:
            ids, values, ranks = (np.array(column, kind) for column, kind in zip(self.columns, self.kinds, strict=True))
            shape = len(ranks), len(ids) // max(1, len(ranks))
            output.new_logprobs = LogprobsLists(ids.reshape(shape), values.reshape(shape), ranks)
        if self.experts:
            output.routed_experts = np.concatenate(self.experts)
        for name, value in self.first_fields.items():
            if not getattr(output, name):
                setattr(output, name, value)


def take_plain_tokens(scheduler: Any, scheduled: Any, ran: Any, held: dict[str, HeldTokens]) -> Any:
    """Append the step's tokens that end nothing to the held ones; the SchedulerOutput of the rest, for upstream.

    A token is plain where upstream's loop would only append it: not the first of its request, which is running, the only one of
    the step and without drafts, none that may end the request, and below the limits.

    Args:
        scheduled: The step's SchedulerOutput.
        ran: Its ModelRunnerOutput.
    """
    if not _is_plain_step(scheduler, ran):
        return scheduled
    is_async = isinstance(scheduler, AsyncScheduler)
    running, stale, requests = RequestStatus.RUNNING, _stale_field(), scheduler.requests
    columns: Any = None if ran.logprobs is None else [_firsts(part) for part in ran.logprobs[:3]]
    rows, sampled, begins = ran.req_id_to_index, ran.sampled_token_ids, getattr(ran.logprobs, "cu_num_generated_tokens", None)
    left = {}
    for name, count in scheduled.num_scheduled_tokens.items():
        tokens, row = held.get(name), rows[name]
        new: Sequence[int] = sampled[row] if sampled else ()
        if (
            tokens is None
            or len(new) != 1
            or count != 1
            or new[0] in tokens.ends
            or (request := tokens.request).status is not running
            or requests.get(name) is not request
            or request.num_output_tokens >= tokens.last
            or (request.events or request.prefill_stats or getattr(request, stale))
            or (tokens.width is not None and columns is None)
        ):
            left[name] = count
            continue
        request.num_in_flight_tokens -= 1
        request.append_output_token_ids(new[0])
        if is_async:
            request.num_output_placeholders -= 1
            computed = request.num_computed_tokens - request.num_output_placeholders
            scheduler.kv_cache_manager.cache_blocks(request, computed)
        tokens.tokens.append(new[0])
        if tokens.width is not None:
            begin = row if begins is None else begins[row]  # requests with drafts have several
            for column, values in zip(tokens.columns, columns, strict=True):
                column.append(values[begin])
    scheduled = copy.copy(scheduled)
    scheduled.num_scheduled_tokens = left
    return scheduled


def source_digest() -> str:
    """Digest of the installed vLLM's code that `take_plain_tokens` replaces; "" where its source is missing."""
    parts = (
        Scheduler.update_from_output,
        Scheduler._update_request_with_output,
        AsyncScheduler,
        check_stop,
        Request.append_output_token_ids,
    )
    try:
        source = "".join(map(inspect.getsource, parts))
    except OSError:
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _is_plain_step(scheduler: Any, ran: Any) -> bool:
    owners = zip((ran, scheduler), FOR_UPSTREAM, strict=True)
    return not any(getattr(owner, name, None) for owner, names in owners for name in names)


def _firsts(part: np.ndarray) -> list[Any]:
    return (part[:, 0] if part.ndim == 2 else part).tolist()  # type: ignore[no-any-return]


def _is_plain(request: Any) -> bool:
    """Whether upstream would look at nothing but a token's own number to see that it ends nothing."""
    others = (request.structured_output_request, request.pooling_params, request.resumable, request.has_encoder_inputs)
    parameters = request.sampling_params
    return not any(others) and parameters.repetition_detection is None and parameters.num_logprobs in (None, 0)


@functools.cache
def _stale_field() -> str:
    """The field of a Request that counts tokens in flight at a preemption. Its name up to vLLM 0.26, and since."""
    return next(name for name in ("num_stale_output_tokens", "async_tokens_to_discard") if name in inspect.getsource(Request))


class PendingOutputs:
    """The outputs that a scheduler holds back, by request."""

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
        """Drop held tokens of requests that the scheduler no longer has: they were aborted."""
        for name in self.tokens.keys() - requests.keys():
            del self.tokens[name]


class HoldingScheduler(Scheduler):  # type: ignore[misc] # mypy does not follow vLLM
    """For synchronous steps. Plain tokens take a short path if the installed vLLM's own was verified against it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = PendingOutputs()
        self._is_verified = source_digest() in VERIFIED_SOURCES
        self._speculation = Speculation()  # since it was last asked for
        if not self._is_verified:
            note("this vLLM's scheduler was not verified: all tokens take its own, slower path")

    def update_from_output(self, scheduled: Any, ran: Any) -> dict[int, Any]:
        """Upstream's, without the outputs that are held."""
        if self._is_verified:
            scheduled = take_plain_tokens(self, scheduled, ran, self._held.tokens)
        by_client: dict[int, Any] = super().update_from_output(scheduled, ran)
        limit = self.max_model_len
        for batch in by_client.values():
            outputs = batch.outputs
            batch.outputs = [each for each in outputs if self._held.pass_on(each, self.requests.get(each.request_id), limit)]
        self._held.forget(self.requests)
        return {client: batch for client, batch in by_client.items() if _has_content(batch)}

    def make_spec_decoding_stats(self, given: Any, *, num_draft_tokens: int, num_accepted_tokens: int, **others: Any) -> Any:
        """Upstream's, which counts nothing unless vLLM logs statistics; called for each request with drafts in a step."""
        self._speculation += Speculation(1, num_draft_tokens, num_accepted_tokens)
        arguments = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens, **others}
        return super().make_spec_decoding_stats(given, **arguments)

    def __call__(self, of: str = "tokens") -> dict[str, int] | tuple[int, ...]:
        """How many tokens each request has that has not ended, or of "speculation" the numbers of Speculation since the last such
        call: vLLM's core calls what it has by the name of a utility, its `scheduler` (v1/engine/core.py:_handle_client_request).
        """
        if of == "speculation":
            taken, self._speculation = self._speculation, Speculation()
            return astuple(taken)
        return {name: request.num_output_tokens for name, request in self.requests.items() if not request.is_finished()}


class AsyncHoldingScheduler(HoldingScheduler, AsyncScheduler):  # type: ignore[misc]
    """For a core that schedules a step while the one before runs."""


def _has_content(batch: Any) -> bool:
    return bool(batch.outputs) or any(getattr(batch, name) is not None for name in BATCH_FIELDS)


def _waits_for_end(request: Any) -> bool:
    parameters = request.sampling_params
    return parameters is not None and parameters.output_kind == RequestOutputKind.FINAL_ONLY and not parameters.detokenize


def _has_tokens_alone(output: Any) -> bool:
    if output.finish_reason is not None:
        return False
    return all(getattr(output, name) is None for name in _other_fields(output.__class__))


@functools.cache
def _other_fields(kind: Any) -> tuple[str, ...]:
    """The fields of EngineCoreOutput that are None in an output with tokens only."""
    defaults = zip(kind.__struct_fields__[-len(kind.__struct_defaults__) :], kind.__struct_defaults__, strict=True)
    return tuple(name for name, default in defaults if default is None and name not in (*JOINED, *FIRST_OUTPUT_FIELDS))
