"""All cases of the table: models, unsupported cases, one start of ranks after another, vLLM, and the results.

Leaves out what a case is (cases.py), what its ranks do (measure.py) and the Markdown (judge.py).

    python -m bench equivalence --config configs/bench_equivalence.yaml [--json FILE] [--to docs/bench/equivalence.md]
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.results import Results, describe, print_table, write_results
from bench.config import BenchRoot
from bench.equivalence import cases as of_cases
from bench.equivalence import judge
from bench.equivalence.cases import Case, Model, layout_keys
from bench.equivalence.ranks import Job, run_jobs
from megasync.config.load import save_config
from megasync.config.schema import Config

NUM_SHOWN = 3  # problems of a case
Runner = Callable[[Sequence[Job], int, Path], Iterator[dict[str, Any]]]  # as run_jobs


class Bench:
    """The results so far; `keep` writes them."""

    def __init__(self, config: BenchRoot, json_path: Path | None) -> None:
        self.config, self.json_path, self.place = config, json_path, config.run.folder
        self.models: dict[str, Path] = {}
        self.transformers: dict[str, list[float]] = {}
        self.references: dict[Case, dict[str, Any]] = {}
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        self.results: Results = {**describe("equivalence", config), "commit": commit, "cases": {}, "unsupported": {}, "vllm": {}}

    def config_of(self, case: Case) -> Config:
        """The config of the case, with its model, which is written if need be."""
        from bench.equivalence.models import microbatch_tokens, write_model

        model, seed = case.model, self.config.run.seed
        if model.name not in self.models:
            self.models[model.name] = write_model(model, self.place / "models", seed)
        minibatches = int(case.keys.get("algorithm.num_minibatches", self.config.algorithm.num_minibatches))
        tokens = microbatch_tokens(seed, self.config.bench_equivalence.micro_batches, case.data_size, minibatches)
        return of_cases.case_config(self.config, case, self.models[model.name], tokens)

    def accepted(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that the config check accepts; the others are recorded as unsupported."""
        taken = []
        for case in cases:
            try:
                reason = of_cases.refusal(self.config_of(case), case.num_ranks)
            except ValueError as error:
                self._note(case, {"problems": [str(error).splitlines()[0]], "differences": {}})
                continue
            if reason:
                self.results["unsupported"][case.name] = {**_described(case), "reason": reason}
            else:
                taken.append(case)
        return taken

    def run(self, cases: Sequence[Case], runner: Runner = run_jobs) -> None:
        """The references first, then all others, by the number of their ranks."""
        references = list(dict.fromkeys(case.reference for case in cases))
        self._start(references, 1, runner)
        rest = [case for case in cases if case not in references]
        for num_ranks in sorted({case.num_ranks for case in rest}):
            self._start([case for case in rest if case.num_ranks == num_ranks], num_ranks, runner)

    def _start(self, cases: Sequence[Case], num_ranks: int, runner: Runner) -> None:
        chosen, jobs, begin = self.config.bench_equivalence, [], time.monotonic()
        for number, case in enumerate(cases):
            place = self.place / "cases" / f"{num_ranks}_{number}"
            parsed = self.config_of(case).model_dump()
            jobs.append(Job(parsed, f"{place}.json", f"{place}_trained", chosen.micro_batches, chosen.case_seconds))
        for number, (case, job, found) in enumerate(zip(cases, jobs, runner(jobs, num_ranks, self.place), strict=True)):
            if case == case.reference:
                self.references[case] = found
            noted = self._judge(case, found, Path(job.folder))
            self._note(case, noted)
            shutil.rmtree(job.folder, ignore_errors=True)
            seconds, begin = time.monotonic() - begin, time.monotonic()
            print(f"{number + 1} of {len(cases)} on {num_ranks} ranks: {case.name}: {said(noted)}, {seconds:.1f} s", flush=True)

    def _judge(self, case: Case, found: dict[str, Any], trained: Path) -> dict[str, Any]:
        from bench.equivalence.models import scored_samples, transformers_log_probs

        reference = self.references.get(case.reference, {"error": "was not run"})
        for each, whose in ((found, ""), (reference, "the reference: ")):
            if "error" in each:
                return {"problems": [f"{whose}{each['error']}"], "differences": {}}
        samples = scored_samples(self.config.run.seed)
        if case.model.name not in self.transformers:
            self.transformers[case.model.name] = transformers_log_probs(self.models[case.model.name], samples)
        theirs = self.transformers[case.model.name], transformers_log_probs(trained, samples)
        worst = judge.differences(found, reference, theirs)
        wanted = self.config.bench_equivalence.micro_batches if case.layout else 1
        wrong = judge.problems(found, worst, case.model.family, wanted)
        kept = {name: found[name] for name in ("history", "micro_batches", *judge.EXPORTS)}
        return {"problems": wrong, "differences": worst, **kept}

    def read_back(self, families: Sequence[str]) -> None:
        """From vLLM, of one layout a family, under every wrap."""
        from bench.equivalence import read_back

        for family in families:
            case = Case(Model(family), read_back.LAYOUT, read_back.NUM_RANKS, layout_keys(read_back.LAYOUT, "ddp"))
            self.results["vllm"][family] = found = read_back.read_back(self.config, self.config_of(case).model_dump(), family)
            self.keep()
            print(f"{family} read back from vLLM: {found.get('error', 'equal bit for bit')}", flush=True)

    def _note(self, case: Case, noted: dict[str, Any]) -> None:
        self.results["cases"][case.name] = {**_described(case), **noted}
        self.keep()

    def keep(self) -> None:
        write_results(self.results, self.place / "bench_equivalence.json", self.json_path)


def _described(case: Case) -> dict[str, Any]:
    keys = {"family": case.model.family, "model": case.model.name, "layout": case.layout, "num_ranks": case.num_ranks}
    return {**keys, "wrap": case.wrap, "keys": case.keys}


def said(noted: dict[str, Any]) -> str:
    """One line."""
    worst = ", ".join(f"{name} {value:.1e}" for name, value in noted["differences"].items())
    problems: list[str] = noted["problems"]
    return "; ".join(problems[:NUM_SHOWN]) or f"right ({worst})"


def wrong(results: Results) -> Iterator[str]:
    """Names of what failed or is out of bounds."""
    yield from (name for name, each in results["cases"].items() if each["problems"])
    yield from (f"{family} from vLLM" for family, each in results["vllm"].items() if "error" in each)


def run(config: BenchRoot, json_path: Path | None, document_path: Path | None) -> int:
    """By a prepared config. Exit code 1: a case failed or is out of bounds."""
    (config.run.folder / "cases").mkdir(parents=True, exist_ok=True)
    for former in ("models", "cases", "vllm"):
        shutil.rmtree(config.run.folder / former, ignore_errors=True)
    save_config(config, config.run.folder / "config.yaml")
    from transformers.utils import logging

    logging.disable_progress_bar()  # one for each model that is read or written
    bench = Bench(config, json_path)
    bench.run(bench.accepted(of_cases.table(config)))
    bench.read_back(of_cases.read_back_families(config))
    bench.keep()
    show(bench.results)
    if document_path is not None:
        judge.write_document(bench.results, document_path)
    return int(any(wrong(bench.results)))


def show(results: Results) -> None:
    """Print the faults, or that there are none."""
    failed, cases = list(wrong(results)), results["cases"]
    rows = [[name, said(cases[name]) if name in cases else results["vllm"][name.split()[0]]["error"]] for name in failed]
    if rows:
        print_table("not within bounds", ("case", "what"), rows)
    read, unsupported = len(results["vllm"]), len(results["unsupported"])
    print(f"{len(cases)} cases, {unsupported} unsupported, {read} families from vLLM; {len(failed)} not right")
