"""Whole tiny runs on a CPU by random configs: any family, with a handful of keys that are not what they are by default.

    python -m tests.fuzz_keys --minutes 60 --seed 0 [--to FOLDER]      # each run prints its seed and its keys
    python -m tests.fuzz_keys --runs 1 --seed 17 --to FOLDER           # that run alone

What `megasync train --check` takes has to run to its end, and on for two more steps in a second process, with other keys where a
resumed run may have them; what it refuses is drawn again, and the refusal has to name its key. A run is right when it ends with
exit code 0, leaves nothing behind, every number that it logged is finite, and trainer and vLLM agree as its dtype allows. Leaves
out kills and the data's pairing (tests/fuzz_runs.py), and GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from engine.config import BIASED_ROUTERS, DELTA_NET_FAMILIES, FAMILIES, LATENT_FAMILIES, MOE_FAMILIES
from tests.runs.train_cases import TORCHRUN, environment, metrics, processes_with, write_config
from tests.support.tiny_models import DELTA_SERVED, SERVED, write_tiny_model

FIRST_STEPS, ALL_STEPS, LIMIT_SECONDS, END_SECONDS, DRAWS = 3, 5, 400.0, 40.0, 12
GAPS = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.3}  # mean of |trainer - vLLM| in nats, at most: of these models
FP8_GAP = 1.0
KEY = re.compile(r"\b(run|model|engine|rollout|sync|algorithm|data|checkpoint)\.[a-z_0-9.]+")
VALUES: dict[str, tuple[Any, ...]] = {
    "run.deterministic": (True,),
    "run.export_hf": (True,),
    "run.loggers": ("[]",),
    "run.log_samples": (0, 100),
    "model.dtype": ("bfloat16", "float16"),
    "model.exact": (True,),
    "engine.wrap": ("ddp", "ddp", "megatron_fsdp"),
    "engine.parallel.tensor": (2,),
    "engine.parallel.pipeline": (2,),
    "engine.parallel.virtual_pipeline": (2,),
    "engine.parallel.context": (2,),
    "engine.parallel.context_attention": ("ulysses",),
    "engine.parallel.expert": (2,),
    "engine.parallel.sequence": (True,),
    "engine.gradient_dtype": ("bfloat16",),
    "engine.tokens_per_microbatch": (64, 2000),
    "engine.balance": ("cost",),
    "engine.head_dtype": ("float32",),
    "engine.logits_chunk_tokens": (16, 50),
    "engine.recompute": ("selective", "full"),
    "engine.recompute_modules": ("[mlp]", "[core_attn,layernorm]", "[moe]"),
    "engine.fusions": ("all",),
    "engine.optimizer.decay": ("linear", "cosine"),
    "engine.optimizer.clip_grad_norm": (0.0, 0.01),
    "engine.optimizer.warmup_steps": (2,),
    "engine.optimizer.offload": (True,),
    "engine.lora.rank": (4,),
    "engine.lora.dropout": (0.1,),
    "engine.lora.rslora": (True,),
    "engine.lora.sync": ("adapter",),
    "engine.lora.targets": ("[linear_qkv]", "[linear_fc1,linear_fc2]"),
    "rollout.dtype": ("fp8",),
    "rollout.placement": ("colocated",),
    "rollout.replicas": (2,),
    "rollout.tensor_parallel": (2,),
    "rollout.max_staleness": (1, 2),
    "rollout.on_update": ("continue", "restart"),
    "rollout.cache_on_update": ("recompute",),
    "rollout.group_size": (2, 5),
    "rollout.temperature": (0.5, 1.5),
    "rollout.top_p": (0.9,),
    "rollout.top_k": (20,),
    "rollout.min_p": (0.05,),
    "rollout.stop": ("['7']",),
    "rollout.oversample": (1.5, 2.0),
    "rollout.max_num_seqs": (3, 8),
    "rollout.speculation.method": ("ngram",),
    "rollout.speculation.prompt_lookup_min": (1,),
    "rollout.speculation.num_tokens": (1, 8),
    "rollout.reward": ("exact_match", "{token_count: 1.0, exact_match: 0.5}", "math_verify"),
    "rollout.reward_on_failure": ("zero",),
    "rollout.record": ("all", "none"),
    "rollout.evaluate_every_steps": (1, 2),
    "rollout.evaluate_at_start": (False,),
    "rollout.episode": ("examples.calculator:episode",),
    "rollout.episode_placement": ("cluster",),
    "rollout.episode_max_turns": (2,),
    "rollout.episode_on_failure": ("zero", "drop"),
    "sync.transport": ("delta", "nccl", "shm"),
    "sync.bucket_bytes": ("8KiB", "64KiB"),
    "sync.verify": ("none", "readback"),
    "sync.canary_tolerance": (0.0,),
    "sync.log": ("digests", "deltas"),
    "sync.log_full_every": (2,),
    "sync.log_keep": (1, 2),
    "algorithm.name": ("sft",),
    "algorithm.dual_clip": (3.0,),
    "algorithm.ratio_level": ("sequence",),
    "algorithm.kl_coefficient": (0.01,),
    "algorithm.loss": ("cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl"),
    "algorithm.kl_estimator": ("k2",),
    "algorithm.kl_in": ("reward",),
    "algorithm.entropy_coefficient": (0.01,),
    "algorithm.advantage": ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "pass_at_k"),
    "algorithm.credit": ("turn",),
    "algorithm.pass_k": (2,),
    "algorithm.load_balancing": (0.01,),
    "algorithm.router_bias_update_rate": (0.001,),
    "algorithm.router_replay": ("rollout",),
    "algorithm.log_router_gap": (True,),
    "algorithm.support_replay": (True,),
    "algorithm.importance_correction": ("none", "mask"),
    "algorithm.importance_level": ("sequence", "geometric"),
    "algorithm.loss_aggregation": ("sequence_mean", "constant_length"),
    "algorithm.baseline": ("leave_one_out",),
    "algorithm.normalize_advantage_by_std": (False,),
    "algorithm.truncated": ("mask", "penalise"),
    "algorithm.overlong_buffer": (4,),
    "algorithm.log_entropy": (False,),
    "algorithm.filter_groups": (True,),
    "algorithm.filter_factor": (1, 2),
    "algorithm.num_minibatches": (1, 4),
    "algorithm.num_passes": (1, 2),
    "algorithm.non_finite": ("skip",),
    "algorithm.old_log_probs": ("separate",),
    "data.batch_size": (4, 7),
    "data.shuffle": (False,),
    "data.sampler": ("difficulty",),
    "checkpoint.asynchronous": (True,),
    "checkpoint.keep": (1,),
}
WITH: dict[str, dict[str, Any]] = {  # what a key is nothing without; by its longest prefix
    "engine.lora.": {"engine.lora.rank": 4},
    "engine.recompute_modules": {"engine.recompute": "selective"},
    "engine.parallel.virtual_pipeline": {"engine.parallel.pipeline": 2},
    "engine.parallel.context_attention": {"engine.parallel.context": 2},
    "engine.parallel.sequence": {"engine.parallel.tensor": 2},
    "engine.gradient_dtype": {"model.dtype": "bfloat16"},
    "algorithm.support_replay": {"rollout.top_k": 20},
    "rollout.on_update": {"rollout.max_staleness": 2},
    "rollout.cache_on_update": {"rollout.max_staleness": 2, "rollout.on_update": "continue"},
    "rollout.speculation.": {"rollout.speculation.method": "ngram"},
    "rollout.episode_": {"rollout.episode": VALUES["rollout.episode"][0]},
    "sync.log_full_every": {"sync.log": "deltas"},
    "sync.log_keep": {"sync.log": "deltas"},
    "algorithm.credit": {"rollout.episode": VALUES["rollout.episode"][0]},
    "algorithm.pass_k": {"algorithm.advantage": "pass_at_k"},
    "algorithm.kl_estimator": {"algorithm.kl_coefficient": 0.01},
    "algorithm.kl_in": {"algorithm.kl_coefficient": 0.01},
    "algorithm.log_router_gap": {"algorithm.router_replay": "rollout"},
    "algorithm.overlong_buffer": {"algorithm.truncated": "penalise"},
    "algorithm.filter_factor": {"algorithm.filter_groups": True},
}
AT_RESUME = (  # of a run that goes on, these may be others
    *("rollout.max_staleness", "rollout.on_update", "rollout.replicas", "rollout.group_size", "rollout.reward", "rollout.record"),
    *("algorithm.filter_groups", "algorithm.num_minibatches", "algorithm.kl_coefficient", "data.batch_size", "sync.transport"),
    *("sync.log", "engine.tokens_per_microbatch", "engine.recompute", "checkpoint.asynchronous", "rollout.temperature"),
    *("rollout.dtype", "rollout.speculation.method"),
)


def draw(source: random.Random, names: tuple[str, ...], most: int) -> dict[str, Any]:
    keys = {name: source.choice(VALUES[name]) for name in source.sample(names, source.randint(2, most))}
    for name in tuple(keys):
        for prefix, more in WITH.items():
            if name.startswith(prefix):
                keys = {**more, **keys}
    return keys


def overrides(keys: Mapping[str, Any]) -> list[str]:
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()]


def accepted(source: random.Random, config: Path, keys: dict[str, Any], ranks: int) -> bool:
    """Whether the check takes them; a key that it names is taken out of `keys`, and they are tried again."""
    for _ in range(DRAWS):
        command = [sys.executable, "-m", "megasync", "train", str(config), "--check", "--nproc", str(ranks), *overrides(keys)]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
        if said.returncode == 0:
            return True
        text = said.stdout + said.stderr
        assert said.returncode == 2 and "Traceback" not in text, f"the check ends with {said.returncode}:\n{text}"
        named = [found[0].rstrip(".") for found in KEY.finditer(text)]
        assert named, f"a refusal that names no key:\n{text}"
        ours = [name for name in keys if name in named]
        print(f"    refused: {' '.join(text.split())[:240]}", flush=True)
        if not ours:
            return False
        del keys[source.choice(ours)]
    return False


def launch(config: Path, keys: Mapping[str, Any], ranks: int) -> tuple[int, str]:
    """Exit code and what was said; where it takes too long, where its processes stand. None of them is left."""
    own = environment(config, MEGASYNC_TEST_MARKER=f"keys-{uuid4().hex}")
    marker = own["MEGASYNC_TEST_MARKER"]
    process = subprocess.Popen(
        [*TORCHRUN, str(config), *overrides(keys), "--nproc", str(ranks)],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = process.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        for each in processes_with(marker):
            each.send_signal(signal.SIGABRT)  # it says where it stands
        raise AssertionError(f"not over after {LIMIT_SECONDS:g} s\n{process.communicate()[0][-12000:]}") from None
    deadline = time.monotonic() + END_SECONDS
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"left running: {left}"
    files = sorted(Path(own["TMPDIR"]).iterdir())
    assert not files, f"left behind: {files}"
    return process.returncode, said


def first_config(source: random.Random, folder: Path) -> tuple[Path, str]:
    """And the family."""
    family = source.choice(FAMILIES)
    config = SERVED if family in LATENT_FAMILIES else DELTA_SERVED if family in DELTA_NET_FAMILIES else {}
    tied = source.random() < 0.4 and family not in BIASED_ROUTERS  # vLLM ignores it in these
    model = write_tiny_model(folder / "model", family, tied=tied, seed=source.randrange(100), **config)
    limits = {"answer_timeout_seconds": 60, "start_timeout_seconds": 200, "max_model_len": 64}
    eval_lines = "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(6))
    (folder / "held_out.jsonl").write_text(eval_lines)
    return write_config(
        folder,
        run={"steps": FIRST_STEPS, "hung_rank_timeout_seconds": 60},
        model={"path": str(model)},
        rollout=limits,
        data={"eval": str(folder / "held_out.jsonl")},
        checkpoint={"every_steps": 2},
    ), family


def judge(run: Path, keys: Mapping[str, Any], num_steps: int) -> None:
    """What the run has logged."""
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1)), [line["step"] for line in lines]
    assert (run / "summary.json").is_file(), "no summary"
    wrong = [(line["step"], key, value) for line in lines for key, value in line.items() if not math.isfinite(value)]
    assert not wrong, f"not finite: {wrong[:5]}"
    if keys.get("algorithm.name") == "sft":
        return
    allowed = FP8_GAP if keys.get("rollout.dtype") == "fp8" else GAPS[keys.get("model.dtype", "float32")]
    canary = [line["sync/canary_gap"] for line in lines if "sync/canary_gap" in line]
    assert max(canary, default=0.0) <= allowed, f"the canary's gaps {canary}"
    fresh = [line["logprob_gap/mean"] for line in lines if line["staleness/max"] == 0]  # others differ by what was learnt since
    is_cut = any(name in keys for name in ("rollout.top_p", "rollout.top_k", "rollout.min_p", "engine.lora.dropout"))
    assert is_cut or max(fresh, default=0.0) <= allowed, f"gaps of samples of the newest weights {fresh}"
    if keys.get("model.exact"):
        assert max(fresh + canary, default=0.0) == 0.0, f"not exact: {fresh}, {canary}"


def one_run(seed: int, folder: Path) -> str:
    """What it came to, in words."""
    source = random.Random(seed)
    config, family = first_config(source, folder)
    ranks = source.choice((1, 2, 2, 2, 4))
    names = tuple(name for name in VALUES if family in MOE_FAMILIES or "rout" not in name.partition(".")[2].split("_")[0])
    keys = draw(source, names, 12)
    if family in DELTA_NET_FAMILIES:
        keys = {"model.dtype": "bfloat16", **keys}  # of vLLM's kernels for CPUs
    print(f"seed {seed}: {family}, {ranks} ranks, {' '.join(overrides(keys))}", flush=True)
    if not accepted(source, config, keys, ranks):
        return "refused"
    print(f"    runs with: {' '.join(overrides(keys))}", flush=True)
    run, begin = folder / "runs" / "run", time.monotonic()
    code, said = launch(config, keys, ranks)
    assert code == 0, f"exit code {code}:\n{said[-8000:]}"
    judge(run, keys, FIRST_STEPS)
    changed = draw(source, tuple(name for name in AT_RESUME if name in names), 4)
    again = {**keys, "run.steps": ALL_STEPS, **changed}
    if keys.get("algorithm.name") == "sft" or not accepted(source, config, again, ranks):
        again = {**keys, "run.steps": ALL_STEPS}
    more = {key: again[key] for key in changed if key in again}
    print(f"    {time.monotonic() - begin:.0f} s; goes on with: {' '.join(overrides(more))}", flush=True)
    code, said = launch(config, again, ranks)
    if code == 2:
        assert KEY.search(said), f"a refusal that names no key:\n{said}"
        return f"right; to go on so is refused: {' '.join(said.split())[-300:]}"
    assert code == 0, f"resumed: exit code {code}:\n{said[-8000:]}"
    judge(run, again, ALL_STEPS)
    return f"right, {time.monotonic() - begin:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=10.0**9)
    parser.add_argument("--to", type=Path, default=None)
    given = parser.parse_args()
    os.environ.setdefault("PYTEST_XDIST_WORKER", "gw0")  # others run beside it (train_cases.py)
    top = given.to or Path(tempfile.mkdtemp(prefix="fuzz-keys-"))
    end, wrong = time.monotonic() + 60 * given.minutes, []
    for seed in range(given.seed, given.seed + given.runs):
        if time.monotonic() > end:
            break
        folder = top / f"seed{seed}"
        folder.mkdir(parents=True)
        try:
            print(f"    {one_run(seed, folder)}", flush=True)
        except Exception:  # noqa: BLE001 # reported, and the next one begins
            wrong.append(seed)
            print(f"WRONG, seed {seed}: {folder}\n{traceback.format_exc()[-5000:]}", flush=True)
    print(json.dumps({"wrong": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
