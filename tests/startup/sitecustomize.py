"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports of vLLM. A quarter of those is the collector, which looks for cycles among modules. vLLM
has it look five times more as it starts and ends, and so does every process as it ends: none looks through what was imported. A
seventh is what transformers finds out at each import from its source files and all installed packages: two answers are kept in
files, for as long as the module that asks and the packages stay. An eighth is torch's compiler, which vLLM imports to change it,
and nothing is compiled here. A tenth are the texts of signatures that dataclasses have for a docstring, and a search of all
modules for each operator of torch's, for a place in its source that nobody looks at. Imports here are those that most processes
do without.
"""

import atexit
import gc
import os
import sys

ASKS = "transformers.utils.import_utils"
OPERATORS = "torch._library.utils"
COMPILER = "torch._inductor.lowering"
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


gc.set_threshold(500_000, 50, 1000)
gc.callbacks.append(freeze)
atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder())
