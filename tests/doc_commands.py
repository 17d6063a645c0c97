"""Every command of the README and of docs/, as written: collected from the pages' code blocks, and run in order by hand.

    python -m tests.doc_commands                  # lists the commands and what each of them needs
    python -m tests.doc_commands --run FOLDER     # runs the ones that a CPU can run, in a new clone at FOLDER
    python -m tests.doc_commands --run FOLDER --only tools.md
    python -m tests.doc_commands --run FOLDER --only agents.md --steps 12    # each training ends after so many steps

A page's commands run in the page's order, in one clone for all pages. PLACEHOLDERS and FILES replace names that stand for the
reader's own files. A package that a command's comment installs with pip is installed first. NEEDS says why a command is not
run. The suite checks that each command is one that its program takes (test_doc_commands.py); docs/your_own.md is run there as a
whole (test_your_own.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("README.md", "docs/running.md", "docs/tools.md")
ELSEWHERE = ("docs/your_own.md",)  # tests/test_your_own.py
BLOCKS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {
    "model.path=FOLDER": "model.path=smollm2/model",
    "models/mine": "smollm2/model",
    "data.prompt_key=problem data.answer_key=solution": "data.prompt_key=question data.answer_key=answer",
    "data.prompt_key=problem": "data.prompt_key=question",
}
FILES = {"test.jsonl": "smollm2/held_out.jsonl", "prompts.jsonl": "smollm2/held_out.jsonl"}  # the first NUM_LINES of the source
NUM_LINES = 16
# Why a command is not run here, by the first expression that is found in it.
NEEDS = {
    r"^(bench/gpus|tests/doc_commands_gpu|bench/peers/run)\.sh": "needs a GPU",
    r"-m gpu\b": "needs GPUs",
    r"^megasync train configs/smollm2\.yaml": "needs a GPU; the first lines of the config say what to add on a CPU",
    r"runs/smollm2|--compare runs/grpo-gpu": "needs the run on a GPU before it",
    r"configs/bench_(train|episodes)\.yaml": "needs a GPU",
    r"configs/agents_smollm2\.yaml": "needs a GPU; the first lines of the config say what to add on a CPU",
    r"^\./launch/test\.sh( --all)?$": "it is the suite itself",
    r"-m tests\.|^MEGASYNC_\w+=\w+(,\w+)* python -m pytest": "takes half an hour to hours",
    r"torchrun_nodes\.sh|^touch runs/NAME": "needs several nodes",
    r"^megasync scale runs/NAME": "needs a run that goes on",
    r"^(sbatch|kubectl)": "needs a cluster",
    r"IMAGE": "needs an image",
}
INSTALLS = re.compile(r"\bpip install ([\w-]+)")
UNTIL_STOPPED = re.compile(r"--watch|^megasync serve")
JUDGES = re.compile(r"^megasync doctor")  # exit code 1: this machine is not fit, as it says
SERVES_SECONDS, LIMIT_SECONDS = 20.0, 1800.0


class Command(NamedTuple):
    """One line of a block, continued lines joined, without its comment; `installs`: packages that the comment tells pip to."""

    page: str
    line: str
    installs: str = ""

    @property
    def needs(self) -> str:
        """Why it is not run on a CPU; empty: it is."""
        return next((why for pattern, why in NEEDS.items() if re.search(pattern, self.line)), "")

    @property
    def words(self) -> list[str]:
        """Without variables before it."""
        words = shlex.split(self.line.partition(" > ")[0])
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        return words


def collect() -> list[Command]:
    """All but those of ELSEWHERE."""
    rest = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    pages = [*FIRST, *(page for page in rest if page not in (*FIRST, *ELSEWHERE)), "CONTRIBUTING.md"]
    return [Command(page, *line) for page in pages for line in lines_of((ROOT / page).read_text(encoding="utf-8"))]


def lines_of(page: str) -> Iterator[tuple[str, str]]:
    """Each command, and the packages that its comment installs."""
    for line in "".join(BLOCKS.findall(page)).replace("\\\n", " ").splitlines():
        command, _, comment = re.sub(r"\s+", " ", f" {line}").partition(" #")
        if command.strip():
            yield command.strip(), " ".join(INSTALLS.findall(comment))


def write_files(folder: Path) -> None:
    """Write the entries of FILES that are missing and whose source exists."""
    for name, source in FILES.items():
        if (folder / source).exists() and not (folder / name).exists():
            lines = (folder / source).read_text(encoding="utf-8").splitlines(keepends=True)
            (folder / name).write_text("".join(lines[:NUM_LINES]), encoding="utf-8")


def run(command: Command, clone: Path, steps: int = 0) -> tuple[int, float, str]:
    """Exit code, seconds, output. `steps`: of each training; 0: as many as its config says."""
    line = command.line
    if steps and line.startswith("megasync train "):
        line += f" run.steps={steps}"
    for placeholder, remedy in PLACEHOLDERS.items():
        line = line.replace(placeholder, remedy)
    if command.installs:
        line = f"pip install --quiet {command.installs} && {line}"
    write_files(clone)
    begin = time.monotonic()
    limit = SERVES_SECONDS if UNTIL_STOPPED.search(command.line) else LIMIT_SECONDS
    inherited = {name: value for name, value in os.environ.items() if name not in ("MEGASYNC_PYTHON", "PYTHONPATH")}
    shell = ["timeout", "--signal=INT", f"{limit:g}", "bash", "-c", f"[ ! -e .venv ] || source .venv/bin/activate; {line}"]
    done = subprocess.run(shell, cwd=clone, env=inherited, capture_output=True, text=True, check=False)
    code = 0 if UNTIL_STOPPED.search(command.line) and done.returncode in (124, 130) else done.returncode
    return code, time.monotonic() - begin, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description="The documents' commands, as written.")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="clone there, and run those that a CPU can run")
    parser.add_argument("--only", default="", metavar="PAGE", help="pages whose name holds this")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="of each training (default: those of its config)")
    given = parser.parse_args()
    commands = [command for command in collect() if given.only in command.page]
    if given.run is not None and not given.run.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(given.run)], check=True)
        if given.only:  # else the README's first command does it
            subprocess.run(["./launch/setup.sh"], cwd=given.run, check=True)
    failed = 0
    for command in commands:
        if command.needs or given.run is None:
            print(f"{command.page}: {command.line}" + (f"\n    not run: {command.needs}" if command.needs else ""))
            continue
        code, seconds, said = run(command, given.run, given.steps)
        failed += code not in ((0, 1) if JUDGES.search(command.line) else (0,))
        print(f"{command.page}: {command.line}\n    exit code {code}, {seconds:.0f} s" + (f"\n{said[-4000:]}" if code else ""))
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
