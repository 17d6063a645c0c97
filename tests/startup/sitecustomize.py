"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports of vLLM. A quarter of those is the collector, which looks for cycles among modules. vLLM
has it look five times more as it starts and ends, and so does every process as it ends: none looks through what was imported. A
seventh is what transformers finds out at each import from its source files and all installed packages: two answers are kept in
files, for as long as the module that asks and the packages stay. An eighth is torch's compiler, which vLLM imports to change it,
and nothing is compiled here. Imports here are those that most processes do without.
"""

import atexit
import gc
import os
import sys

ASKS = "transformers.utils.import_utils"
COMPILER = "torch._inductor.lowering"
num_frozen = 0  # modules


def freeze(phase, info):
    """What was imported, before a full collection looks through it: each time that a thousand more modules are there."""
    global num_frozen  # noqa: PLW0603
    if phase == "start" and info["generation"] == 2 and len(sys.modules) > num_frozen + 1000:
        num_frozen = len(sys.modules)
        gc.freeze()
        gc.unfreeze = lambda: None  # vLLM's processes look through everything as they end (v1/engine/core.py:836)


class Finder:
    """Import hooks. The module that asks is as Python finds it, with a loader that puts the two functions in."""

    has_found = False

    def find_spec(self, name, path=None, target=None):
        if name == COMPILER and is_asked_by("_patch_inductor_fallback_allow_list"):  # vLLM 0.32, env_override.py:887
            raise ImportError(name)  # it goes on without
        if name != ASKS or self.has_found:
            return None
        import importlib.metadata
        import importlib.util

        self.has_found = True
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            asked = importlib.metadata.packages_distributions
            importlib.metadata.packages_distributions = kept(asked, spec.origin)
            try:
                run(module)
            finally:
                importlib.metadata.packages_distributions = asked
            module.define_import_structure = kept(module.define_import_structure, spec.origin)

        spec.loader.exec_module = exec_module
        return spec


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
