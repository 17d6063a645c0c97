"""What a lost node and a slow link cost a run of rollouts: minutes a case on two cores, so that names choose the cases.

    MEGASYNC_LOST_NODES=all python -m pytest tests/runs/test_lost_nodes.py -s
    MEGASYNC_LOST_NODES=replica-node,trainer-node-staleness4-0 python -m pytest tests/runs/test_lost_nodes.py -s

Without names only the table of cases is looked at; tests/faults/lost_table.py tries many moments. Runs are
skipped without root, or where namespaces are not allowed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.lost_table import in_runs
from tests.faults.nodes import FIRST_STEP, KINDS, STALENESS, LostCase, LostRun, lost_cases
from tests.runs.train_cases import write_config
from tests.support.nodes import nodes, why_not

pytestmark = pytest.mark.long

NAMES = [name for name in os.environ.get("MEGASYNC_LOST_NODES", "").split(",") if name]
CASES = lost_cases(num_points=2)
CHOSEN = [case for case in CASES if any(name == "all" or name in case.name for name in NAMES)]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="msl-", dir="/tmp"))  # short enough for sockets
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_the_cases_are_all_kinds_at_moments_in_the_midst() -> None:
    assert {(case.kind, case.staleness) for case in CASES} == {(kind, staleness) for kind in KINDS for staleness in STALENESS}
    assert len({case.name for case in CASES}) == len(CASES) and all(case.step >= FIRST_STEP for case in CASES)
    runs = in_runs(CASES, together=2)
    assert [case.name for run in runs for case in run if len(run) == 1] == [c.name for c in CASES if c.kind == "replica-node"]
    assert sorted(case.name for run in runs for case in run) == sorted(case.name for case in CASES)


@pytest.mark.skipif(not NAMES or bool(why_not()), reason="MEGASYNC_LOST_NODES names no case, or there can be no nodes")
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_a_run_of_rollouts_survives(case: LostCase, tmp_path: Path, short_folder: Path) -> None:
    config = write_config(tmp_path, engine={"wrap": "ddp"})
    with nodes(2, short_folder) as pair:
        run = LostRun([case], pair, config)
        run.run()
    print(f"{case.name}: after step {case.step}, exit codes {run.codes}, {run.seen[0].lost_seconds:.1f} s to the next step")
    assert run.problems == [], run.said
