"""The GPUs of this machine as nvidia-smi tells of them: driver, who is visible, memory, compute capability, links.

`read_*` ask nvidia-smi, `parse_*` read its words, `check_*` judge. Leaves out transfers between GPUs (network.py). No torch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megasync.config.errors import some
from megasync.diagnosis.finding import Finding, error, ok, warning

QUERY = "index,name,uuid,memory.total,memory.used,compute_cap,compute_mode,mig.mode.current,driver_version"
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}  # of each CUDA major (CUDA release notes, minor version compatibility)
BFLOAT16, LEAST_CAPABILITY = (8, 0), (7, 5)  # vllm/platforms/cuda.py; vLLM's and torch's builds for CUDA 13
BUSY_SHARE = 0.05  # of a GPU's memory; the driver itself takes less
SECONDS = 30.0
Pair = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi; memory in MiB."""

    index: int
    name: str
    uuid: str
    total: int
    used: int
    capability: tuple[int, int]
    mode: str = "Default"
    mig: str = "Disabled"
    driver: str = ""


@dataclass(frozen=True)
class GpuUse:
    """What a run wants of the GPUs that it sees: the first `num_ranks` for the trainer, then those of replicas."""

    num_ranks: int = 1
    replica_gpus: int = 0
    dtype: str = "bfloat16"
    replica_share: float = 0.0  # rollout.gpu_memory_utilization; 0: no replicas
    is_colocated: bool = False

    @property
    def num_gpus(self) -> int:
        return self.num_ranks + self.replica_gpus


def ask(*arguments: str) -> str | None:
    """What nvidia-smi says; None where there is none, or it fails or hangs."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def read_gpus() -> list[Gpu]:
    return parse_gpus(ask(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits") or "")


def read_users() -> dict[str, list[str]]:
    """Processes that compute on GPUs, by the GPU's uuid."""
    told = ask("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits") or ""
    users: dict[str, list[str]] = {}
    for line in told.splitlines():
        uuid, pid, mib, name = [*map(str.strip, line.split(",", 3)), "", "", "", ""][:4]
        users.setdefault(uuid, []).append(f"{pid} ({name.rpartition('/')[2]}, {mib} MiB)")
    return users


def parse_gpus(text: str) -> list[Gpu]:
    """Of the fields QUERY, a line a GPU; what the driver does not tell is `[N/A]`."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(QUERY.split(",")) and fields[0].isdigit():
            index, name, uuid, total, used, capability, mode, mig, driver = fields
            major, _, minor = capability.partition(".")
            numbers = (_number(major), _number(minor))
            found.append(Gpu(int(index), name, uuid, _number(total), _number(used), numbers, mode, mig, driver))
    return found


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def parse_links(text: str) -> dict[Pair, str]:
    """Of `nvidia-smi topo -m` or `topo -p2p r`: the word for each pair of GPUs, such as NV18, SYS or OK."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    columns: list[int] = []
    links: dict[Pair, str] = {}
    for row in rows:
        numbers = [int(word[3:]) for word in row if re.fullmatch(r"GPU\d+", word)]
        if not columns:
            columns = numbers  # of the first line that names GPUs
        elif len(numbers) == 1 and len(row) > len(columns):
            words = zip(columns, row[1:], strict=False)
            links |= {(numbers[0], column): word for column, word in words if word != "X"}
    return links


def check_driver(gpus: Sequence[Gpu], cuda: str | None, lane: str, *, has_device: bool) -> list[Finding]:
    """`cuda`: torch's, '' for a CPU build, None without torch; `has_device`: whether Linux has a device file of an NVIDIA GPU."""
    if not gpus:
        return _check_no_gpu(cuda, lane, has_device=has_device)
    driver = gpus[0].driver
    if not cuda:
        seen = f"driver {driver} and {len(gpus)} GPUs, and torch is a build for CPUs"
        if lane == "cpu":
            return ok("CUDA driver", f"{seen}, as lane cpu has it")
        return error("CUDA driver", seen, "MEGASYNC_LANE=gpu ./launch/setup.sh installs torch for CUDA")
    least = LEAST_DRIVER.get(_number(cuda.partition(".")[0]), max(LEAST_DRIVER.values()))
    if _number(driver.partition(".")[0]) < least:
        remedy = f"install driver {least} or newer, or a torch for an older CUDA"
        return error("CUDA driver", f"driver {driver}: torch's CUDA {cuda} needs {least} or newer", remedy)
    return ok("CUDA driver", f"driver {driver}, torch for CUDA {cuda}")


def _check_no_gpu(cuda: str | None, lane: str, *, has_device: bool) -> list[Finding]:
    if has_device:
        remedy = "install or reload the NVIDIA driver, then see that nvidia-smi lists the GPUs; in a container: --gpus all"
        return error("CUDA driver", "there is an NVIDIA GPU, and nvidia-smi does not answer", remedy)
    if lane == "gpu" or cuda:
        seen = f"no GPU, and torch is built for CUDA {cuda}" if cuda else "no GPU, and lane gpu is asked for"
        return error("CUDA driver", seen, "MEGASYNC_LANE=cpu ./launch/setup.sh, or a machine with GPUs")
    return ok("CUDA driver", "no GPU; torch is a build for CPUs" if cuda == "" else "no GPU")


def visible(gpus: Sequence[Gpu], listed: str | None) -> tuple[list[Gpu], list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, in its order, and names in it that are no GPU's. `listed` None: all."""
    if listed is None:
        return list(gpus), []
    names = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    found, unknown = [], []
    for name in names:
        of_name = [gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))]
        found += of_name
        unknown += [] if of_name or name.startswith("MIG-") else [name]
    return found, unknown


def check_visible(gpus: Sequence[Gpu], listed: str | None, use: GpuUse) -> list[Finding]:
    """Whether as many are visible as the run wants."""
    there, unknown = visible(gpus, listed)
    if not gpus:
        return []
    if unknown:
        remedy = f"write CUDA_VISIBLE_DEVICES={','.join(str(gpu.index) for gpu in gpus)} or less of it; CUDA stops at the first"
        return error("GPUs", f"CUDA_VISIBLE_DEVICES={listed}: there is no GPU {some(unknown)}", remedy)
    if not there:
        seen = f"CUDA_VISIBLE_DEVICES={listed!r} hides all {len(gpus)} GPUs: the run would use the CPU"
        return warning("GPUs", seen, "unset CUDA_VISIBLE_DEVICES")
    if use.num_gpus > len(there):
        seen = f"{len(there)} visible, {use.num_ranks} trainer ranks and {use.replica_gpus} for replicas are wanted"
        remedy = "fewer ranks (--nproc) or rollout.replicas, or rollout.placement=colocated: in turns on the same"
        return error("GPUs", seen, remedy)
    names = sorted({gpu.name for gpu in there})
    return ok("GPUs", f"{len(there)} visible: {some(names)}, {there[0].total // 1024} GiB")


def check_memory(gpus: Sequence[Gpu], users: dict[str, list[str]], use: GpuUse) -> list[Finding]:
    """Memory of visible GPUs that others hold: vLLM does not start where its share is not free (v1/worker/utils.py:716)."""
    replicas = gpus[: use.num_gpus] if use.is_colocated else gpus[use.num_ranks : use.num_gpus]
    found = []
    for gpu in gpus:
        who = f"; process {some(users[gpu.uuid], 3)}" if users.get(gpu.uuid) else ""
        seen = f"GPU {gpu.index}: {gpu.used} of {gpu.total} MiB are in use{who}"
        if gpu in replicas and use.replica_share and gpu.used + use.replica_share * gpu.total > gpu.total:
            free = max(0, gpu.total - gpu.used) / max(1, gpu.total)
            remedy = "end these processes (nvidia-smi lists them), choose others by CUDA_VISIBLE_DEVICES, or write "
            remedy += f"rollout.gpu_memory_utilization={int(free * 100) / 100:g} or less"
            found += error("GPU memory", f"{seen}: vLLM wants {use.replica_share:g} of it", remedy)
        elif gpu.used > BUSY_SHARE * gpu.total:
            found += warning("GPU memory", seen, "end these processes, or choose other GPUs by CUDA_VISIBLE_DEVICES")
    return found or (ok("GPU memory", f"free on {len(gpus)}") if gpus else [])


def check_capability(gpus: Sequence[Gpu], use: GpuUse) -> list[Finding]:
    """Old GPUs, and modes in which processes cannot share one."""
    found = []
    for gpu in gpus:
        told = f"GPU {gpu.index}, {gpu.name}: compute capability {'.'.join(map(str, gpu.capability))}"
        if gpu.capability < LEAST_CAPABILITY:
            found += error("GPU kind", f"{told}: torch and vLLM have no kernels for it", "take a GPU of 7.5 or newer")
        elif gpu.capability < BFLOAT16 and use.dtype == "bfloat16":
            found += error("GPU kind", f"{told}: vLLM refuses bfloat16 below 8.0", "model.dtype=float16, or a newer GPU")
        if "exclusive" in gpu.mode.lower():
            seen = f"GPU {gpu.index}: compute mode {gpu.mode}: one process has it alone"
            make = error if use.is_colocated else warning
            found += make("GPU kind", seen, f"nvidia-smi -i {gpu.index} -c DEFAULT")
        if gpu.mig == "Enabled":
            seen = f"GPU {gpu.index} is cut in MIG instances, between which NCCL has no way"
            found += warning("GPU kind", seen, f"one rank an instance alone, or nvidia-smi -i {gpu.index} -mig 0")
    capabilities = {gpu.capability for gpu in gpus}
    if len(capabilities) > 1:
        seen = f"GPUs of several kinds: {some(sorted({gpu.name for gpu in gpus}))}"
        found += warning("GPU kind", seen, "choose those of one kind by CUDA_VISIBLE_DEVICES: the slowest sets the pace")
    return found or (ok("GPU kind", f"compute capability {'.'.join(map(str, gpus[0].capability))}") if gpus else [])


def check_links(gpus: Sequence[Gpu], links: dict[Pair, str], peers: dict[Pair, str]) -> list[Finding]:
    """Between each two visible GPUs: NVLink or not (`topo -m`), peer access or not (`topo -p2p r`)."""
    pairs = [(one.index, other.index) for one in gpus for other in gpus if one.index < other.index]
    if not pairs:
        return []
    found = []
    if apart := [pair for pair in pairs if peers.get(pair, "OK") != "OK"]:
        seen = f"no peer access between {_pairs(apart)}: NCCL copies through host memory"
        remedy = "see IOMMU and ACS in the BIOS (NCCL's troubleshooting), or keep the ranks of a tensor-parallel group on others"
        found += warning("GPU links", seen, remedy)
    if slow := [pair for pair in pairs if pair in links and not links[pair].startswith("NV")]:
        seen = f"no NVLink between {_pairs(slow)} ({links[slow[0]]}): collectives go over PCIe"
        remedy = "engine.parallel.tensor=1 and rollout.tensor_parallel=1 where the model fits; data parallelism sends less"
        found += warning("GPU links", seen, remedy)
    kinds = sorted({links[pair] for pair in pairs if pair in links})
    return found or ok("GPU links", f"{some(kinds) or 'not told'} between {len(gpus)} GPUs, peer access everywhere")


def _pairs(pairs: Sequence[Pair]) -> str:
    return some([f"{one} and {other}" for one, other in pairs], 3)
