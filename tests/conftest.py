"""What all tests share: an environment for two cores and no network chatter, set before anything imports torch."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import os
import signal
import sys
import tempfile
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
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",  # stays after a run
    "MEGASYNC_TIMED_CALLS": f"{tempfile.gettempdir()}/megasync_timed_{os.getuid()}/calls.json",  # so does this
}
Path(ENVIRONMENT["MEGASYNC_TIMED_CALLS"]).parent.mkdir(exist_ok=True)
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
STARTUP = str(ROOT / "tests" / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # xdist's workers inherit it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))
# a shell that starts this in the background has SIGINT ignored, and every process below inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# workers take whole files (launch/test.sh): the longest first, so that all end at about the same time
LONGEST_FIRST = (
    *("test_nodes", "test_train", "test_unsteady_run", "test_bench", "test_submit", "test_sync_trainer", "test_real_model"),
    *("test_episode_runs", "test_life", "test_stream_vllm", "test_engine", "test_objectives", "test_lora", "test_experts"),
    *("test_killed_episodes", "test_scale", "test_newest_weights", "test_stop"),
    *("test_faults", "test_exact_runs", "test_steps", "test_sync_vllm", "test_sync_workers", "test_reward_pool", "test_context"),
    *("test_template", "test_families", "test_float16", "test_python_tool", "test_router", "test_overrides", "test_bisect"),
    *("test_generation_vllm", "test_plan_vllm", "test_resume", "test_checkpoint", "test_unshard", "test_upstream"),
    *("test_quickstart_assets", "test_heartbeat", "test_batch", "test_bench_train", "test_equivalence"),
    *("test_config_check", "test_vllm_contract", "test_group_transport", "test_rank_zero", "test_stream_units"),
)
VLLM_ON_CPU = {
    *("test_train", "test_sync_vllm", "test_sync_trainer", "test_bench", "test_plan_vllm", "test_stream_vllm"),
    *("test_generation_vllm", "test_faults", "test_real_model", "test_episode_runs", "test_nodes", "test_bisect"),
    *("test_exact_runs", "test_exact_layers", "test_unsteady_run", "test_sync_workers"),
    *("test_killed_episodes", "test_scale", "test_newest_weights", "test_stop"),
}
# how long an example takes says nothing on a busy machine; a test may want fewer of them
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Tests that are not marked gpu see no GPU."""
    if config.option.markexpr in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if reason := _cannot_run(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def _cannot_run(item: pytest.Item) -> str:
    """Why a test has no place on this machine; empty where it has."""
    from megasync.launch.devices import visible_devices

    if marker := item.get_closest_marker("gpu"):
        needed, there = (*marker.args, 1)[0], len(visible_devices())
        return f"needs {needed} GPUs, {there} are visible" if there < needed else ""
    starts_vllm = item.path.stem in VLLM_ON_CPU
    return "starts vLLM on the CPU, and the one here is built for GPUs" if starts_vllm and not _is_cpu_vllm() else ""


@functools.cache
def _is_cpu_vllm() -> bool:
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    return "vllm-cpu" in names or "cpu" in importlib.metadata.version("vllm")


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
