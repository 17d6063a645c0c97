"""What all tests share: an environment for two cores and no network chatter, set before anything imports torch."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import json
import math
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_DISABLE_JIT": "1",  # of vLLM's drafts from n-grams: compiling takes longer than they do
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",  # stays after a run
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
STARTUP = str(ROOT / "tests" / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # xdist's workers inherit it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))
# a shell that starts this in the background has SIGINT ignored, and every process below inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

DURATIONS = Path(__file__).with_name("durations.json")  # seconds of each file, as --record-durations writes them
# how long an example takes says nothing on a busy machine; a test may want fewer of them
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of the module's own, on this machine."""
    from megasync.launch.ray_cluster import start_ray

    stop = start_ray("local")
    yield
    stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests marked `long`, too")
    parser.addoption("--record-durations", action="store_true", help="write the seconds of each file into tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Tests that are not marked gpu see no GPU."""
    if config.option.markexpr in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


class DurationRecorder:
    """Sums the seconds of each file and writes them at the end; in the process that starts the workers. Files that did not run
    keep theirs."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = {file: seconds for file, seconds in json.loads(DURATIONS.read_text()).items() if (ROOT / file).is_file()}
        rounded = known | {file: round(seconds, 1) for file, seconds in self.seconds.items()}
        DURATIONS.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take whole files (launch/test.sh): the longest first, so that all end at about the same time."""
    if not config.option.all and not any(".py" in argument for argument in config.args):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], math.inf))  # a new file may take long
    for item in items:
        if reason := _cannot_run(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def _cannot_run(item: pytest.Item) -> str:
    """Why a test has no place on this machine; empty where it has."""
    from megasync.launch.devices import visible_devices

    if marker := item.get_closest_marker("gpu"):
        needed, there = (*marker.args, 1)[0], len(visible_devices())
        return f"needs {needed} GPUs, {there} are visible" if there < needed else ""
    starts_vllm = item.get_closest_marker("vllm_on_cpu")
    return "starts vLLM on the CPU, and the one here is built for GPUs" if starts_vllm and not _is_cpu_vllm() else ""


@functools.cache
def _is_cpu_vllm() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm-cpu"))
    return "cpu" in importlib.metadata.version("vllm")


@pytest.hookimpl(trylast=True)  # after fixtures, which may need the ranks
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Idle ranks take some of the cores, so they end before a file that does not use them."""
    if nextitem is None or not hasattr(getattr(nextitem, "module", None), "run_ranks"):
        from tests.support.ranks import end_ranks

        end_ranks()


def pytest_sessionfinish() -> None:
    from tests.support.ranks import end_ranks

    end_ranks()
    atexit.unregister(gc.freeze)  # of startup/sitecustomize.py: what prints the results leaves without a word about leaks
    gc.unfreeze()
