"""`megasync render slurm|kuberay CONFIG ...`: a job file for a batch system, from a config and a few flags.

    megasync render slurm configs/grpo_fsdp.yaml --nodes 2 --gpus 8 --time 24:00:00 > job.sh; sbatch job.sh
    megasync render kuberay configs/grpo_fsdp.yaml --nodes 2 --gpus 8 --image IMAGE --claim CLAIM | kubectl apply -f -

The templates are in launch/templates/. Refuses what cannot fit, as the launchers would. Leaves out submitting. No torch in here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megasync.config.errors import main_errors, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.config.shipped import CLONE, clone, shipped
from megasync.launch.cluster_room import Demand, placement_problem, pool_options
from megasync.launch.num_ranks import pools, replica_gpus_of_node
from megasync.launch.scope import LAST_PORT

TEMPLATES = {"slurm": "slurm.sh", "kuberay": "rayjob.yaml"}
MAX_CHARACTERS = 47  # of a RayJob's name: KubeRay v1.4.2, ray-operator/controllers/ray/utils/constant.go:MaxRayJobNameLength
ONE_OPTION = re.compile(r"-[^\s=]+(=[^\n]*)?")  # of sbatch; its value may have blanks
CPUS_BESIDE = 4  # of a node, for Ray, reward processes and the launcher


class AtTemplate(string.Template):
    """A template with @{name}: a $ is the shell's."""

    delimiter = "@"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags may stand before, between and after the overrides."""
    parser = argparse.ArgumentParser(prog="megasync render", description="A job file for a batch system.")
    parser.add_argument("system", choices=list(TEMPLATES))
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus", type=int, default=0, metavar="G", help="GPUs of a node (default: 0)")
    parser.add_argument(
        "--nproc", type=int, metavar="P", help="trainer ranks of a node (default: 1, or the GPUs less the replicas')"
    )
    parser.add_argument("--cpus", type=int, metavar="C", help="CPUs of a node (default: the ranks, the replicas' workers and 4)")
    parser.add_argument(
        "--grace-seconds", type=int, default=300, metavar="S", help="for a checkpoint before the end (default: 300)"
    )
    parser.add_argument("--max-restarts", type=int, default=3, metavar="K", help="after a lost node (default: 3)")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--time", default="24:00:00", help="limit of one job (default: 24:00:00)")
    slurm.add_argument("--port", type=int, default=29400, help="of the head node (default: 29400)")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="such as --sbatch=--partition=gpu; as often as wanted"
    )
    kuberay = parser.add_argument_group("kuberay")
    kuberay.add_argument("--image", help="with the packages that locks/ pin")
    kuberay.add_argument("--claim", help="volume claim with code, model, data and runs")
    kuberay.add_argument("--mount", default=str(CLONE), help="where it is mounted (default: this clone's folder)")
    kuberay.add_argument("--memory", default="200Gi", help="of a node (default: 200Gi)")
    kuberay.add_argument("--shm", default="16Gi", help="of /dev/shm (default: 16Gi)")
    given = parser.parse_intermixed_args(list(arguments))
    if given.system == "kuberay" and not (given.image and given.claim):
        parser.error("kuberay needs --image and --claim")
    if given.nodes < 1 or given.gpus < 0 or (given.nproc is not None and given.nproc < 1):
        parser.error("--nodes and --nproc: at least 1; --gpus: at least 0")
    if not 0 < given.port <= LAST_PORT:
        parser.error(f"--port {given.port}: 1 to {LAST_PORT}")
    for option in given.sbatch:
        if not ONE_OPTION.fullmatch(option):
            parser.error(f"--sbatch {option!r}: one option is expected, as --sbatch=--partition=gpu; repeat --sbatch for more")
    return given


def main(arguments: Sequence[str]) -> int:
    """Print the file; 2 where the run cannot fit."""
    given = parse(arguments)
    with main_errors():
        config = load_config(given.config, given.overrides)
        print(render(given, config, shlex.join(["megasync", "render", *arguments])), end="")
    return 0


def render(given: argparse.Namespace, config: Config, command: str) -> str:
    """The file's text.

    Raises:
        ConfigError: the run does not fit on so many nodes, or its job, queued again, would not resume.
    """
    message, choices = "checkpoint.resume = never: a job that is queued again would begin at step 1", "auto, newest_weights"
    remedy = "write checkpoint.resume=auto, and run.name=NAME for a run that begins at step 1"
    refuse_if(given.system == "slurm" and not config.checkpoint.resumes, message, choices=choices, remedy=remedy)
    share = replica_gpus_of_node(config, given.nodes)
    nproc = given.nproc or (given.gpus - share if given.gpus else 1)
    message = f"rollout.replicas = {config.rollout.replicas}: their share leaves no GPU of a node for the trainer"
    refuse_if(nproc < 1, message, GPUs=str(given.gpus), remedy="more --nodes or --gpus, or lower rollout.replicas")
    cpus = given.cpus or nproc + share + CPUS_BESIDE
    nodes = {f"node{number}": {"CPU": float(cpus), "GPU": float(given.gpus)} for number in range(1, given.nodes + 1)}
    spread = 0 if given.nodes * nproc < given.nodes else given.nodes
    demand = Demand(given.nodes * nproc, spread, pools(config))
    refuse_if(problem := placement_problem(nodes, demand), problem)
    message = f"{given.config}: there is no such file below {CLONE}, the working folder of a kuberay job"
    is_away = given.system == "kuberay" and not (CLONE / given.config).is_file()
    refuse_if(is_away, message, remedy="copy it there, or name it by its whole path on the volume")
    values = common(given, config, command) | {"nproc": nproc, "cpus": cpus}
    values |= of_slurm(given, config) if given.system == "slurm" else of_kuberay(given, config, nproc, cpus)
    template = shipped(f"launch/templates/{TEMPLATES[given.system]}").read_text(encoding="utf-8")
    return AtTemplate(template).substitute(values)


def common(given: argparse.Namespace, config: Config, command: str) -> dict[str, object]:
    return {
        "name": job_name(config.run.name),
        "nodes": given.nodes,
        "command": command.replace("\n", "\n# "),  # it stands in a comment
        "root": shlex.quote(str(clone("megasync render"))),
        "arguments": shlex.join([given.config, *given.overrides]),
        "grace_seconds": given.grace_seconds,
        "max_restarts": given.max_restarts if config.checkpoint.every_steps and config.checkpoint.resumes else 0,
    }


def job_name(run_name: str) -> str:
    """One word, that also names Slurm's log: blanks end an option of #SBATCH, and % and / mean something there."""
    return re.sub(r"[^\w.+-]+", "-", run_name).strip("-") or "run"


def kubernetes_name(run_name: str) -> str:
    """An RFC 1035 label, of as many characters as KubeRay takes: the run's name, or its letters and digits with a digest of it.

    Two runs never have the same one, which `kubectl apply` would take for a change of the first.
    """
    if len(run_name) <= MAX_CHARACTERS and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run_name):
        return run_name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: MAX_CHARACTERS - len(digest) - 1].strip('-')}-{digest}"


def of_slurm(given: argparse.Namespace, config: Config) -> dict[str, object]:
    gpus = [f"--gpus-per-node={given.gpus}"] if given.gpus else []
    return {
        "time": given.time,
        "port": given.port,
        "more_lines": "\n".join(f"#SBATCH {shlex.quote(option)}" for option in [*gpus, *given.sbatch]),
        "here": shlex.quote(str(Path.cwd())),  # where the config, its data and modules are named from
        "run_folder": shlex.quote(str(config.run.folder)),
    }


def of_kuberay(given: argparse.Namespace, config: Config, nproc: int, cpus: int) -> Mapping[str, object]:
    driver = ["python", "-m", "megasync.launch.driver", "--num-ranks", str(given.nodes * nproc)]
    driver += ["--trainer-nodes", str(given.nodes), *pool_options(pools(config))]
    driver += ["--", given.config, *given.overrides]
    stop = f"touch {shlex.quote(str(CLONE / config.run.folder))}/stop; sleep {given.grace_seconds}"
    try:
        ray_version = version("ray")
    except PackageNotFoundError:
        pins = shipped("locks/gpu.txt").read_text(encoding="utf-8")
        ray_version = re.findall(r"^ray==(.*)$", pins, flags=re.MULTILINE)[0]
    resources = {"cpu": str(cpus), "memory": given.memory} | ({"nvidia.com/gpu": str(given.gpus)} if given.gpus else {})
    return {
        "kubernetes_name": kubernetes_name(config.run.name),
        "entrypoint": json.dumps(shlex.join(driver), ensure_ascii=False),  # a text of YAML, too
        "stop": json.dumps(stop, ensure_ascii=False),
        "ray_version": ray_version,
        "root": json.dumps(str(clone("megasync render")), ensure_ascii=False),
        **{name: json.dumps(getattr(given, name), ensure_ascii=False) for name in ("image", "claim", "mount", "shm")},
        "worker_resources": ", ".join(f"{name}: {json.dumps(amount)}" for name, amount in resources.items()),
    }
