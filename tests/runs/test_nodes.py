"""A run on two nodes, which are namespaces here: torchrun_nodes.sh and submit give the metrics of one node, what is missing or
wrong is named, and nothing is left behind.

Skipped without root, or where namespaces are not allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.runs.train_cases import exact, launch, write_config
from tests.support.nodes import Node, nodes, why_not

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(ROOT / "launch" / "torchrun_nodes.sh")
SECONDS = 400

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the quickstart's model, with one replica."""
    run = {"steps": 2, "hung_rank_timeout_seconds": 30}
    return write_config(tmp_path_factory.mktemp("nodes"), run=run, checkpoint={"every_steps": 2})


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    folder = Path(tempfile.mkdtemp(prefix="msn-", dir="/tmp"))  # short enough for sockets
    try:
        with nodes(2, folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(node: Node, config: Path, *arguments: str, head: str, **more: str) -> subprocess.Popen[str]:
    own = os.environ | {"MEGASYNC_PYTHON": sys.executable} | more
    command = [COMMAND, str(config), "--nodes", "2", "--head", head, *arguments]
    return node.start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def together(
    pair: Sequence[Node], config: Path, *arguments: str, second: Sequence[str] = (), **more: str
) -> list[tuple[int, str]]:
    """The command on both nodes, `second` and `more` on the second alone; exit codes and what was said. Leaves nothing behind."""
    head = pair[0].address
    running = [
        start(pair[0], config, *arguments, head=head),
        start(pair[1], config, *arguments, *second, head=head, **more),
    ]
    try:
        ended = [(process.communicate(timeout=SECONDS)[0], process.returncode) for process in running]
    finally:
        for process in running:
            process.kill()
    for node in pair:
        deadline = time.monotonic() + 30
        while node.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert node.processes() == []
        assert list(node.temporary.glob("*")) == []
    return [(code, text) for text, code in ended]


def test_two_nodes_give_the_metrics_of_one(pair: Sequence[Node], config: Path) -> None:
    (code, said), (other, _) = together(pair, config, "run.name=many")
    assert (code, other) == (0, 0), said
    done = launch(config, "run.name=one")
    assert done.returncode == 0, done.stderr
    assert exact(config.parent / "runs" / "many") == exact(config.parent / "runs" / "one")


def test_a_node_that_does_not_come_is_named(pair: Sequence[Node], config: Path) -> None:
    process = start(pair[0], config, "--nodes", f"{pair[0].name},other", "--wait-seconds", "8", head=pair[0].address)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"gave up after 8 s: 1 of 2 nodes are here: {pair[0].name} ({pair[0].address}); not here: other" in said
    assert pair[0].processes() == [] and list(pair[0].temporary.glob("*")) == []


def test_a_node_that_nobody_answers_gives_up(pair: Sequence[Node], config: Path) -> None:
    process = start(pair[1], config, "--wait-seconds", "5", head=pair[0].address)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"waiting: the head node {pair[0].address}:29400 is not here" in said and "gave up after 5 s" in said


SKEWED = "import time\nnow = time.time\ntime.time = lambda: now() - 60\n"


@pytest.mark.parametrize("what", ["config", "model", "clock", "commit"])
def test_what_differs_is_refused_by_name(pair: Sequence[Node], config: Path, what: str, tmp_path: Path) -> None:
    more: dict[str, str] = {}
    if what == "clock":
        (tmp_path / "sitecustomize.py").write_text(SKEWED)
        more["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    second = {"config": ["run.seed=1"], "model": [f"model.path={tmp_path}/none"]}.get(what, [])
    if what == "commit":
        clone = tmp_path / "clone"
        shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "runs", "tests", "docs", "__pycache__"))
        (clone / "engine" / "sample.py").write_text((ROOT / "engine" / "sample.py").read_text() + "\n")
        command = [str(clone / "launch" / "torchrun_nodes.sh"), str(config), "--nodes", "2", "--head", pair[0].address]
        own = os.environ | {"MEGASYNC_PYTHON": sys.executable}
        running = [
            start(pair[0], config, head=pair[0].address),
            pair[1].start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT),
        ]
        ended = [(process.communicate(timeout=SECONDS)[0], process.returncode) for process in running]
        found = [(code, text) for text, code in ended]
    else:
        found = together(pair, config, "run.name=refused", second=second, **more)
    told = {
        "config": f"{pair[1].name}: another config\n  here:   run.seed 1 (elsewhere 0)",
        "model": f"{pair[1].name}: model.path",
        "clock": f"{pair[1].name}: its clock is -60",
        "commit": f"{pair[1].name}: other code than the other nodes",
    }[what]
    for code, said in found:
        assert code == 2, said
        assert told in said, said
    assert not (config.parent / "runs" / "refused" / "metrics.jsonl").exists()
