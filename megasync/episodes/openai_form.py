"""OpenAI's chat completions: requests read, replies written, whole or as a stream. Leaves out the Responses API and embeddings.

POST /v1/chat/completions {"model": "policy", "messages": [...], "tools": [...], "n": 2, "stream": true}
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.episodes.asking import MOST_SAMPLES, Asked, number, objects, refuse, texts
from megasync.episodes.chat import Reply
from megasync.episodes.messages import MessageError

NOT_THERE = ("logprobs", "top_logprobs", "logit_bias", "audio", "functions", "prediction")


class OpenAIForm:
    """Stateless."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        refuse(body, NOT_THERE)
        response_format = body.get("response_format") or {"type": "text"}
        if not isinstance(response_format, Mapping) or response_format.get("type") != "text":
            raise MessageError("response_format: the policy writes text; leave it out, and read the text")
        options = body.get("stream_options") or {}
        limit = number(body, "max_completion_tokens") or number(body, "max_tokens")
        return Asked(
            messages=objects(body, "messages"),
            tools=objects(body, "tools") if body.get("tool_choice") != "none" else (),
            max_tokens=limit,
            stop=texts(body, "stop"),
            num_samples=number(body, "n", most=MOST_SAMPLES) or 1,
            stream=bool(body.get("stream")),
            model=str(body.get("model") or "policy"),
            with_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            body=body,
        )

    def whole(self, asked: Asked, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            {"index": index, "message": _message(reply), "logprobs": None, "finish_reason": reply.finish_reason}
            for index, reply in enumerate(replies)
        ]
        return {**_head(asked, "chat.completion"), "choices": choices, "usage": _usage(replies)}

    def events(self, asked: Asked, replies: Sequence[Reply]) -> list[str]:
        head = _head(asked, "chat.completion.chunk")
        choices = [choice for index, reply in enumerate(replies) for choice in _streamed(index, reply)]
        chunks = [{**head, "choices": [choice]} for choice in choices]
        if asked.with_usage:
            chunks.append({**head, "choices": [], "usage": _usage(replies)})
        return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}.get(status, "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


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
