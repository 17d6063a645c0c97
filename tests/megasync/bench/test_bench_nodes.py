"""Weights on lanes between namespaces: two sender nodes, two replicas on a third; counted by the kernel. And the simulation.

python -m pytest tests/megasync/bench/test_bench_nodes.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.bench.nodes.simulate import CASES, GPUS, NAMESPACES, Case, simulate

ROOT = Path(__file__).resolve().parents[3]


def missing() -> str:
    """What there is not for namespaces of one's own."""
    if os.geteuid() != 0:
        return "namespaces of network need root"
    tools = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if tools:
        return f"no {', '.join(tools)} here (iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this container may not make namespaces"


@pytest.mark.skipif(bool(missing()), reason=missing() or "they can be made")
def test_two_replicas_of_a_node_cost_its_link_the_weights_once(tmp_path: Path) -> None:
    """Every round compares what each receiver holds with what was sent."""
    results = tmp_path / "nodes.json"
    environment = os.environ | {"PYTHON": sys.executable, "RATE": "4000mbit", "PREFIX": "mst", "SUBNET": "10.83.0"}
    done = subprocess.run(
        [str(ROOT / "docs/bench/nodes.sh"), str(results), "1", "2x1x2"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (case,) = json.loads(results.read_text())
    lanes, group = case["lanes"], case["one group"]
    assert (case["replicas"], lanes["lanes"], group["lanes"]) == (2, 2, 1)
    assert 1 <= lanes["received"][0] / lanes["bytes"] <= 1.02
    assert all(0.49 <= sent / lanes["bytes"] <= 0.52 for sent in lanes["sent"])
    assert group["received"][0] / group["bytes"] > 1.9


def test_lanes_to_the_ranks_own_devices_bring_what_one_group_does(tmp_path: Path) -> None:
    config, results = ROOT / "configs" / "bench_gpu.yaml", tmp_path / "lanes.json"
    own = ["bench.shapes=tiny", "model.dtype=float32", "bench.num_ranks=2", "rollout.replicas=2", "bench.rounds=1"]
    own += ["sync.bucket_bytes=1MiB", "bench.lora_rank=0", f"run.dir={tmp_path}"]
    command = [sys.executable, "-m", "megasync.bench", "lanes", "--config", str(config), *own, "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(results.read_text())
    assert list(told["summary"]) == ["floor", "one group", "lanes"]
    syncs = [each for each in told["rounds"] if each["method"] != "floor"]
    assert all(each["same_weights"] for each in syncs)
    assert [each["receivers"] for each in syncs] == [1, 2]


def test_a_simulated_sync_takes_what_its_narrowest_link_does_and_a_little_more() -> None:
    for senders, nodes in ((1, 1), (1, 4), (4, 1), (3, 2)):
        found, least = simulate(Case("", 2e8, 1, senders, nodes, "", 1, 2), NAMESPACES), 2e8 / NAMESPACES.network
        assert least < found.seconds < 1.25 * least
    found = simulate(CASES[0], GPUS)
    assert CASES[0].num_bytes / (8 * GPUS.network) < found.seconds < 1.25 * CASES[0].num_bytes / (8 * GPUS.network)
