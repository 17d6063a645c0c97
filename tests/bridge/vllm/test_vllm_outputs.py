"""Outputs of requests that end in vLLM's core, held there: vLLM's own types, no engine.

python -m pytest tests/bridge/vllm/test_vllm_outputs.py
"""

from __future__ import annotations

import inspect
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from bridge.generation import GenerationRequest
from bridge.vllm.serving.requests import sampling_parameters

LIMIT = 64  # max_model_len


def request(**fields: Any) -> Any:
    from vllm.v1.request import Request

    wanted = GenerationRequest((5,), max_new_tokens=9, **fields)
    return Request("0", [5], sampling_parameters(wanted, 0), None)


def output(tokens: list[int], name: str = "0", **fields: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    column = np.array(tokens, np.int32).reshape(-1, 1)
    reported = LogprobsLists(column, column / 8, column[:, 0])
    return EngineCoreOutput(name, list(tokens), new_logprobs=reported, routed_experts=column[:, None].astype(np.uint8), **fields)


STEPS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(deadline=None)  # the first case imports vLLM
@given(STEPS, st.sampled_from(["STOP", "LENGTH"]))
def test_the_last_output_brings_all_tokens_in_order(steps: list[list[int]], reason: str) -> None:
    from vllm.v1.engine import FinishReason

    from bridge.vllm.serving import outputs

    held, other, running = outputs.PendingOutputs(), output([3], "1"), request()
    for tokens in steps[:-1]:
        assert not held.pass_on(output(tokens), running, LIMIT)
        assert not held.pass_on(other, running, LIMIT)
    last = output(steps[-1], finish_reason=FinishReason[reason])
    assert held.pass_on(last, None, LIMIT)
    whole = [token for tokens in steps for token in tokens]
    assert last.new_token_ids == whole and last.finish_reason == FinishReason[reason]
    assert last.new_logprobs.logprob_token_ids[:, 0].tolist() == whole == last.new_logprobs.sampled_token_ranks.tolist()
    assert last.new_logprobs.logprobs[:, 0].tolist() == [token / 8 for token in whole]
    assert last.routed_experts[:, 0, 0].tolist() == whole
    again = output([1], finish_reason=FinishReason.STOP)
    assert held.pass_on(again, None, LIMIT) and again.new_token_ids == [1]


def test_what_the_front_end_needs_at_once_is_not_held() -> None:
    from bridge.vllm.serving import outputs

    held = outputs.PendingOutputs()
    assert held.pass_on(output([3]), request(stop=("end",)), LIMIT)
    assert not held.pass_on(output([3]), request(), LIMIT)
    with_more = output([4], kv_transfer_params={"of": "a connector"})
    assert held.pass_on(with_more, request(), LIMIT) and with_more.new_token_ids == [3, 4]


def test_aborted_requests_leave_nothing() -> None:
    from bridge.vllm.serving import outputs

    held, running = outputs.PendingOutputs(), {name: request() for name in ("0", "1")}
    for name, each in running.items():
        assert not held.pass_on(output([3], name), each, LIMIT)
    held.forget(running)
    assert held.tokens.keys() == running.keys()
    del running["0"]
    held.forget(running)
    assert held.tokens.keys() == {"1"}


def test_what_is_relied_on_in_vllm() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request

    from bridge.vllm.serving import outputs

    assert "update_from_output" in vars(Scheduler) and "update_from_output" not in vars(AsyncScheduler)
    assert not callable(object.__new__(Scheduler))
    assert inspect.iscoroutinefunction(AsyncMPClient.call_utility_async)
    assert "method := getattr(self, method_name)" in inspect.getsource(EngineCoreProc._handle_client_request)
    assert "self.scheduler: " in inspect.getsource(EngineCore.__init__)
    assert isinstance(Request.num_output_tokens, property) and callable(Request.is_finished)
    assert LogprobsLists._fields[:3] == ("logprob_token_ids", "logprobs", "sampled_token_ranks")
    reported = set(EngineCoreOutputs.__struct_fields__)
    assert {"outputs", *outputs.BATCH_FIELDS} <= reported
    assert reported <= {"engine_index", "outputs", "timestamp", "utility_output", "weight_version", *outputs.BATCH_FIELDS}
    assert {"new_prompt_logprobs_tensors", "kv_transfer_params"} <= set(outputs._other_fields(EngineCoreOutput))
    assert set(outputs.JOINED) <= set(EngineCoreOutput.__struct_fields__)
    assert not outputs._has_content(EngineCoreOutputs())
