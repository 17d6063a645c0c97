"""Each broken machine or folder is found, with its remedy; a sound machine has no errors."""

from __future__ import annotations

import json
import os
import py_compile
from dataclasses import asdict
from pathlib import Path

import pytest

from megasync.config.files import lock, lock_holder
from megasync.diagnosis import gpus, inputs, limits, packages, storage
from megasync.diagnosis.environment import check_environment, has_compiled
from megasync.diagnosis.finding import exit_code
from megasync.diagnosis.gpus import parse_gpus, parse_links
from megasync.diagnosis.needs import Needs, needs_of
from megasync.hf.tensors import num_parameters
from megasync.doctor import main
from tests.megasync.diagnosis import broken
from tests.support.config_files import ROOT, write_runnable
from tests.megasync.diagnosis import broken_inputs, broken_machines  # noqa: F401  (they fill the table)
from tests.megasync.diagnosis.table import CASES, GIB, MIB, ON_GPUS, PINS, ROOMY, SEPARATE, Check, REQUIRES


def test_the_table_is_long_enough() -> None:
    assert len({name for name, *_ in CASES}) == len(CASES) >= 25


@pytest.mark.parametrize(("check", "level", "seen", "remedy"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_each_broken_machine_is_found_with_its_remedy(check: Check, level: str, seen: str, remedy: str, tmp_path: Path) -> None:
    found = check(tmp_path)
    of_level = [finding for finding in found if finding.level == level]
    assert of_level, found
    assert any(seen in finding.seen and remedy in finding.remedy for finding in of_level), of_level
    assert exit_code(found) == (level == "error"), found
    assert all(finding.remedy for finding in found if finding.level != "ok"), found


def test_what_is_sound_is_ok(tmp_path: Path) -> None:
    """The same checks, on what is as it should be."""
    config = broken.config(tmp_path)
    two = parse_gpus(f"{broken.smi(0)}\n{broken.smi(1)}")
    links, peers = parse_links(broken.TOPOLOGY.format(link="NV18")), parse_links(broken.PEERS.format(state="OK"))
    assert links == {(0, 1): "NV18", (1, 0): "NV18"} and peers == {(0, 1): "OK", (1, 0): "OK"}
    found = [
        *packages.check_python((3, 12, 1), "gpu", "/usr/bin/python"),
        *packages.check_processor("x86_64", {"avx2"}, "cpu"),
        *packages.check_packages(PINS, PINS, "cpu"),
        *packages.check_requirements(REQUIRES, {"numpy": "2.3.0", "torch": "2.13.0+cpu"}, "cpu"),
        *packages.check_companions({"torchvision": "0.28.0", "json": "1"}, lambda _: ""),
        *packages.check_apex({}, []),
        *packages.check_apex({"apex": "0.1"}, [str(broken.package(tmp_path, "apex", "0.1", "optimizers/__init__.py"))]),
        *gpus.check_driver(two, "13.0", "gpu", has_device=True),
        *gpus.check_driver([], "", "cpu", has_device=False),
        *gpus.check_visible(two, None, SEPARATE),
        *gpus.check_memory(two, {}, SEPARATE),
        *gpus.check_capability(two, SEPARATE),
        *gpus.check_links(two, links, peers),
        *limits.check_limits(ROOMY, has_infiniband=False),
        *limits.check_memory(64 * GIB, -1, needs_of(config, 10**9, 2, has_gpus=False)),
        *storage.check_shared_memory(8 * GIB, needs_of(config, 10**9, 2, has_gpus=False)),
        *storage.check_disk(tmp_path, GIB, 0, Needs()),
        *inputs.check_model(str(broken.sharded(tmp_path / "other"))),
        *inputs.check_tokenizer(config)[0],
        *inputs.check_data(config, None),
        *inputs.check_reward(config),
        *check_environment({"NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": "WARN"}, ON_GPUS),
    ]
    assert [asdict(each) for each in found if each.level != "ok"] == []


def test_pythons_are_those_of_the_setup() -> None:
    script = (ROOT / "launch/setup.sh").read_text()
    for lane, versions in packages.PYTHONS.items():
        assert f"{lane}) PYTHON_VERSIONS=({' '.join(f'{major}.{minor}' for major, minor in versions)})" in script
    for lane in ("cpu", "gpu"):
        pins = packages.read_lock(packages.LOCKS / f"{lane}.txt")
        assert pins.keys() >= {*packages.VITAL, packages.VLLM[lane]} and packages.OTHER_VLLM[lane] not in pins
    assert {*packages.FOR_DEVELOPERS, *packages.TRIED} <= PINS.keys() | {"vllm"}


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH",
        broken.fake_smi(
            tmp_path, f"case $1 in --query-gpu=*) echo '{broken.smi(1)}';; *) echo '{'GPU-1a, 7, 300, /usr/bin/python3'}';; esac"
        ),
    )
    assert gpus.read_gpus() == [broken.gpu(1, name="NVIDIA H100 80GB HBM3")]
    assert gpus.read_users() == {"GPU-1a": ["7 (python3, 300 MiB)"]}
    monkeypatch.setenv(
        "PATH", broken.fake_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    )
    assert gpus.read_gpus() == []


def test_needs_follow_the_config(tmp_path: Path) -> None:
    config = broken.config(tmp_path, "sync.bucket_bytes=64MiB", "checkpoint.every_steps=50", "model.dtype=float32")
    assert num_parameters(tmp_path / "model") == 2 * 128 * 128 + 128 + 4 * (128 * (2 * 128 + 2 * 64 + 3 * 256 + 2) + 2 * 32)
    on_cpu, on_gpus = (needs_of(config, 10**9, 4, has_gpus=has_gpus) for has_gpus in (False, True))
    assert on_cpu.shared_memory == 128 * MIB and on_gpus.shared_memory == 0 and on_gpus.replica_gpus == 1
    assert on_cpu.disk == 2 * 16 * 10**9, "of 100 steps two checkpoints: weights, main weights and two moments"
    assert on_cpu.host_memory > (4 + 4 + 8 + 4) * 10**9 > on_gpus.host_memory
    logged = broken.config(tmp_path, "model.dtype=bfloat16", "checkpoint.every_steps=0", "sync.log=deltas", "sync.log_keep=30")
    unlogged = logged.model_copy(update={"sync": config.sync})
    needed, without = (needs_of(one, 10**9, 4, has_gpus=True) for one in (logged, unlogged))
    assert needed.host_memory - without.host_memory == 2 * 10**9, "a copy of the weights"
    assert needed.disk - without.disk == 2 * 10**9 * (3 + 47 * 0.005), "of 50 versions three whole ones"
    ddp = config.model_copy(update={"engine": config.engine.model_copy(update={"wrap": "ddp"})})
    more = needs_of(ddp, 10**9, 4, has_gpus=False).host_memory - on_cpu.host_memory
    assert more == 3 * 8 * 10**9, "weights and gradients on each of four ranks"


def test_no_lock_is_left_behind(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "run") is None and list(tmp_path.iterdir()) == []
    descriptor = lock(tmp_path / "run")
    assert descriptor is not None
    os.close(descriptor)
    assert lock_holder(tmp_path / "run") is None


def test_a_sound_machine_has_no_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one, with a config like the quickstart's."""
    config = write_runnable(tmp_path)
    overrides = [
        "sync.bucket_bytes=1MiB",
        "rollout.kv_cache_bytes=64MiB",
        "rollout.max_model_len=1200",
        "checkpoint.every_steps=10",
    ]
    code = main([str(config), *overrides, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, [each for each in found if each["level"] == "error"]
    assert {"Python", "packages", "gloo", "/dev/shm", "disk", "clock", "model", "tokenizer", "data", "reward"} <= {
        f["check"] for f in found
    }
    assert all(each["level"] in ("ok", "warning", "error") and (each["remedy"] or each["level"] == "ok") for each in found)
    assert not (tmp_path / "runs").exists()


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "nothing.yaml")])
    assert stop.value.code == 2 and "there is no such config file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["--num-ranks", "0"])
    assert stop.value.code == 2
    capsys.readouterr()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main([str(write_runnable(tmp_path)), f"data.train={tmp_path}/gone.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "error   data" in said and "error   environment" in said and "2 errors" in said and "remedy:" in said


def test_a_package_is_compiled_where_python_finds_it_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "not_compiled_yet.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_compiled("not_compiled_yet")
    py_compile.compile(str(file))
    assert has_compiled("not_compiled_yet") and has_compiled("no_such_package")
