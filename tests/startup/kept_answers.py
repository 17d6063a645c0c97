"""transformers.utils.import_utils with two answers kept in files: for as long as that module and the installed packages stay."""

import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).parent / "__pycache__"


def spec_of(name):
    """As Python finds it, with a loader that puts the two functions in."""
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


def kept(function, module_file):
    """The same function of paths."""
    packages = Path(module_file).parents[2]
    state = [path.stat().st_mtime_ns for path in (Path(module_file), packages)]

    def ask(*paths, **options):
        question = repr((function.__name__, [str(path) for path in paths], options, str(packages), state))
        file = FOLDER / f"{function.__name__}-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
        with suppress(FileNotFoundError):
            return pickle.loads(file.read_bytes())
        answer = function(*paths, **options)
        with suppress(OSError):  # such as where the checkout may not be written to
            FOLDER.mkdir(exist_ok=True)
            partial = file.with_name(f"{file.name}-{os.getpid()}")
            partial.write_bytes(pickle.dumps(answer))
            partial.replace(file)
        return answer

    return ask
