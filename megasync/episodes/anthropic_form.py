"""Anthropic's messages: requests read, replies written, whole or as a stream. Leaves out images, documents and server tools.

POST /v1/messages {"model": "policy", "max_tokens": 512, "system": "...", "messages": [...], "tools": [...], "stream": true}
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.episodes.asking import Asked, number, objects, refuse, texts
from megasync.episodes.chat import Reply
from megasync.episodes.messages import Message, MessageError, text_of

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicForm:
    """Stateless."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        refuse(body, ("mcp_servers", "container", "output_format"))
        messages: list[Message] = []
        if system := text_of(body.get("system")):
            messages.append({"role": "system", "content": system})
        for message in objects(body, "messages"):
            messages += _messages(message)
        tools = objects(body, "tools")
        if kinds := [tool["type"] for tool in tools if tool.get("type") not in (None, "custom")]:
            raise MessageError(f"tools: type = {kinds[0]!r:.100}: a server's own tool; give tools with an input_schema")
        choice = body.get("tool_choice")
        thinking = body.get("thinking")
        return Asked(
            messages=messages,
            tools=() if isinstance(choice, Mapping) and choice.get("type") == "none" else tools,
            max_tokens=number(body, "max_tokens"),
            stop=texts(body, "stop_sequences"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or "policy"),
            with_reasoning=isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive"),
            body=body,
        )

    def whole(self, asked: Asked, replies: Sequence[Reply]) -> dict[str, Any]:
        return {**_envelope(asked, replies[0], _blocks(asked, replies[0])), **_end(replies[0])}

    def events(self, asked: Asked, replies: Sequence[Reply]) -> list[str]:
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

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


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
    """How a block begins, and its one delta."""
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
    envelope = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": asked.model}
    return {**envelope, "content": list(blocks), "stop_reason": None, "stop_sequence": None, "usage": usage}
