"""Python runs this at the start of each process of the tests: conftest.py puts this folder on PYTHONPATH.

Most of what the tests take is imports, and a quarter of those is the collector, which looks for cycles among modules.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
