"""A run on two nodes, which are namespaces here: torchrun_nodes.sh and submit give the metrics of one node, what is missing or
wrong is named, and nothing is left behind.

Skipped without root, or where namespaces are not allowed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from megasync.launch.ray_cluster import WORKER_ENVIRONMENT, NO_DRAINING
from megasync.launch.preflight import NUM_PIECES, flat
from tests.runs.train_cases import exact, launch, metrics, train, write_config, write_supervised_config
from tests.support.nodes import Node, nodes, why_not

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path("launch") / "torchrun_nodes.sh"
SECONDS = 400
RAY_PORT = 6390

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the quickstart's model, with one replica."""
    run = {"steps": 2, "hung_rank_timeout_seconds": 30}
    return write_config(tmp_path_factory.mktemp("nodes"), run=run, checkpoint={"every_steps": 2})


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a Ray."""
    return write_supervised_config(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    folder = Path(tempfile.mkdtemp(prefix="msn-", dir="/tmp"))  # short enough for sockets
    try:
        with nodes(2, folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(
    node: Node, config: Path, *arguments: str, head: str, root: Path = ROOT, **more: str
) -> subprocess.Popen[str]:
    """The command of the clone at `root`."""
    own = os.environ | {"MEGASYNC_PYTHON": sys.executable} | more
    command = [str(root / COMMAND), str(config), "--nodes", "2", "--head", head, *arguments]
    return node.start(command, own, root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def together(
    pair: Sequence[Node], config: Path, *arguments: str, second: Sequence[str] = (), root: Path = ROOT, **more: str
) -> list[tuple[int, str]]:
    """The command on both nodes, `second`, `root` and `more` on the second alone; exit codes and what was said. Leaves nothing
    behind.
    """
    head = pair[0].address
    running = [
        start(pair[0], config, *arguments, head=head),
        start(pair[1], config, *arguments, *second, head=head, root=root, **more),
    ]
    try:
        ended = [(process.communicate(timeout=SECONDS)[0], process.returncode) for process in running]
    finally:
        for process in running:
            process.kill()
    for node in pair:
        wait_for_end(node)
        assert node.processes() == []
        assert list(node.temporary.glob("*")) == []
    return [(code, text) for text, code in ended]


@pytest.fixture(scope="module")
def of_one(config: Path) -> list[dict[str, Any]]:
    """The metrics of one node."""
    code, said = train(config, "run.name=one")
    assert code == 0, said
    return exact(config.parent / "runs" / "one")


def test_two_nodes_give_the_metrics_of_one(pair: Sequence[Node], config: Path, of_one: list[dict[str, Any]]) -> None:
    (code, said), (other, _) = together(pair, config, "run.name=many")
    assert (code, other) == (0, 0), said
    assert exact(config.parent / "runs" / "many") == of_one


def wait_for_end(node: Node) -> None:
    deadline = time.monotonic() + 30
    while node.processes() and time.monotonic() < deadline:
        time.sleep(0.2)


@contextmanager
def ray_of(pair: Sequence[Node], token: str) -> Iterator[dict[str, str]]:
    """Somebody's Ray over both nodes, its job server on the first; what lets others in. Ended by process id."""
    own = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **WORKER_ENVIRONMENT, **NO_DRAINING}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"  # a job is started by `python`
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), own.get("PYTHONPATH")]))
    head = [f"--port={RAY_PORT}", "--head", f"--dashboard-host={pair[0].address}", "--dashboard-port=8265"]
    head.append("--no-monitor")
    places = [head, [f"--address={pair[0].address}:{RAY_PORT}"]]
    running = []
    try:
        for node, place in zip(pair, places, strict=True):
            flags = ["--block", "--disable-usage-stats", "--num-cpus=4", f"--node-ip-address={node.address}"]
            flags += [f"--temp-dir={node.temporary}/ray", f"--object-store-memory={200 * 2**20}"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *flags]
            running.append(node.start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            lines = iter(running[-1].stdout or ())
            said = "".join(itertools.takewhile(lambda line: "Ray runtime started" not in line, lines))
            assert running[-1].poll() is None, said
        yield own
    finally:
        for node, process in zip(pair, running, strict=False):
            for line in node.processes():
                if "ray.scripts.scripts start" in line:
                    subprocess.run(["nsenter", "-t", str(node.init), "-p", "-m", "kill", line.split()[0]], check=False)
            process.communicate(timeout=60)
            wait_for_end(node)
            for path in (node.temporary / "ray", *node.temporary.glob("pymp-*")):  # of its processes, some of which it kills
                shutil.rmtree(path, ignore_errors=True)


def test_submit_to_two_nodes_gives_the_metrics_of_one(pair: Sequence[Node], config: Path, of_one: list[dict[str, Any]]) -> None:
    """A rank on each node; what has no room is refused with the numbers, by what the job starts."""
    values = flat(yaml.safe_load(config.read_text()) | {"run": {"name": "job", "dir": str(config.parent / "runs"), "steps": 2}})
    overrides = ["tests/data/submit.yaml", *(f"{key}={value}" for key, value in values.items()), "run.trainer_nodes=2"]
    with ray_of(pair, secrets.token_hex(16)) as own:

        def ended(module: str, *arguments: str, **more: str) -> tuple[int, str]:
            command = [sys.executable, "-m", module, *arguments]
            process = pair[0].start(command, own | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said, _ = process.communicate(timeout=SECONDS)
            return process.returncode, said

        flags = ["--num-ranks", "12", "--trainer-nodes", "2", "--pool", "rollout", "1", "1"]
        ray = f"{pair[0].address}:{RAY_PORT}"
        code, said = ended("megasync.launch.driver", *flags, "--", *overrides, RAY_ADDRESS=ray)
        assert code == 2, said
        assert "12 trainer ranks of one CPU each, as many on each of 2 nodes" in said and "0 GPUs, 4 CPUs" in said
        server = f"http://{pair[0].address}:8265"
        code, said = ended("megasync.submit", *overrides, "--address", server, "--num-ranks", "2")
        assert code == 0, said
    assert exact(config.parent / "runs" / "job") == of_one


@pytest.mark.skipif(not os.environ.get("MEGASYNC_LOST_NODES"), reason="minutes: MEGASYNC_LOST_NODES asks for it")
def test_after_a_loss_a_run_goes_on_with_one_node(pair: Sequence[Node], supervised: Path) -> None:
    """Once nobody has come in time; with the batches of two nodes, and sums in another order."""
    flags = ["run.steps=40", "checkpoint.every_steps=5", "run.hung_rank_timeout_seconds=10"]
    flags += ["--max-restarts", "1", "--min-nodes", "1", "--wait-seconds", "40"]
    running = [start(node, supervised, "run.name=fewer", *flags, head=pair[0].address) for node in pair]
    folder = supervised.parent / "runs" / "fewer"
    try:
        deadline = time.monotonic() + SECONDS
        while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < 7:
            assert time.monotonic() < deadline and running[0].poll() is None, running[0].communicate()[0]
            time.sleep(0.02)
        pair[1].kill()
        said, _ = running[0].communicate(timeout=SECONDS)
    finally:
        for process in running:
            process.kill()
            process.communicate()
        pair[1].revive()
    assert running[0].returncode == 0, said
    assert f"the run continues from its newest checkpoint with 1 nodes, {pair[0].name}, and 1 trainer ranks" in said
    assert launch(supervised, "run.name=whole", *flags[:3]).returncode == 0
    lines, whole = metrics(folder), metrics(supervised.parent / "runs" / "whole")
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["train/response_tokens"] for line in lines] == [line["train/response_tokens"] for line in whole]
    assert [line["loss/sft"] for line in lines] == pytest.approx([line["loss/sft"] for line in whole], rel=1e-3)
    assert pair[0].processes() == [] and list(pair[0].temporary.glob("*")) == []


def test_a_number_of_nodes_that_can_never_do_is_refused(supervised: Path) -> None:
    own = os.environ | {"MEGASYNC_PYTHON": sys.executable}
    flags = ["--nodes", "2", "--head", "127.0.0.1", "--max-restarts", "1", "checkpoint.every_steps=5", "engine.parallel.tensor=2"]
    done = subprocess.run(
        [ROOT / COMMAND, str(supervised), *flags, "--min-nodes", "1"], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--min-nodes 1: data parallelism cannot shrink to 1 nodes of 1 ranks" in done.stderr
    assert "2 does not divide 1 ranks" in done.stderr


SKEWED = "import time\nnow = time.time\ntime.time = lambda: now() - 60\n"


def assert_is_refused(supervised: Path, found: Sequence[tuple[int, str]], *reported: str) -> None:
    for code, said in found:
        assert code == 2, said
        assert all(words in said for words in reported), said
    assert not (supervised.parent / "runs" / "refused" / "metrics.jsonl").exists()


def test_what_differs_is_refused_by_name(pair: Sequence[Node], supervised: Path, tmp_path: Path) -> None:
    """All of it at once; each alone is in tests/megasync/launch/test_preflight.py."""
    model, name, clone = str(supervised.parent / "assets" / "model"), pair[1].name, tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "runs", "tests", "docs", "__pycache__"))
    (clone / "engine" / "sample.py").write_text((ROOT / "engine" / "sample.py").read_text() + "\n")
    pair[1].start(["mount", "-t", "tmpfs", "tmpfs", model], os.environ).wait()
    try:
        found = together(pair, supervised, "run.name=refused", second=["run.seed=1"], root=clone)
    finally:
        pair[1].start(["umount", model], os.environ).wait()
    reported = [f"{name}: other code than the other nodes", f"{name}: another config\n  here:   run.seed 1 (elsewhere 0)"]
    assert_is_refused(supervised, found, *reported, f"{name}: other files\n  here:   model.path 0 files, 0 bytes")


def test_ranks_with_other_weights_end_both_nodes(pair: Sequence[Node], supervised: Path, tmp_path: Path) -> None:
    """One bit, in a place that the comparison of files leaves out."""
    model, other = supervised.parent / "assets" / "model", tmp_path / "model"
    shutil.copytree(model, other)
    with (other / "model.safetensors").open("r+b") as file:
        place = int(40.5 / NUM_PIECES * os.fstat(file.fileno()).st_size)
        (value,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([value ^ 1]), place)
    pair[1].start(["mount", "--bind", str(other), str(model)], os.environ).wait()
    try:
        found = together(pair, supervised, "run.name=refused")
    finally:
        pair[1].start(["umount", str(model)], os.environ).wait()
    assert_is_refused(supervised, found, f"differs between rank 1 on node {pair[1].name} and rank 0 on node {pair[0].name}")


def test_another_clock_is_refused_by_name(pair: Sequence[Node], supervised: Path, tmp_path: Path) -> None:
    startup = ROOT / "tests" / "startup" / "sitecustomize.py"
    (tmp_path / "sitecustomize.py").write_text(startup.read_text() + SKEWED)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    found = together(pair, supervised, "run.name=refused", PYTHONPATH=path)
    assert_is_refused(supervised, found, f"{pair[1].name}: its clock is -60")
