"""Stop texts where syncs hold or restart running samples and a replica dies: each response ends right at its stop text.

    python -m pytest tests/runs/test_stop_texts.py
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bridge.detokenizer import Detokenizer, load
from megasync.rollouts.records import load_record, paths_of
from tests.runs.train_cases import TORCHRUN, endless_run, metrics, processes_with, write_config
from tests.support.processes import name_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]
STOPS = ["37", "5", "=-"]
STEPS_BEFORE, STEPS_AFTER = 4, 6


@pytest.mark.parametrize("on_update", ["restart", "continue"])
def test_responses_end_right_at_their_stop_text(on_update: str, tmp_path: Path) -> None:
    """A replica's engine is killed on the way; `continue` computes the cache of the running ones again."""
    rollout = {"max_staleness": 2, "on_update": on_update, "stop": STOPS, "record": "all", "replicas": 2, "min_replicas": 1}
    rollout |= {"max_new_tokens": 48, "max_model_len": 64}
    rollout |= {"cache_on_update": "recompute"} if on_update == "continue" else {}
    config = write_config(tmp_path, engine={"wrap": "ddp", "optimizer": {"learning_rate": 1e-5}}, rollout=rollout)
    with endless_run([*TORCHRUN, "--nproc", "1"], config) as run:
        run.wait_for(STEPS_BEFORE)
        kill_an_engine(run.marker)
        run.wait_for(STEPS_BEFORE + STEPS_AFTER)
        (run.folder / "stop").touch()
        run.process.wait(timeout=300)
    text_of = Detokenizer(load(str(tmp_path / "assets" / "model"))[0]).text
    kinds = set()
    for path in paths_of(run.folder).values():
        for group in load_record(path).groups:
            for done in group.members.values():
                ids = [int(token) for token in done.token_ids]
                whole, before = text_of(ids), text_of(ids[:-1])
                stops = [stop for stop in STOPS if stop in whole]
                assert not [stop for stop in STOPS if stop in before], (before, whole)
                assert done.finish_reason == ("stop" if stops or len(ids) < rollout["max_new_tokens"] else "length"), whole
                kinds.update(stops or [done.finish_reason])
    assert {"37", "5"} <= kinds, kinds
    lines = metrics(run.folder)
    assert max(line["staleness/max"] for line in lines) > 0


def kill_an_engine(marker: str) -> None:
    engines: list[psutil.Process] = [each for each in processes_with(marker) if "EngineCor" in name_of(each)]
    assert len(engines) == 2
    engines[0].kill()
