"""Conversations for chat templates that know no tools, or no system message.

Tools are described in the system message, in the hermes form, and their results are messages of the user. A system message is put
before the first message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megasync.episodes.messages import Message, Tool

TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def fold(
    messages: Sequence[Message], tools: Sequence[Tool], *, with_tools: bool, with_system: bool
) -> tuple[list[Message], Sequence[Tool]]:
    """The messages, and the tools that are left to the template. With folded tools, messages of the user in a row become one."""
    made = [dict(message) for message in messages]
    if with_tools:
        made = _joined([_without_tools(message) for message in made])
        if tools:
            described = TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            if made and made[0]["role"] == "system":
                made[0]["content"] += f"\n\n{described}"
            else:
                made.insert(0, {"role": "system", "content": described})
        tools = ()
    if with_system and len(made) > 1 and made[0]["role"] == "system" and made[1]["role"] == "user":
        system = made.pop(0)
        made[0]["content"] = f"{system['content']}\n\n{made[0]['content']}"
    return made, tools


def _without_tools(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in message["tool_calls"]]
    content = [message["content"]] if message["content"] else []
    return {**{name: message[name] for name in message if name != "tool_calls"}, "content": "\n".join([*content, *calls])}


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Templates that want roles in turn refuse two messages of the user in a row, as results of two tools would be."""
    made: list[Message] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1]["content"] += f"\n{message['content']}"
        else:
            made.append(message)
    return made
