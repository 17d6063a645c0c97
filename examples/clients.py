"""Episodes with unchanged programs: OpenAI's and Anthropic's official clients, and the openai-agents framework.

Each asks the question, runs the tool that the model calls, and reads the answer; the server behind `model.serve()` records the
sampled and the given tokens. Copy the one that is most similar to your program. Creating a client takes 30 ms, mostly for TLS
certificates that the loopback does not need: the episodes of a process share one client, each with its own address and key.
Leaves out the model and the data (chat_calculator.py). No torch in here.

    rollout: {episode: examples.clients:by_openai}      # or by_anthropic, or by_agents (pip install openai-agents)
"""

from __future__ import annotations

import functools
import json
from typing import Any

MAX_TURNS = 2
ABOUT = "The product of two whole numbers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    return a * b


def result_of(arguments: Any) -> str:
    """The result of a call that the model wrote, as text; ? if the arguments are wrong."""
    try:
        return str(multiply(int(arguments["a"]), int(arguments["b"])))
    except (KeyError, TypeError, ValueError):
        return "?"


@functools.cache
def openai_client() -> Any:
    """The client of this process; `with_options` sets the address and key of an episode."""
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


@functools.cache
def anthropic_client() -> Any:
    """The client of this process, as `openai_client`."""
    import anthropic

    return anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="none")


async def by_openai(task: Any, model: Any) -> float:
    """The loop that OpenAI's documentation shows for function calling."""
    tools: Any = [{"type": "function", "function": {"name": "multiply", "description": ABOUT, "parameters": PARAMETERS}}]
    messages: Any = [{"role": "user", "content": task.prompt}]
    async with model.serve() as access:
        client = openai_client().with_options(base_url=access.openai_url, api_key=access.key)
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = completion.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = result_of(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
    return float(message.content == task.answer)


async def by_anthropic(task: Any, model: Any) -> float:
    """The loop that Anthropic's documentation shows for tool use."""
    tools: Any = [{"name": "multiply", "description": ABOUT, "input_schema": PARAMETERS}]
    messages: Any = [{"role": "user", "content": task.prompt}]
    async with model.serve() as access:
        client = anthropic_client().with_options(base_url=access.anthropic_url, api_key=access.key)
        for _ in range(MAX_TURNS):
            said = await client.messages.create(model="policy", max_tokens=64, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": said.content})
            calls = [block for block in said.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": result_of(call.input)} for call in calls]
            if not calls:
                break
            messages.append({"role": "user", "content": results})
    return float("".join(block.text for block in said.content if block.type == "text") == task.answer)


async def by_agents(task: Any, model: Any) -> float:
    """An agent with a function for a tool: the loop is the framework's."""
    import agents

    agents.set_tracing_disabled(True)
    async with model.serve() as access:
        client = openai_client().with_options(base_url=access.openai_url, api_key=access.key)
        policy = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = agents.Agent(name="calculator", tools=[agents.function_tool(multiply)], model=policy)
        try:
            run = await agents.Runner.run(agent, task.prompt, max_turns=MAX_TURNS)
        except agents.exceptions.MaxTurnsExceeded:
            return 0.0
    return float(run.final_output == task.answer)
