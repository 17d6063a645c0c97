"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports of vLLM. A quarter of those is the collector, which looks for cycles among modules. vLLM
has it look five times more as it starts and ends, and so does every process as it ends: none looks through what was imported. A
seventh is what transformers finds out at each import from its source files and all installed packages: two answers are kept in
files, for as long as the module that asks and the packages stay. An eighth is torch's compiler, which vLLM imports to change it,
and nothing is compiled here. A tenth are the texts of signatures that dataclasses have for a docstring, and a search of all
modules for each operator of torch's, for a place in its source that nobody looks at. Parsers of vLLM's servers take a fifth. Ray
on one machine starts no autoscaler, no log monitor and no dashboard, and its workers start without a process that imports ray to
set their environment; one run of tests/runs/test_train.py has all of them. Imports here are those that most processes do
without.
"""

import atexit
import gc
import os
import sys

ASKS = "transformers.utils.import_utils"
OPERATORS = "torch._library.utils"
COMPILER = "torch._inductor.lowering"
SERVED, STRUCTURED = "vllm.reasoning.abs_reasoning_parsers", "vllm.v1.structured_output"
TOOLS = {"vllm.entrypoints.mcp": "", "vllm.entrypoints.mcp.tool_server": "ToolServer"}
PARSERS = {"vllm.parser": "", "vllm.parser.engine": "", "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter"}
SET_UP = ("--serialized-runtime-env-context", "--language")
num_frozen = 0  # modules


def freeze(phase, info):
    """What was imported, before a collection looks through it: each time that a thousand more modules are there."""
    global num_frozen  # noqa: PLW0603
    if phase == "start" and len(sys.modules) > num_frozen + 1000:
        num_frozen = len(sys.modules)
        gc.freeze()
        gc.unfreeze = lambda: None  # vLLM's processes look through everything as they end (v1/engine/core.py:836)


class Finder:
    """Import hooks. A module of `changes` is as Python finds it, with a loader that makes the change."""

    def __init__(self):
        self.changes = {ASKS: keep_answers, OPERATORS: tell_places_alone, "dataclasses": write_no_signatures}
        self.changes |= {SERVED: without(TOOLS), STRUCTURED: without(PARSERS)}
        self.changes["ray._private.parameter"] = start_no_monitors
        self.changes["ray._private.services"] = start_no_dashboard

    def find_spec(self, name, path=None, target=None):
        if name == COMPILER and is_asked_by("_patch_inductor_fallback_allow_list"):  # vLLM 0.32, env_override.py:887
            raise ImportError(name)  # it goes on without
        change = self.changes.pop(name, None)
        if change is None:
            return None
        import importlib.util

        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: change(module, load)
        return spec


def keep_answers(module, load):
    import importlib.metadata

    asked = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = kept(asked, module.__spec__.origin)
    try:
        load(module)
    finally:
        importlib.metadata.packages_distributions = asked
    module.define_import_structure = kept(module.define_import_structure, module.__spec__.origin)


def tell_places_alone(module, load):
    """Where an operator is defined. inspect.getframeinfo, which torch asks, reads the line itself, too."""

    def get_source(stacklevel):
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    load(module)
    module.get_source = get_source


def write_no_signatures(module, load):
    """A dataclass without a docstring has its name for one, as where there is no signature (dataclasses.py:1098)."""

    def signature(_):
        raise ValueError

    load(module)
    others = vars(module.inspect)
    module.inspect = type(sys)("inspect")
    vars(module.inspect).update(others, signature=signature)


def without(parts):
    """A module is loaded without these, which it names in hints and in an isinstance alone; each with a class that it takes."""

    def change(module, load):
        missing = {name: type(sys)(name) for name in parts if name not in sys.modules}
        for name, made in missing.items():
            vars(made)[parts[name]] = type(parts[name], (), {})
        sys.modules.update(missing)
        try:
            load(module)
        finally:
            for name in missing:
                del sys.modules[name]

    return change


def start_no_monitors(module, load):
    """No autoscaler and no log monitor. `ray start` gives both options itself."""
    load(module)
    init = module.RayParams.__init__
    without = {"no_monitor": True, "include_log_monitor": False}
    module.RayParams.__init__ = lambda self, *values, **options: init(self, *values, **{**without, **options})


def start_no_dashboard(module, load):
    """Where there is to be none, Ray starts its process without a page."""
    load(module)
    start = module.start_api_server
    module.start_api_server = lambda has_page, *values, **options: (
        (None, None) if has_page is False else start(has_page, *values, **options)
    )


def is_asked_by(function):
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def kept(function, module_file):
    """The same function of paths."""
    import hashlib
    import pickle
    from contextlib import suppress
    from pathlib import Path

    folder, packages = Path(__file__).parent / "__pycache__", Path(module_file).parents[2]
    state = [path.stat().st_mtime_ns for path in (Path(module_file), packages)]

    def ask(*paths, **options):
        question = repr((function.__name__, [str(path) for path in paths], options, str(packages), state))
        file = folder / f"{function.__name__}-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
        with suppress(FileNotFoundError):
            return pickle.loads(file.read_bytes())
        answer = function(*paths, **options)
        with suppress(OSError):  # such as where the checkout may not be written to
            folder.mkdir(exist_ok=True)
            partial = file.with_name(f"{file.name}-{os.getpid()}")
            partial.write_bytes(pickle.dumps(answer))
            partial.replace(file)
        return answer

    return ask


def start_worker(path, *arguments):
    """What Ray's setup_worker.py does for a worker, for which it imports ray: it gives its environment to another process."""
    import json

    own = dict(argument.partition("=")[::2] for argument in arguments if argument.startswith(SET_UP))
    context = json.loads(own.get(SET_UP[0]) or "{}")
    variables, python = context.pop("env_vars", {}), context.pop("py_executable", sys.executable)
    if own.get(SET_UP[1]) == "PYTHON" and not any(context.values()) and "$" not in "".join(variables.values()):
        others = [argument for argument in arguments if not argument.startswith(SET_UP)]
        os.execve(python, [python, *others], {**os.environ, **variables})


gc.set_threshold(500_000, 50, 1000)
gc.callbacks.append(freeze)
atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder())
if sys.orig_argv[1:2] and sys.orig_argv[1].endswith("ray/_private/workers/setup_worker.py"):
    start_worker(*sys.orig_argv[1:])
