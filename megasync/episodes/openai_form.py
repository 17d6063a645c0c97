"""OpenAI's chat completions: requests read, replies written, whole or as a stream. Leaves out the Responses API and embeddings.

POST /v1/chat/completions {"model": "policy", "messages": [...], "tools": [...], "n": 2, "stream": true}
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.episodes.chat import Reply
from megasync.episodes.messages import MessageError
from megasync.episodes.upstream_requests import (
    DRAWN,
    ERROR_KINDS,
    MAX_SAMPLES,
    Asked,
    KnownFields,
    flag,
    mapping,
    number,
    objects,
    only,
    texts,
)

FIELDS = KnownFields(
    taken=frozenset(
        {"model", "messages", "tools", "tool_choice", "max_completion_tokens", "max_tokens", "stop", "n", "stream"}
        | {"stream_options", "response_format", "reasoning_effort"}
        | {"chat_template_kwargs", "continue_final_message", "add_generation_prompt"}
    ),
    harmless=frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"prompt_cache_options", "priority", "request_id", "cache_salt"}
    ),
    of_run=DRAWN,
    neutral={
        "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "verbosity": ("medium",),
        "repetition_penalty": (1,), "parallel_tool_calls": (True,), "modalities": (["text"],), "function_call": ("none",),
        "echo": (False,), "min_tokens": (0,), "ignore_eos": (False,), "include_reasoning": (True,),
    },
)  # fmt: skip


BEGINS = ("prefix", "partial")  # by which protocols like this one say, in a last message, that the model is to continue it


def read(body: Mapping[str, Any]) -> Asked:
    of_run = FIELDS.check(body)
    if mapping(body, "response_format").get("type", "text") != "text":
        raise MessageError("response_format: the policy writes text; leave it out, and read the text")
    tools, is_forced = _tools(body)
    limit = number(body, "max_completion_tokens") or number(body, "max_tokens")
    effort = {"reasoning_effort": body["reasoning_effort"]} if body.get("reasoning_effort") else {}
    return Asked(
        messages=objects(body, "messages"),
        tools=tools,
        max_tokens=limit,
        stop=texts(body, "stop"),
        num_samples=number(body, "n", most=MAX_SAMPLES) or 1,
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "policy"),
        with_usage=bool(mapping(body, "stream_options").get("include_usage")),
        continues=_continues(body),
        template={**effort, **mapping(body, "chat_template_kwargs")},
        without_effect=(*of_run, "tool_choice") if is_forced else of_run,
        body=body,
    )


def whole(asked: Asked, replies: Sequence[Reply]) -> dict[str, Any]:
    choices = [
        {"index": index, "message": _message(reply), "logprobs": None, "finish_reason": reply.finish_reason}
        for index, reply in enumerate(replies)
    ]
    return {**_head(asked, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def events(asked: Asked, replies: Sequence[Reply]) -> list[str]:
    head = _head(asked, "chat.completion.chunk")
    choices = [choice for index, reply in enumerate(replies) for choice in _streamed(index, reply)]
    chunks = [{**head, "choices": [choice]} for choice in choices]
    if asked.with_usage:
        chunks.append({**head, "choices": [], "usage": _usage(replies)})
    return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]


def error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": ERROR_KINDS.get(status, "server_error"), "param": None, "code": None}}


def _continues(body: Mapping[str, Any]) -> bool:
    """Whether the model continues the last message, by the rules of vLLM's server."""
    continues, begins = flag(body, "continue_final_message"), flag(body, "add_generation_prompt")
    if continues and begins:
        raise MessageError("continue_final_message and add_generation_prompt: write one of them as true")
    if begins is False and not continues:
        raise MessageError("add_generation_prompt = False: goes with continue_final_message = true alone")
    last = objects(body, "messages")[-1:]
    return bool(continues) or any(message.get(name) is True for message in last for name in BEGINS)


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The tools that the policy may call, and whether the program wants it to call one."""
    tools = objects(body, "tools")
    choice = body.get("tool_choice") or "auto"
    if choice in ("auto", "none", "required"):
        return () if choice == "none" else tools, choice == "required"
    choice = mapping(body, "tool_choice")
    kind = choice.get("type")
    if kind == "function":
        return only(tools, mapping(choice, "function").get("name")), True
    if kind == "allowed_tools":
        allowed = mapping(choice, "allowed_tools")
        names = [mapping(tool, "function").get("name") for tool in objects(allowed, "tools")]
        return [tool for name in names for tool in only(tools, name)], allowed.get("mode") == "required"
    raise MessageError(f"tool_choice = {choice!r:.100}: write auto, none, required or a function's name")


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": asked.model}


def _message(reply: Reply) -> dict[str, Any]:
    message = {name: value for name, value in reply.message.items() if name != "finish_reason"}
    return {**message, "content": message["content"] or (None if "tool_calls" in message else ""), "refusal": None}


def _streamed(index: int, reply: Reply) -> list[dict[str, Any]]:
    """The role, then each part whole: tokens come from the replica when the answer has ended."""
    message = _message(reply)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning", "content") if message.get(name)]
    deltas += [{name: message[name]} for name in ("invalid_tool_calls",) if message.get(name)]
    deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(message.get("tool_calls", ()))]
    reasons = [*[None] * len(deltas), reply.finish_reason]
    return [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        for delta, reason in zip([*deltas, {}], reasons, strict=True)
    ]


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    """The prompt once, however many samples it has."""
    prompt, sampled = max(reply.num_prompt_tokens for reply in replies), sum(reply.num_sampled_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
