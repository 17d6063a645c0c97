"""Starts a run through Ray's job API: the program that torchrun starts, with one Ray actor a trainer rank.

With --address the job goes to that cluster. The code and configs of this repository travel with it, and what --include names,
such as your rewards; model, data and run folder must lie on a file system that its nodes share. Without, a local cluster is
started and ends with the run. Logs are followed, the exit code is the run's, Ctrl-C stops the job. Exit code 2: config or command
are wrong.

    megasync submit CONFIG.yaml [key=value ...] [--address http://HOST:8265] [--num-ranks N] [--include PATH ...] [--no-wait]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megasync.config.errors import ConfigError, main_errors
from megasync.config.load import load_config
from megasync.config.own_packages import PACKAGES
from megasync.config.schema import Config
from megasync.config.shipped import FOLDERS, clone
from megasync.launch.cluster_room import pool_options
from megasync.launch.devices import visible_devices
from megasync.launch.exit_summary import exit_summary
from megasync.launch.included import as_packages, import_roots, included_modules, refuse_excluded
from megasync.launch.job_server import exit_code, follow_in_thread, stop, submit
from megasync.launch.num_ranks import default_num_ranks, num_teacher_gpus, pools
from megasync.launch.processes import REFUSED, code_of, sigterm_as_ctrl_c
from megasync.launch.ray_cluster import local_cluster
from megasync.launch.scope import FOR_CLUSTER, RAY_ADDRESS, run_scope
from megasync.launch.stop_request import forget_former_stop, launched
from megasync.train import why_done

TRAINER = "megasync.train:main"
UPLOADED = (*PACKAGES, *sorted({folder.partition("/")[0] for folder in FOLDERS}), "examples", "tests")  # they travel to a cluster


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags may stand before, between and after the overrides."""
    parser = argparse.ArgumentParser(
        prog="megasync submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file")
    help_ = "laid over the file, such as engine.wrap=ddp"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    parser.add_argument("--address", help="a cluster's job server; left out: a local cluster for this run")
    parser.add_argument("--num-ranks", type=int, help="trainer ranks (default: 2, or the GPUs less the replicas')")
    include_help = "a package, a module or a folder of them, such as your rewards': importable in the job, and travels with it"
    parser.add_argument("--include", action="append", default=[], type=Path, metavar="PATH", help=include_help)
    parser.add_argument("--no-wait", action="store_true", help="leave once the job is submitted (needs --address)")
    parser.add_argument("--program", default=TRAINER, help="module:function(argv) that every rank runs")
    options = parser.parse_intermixed_args(argv)
    if options.no_wait and not options.address:
        parser.error("--no-wait needs --address: a local cluster ends with this command")
    if options.address and options.num_ranks is None:
        parser.error("--address needs --num-ranks: how many trainer ranks the cluster shall run")
    if options.num_ranks is not None and options.num_ranks < 1:
        parser.error(f"--num-ranks {options.num_ranks}: at least 1")
    return options


def check(options: argparse.Namespace, num_ranks: int) -> int:
    """The trainer's own check of config, model and data, in a process of its own; its exit code."""
    if options.program != TRAINER:
        return 0
    command = [sys.executable, "-m", "megasync.train", "--check", "--world-size", str(num_ranks)]
    roots = [*import_roots(included_modules(options.include)), *filter(None, [os.environ.get("PYTHONPATH")])]
    # the job runs in a cluster with a Ray, whatever there is here
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), RAY_ADDRESS: "auto"}
    environment |= {FOR_CLUSTER: options.address} if options.address else {}
    return subprocess.run(
        [*command, options.config, *options.overrides], env=environment, check=False, stdout=subprocess.DEVNULL
    ).returncode


def absolute_paths(config: Config) -> list[str]:
    """Overrides that name the config's folders and files for processes with another working directory."""
    paths = {"run.dir": config.run.dir} | {key: path for key, path in config.input_paths.items() if Path(path).exists()}
    return [f"{key}={json.dumps(str(Path(path).resolve()))}" for key, path in paths.items()]


def job(options: argparse.Namespace, config: Config, num_ranks: int) -> dict[str, Any]:
    """Keyword arguments of `submit_job`.

    Raises:
        ConfigError: the config file is not among the files that are uploaded to the cluster.
    """
    path = Path(os.path.realpath(options.config))
    environment = {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    modules = included_modules(options.include)
    runtime_env: dict[str, Any] = {
        "env_vars": environment,
        **({"py_modules": list(map(str, as_packages(modules)))} if modules else {}),
    }
    interpreter, config_path = sys.executable, str(path)
    if options.program == TRAINER and not options.address:
        environment |= launched(config.run.folder)  # a cluster's driver does it, where the run's folder may be out of reach here
    if options.address:
        root = clone("megasync submit --address")
        if not any(path.is_relative_to(root / name) for name in UPLOADED):
            remedy = f"move it below {root / 'configs'}, which travels to the cluster"
            raise ConfigError(f"{path}: the cluster would not see this config", remedy=remedy)
        excludes = [f"/{entry.name}" for entry in root.iterdir() if entry.name not in UPLOADED]
        refuse_excluded(modules, excludes)
        runtime_env |= {"working_dir": str(root), "excludes": [*excludes, "__pycache__"]}
        interpreter, config_path = "python", str(path.relative_to(root))
    driver = [interpreter, "-m", "megasync.launch.driver", "--num-ranks", str(num_ranks), "--program", options.program]
    if options.program == TRAINER:
        driver += ["--submitted", f"{time.time():.3f}"]
        driver += ["--trainer-nodes", str(config.run.trainer_nodes)]
        driver += pool_options(pools(config))
    arguments = [config_path, *options.overrides, *absolute_paths(config)]
    return {"entrypoint": shlex.join([*driver, "--", *arguments]), "runtime_env": runtime_env}


def num_cpus(config: Config, num_ranks: int) -> int:
    """CPUs that a local cluster declares: enough for all processes, which share the machine's cores."""
    replicas = config.rollout.replicas * config.rollout.tensor_parallel
    return max(os.cpu_count() or 1, num_ranks + replicas + num_teacher_gpus(config) + 1)


def submit_to_cluster(address: str, job_arguments: dict[str, Any], words: Callable[[int], str], *, wait: bool) -> int:
    """Submit, and follow if `wait`; the error has advice where the cluster does not answer or refuses the user."""
    from ray.exceptions import AuthenticationError

    try:
        client, job_id = submit(address, job_arguments)
    except OSError as error:
        print(f"--address {address}: no job server answers there: {error}", file=sys.stderr)
        return 1
    except AuthenticationError:
        remedy = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to what its owner gave you"
        print(f"--address {address}: the cluster refuses this user; {remedy}", file=sys.stderr)
        return 1
    by_hand = f"follow it with: ray job logs --follow --address {address} {job_id}"
    if not wait:
        print(by_hand)
        return 0
    try:
        return follow_to_end(client, job_id, words)
    except OSError as error:
        print(f"--address {address}: the connection is lost ({error}); {job_id} may go on; {by_hand}", file=sys.stderr)
        return 1


def follow_to_end(client: Any, job_id: str, words: Callable[[int], str]) -> int:
    """The job's exit code. `words`, of that code: to be said last where a run began and is not done."""
    try:
        follow_in_thread(client, job_id)
        code = exit_code(client, job_id)
    except KeyboardInterrupt as interrupt:
        print(f"stopping {job_id}", file=sys.stderr)
        stop(client, job_id)
        code = code_of(interrupt)
    if code not in (0, REFUSED):
        print(words(code), file=sys.stderr)
    return code


def main(argv: Sequence[str]) -> int:
    """The run's exit code; 2 when config or command are wrong and nothing was started."""
    options = parse(argv)
    with main_errors():
        config = load_config(options.config, options.overrides)
        num_ranks = options.num_ranks or default_num_ranks(config, len(visible_devices()))
        job_arguments = job(options, config, num_ranks)
        why = why_done(config) if options.program == TRAINER else ""
    if code := check(options, num_ranks):
        return code
    if why:
        print(f"{config.run.folder}: {why}")
        return 0
    if options.program == TRAINER and not options.address:
        with main_errors():
            forget_former_stop(config.run.folder)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sigterm_as_ctrl_c()  # the job and a local cluster end with this process
    words = partial(exit_summary, config, shlex.join([sys.executable, "-m", "megasync.submit", *argv]))
    try:
        if options.address:
            return submit_to_cluster(options.address, job_arguments, words, wait=not options.no_wait)
        with run_scope(), local_cluster(num_cpus(config, num_ranks)) as address:
            return follow_to_end(*submit(address, job_arguments), words)
    except (RuntimeError, OSError) as error:
        print(f"the Ray cluster failed: {error}\n`megasync doctor` looks at this machine", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        return code_of(interrupt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
