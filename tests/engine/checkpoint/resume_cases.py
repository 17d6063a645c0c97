"""What tests/engine/checkpoint/test_resume.py runs on its ranks: checkpoints of one layout, resumed in others."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import checkpoint
from engine.resume import INDEX_FILE, random_file
from engine.engine import Engine
from bridge.layout.digest import digest_tensor
from tests.engine.engine_cases import engine, everywhere, random_samples
from tests.support.file_limit import file_limit

STOP, STEPS = 2, 7
FILE_BYTES = 100_000  # several files a rank


def history(built: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of these steps."""
    found = []
    for step in range(first, last):
        metrics = built.update(built.prepare(random_samples(8, seed=step)))
        found.append((metrics["loss/sft"], metrics["grad_norm"]))
    return found


def save(built: Engine, root: Path, path: str, **options: Any) -> checkpoint.Save:
    options = {"file_bytes": FILE_BYTES, **options}
    step = options.pop("step", STOP)
    return checkpoint.save(root, step, built, everywhere(built), Path(path), 1, **options)


def readable_after_kills(path: str, root: str, moments: list[float]) -> list[list[str]]:
    """A process saves the same weights again and again and is killed so many seconds after its first checkpoint: of each moment
    what differs from that in the checkpoint which is the newest then. On a rank that has joined no world and trained nothing, so
    that it can be forked: each process is a world of its own."""
    found, first = [], Path(root) / "first"
    os.environ.pop("MASTER_ADDR", None)
    for number, seconds in enumerate(moments):
        folder = Path(root) / str(number)
        child = os.fork()
        if child == 0:
            try:
                _save_for_ever(path, folder, first if number == 0 else None)
            finally:
                traceback.print_exc()
                os._exit(1)
        while checkpoint.newest(folder) is None or not first.exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = checkpoint.newest(folder)
        assert newest is not None
        found.append(differing(first, newest))
    return found


def _save_for_ever(path: str, folder: Path, copy: Path | None) -> None:
    with engine(path, name="sft") as built:
        history(built, 0, 1)
        for step in itertools.count(1):
            saving = save(built, folder, path, step=step, asynchronous=step % 2 == 0)
            saving.wait()
            if step == 1 and copy is not None:
                shutil.copytree(saving.folder, copy.with_name("copying"))
                copy.with_name("copying").rename(copy)


def failing_save(path: str, root: str) -> dict[str, Any]:
    """What a save says of whose last rank's files are not what was exported, and what it leaves; then one that succeeds."""
    with engine(path, name="sft") as built:
        is_wrong = built.layout.rank == built.layout.world_size - 1
        values = itertools.count()
        digest = (lambda tensor: next(values)) if is_wrong else digest_tensor
        saving = save(built, Path(root), path, digest=digest, asynchronous=True)
        reported, left = "", []
        try:
            saving.wait()
        except checkpoint.CheckpointError as error:
            reported = str(error)
            dist.barrier()  # rank 0 takes away what there is
            left = sorted(file.name for file in Path(root).iterdir())
        dist.barrier()  # before it begins the next one
        whole = save(built, Path(root), path, digest=digest_tensor, asynchronous=True).wait()
        files = sorted(file.name for file in Path(root).iterdir())
        return {"reported": reported, "left": left, "then": files, "hf": len(list((whole / "hf").glob("*.safetensors")))}


def early_failures(path: str, root: str) -> dict[str, str]:
    """What a save says where the first files of a checkpoint cannot be written: on rank 0, on the last rank, of adapters."""
    reported = {}
    with engine(path, name="sft") as built:
        rank = built.layout.rank

        def attempt(name: str, limit_bytes: int, *, is_limited: bool, **options: Any) -> None:
            with file_limit(limit_bytes if is_limited else resource.RLIM_INFINITY):
                reported[name] = failure(lambda: save(built, Path(root) / name, path, **options).wait())

        for asynchronous in (False, True):
            attempt(f"random states {asynchronous}", 1000, is_limited=rank > 0, asynchronous=asynchronous)
        attempt("progress", 1000, is_limited=rank == 0, write_more=lambda folder: (folder / "progress").write_bytes(bytes(2000)))
        if rank == 0:
            (Path(root) / "file").touch()
        attempt("file", 0, is_limited=False)
        attempt("whole", 0, is_limited=False)
    with engine(path, name="sft", lora={"rank": 64, "alpha": 8.0}) as built:
        size = (Path(root) / "whole" / f"step_{STOP:08d}" / "random_00000.pt").stat().st_size
        for asynchronous in (False, True):
            attempt(f"adapter {asynchronous}", size + 1000, is_limited=rank == 0, asynchronous=asynchronous)
    return reported


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def strictness(path: str, root: str) -> dict[str, str]:
    """What resuming says to an index with something wrong in it."""
    with engine(path, name="sft") as built:
        history(built, 0, 1)
        folder = save(built, Path(root), path).wait()
        file = folder / INDEX_FILE
        index, reported = file.read_text(), {}
        for name, change in WRONG.items():
            wrong = json.loads(index)
            change(wrong["tensors"])
            file.write_text(json.dumps(wrong))
            reported[name] = refusal(folder, built)
        file.write_text(index)
        tensors = load_file(folder / "rank_00000-000.safetensors")
        one, other = (f"weight {QKV.format(layer)} 0,0" for layer in (0, 1))
        save_file({**tensors, one: tensors[other], other: tensors[one]}, folder / "rank_00000-000.safetensors")
        reported["layers"] = refusal(folder, built)
        file.write_text("{")
        reported["damaged"] = refusal(folder, built)
        file.unlink()
        (folder / "rank_00000.pt").touch()
        reported["older"] = refusal(folder, built)
    return reported


QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda tensors: tensors.pop(QKV.format(1)),
    "superfluous": lambda tensors: tensors.update({QKV.format(2): tensors[QKV.format(1)]}),
    "shape": lambda tensors: tensors[QKV.format(1)].update(shape=[1, 1]),
    "part": lambda tensors: tensors[QKV.format(1)].update(boxes=[]),
}


def refusal(folder: Path, built: Engine) -> str:
    try:
        checkpoint.restore(folder, built)
    except ValueError as error:
        return str(error)
    return ""


def damages_of_one_rank(path: str, root: str) -> dict[str, str]:
    """What resuming says on this rank to files that rank 1 alone reads: the first half of them, nothing, another weight."""
    reported = {}
    with engine(path, name="sft") as built:
        folder = save(built, Path(root), path).wait()
        tensors, random = folder / "rank_00001-000.safetensors", folder / random_file(1)

        def attempt(name: str, change: Callable[[], Any]) -> None:
            dist.barrier()
            if built.layout.rank == 0:
                change()
            dist.barrier()
            reported[name] = refusal(folder, built)

        for file in (random, tensors):
            whole = file.read_bytes()
            for how, left in (("half", whole[: len(whole) // 2]), ("empty", b""), ("whole", whole)):
                attempt(f"{file.name} {how}", partial(file.write_bytes, left))
        values = load_file(tensors)
        next(value for name, value in values.items() if name.startswith("weight ")).add_(1)
        attempt("weight", partial(save_file, values, tensors))
    return reported


def wrote(root: str, cases: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Of each case the losses of the steps after a checkpoint in the folder of its name."""
    found = {}
    for name, case in cases.items():
        with engine(num_steps=STEPS, name="sft", tokens=1000, **case) as built:
            history(built, 0, STOP)
            saving = save(built, Path(root) / name, case["path"], asynchronous=True, digest=digest_tensor)
            found[name] = history(built, STOP, STEPS)
            saving.wait()
    return found


def resumed(root: str, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case, which resumes the checkpoint of that name, the losses, and what it saves again before the first step."""
    found = []
    for number, (name, case) in enumerate(cases):
        folder = Path(root) / name / f"step_{STOP:08d}"
        with engine(num_steps=STEPS, name="sft", tokens=1000, **case, **checkpoint.engine_arguments(folder)) as built:
            note = checkpoint.restore(folder, built)
            second = save(built, Path(root) / f"again-{built.layout.world_size}-{number}", case["path"]).wait()
            found.append({"losses": history(built, STOP, STEPS), "note": note, "differing": differing(folder, second)})
    return found


def newer_weights(path: str, root: str, **case: Any) -> dict[str, Any]:
    """What a run saves that goes on from a checkpoint with the weights of two steps later: where it differs from either."""
    case |= {"num_steps": STEPS, "name": "sft", "path": path, "optimizer": {"warmup_steps": 100}}
    with engine(**case) as built:
        history(built, 0, STOP)
        former = save(built, Path(root) / "former", path).wait()
        history(built, STOP, STOP + 2)
        later = save(built, Path(root) / "later", path).wait()
        expected = built.schedule.num_steps, built.optimizer.param_groups[0]["lr"]
    with engine(**case, weights_path=later / "hf") as built:
        note = checkpoint.restore(former, built, steps_since=2)
        found = built.schedule.num_steps, built.optimizer.param_groups[0]["lr"]
        saved = save(built, Path(root) / "saved", path).wait()
        losses = history(built, STOP + 2, STEPS)
    return {
        "note": note, "schedule": (found, expected), "former": differing(former, saved), "later": differing(later, saved),
        "losses": losses,
    }  # fmt: skip


def rates(path: str, root: str, parts: list[tuple[int, int]]) -> list[float]:
    """Learning rates of a run of 6 batches, resumed for each of `parts`: so many batches, each cut into so many mini-batches."""
    found: list[float] = []
    batches, folder = 0, None
    for number, num_minibatches in parts:
        options: dict[str, Any] = {"num_minibatches": num_minibatches, "optimizer": {"warmup_steps": 0, "decay": "linear"}}
        start = checkpoint.engine_arguments(folder) if folder else {}
        with engine(path, name="sft", num_steps=6, **options, **start) as built:
            if folder is not None:
                checkpoint.restore(folder, built)
            found += [built.update(built.prepare(random_samples(8, seed=0)))["learning_rate"] for _ in range(number)]
            batches += number
            folder = save(built, Path(root), path, step=batches).wait()
    return found


def differing(one: Path, other: Path) -> list[str]:
    """Names of tensors that are not the same bit for bit, of main weights, optimizer state and the Hugging Face folder."""
    left, right = contents(one), contents(other)
    changed = {name for name in left.keys() & right.keys() if not torch.equal(left[name], right[name])}
    return sorted(changed | (left.keys() ^ right.keys()))


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, and their step counts."""
    found: dict[str, torch.Tensor] = {}
    for name, entry in json.loads((folder / INDEX_FILE).read_text())["tensors"].items():
        found[f"steps {name}"] = torch.tensor(entry["steps"])
        for kind in entry["kinds"]:
            whole = found[f"{kind} {name}"] = torch.full(entry["shape"], math.nan)
            for offsets, sizes, file in entry["boxes"]:
                region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                with safe_open(folder / file, framework="pt") as opened:
                    whole[region] = opened.get_tensor(f"{kind} {name} {','.join(map(str, offsets))}")
    for path in (*folder.glob("hf/*.safetensors"), *folder.glob("adapter/*.safetensors")):
        found |= load_file(path)
    return found
