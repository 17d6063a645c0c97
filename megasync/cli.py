"""`megasync VERB ...`, the one command: a table of verbs. Each is a module with `main(arguments) -> int`, imported on demand.

Exit codes: 0 done; 2 the command or the config is wrong, nothing was started; 1 failed while running; 130 after Ctrl-C; 141 if
the reader of the output, such as `head`, closed it. A new verb is one more line of VERBS. Leaves out the verbs (tools/).

    megasync train configs/quickstart.yaml engine.wrap=ddp      # or: python -m megasync train ...
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from megasync.config.errors import DISK_FULL, explain, nearest_name
from megasync.config.own_packages import shadowing
from megasync.config.shipped import how_to_install
from megasync.launch.launcher import forget
from megasync.launch.processes import INTERRUPTED, REFUSED, UNREAD, run_and_leave, survive_closed_output

VERBS = {  # one line of help each
    "train": "train with a config, on this machine's GPUs or CPU",
    "submit": "train as a Ray job, on a running cluster or a new local one",
    "serve": "serve an engine to clients that write the training loop themselves (Tinker's API)",
    "quickstart": "train a small model with RL, from nothing, in a few minutes",
    "assets": "write a small model and data for experiments",
    "import": "convert a config of verl or TRL, and list keys without a counterpart",
    "scale": "change the number of replicas of an active run",
    "export": "write a run's weights as a Hugging Face folder, optionally with adapters merged",
    "report": "write a run's report.html",
    "plan": "estimate memory and step time of a run before it starts",
    "generate": "write responses of a run or a model to prompts",
    "evaluate": "avg@k and pass@k of a run or a model, with confidence intervals",
    "bisect": "find the first module whose outputs differ between a run's trainer and replica",
    "render": "write a job file for Slurm or KubeRay from a config",
    "replay": "sample a step's training data again, and compare it token by token",
    "doctor": "check this machine for problems that would make a run fail, with remedies",
}
MODULES = {verb: f"megasync.tools.{verb}.command" for verb in VERBS} | {
    "train": "megasync.train",
    "submit": "megasync.submit",
    "serve": "megasync.service.command",
    "render": "megasync.launch.render",
    "import": "megasync.tools.import_config.command",
}
NEED_TORCH = ("train", "serve", "quickstart", "assets", "plan", "generate", "evaluate", "bisect", "replay")
OF_LANES = (  # modules of the packages that the extras cpu and gpu install
    *("torch", "vllm", "ray", "megatron", "megatron_fsdp", "mbridge", "aiohttp", "renderers", "setproctitle", "math_verify"),
    *("matplotlib", "peft", "plotly", "tensorboard"),
)
KEY_AS_OPTION = re.compile(r"--?[a-z]\w*\.[a-z]")  # no option has a dot in its name


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {help_line}" for name, help_line in VERBS.items())
    return f"usage: megasync VERB ...\n\n{verbs}\n\nmegasync VERB --help shows its options, megasync --version the version."


def version() -> str:
    """Versions of megasync and Python, as text."""
    try:
        own = importlib.metadata.version("megasync")
    except importlib.metadata.PackageNotFoundError:
        own = "from source, not installed"
    return f"megasync {own} (Python {platform.python_version()})"


def main(arguments: Sequence[str]) -> int:
    """Runs the verb and returns its exit code; INTERRUPTED after Ctrl-C, UNREAD if the reader closed the output, 1 if a disk is
    full.
    """
    try:
        try:
            code = run_verb(arguments)
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"megasync {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if _has_reader():
            raise  # of another pipe
        code = UNREAD
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        has_room, code = _has_room(), 1
        file = (error.filename or "a file that it writes") if has_room else "its output"
        remedy = "free space on that disk, or write to another one"
        print(explain(f"megasync {arguments[0]}: {file}: {error.strerror}", remedy=remedy), file=sys.stderr)
        if has_room:
            return code
    else:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # later writes are discarded
    return code


def run_verb(arguments: Sequence[str]) -> int:
    """Runs the verb and returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(version() if arguments and arguments[0] == "--version" else usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else REFUSED
    name, *rest = arguments
    if problem := _problem(name, rest):
        print(problem, file=sys.stderr)
        return REFUSED
    if name not in ("train", "doctor") and (left_out := forget(os.environ)):
        print(f"megasync {name}: ignores {left_out}, which another launcher set in the environment", file=sys.stderr)
    if name in NEED_TORCH and not {"-h", "--help"} & set(rest) and not find_spec("torch"):
        return _not_installed(name, "torch")
    try:
        run: Callable[[Sequence[str]], int] = importlib.import_module(MODULES[name]).main
        return run(rest)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in OF_LANES:
            raise
        return _not_installed(name, package)


def _problem(name: str, arguments: Sequence[str]) -> str:
    """The message for an unknown verb, or for a config key that is written as an option; else empty."""
    if name not in VERBS:
        near = nearest_name(name, VERBS)
        remedy = f"write megasync {near}" if near else "write one of the choices"
        if name == "bench":
            near, remedy = "", "write python -m bench, in a clone of the repository"
        return explain(f"megasync {name}: there is no such verb", nearest=near, choices=", ".join(VERBS), remedy=remedy)
    if option := next((each for each in arguments if KEY_AS_OPTION.match(each)), ""):
        key, _, value = option.lstrip("-").partition("=")
        return explain(f"{option}: a key of a config is written without dashes", remedy=f"write {key}={value or 'VALUE'}")
    return ""


def _not_installed(verb: str, package: str) -> int:
    """Prints the message for a missing package: a plain `pip install .` has none for training."""
    headline = f"megasync {verb}: needs the package {package}, which is not installed"
    print(explain(headline, remedy=how_to_install()), file=sys.stderr)
    return REFUSED


def _has_reader() -> bool:
    """Whether the reading end of stdout is still open."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _has_room() -> bool:
    """Whether stdout takes one more byte."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.errno not in DISK_FULL
    return True


def entry() -> NoReturn:
    """Of the console script and of `python -m megasync` (__main__.py). Both import rewards from the working folder."""
    if sys.getfilesystemencoding() == "ascii":  # as by LC_ALL=C with PYTHONUTF8=0: names that are not ASCII could not be opened
        os.execve(sys.executable, sys.orig_argv, {"PYTHONIOENCODING": "ascii"} | os.environ | {"PYTHONUTF8": "1"})  # noqa: S606
    survive_closed_output("stderr")
    try:
        here = Path.cwd()
    except FileNotFoundError:
        print(explain("the working folder has been deleted", remedy="change to a folder that exists"), file=sys.stderr)
        sys.exit(REFUSED)
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    if files := shadowing(here, OF_LANES):
        remedy = f"rename {files}: Python searches the working folder first and would import it instead of the library"
        print(explain(f"{here} holds {files}", remedy=remedy), file=sys.stderr)
        sys.exit(REFUSED)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on main catches it
    if sys.argv[1:2] == ["train"]:  # may be a rank, with threads that can keep a process from ending
        run_and_leave(main)
    sys.exit(main(sys.argv[1:]))
