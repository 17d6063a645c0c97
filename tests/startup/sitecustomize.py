"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports of vLLM. A quarter of those is the collector, which looks for cycles among modules. vLLM
has it look five times more as it starts, and so does every process as it ends: what was imported is looked through once. A
seventh is what transformers finds out at each import from its source files and all installed packages: kept_answers.py keeps it.
"""

import atexit
import gc
import sys

ASKS = "transformers.utils.import_utils"


def freeze_once(phase, info):
    """After the first full collection."""
    if phase == "stop" and info["generation"] == 2:
        gc.callbacks.remove(freeze_once)
        gc.freeze()


class Finder:
    """An import hook for the module that asks."""

    def find_spec(self, name, path=None, target=None):
        if name != ASKS:
            return None
        sys.meta_path.remove(self)
        from kept_answers import spec_of

        return spec_of(name)


gc.set_threshold(100_000, 50, 1000)
gc.callbacks.append(freeze_once)
atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder())
