"""Whether this process is a rank that a launcher has started: by torchrun's variables, all of them. No torch in here.

Job controllers (PyTorchJob), schedulers and shells inside of a rank leave some of them behind. A process that has them by chance
would train one rank alone, or wait for others that never come.

    with main_errors():
        is_one = is_rank(os.environ, nproc=None)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, MutableMapping

from megasync.config.errors import ConfigError
from megasync.launch.connect import connection_problem

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_RANKS = (*NEEDED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
SLURM = "SLURM_STEP_NUM_TASKS"
TASKS = {  # number of tasks by launchers that start a command several times, and how each starts it once
    SLURM: ("srun", "--ntasks=1"),  # sbatch and salloc do not set it
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "-np 1"),
    "PMI_SIZE": ("mpiexec", "-n 1"),  # of MPICH and Intel MPI
    "JSM_NAMESPACE_SIZE": ("jsrun", "--nrs 1"),
}
OF_TORCHRUN = "PET_"  # torchrun's own options, as PyTorchJob gives them
AGENT, AGENT_SECONDS, FIRST_RANK_SECONDS = "TORCHELASTIC_USE_AGENT_STORE", 20.0, 120.0


def is_rank(environment: Mapping[str, str], nproc: int | None = None) -> bool:
    """True: run as that rank. False: nothing was launched here, or for one node alone, on which this process may start its ranks.

    `nproc`: the value of --nproc, if given.

    Raises:
        ConfigError: it is one of several nodes, or ranks, and cannot find the others; or --nproc says something else.
    """
    if "RANK" not in environment:
        _refuse_tasks(environment)
        return False
    rank, size = int_of(environment, "RANK"), int_of(environment, "WORLD_SIZE")
    given = ", ".join(f"{name}={environment[name]}" for name in OF_RANKS if name in environment)
    missing = [name for name in NEEDED if name not in environment]
    if missing and size == 1 and rank == 0:
        return False
    if missing:
        raise ConfigError(
            f"{given}: set by a launcher or left behind in a shell; a rank also has {', '.join(missing)}, as torchrun sets them",
            for_this_machine=f"env {' '.join(f'-u {name}' for name in OF_RANKS if name in environment)} megasync train ...",
            for_all_nodes=f"launch/torchrun_nodes.sh CONFIG.yaml --nodes {size} --head HOST --node-rank {rank}, on each node",
            remedy="start it as one of these",
        )
    if not 0 <= rank < size:
        raise ConfigError(f"{given}: no rank of so many", remedy=f"set RANK from 0 to {size - 1}, or unset both")
    if nproc is not None and nproc != size:
        message = f"--nproc {nproc}: this process is rank {rank} of {size} by {given}"
        raise ConfigError(message, remedy=f"leave --nproc out to run as that rank, or unset {' '.join(NEEDED)}")
    return True


def _refuse_tasks(environment: Mapping[str, str]) -> None:
    """ConfigError where a launcher starts this command several times: every task would start all ranks of the run."""
    several = [each for each in TASKS if environment.get(each) and int_of(environment, each) > 1]
    name = next(iter(several), None)
    if environment.get(SLURM) and name != SLURM:  # of srun, which also sets PMI_SIZE: it alone counts
        return
    if name and not sys.stdin.isatty():  # srun --pty gives a terminal to one task alone
        program, once = TASKS[name]
        times = f"{program} starts this command {environment[name]} times"
        script = "launch/torchrun_nodes.sh CONFIG.yaml --nodes HOST,HOST --head HOST"
        nodes = f"srun --ntasks-per-node=1 {script}" if program == "srun" else f"{script}, on each node"
        remedy = f"write {program} {once}, or start it in one task, or on each node, as above"
        message = f"{name} = {environment[name]}: {times}, and it starts the ranks itself"
        here = f"env {' '.join(f'-u {each}' for each in several)} megasync ..."
        raise ConfigError(message, for_one_task_alone=here, for_all_nodes=nodes, remedy=remedy)


def int_of(environment: Mapping[str, str], name: str) -> int:
    """0 for RANK and 1 for the others where they are not set.

    Raises:
        ConfigError: it is no whole number.
    """
    text = environment.get(name, "0" if name == "RANK" else "1")
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: a whole number is expected", given_in="the environment", remedy=f"unset {name}")
    return int(text)


def forget(environment: MutableMapping[str, str]) -> str:
    """Remove the variables, so that no child takes itself for a rank. Returns the ones that named a rank, for a note."""
    there = [name for name in environment if name in OF_RANKS or name.startswith(OF_TORCHRUN)]
    found = {name: environment.pop(name) for name in there}
    return ", ".join(f"{name}={value}" for name, value in found.items() if name in ("RANK", "WORLD_SIZE"))


def await_store(environment: Mapping[str, str]) -> None:
    """Until the first rank's store, or that of the launcher's agent, answers.

    Raises:
        ConfigError: it does not.
    """
    has_agent = environment.get(AGENT) == "True"
    if int_of(environment, "RANK") == 0 and not has_agent:
        return  # whose store it is
    seconds, address = AGENT_SECONDS if has_agent else FIRST_RANK_SECONDS, environment["MASTER_ADDR"]
    port, deadline = int_of(environment, "MASTER_PORT"), time.monotonic() + seconds
    while problem := connection_problem(address, port):
        if time.monotonic() > deadline:
            given = ", ".join(f"{name}={environment[name]}" for name in NEEDED)
            message = f"nothing answers at MASTER_ADDR:MASTER_PORT, {address}:{port}, within {seconds:g} s: {problem}"
            remedy = f"unset {' '.join(NEEDED)} where no launcher has set them for this run, else look at rank 0"
            raise ConfigError(message, by=given, remedy=remedy)
        time.sleep(0.2)
