"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports, and a quarter of those is the collector, which looks for cycles among modules. It looks
again when the process ends, for as long: what is frozen then it leaves to the kernel.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 1000)
atexit.register(gc.freeze)
