"""Anthropic's messages: requests read, replies written, whole or as a stream. Leaves out images, documents and server tools.

POST /v1/messages {"model": "policy", "max_tokens": 512, "system": "...", "messages": [...], "tools": [...], "stream": true}
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.episodes.chat import Reply
from megasync.episodes.messages import Message, MessageError, text_of
from megasync.episodes.upstream_requests import DRAWN, ERROR_KINDS, Asked, KnownFields, mapping, number, objects, only, texts

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


FIELDS = KnownFields(
    taken=frozenset(
        {"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thinking", "model"}
        | {"chat_template_kwargs"}
    ),
    harmless=frozenset(
        {"metadata", "cache_control", "service_tier", "inference_geo", "user_profile_id", "workspace_id", "diagnostics", "betas"}
        | {"billing_policy"}
    ),
    of_run=DRAWN,
    neutral={"speed": ("standard",)},
)


def read(body: Mapping[str, Any]) -> Asked:
    of_run = FIELDS.check(body)
    messages: list[Message] = []
    if system := text_of(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in objects(body, "messages"):
        for made in _messages(message):
            if made["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
                messages[-1] = _joined(messages[-1], made)  # Anthropic documents two in a row as one
            else:
                messages.append(made)
    tools, is_forced = _tools(body)
    thinking = mapping(body, "thinking")
    if thinking.get("type", "disabled") not in ("enabled", "adaptive", "disabled"):
        raise MessageError(f"thinking: type = {thinking['type']!r:.100}: write enabled, adaptive or disabled")
    more = {"tool_choice": is_forced, "thinking.budget_tokens": bool(thinking.get("budget_tokens"))}
    return Asked(
        messages=messages,
        tools=tools,
        max_tokens=number(body, "max_tokens"),
        stop=texts(body, "stop_sequences"),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "policy"),
        with_reasoning=thinking.get("type") in ("enabled", "adaptive"),
        continues=bool(messages) and messages[-1]["role"] == "assistant",
        template=mapping(body, "chat_template_kwargs"),
        without_effect=(*of_run, *(name for name, is_said in more.items() if is_said)),
        body=body,
    )


def whole(asked: Asked, replies: Sequence[Reply]) -> dict[str, Any]:
    return {**_envelope(asked, replies[0], _blocks(asked, replies[0])), **_end(replies[0])}


def events(asked: Asked, replies: Sequence[Reply]) -> list[str]:
    reply = replies[0]
    made: list[dict[str, Any]] = [{"type": "message_start", "message": _envelope(asked, reply, [])}]
    for index, block in enumerate(_blocks(asked, reply)):
        empty, delta = _streamed(block)
        made += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    made += [
        {"type": "message_delta", "delta": _end(reply), "usage": {"output_tokens": reply.num_sampled_tokens}},
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in made]


def error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ERROR_KINDS.get(status, "api_error"), "message": message}}


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The tools that the policy may call, and whether the program wants it to call one."""
    tools, choice = objects(body, "tools"), mapping(body, "tool_choice")
    if kinds := [tool["type"] for tool in tools if tool.get("type") not in (None, "custom")]:
        raise MessageError(f"tools: type = {kinds[0]!r:.100}: a server's own tool; give tools with an input_schema")
    if choice.get("disable_parallel_tool_use"):
        raise MessageError("tool_choice: disable_parallel_tool_use: the policy may call several tools; leave it out")
    kind = choice.get("type", "auto")
    if kind not in ("auto", "any", "tool", "none"):
        raise MessageError(f"tool_choice: type = {kind!r:.100}: write auto, any, tool or none")
    if kind in ("none", "tool"):
        return () if kind == "none" else only(tools, choice.get("name")), kind == "tool"
    return tools, kind == "any"


def _joined(one: Message, other: Message) -> Message:
    made = {**one, **other, "content": one["content"] + other["content"]}
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    reasoning = one.get("reasoning", "") + other.get("reasoning", "")
    return {**made, **({"tool_calls": calls} if calls else {}), **({"reasoning": reasoning} if reasoning else {})}


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """One of theirs may be several of ours: each tool result is a message of its own, before what the user says beside it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise MessageError(f"a message's role is {role!r:.100}: write user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    made: Message = {"role": role}
    results: list[Message] = []
    parts, calls, thoughts = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else "text"
        if kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text_of(block.get("content"))})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            parts.append(block)
    made["content"] = text_of(parts)
    made.update({name: value for name, value in (("tool_calls", calls), ("reasoning", "".join(thoughts))) if value})
    return [*results, made] if parts or calls or not results else results


def _blocks(asked: Asked, reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if asked.with_reasoning and message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": "policy"})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls or ():
        given = json.loads(call.function.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": given})
    return blocks


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The start of a block, and its only delta."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.stopped_by and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _envelope(asked: Asked, reply: Reply, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    usage = {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_sampled_tokens}
    envelope: dict[str, Any] = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
    }
    if reply.message.invalid_tool_calls:
        envelope["invalid_tool_calls"] = reply.message.invalid_tool_calls
    return {**envelope, "content": list(blocks), "stop_reason": None, "stop_sequence": None, "usage": usage}
