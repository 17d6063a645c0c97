"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports, and a quarter of those is the collector, which looks for cycles among modules. vLLM has
it look five times more as it starts, and so does every process as it ends: what was imported is looked through once.
"""

import atexit
import gc


def freeze_once(phase: str, info: dict[str, int]) -> None:
    """After the first full collection."""
    if phase == "stop" and info["generation"] == 2:
        gc.callbacks.remove(freeze_once)
        gc.freeze()


gc.set_threshold(100_000, 50, 1000)
gc.callbacks.append(freeze_once)
atexit.register(gc.freeze)
