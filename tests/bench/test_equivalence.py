"""Random layouts with random features against one rank, and the bench that does the same for a table of them.

A failure prints the seed; MEGASYNC_EQUIVALENCE_SEED=SEED draws the same cases again, MEGASYNC_EQUIVALENCE_CASES=30 more of them.

    python -m pytest tests/bench/test_equivalence.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from engine.config import DELTA_NET_FAMILIES, FAMILIES, MOE_FAMILIES
from bench import cli
from bench.common.processes import run_ranks as run_logged
from bench.config import BenchRoot
from bench.equivalence import cases as of_cases
from bench.equivalence import judge
from bench.equivalence import run as of_runs
from bench.equivalence.cases import Case
from bench.equivalence.models import FIELDS
from bench.equivalence.run import Bench
from bench.equivalence.ranks import Job
from megasync.config.load import load_config
from tests.bench.random_layouts import draw_case
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "bench_equivalence.yaml"
SEED = int(os.environ.get("MEGASYNC_EQUIVALENCE_SEED") or random.SystemRandom().randrange(2**32))
NUM_CASES = int(os.environ.get("MEGASYNC_EQUIVALENCE_CASES", "3"))
NUM_RANKS = 2
ANY_TIME = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Two steps of two micro-batches a case."""
    folder = tmp_path_factory.mktemp("equivalence")
    sizes = ["bench_equivalence.steps=2", "bench_equivalence.micro_batches=2"]
    return Bench(load_config(CONFIG, [f"run.dir={folder}", *sizes], BenchRoot), None)


def on_ranks(jobs: Sequence[Job], num_ranks: int, _: Path) -> Iterator[dict[str, Any]]:
    """On ranks that other tests have started, or will use."""
    for job in jobs:
        arguments = {"config": job.config, "folder": job.folder, "micro_batches": job.micro_batches}
        yield run_ranks(num_ranks, "bench.equivalence.measure:measure", arguments)[0]


def drawn(bench: Bench, count: int, numbers_of_ranks: tuple[int, ...]) -> list[Case]:
    """Of random draws those that the config's check takes."""
    found: list[Case] = []

    @seed(SEED)
    @settings(ANY_TIME, max_examples=50 * count, phases=[Phase.generate], database=None)
    @given(st.randoms(use_true_random=True))
    def collect(draw: random.Random) -> None:
        assume(len(found) < count)
        case = draw_case(draw, FAMILIES, numbers_of_ranks)
        assume(not of_cases.refusal(bench.config_of(case), case.num_ranks))
        found.append(case)

    collect()
    assert len(found) == count
    return found


def test_random_layouts_train_as_one_rank(bench: Bench) -> None:
    """Losses, gradient norms, log-probs of transformers before and after training, exports; of any features together."""
    cases = drawn(bench, NUM_CASES, (NUM_RANKS,))
    reported = "\n".join(["", f"MEGASYNC_EQUIVALENCE_SEED={SEED}", *(case.name for case in cases)])
    print(reported)
    bench.run(cases, on_ranks)
    wrong = {name: each["problems"] for name, each in bench.results["cases"].items() if each["problems"]}
    assert not wrong, reported
    assert all(case.name in bench.results["cases"] for case in cases)


@settings(ANY_TIME, max_examples=60)
@given(draw=st.randoms(use_true_random=True))
def test_a_random_config_is_taken_or_refused_by_name(bench: Bench, draw: random.Random) -> None:
    case = draw_case(draw, FAMILIES, (1, 2, 4))
    reason = of_cases.refusal(bench.config_of(case), case.num_ranks)
    keys = ("engine.", "algorithm.", "model.dtype")
    assert not reason or reason.startswith(keys) or "config.json: tie_word_embeddings" in reason
    again = Case(case.model, case.layout, case.num_ranks, json.loads(json.dumps(case.keys)))
    assert bench.config_of(again) == bench.config_of(case)
    assert reason or of_cases.refusal(bench.config_of(case.reference), 1) == "", "what is computed can be computed on one rank"


def test_every_family_has_a_tiny_model_and_a_place_in_the_table(bench: Bench) -> None:
    """Unsupported is what a config's check refuses, with its reason."""
    assert set(FIELDS) >= set(FAMILIES)
    cases = of_cases.table(bench.config)
    taken = bench.accepted(cases)
    reasons = {(each["family"], each["layout"]): each["reason"] for each in bench.results["unsupported"].values()}
    assert len(taken) + len(bench.results["unsupported"]) == len(cases)
    assert {case.model.family for case in taken} == set(FAMILIES)
    for family in FAMILIES:
        refused = {layout for of, layout in reasons if of == family}
        of_contexts = {"cp2_allgather", "cp2_ulysses"} if family in (*MOE_FAMILIES, *DELTA_NET_FAMILIES) else set()
        assert refused <= of_contexts | ({"tp2"} if family in MOE_FAMILIES else {"ep2", "ep2_tp2"})
    assert reasons["qwen3", "ep2"] == "engine.parallel.expert = 2: qwen3 has no experts"


@pytest.mark.parametrize("key", ["families", "layouts", "wraps", "vllm"])
def test_a_wrong_name_is_refused_with_the_choices(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["equivalence", "--config", str(CONFIG), f"run.dir={tmp_path}", f"bench_equivalence.{key}=[tp3]"])
    said = capsys.readouterr().err
    assert said.startswith(f"bench_equivalence.{key}: 'tp3' is not among the choices") and "all, " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override", ["model.path=x", "model.dtype=bfloat16", "engine.optimizer.clip_grad_norm=1.0", "engine.parallel.tensor=2"]
)
def test_keys_that_cases_set_or_that_hide_differences_are_refused(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["equivalence", "--config", str(CONFIG), f"run.dir={tmp_path}", override])
    assert capsys.readouterr().err.startswith(override.partition("=")[0].removesuffix(".tensor"))


def test_a_case_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of the second case look for the model where there is none."""

    def job(reported: dict[str, Any], *others: Any) -> Job:
        if "qwen3" in reported["model"]["path"]:
            reported["model"]["path"] = str(tmp_path / "nowhere")
        return Job(reported, *others)

    monkeypatch.setattr(of_runs, "Job", job)
    chosen = ["families=[qwen3,mistral]", "layouts=[one,ep2]", "wraps=[ddp]", "vllm=[none]", "steps=1"]
    overrides = [f"run.dir={tmp_path}", *(f"bench_equivalence.{each}" for each in chosen)]
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    assert cli.main(["equivalence", "--config", str(CONFIG), *overrides, "--json", str(out), "--to", str(table)]) == 1
    results = json.loads(out.read_text())
    first, second = results["cases"].values()
    assert (first["problems"], second["problems"][0].partition(":")[0]) == ([], "OSError")
    assert {each["layout"] for each in results["unsupported"].values()} == {"ep2"}
    assert "1 not right" in capsys.readouterr().out
    text = table.read_text()
    assert "| mistral | 0 / 0 | - |" in text and "| qwen3 | **failed** | - |" in text
    assert "| mistral | EP2 | engine.parallel.expert = 2: mistral has no experts |" in text


def test_ranks_that_are_late_are_ended_and_say_so(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    sleeping = f"import time; time.sleep(600.{os.getpid()})"
    assert run_logged(1, "timeit", "-n1", "-r1", sleeping, log=log, limit_seconds=5.0) == "not done after 5 s"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert sleeping not in process.cmdline()


def test_what_is_judged() -> None:
    export = {"tensors": 1, "differing": [], "missing": [], "twice": []}
    right = {"history": [{"loss": 0.01, "grad_norm": 2.0}], "micro_batches": [2, 2], "log_probs": [[-1.0], [-2.0]]}
    right |= {"export_before": export, "export_after": export}
    found = {**right, "history": [{"loss": 0.01001, "grad_norm": 2.00004}], "log_probs": [[-1.0], [math.nan]]}
    worst = judge.differences(found, right, ([-1.0], [-2.0]))
    assert worst["loss"] == pytest.approx(1e-5) and worst["grad_norm"] == pytest.approx(2e-5)
    assert worst["log_probs"] == 0.0 and math.isnan(worst["log_probs_trained"])
    assert [each.split()[0] for each in judge.problems(found, worst, "qwen3", 2)] == ["grad_norm", "log_probs_trained"]
    assert [each.split()[0] for each in judge.problems(found, worst, "qwen3_moe", 2)] == ["log_probs_trained"]
    broken = {**right, "export_after": {**export, "missing": ["a"]}}
    nothing = [{**right, "history": [{"loss": 0.0, "grad_norm": norm}]} for norm in (1.84e-5, 1.83e-5)]
    assert judge.differences(*nothing, ([-1.0], [-2.0]))["grad_norm"] == pytest.approx(1e-5), "of rounding alone"
    same = judge.differences(right, right, ([-1.0], [-2.0]))
    assert judge.problems(broken, same, "qwen3", 3) == ["export_after: 1 tensors missing, first a", "steps of 2 micro-batches"]
