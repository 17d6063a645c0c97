"""`megasync VERB ...`, the one command: a table of verbs. Each is a module with `main(arguments) -> int`, imported on demand.

Exit codes: 0 done; 2 the command or the config is wrong, nothing was started; 1 failed while running; 130 after Ctrl-C; 141
where who reads the output, such as `head`, has had enough. Another verb is one more line of VERBS. Leaves out what the verbs do.

    megasync train configs/quickstart.yaml engine.wrap=ddp      # or: python -m megasync train ...
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import select
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from megasync.config.errors import explain, nearest_name
from megasync.config.own_packages import shadowing
from megasync.config.shipped import how_to_install
from megasync.launch.launcher import forget
from megasync.launch.processes import INTERRUPTED, REFUSED, UNREAD, open_output, run_and_leave


class Verb(NamedTuple):
    """Its module, and a line of help."""

    module: str
    says: str


VERBS = {
    "train": Verb("megasync.train", "train by a config, on this machine's GPUs or CPU"),
    "submit": Verb("megasync.submit", "the same as a Ray job, on a cluster or on one of its own"),
    "quickstart": Verb("megasync.quickstart", "a small model, its data and RL, from nothing"),
    "assets": Verb("megasync.assets", "write a model and data to try it with"),
    "import": Verb(
        "megasync.tools.import_config.command", "a config of verl or TRL as one of ours, and what could not be carried over"
    ),
    "scale": Verb("megasync.scale", "more or fewer replicas for a run that goes on"),
    "export": Verb("megasync.export", "a run's weights as a Hugging Face folder, adapters merged if wanted"),
    "report": Verb("megasync.report", "write a run's report.html"),
    "plan": Verb("megasync.plan", "memory and seconds that a run will take, before it starts"),
    "generate": Verb("megasync.generate", "responses of a run or a model to prompts"),
    "evaluate": Verb("megasync.evaluate", "avg@k and pass@k of a run or a model, with confidence intervals"),
    "bisect": Verb("megasync.bisect", "the first module that trainer and replica of a run compute otherwise"),
    "render": Verb("megasync.launch.render", "a job file for Slurm or KubeRay, from a config"),
    "replay": Verb("megasync.replay", "sample what a step was trained on again, and say whether each token is the same"),
    "doctor": Verb("megasync.doctor", "look for what would make a run fail on this machine, with remedies"),
    "bench": Verb("megasync.bench.cli", "measure weight sync, generation and training"),
}


TRAINS = ("train", "quickstart", "assets", "plan", "generate", "evaluate", "bisect", "replay", "bench")  # need torch, all of them
OF_LANES = (  # what the extras cpu and gpu bring, as Python imports it
    *("torch", "vllm", "ray", "megatron", "megatron_fsdp", "mbridge", "aiohttp", "renderers", "setproctitle", "math_verify"),
    *("matplotlib", "peft", "plotly", "tensorboard"),
)


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.says}" for name, verb in VERBS.items())
    return f"usage: megasync VERB ...\n\n{verbs}\n\nmegasync VERB --help says more, megasync --version which one this is."


def version() -> str:
    """Of the package, and of Python."""
    try:
        own = importlib.metadata.version("megasync")
    except importlib.metadata.PackageNotFoundError:
        own = "from source, not installed"
    return f"megasync {own} (Python {platform.python_version()})"


def main(arguments: Sequence[str]) -> int:
    """The verb's exit code; UNREAD where it ended because nobody reads what it says."""
    try:
        code = run_verb(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if _has_reader():
            raise  # another pipe's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
        return UNREAD
    return code


def run_verb(arguments: Sequence[str]) -> int:
    """Its exit code, or INTERRUPTED."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(version() if arguments and arguments[0] == "--version" else usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else REFUSED
    name, *rest = arguments
    if name not in VERBS:
        near = nearest_name(name, VERBS)
        remedy = f"write megasync {near}" if near else "write one of the choices"
        told = explain(f"megasync {name}: there is no such verb", nearest=near, choices=", ".join(VERBS), remedy=remedy)
        print(told, file=sys.stderr)
        return REFUSED
    if name not in ("train", "doctor") and (left_out := forget(os.environ)):
        print(f"megasync {name}: {left_out} in the environment, of another launcher: left out", file=sys.stderr)
    if name in TRAINS and not {"-h", "--help"} & set(rest) and not find_spec("torch"):
        return _not_installed(name, "torch")
    try:
        run: Callable[[Sequence[str]], int] = importlib.import_module(VERBS[name].module).main
        return run(rest)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in OF_LANES:
            raise
        return _not_installed(name, package)
    except KeyboardInterrupt:
        print(f"megasync {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _not_installed(verb: str, package: str) -> int:
    """`pip install .` has what checks and submits configs."""
    told = explain(f"megasync {verb}: needs the package {package}, which is not installed", remedy=how_to_install())
    print(told, file=sys.stderr)
    return REFUSED


def _has_reader() -> bool:
    """Whether somebody can still read the output."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def entry() -> NoReturn:
    """Of the console script and `python -m megasync`. Rewards are imported from the folder where it is started, in both cases."""
    open_output()
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if files := shadowing(Path.cwd(), OF_LANES):
        remedy = f"rename {files}: Python imports from the working folder first, and would take it for the library of that name"
        print(explain(f"{Path.cwd()} holds {files}", remedy=remedy), file=sys.stderr)
        sys.exit(REFUSED)
    if sys.argv[1:2] == ["train"]:  # which may be a rank, with threads that can hold a process at its end
        run_and_leave(main)
    sys.exit(main(sys.argv[1:]))
