"""Every command of the README and of docs/ is one that its program takes: verbs, flags, keys and values."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.config import BenchRoot
from megasync.checks.settings import check_settings
from megasync.cli import MODULES
from megasync.config.load import load_config
from tests.doc_commands import ELSEWHERE, NEEDS, PLACEHOLDERS, ROOT, Command, collect

COMMANDS = collect()
NUM_RANKS = 8  # which all layouts divide
SCRIPTS = {
    "./launch/torchrun_one_node.sh": "megasync.train",
    "./launch/torchrun_nodes.sh": "megasync.nodes",
    "./launch/quickstart.sh": "megasync.tools.quickstart.command",
}
# Not ours, or files that test_docs.py looks for.
OTHERS = (
    *("source", "touch", "sbatch", "kubectl", "python"),
    *("./launch/test.sh", "./launch/check_locks.sh", "bench/gpus.sh", "bench/peers/run.sh"),
    "tests/doc_commands_gpu.sh",
)


class Parsed(Exception):
    """Ends a program where it would begin."""


def parsed(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the parser of its `main` makes of them; what it refuses fails the test."""
    real = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}
    found = []

    def stop(name: str) -> Any:
        def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
            with monkeypatch.context() as patch:  # parse_intermixed_args calls the other
                patch.setattr(argparse.ArgumentParser, "parse_args", real["parse_args"])
                found.append(real[name](self, args, namespace))
            raise Parsed

        return parse

    for name in real:
        monkeypatch.setattr(argparse.ArgumentParser, name, stop(name))
    with pytest.raises(Parsed):
        importlib.import_module(module).main(arguments)
    return found[0]


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """The module whose `main` a command of ours calls, and its arguments; module "": not ours."""
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        module, *rest = rest[1:]
        program = "megasync" if module == "megasync" else ""
    if program == "megasync":
        return MODULES[rest[0]], rest[1:]
    if program:
        return "" if program in OTHERS else SCRIPTS[program], rest
    return "bench.cli" if module == "bench" else module, rest


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rest = module_of(command.words)
    if not module:
        return
    if module.startswith("tests."):
        assert importlib.util.find_spec(module) is not None
        return
    if module == "pytest":
        assert not {word for word in rest if "/" in word and not (ROOT / word).exists()}
        return
    given = parsed(module, rest, monkeypatch)
    overrides = getattr(given, "overrides", [])
    if module == "megasync.tools.quickstart.command":
        load_config(ROOT / "configs/quickstart.yaml", overrides)
    elif config := getattr(given, "config", None):
        is_bench = module.startswith("bench")
        loaded = load_config(ROOT / config, overrides, **({"root": BenchRoot} if is_bench else {}))
        if module == "megasync.train":
            check_settings(loaded, NUM_RANKS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{Path(command.page).stem}: {command.line[:60]}")
def test_programs_take_their_commands(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(command, monkeypatch)


def test_what_is_said_of_commands_is_said_of_some() -> None:
    """No reason and no placeholder without a command."""
    lines = [command.line for command in COMMANDS]
    assert len(lines) > 40
    for pattern in NEEDS:
        assert any(re.search(pattern, line) for line in lines), pattern
    for placeholder in PLACEHOLDERS:
        assert any(placeholder in line for line in lines), placeholder
    assert all((ROOT / page).is_file() for page in ELSEWHERE)


def test_what_a_comment_says_pip_is_to_install_goes_with_its_command() -> None:
    installs = {command.installs: command.line for command in COMMANDS if command.installs}
    assert installs["skyrl-gym"].endswith("configs/agents_gym.yaml") and installs["openai-agents"].endswith("clients:by_agents")
    assert not any("#" in command.line for command in COMMANDS)


def test_the_list_prints() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.doc_commands"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "not run: needs a GPU" in done.stdout
