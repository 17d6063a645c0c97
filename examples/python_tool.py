"""A tool for episodes: runs the model's Python code in a sandbox (sandbox.py) and returns its output.

Limits time, memory, processes, files and output; processes that the code started are killed at its end. Leaves out state between
calls: each runs in a new process.

    tool = PythonTool()
    reply = await model.chat(messages, tools=[tool.description])
    result = await tool(reply.tool_calls[0].function.arguments)      # a text for the model
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.sandbox import ENVIRONMENT, Limits, Sandbox, sandbox

POLL_SECONDS = 0.05
OWN_PROCESSES = 4  # processes of the sandbox itself
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a run, stdout and stderr in the order of writing, and how it ended."""

    output: str
    exit_code: int  # negative: minus the signal's number
    stopped: str = ""  # the limit that ended it

    def text(self) -> str:
        """The result as text for the model."""
        notes = [f"[stopped: {self.stopped}]"] if self.stopped else [f"[exit code {self.exit_code}]"] * bool(self.exit_code)
        return "\n".join([*([self.output.rstrip("\n")] if self.output.strip() else []), *notes])


class PythonTool:
    """`kind`: the kind of sandbox; None: the first one that works on this machine.

    Raises:
        SandboxError: no sandbox works on this machine.
    """

    def __init__(self, limits: Limits | None = None, kind: Sandbox | None = None) -> None:
        self.limits = limits or Limits()
        self._sandbox = kind or sandbox()
        about = f"Runs a Python program without network and returns what it prints. It has {self.limits.seconds:g} seconds."
        code = {"type": "string", "description": "The program. Only its printed output is returned."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        self.description: dict[str, Any] = {
            "type": "function",
            "function": {"name": "python", "description": about, "parameters": parameters},
        }

    async def __call__(self, arguments: str | dict[str, Any]) -> str:
        """Runs a call with the `arguments` that the model wrote; returns the result, or an error, as text for the model."""
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            code = given["code"]
        except (ValueError, KeyError, TypeError):
            code = None
        if not isinstance(code, str):
            return 'error: the arguments must be {"code": "a Python program"}'
        return (await self.run(code)).text()

    async def run(self, code: str) -> Outcome:
        """Runs a program. Cancelling the task kills the program."""
        with tempfile.TemporaryDirectory(prefix="megasync-python-") as folder:
            process = await asyncio.create_subprocess_exec(
                *self._sandbox.command(self.limits, folder),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env=ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
            try:
                return await self._watched(process, code)
            finally:
                _kill(process.pid)
                await process.wait()

    async def _watched(self, process: asyncio.subprocess.Process, code: str) -> Outcome:
        assert process.stdin
        assert process.stdout
        output = bytearray()
        feeding = asyncio.create_task(_feed(process.stdin, code.encode(errors="replace")))
        reading = asyncio.create_task(_read(process.stdout, output, self.limits.output_characters))
        watching = asyncio.create_task(_watch(process.pid, self.limits))
        tasks = {feeding, reading, watching}
        try:
            done, _ = await asyncio.wait({reading, watching}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            stopped = next((task.result() for task in done if task.result()), "")
            if not done:
                stopped = f"ran longer than {self.limits.seconds:g} s"
            if stopped:
                _kill(process.pid)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        while await process.stdout.read(CHUNK_BYTES):  # asyncio reports the exit only after the pipe is drained
            pass
        code_of_exit = await process.wait()
        text = output.decode(errors="replace")[: self.limits.output_characters]
        return Outcome(text, 128 - code_of_exit if code_of_exit > 128 else code_of_exit, stopped)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        os.killpg(group, signal.SIGKILL)


async def _feed(stdin: asyncio.StreamWriter, code: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stdin.write(code)
        await stdin.drain()
        stdin.close()


async def _read(stdout: asyncio.StreamReader, output: bytearray, max_characters: int) -> str:
    """Reads until the program's last process ends; returns the limit that was exceeded, or an empty text."""
    while chunk := await stdout.read(CHUNK_BYTES):
        output += chunk
        if len(output) > 4 * max_characters or len(output.decode(errors="replace")) > max_characters:
            return f"printed more than {max_characters} characters"
    return ""


async def _watch(pid: int, limits: Limits) -> str:
    """Returns the exceeded limit. For limits that the kernel only enforces per process, or not for root."""
    for number in itertools.count():
        found = list(_below(pid))
        if sum(found) > limits.memory_bytes:
            return f"took more than {limits.memory_bytes >> 20} MiB of memory"
        if len(found) > limits.processes + OWN_PROCESSES:
            return f"had more than {limits.processes} processes"
        await asyncio.sleep(POLL_SECONDS if number < 40 else 5 * POLL_SECONDS)
    return ""


def _below(pid: int) -> Iterator[int]:
    """Resident bytes of each descendant process; empty if the kernel does not list children."""
    with contextlib.suppress(OSError):
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
        for child in children:
            with contextlib.suppress(OSError):
                yield int(Path(f"/proc/{child}/statm").read_text().split()[1]) * PAGE_BYTES
            yield from _below(int(child))
