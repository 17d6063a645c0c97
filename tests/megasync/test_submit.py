"""Real Ray clusters of this machine, real jobs, real actors: exit codes, errors and what is left behind.

The trainer's place is taken by tests/megasync/rank_program.py, so that only submission is tested here.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from megasync.config.schema import Config, RolloutConfig
from megasync.config.errors import ConfigError
from megasync.launch.included import as_packages, import_roots, included_modules, refuse_excluded
from megasync.launch.num_ranks import default_num_ranks
from megasync.launch.ray_cluster import local_cluster
from megasync.launch.stop_request import launched
from megasync.submit import absolute_paths, check, job, main, parse
from tests.support.config_files import write_runnable
from tests.support.gpus import pretend_gpus
from tests.support.processes import name_of


if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ["--program", "tests.megasync.rank_program:main"]
# A cluster starts `python` for a job: here the one with the packages. The tests can be imported in every process.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "RAY_USAGE_STATS_ENABLED": "0",
}


def submit(*arguments: str, cwd: Path = ROOT, environment: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megasync.submit", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False)


@dataclass(frozen=True)
class Cluster:
    address: str
    token: dict[str, str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "a config.yaml"
    path.write_text("run: {steps: 1}\n")
    return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Somebody's cluster, and what its owner lets us in with."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            patch.setenv(name, "")  # so that leaving the context takes out what the cluster sets
        with local_cluster(num_cpus=4) as address:
            yield Cluster(address, {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")})


@pytest.mark.long
def test_local_cluster_runs_the_program_on_every_rank_and_replicas_on_their_gpus(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is started with GPUs that do not exist: it assigns them all the same."""
    pretend_gpus(monkeypatch, tmp_path, 8)
    gpus = {"CUDA_VISIBLE_DEVICES": "4,6", "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}', "PATH": os.environ["PATH"]}
    overrides = ["run.name=devices", "rollout.placement=colocated", "rollout.replicas=2"]
    done = submit(config, *overrides, "--num-ranks", "2", *PROGRAM, environment=ENVIRONMENT | gpus, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} counts 2 ranks, local {rank}" in done.stdout
    reported = re.findall(r"(rank|replica) (\d) is on (\S+)", done.stdout)
    ranks, replicas = ({number: gpu for who, number, gpu in reported if who == kind} for kind in ("rank", "replica"))
    assert sorted(ranks.values()) == ["4", "6"], done.stdout
    assert replicas == ranks, done.stdout
    assert "0 GPUs of 2 are for replicas of their own" in done.stdout


@pytest.mark.long
def test_interrupted_leaves_no_process(config: str) -> None:
    """Two at once, each with a cluster of its own: nearly all of it is waiting."""
    command = [sys.executable, "-m", "megasync.submit", config, "run.name=hang", *PROGRAM]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = {kind: subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **options) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        for kind, process in running.items():
            lines = list(itertools.takewhile(lambda line: "counts 2 ranks" not in line, process.stdout))
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) > 5, "".join(lines)
            process.send_signal(kind)
            output, _ = process.communicate(timeout=400)
            assert process.returncode == 128 + kind, output
            _, alive = psutil.wait_procs(family, timeout=60)
            assert not alive
    finally:
        for process in running.values():
            process.kill()  # its cluster ends with it
            process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine.wrap=fsdp2"], ["engine.wrap", "fsdp2", "ddp"]),
        (["--num-ranks", "0"], ["--num-ranks 0"]),
        (["--no-wait"], ["--no-wait needs --address"]),
        (["--address", "http://127.0.0.1:1"], ["--num-ranks"]),
        (["--include", "configs"], ["--include", "configs: there is nothing that Python could import", "__init__.py"]),
        (["--address", "http://127.0.0.1:1", "--num-ranks", "2"], ["the cluster would not see this config"]),
    ],
)
def test_wrong_commands_start_nothing(
    config: str, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([config, *arguments])
    said = capsys.readouterr().err
    assert left.value.code == 2 and all(word in said for word in words), said


@pytest.mark.long
def test_no_cluster_at_the_address() -> None:
    path = ROOT / "tests" / "data" / "submit.yaml"
    done = submit(str(path), "--address", "http://127.0.0.1:1", "--num-ranks", "2", *PROGRAM)
    assert done.returncode == 1
    assert "--address http://127.0.0.1:1: no job server answers there" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_in_another_folder_gets_every_path_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "adapter", "a.jsonl", "held_out"):
        (tmp_path / name).mkdir()
    data = {"train": "a.jsonl", "eval": {"math": {"path": "held_out"}}}
    adapter = {"lora": {"rank": 8, "adapter_path": "adapter"}}
    config = Config.model_validate({"model": {"path": "model"}, "engine": adapter, "data": data})
    found = absolute_paths(config)
    keys = {"run.dir": "runs", "model.path": "model", "engine.lora.adapter_path": "adapter", "data.train": "a.jsonl"}
    assert found == [f'{key}="{tmp_path / name}"' for key, name in {**keys, "data.eval.math.path": "held_out"}.items()]


@pytest.mark.long
@pytest.mark.parametrize("address", ["http://cluster:8265", ""])
def test_missing_packages_are_noted_for_a_cluster_and_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    """But for a local cluster they are; and a module that would have to travel is asked for in any case."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "__init__.py").touch()
    (tmp_path / "graders" / "good.py").write_text("import a_package_of_nodes\ndef good(sample): return 1.0\n")
    (tmp_path / "graders" / "broken.py").write_text("1 / 0\n")
    run, flags = str(write_runnable(tmp_path)), ["--num-ranks", "2", "--include", str(tmp_path / "graders")]
    flags += ["--address", address] if address else []

    def said(*overrides: str) -> tuple[int, str]:
        code = check(parse([run, *overrides, *flags]), 2)
        return code, " ".join(capfd.readouterr().err.split())

    code, reported = said("rollout.reward={graders.good:good: 1, reasoning_gym: 1}")
    assert "No module named 'a_package_of_nodes'" in reported
    is_reported = reported.startswith("not here, but needed on the cluster's nodes: rollout.reward")
    assert (code, is_reported) == ((0, True) if address else (2, False))
    code, reported = said("rollout.reward=reasoning_gym")
    assert (code, bool(reported)) == ((0, False) if address else (2, True)), reported
    for reward, problem in (("graders.bad:good", "graders.bad"), ("graders.broken:good", "ZeroDivisionError")):
        code, reported = said(f"rollout.reward={reward}")
        assert code == 2 and problem in reported and "cannot be imported" in reported
    code, reported = said("rollout.episode=graders.good:good", "rollout.reward=exact_match")
    assert code == (0 if address else 2) and "a_package_of_nodes" in reported


@pytest.mark.parametrize("override", ["rollout.ray_address=auto", "rollout.kv_cache_bytes=900GiB"])
def test_what_the_cluster_has_is_not_looked_for_here(tmp_path: Path, override: str) -> None:
    """Where nothing is submitted, a machine without a Ray or with less memory is refused."""
    options = parse([str(write_runnable(tmp_path)), override, "--address", "http://cluster:8265", "--num-ranks", "2"])
    assert check(options, 2) == 0


def test_a_job_of_this_machine_knows_that_a_former_stop_is_forgotten(tmp_path: Path) -> None:
    """By this command, before it starts a cluster; on a cluster of somebody's the job itself does it."""
    config, path = Config.model_validate({"run": {"dir": str(tmp_path)}}), str(ROOT / "tests" / "data" / "submit.yaml")
    reported = launched(tmp_path / "run")
    cluster = ["--address", "http://127.0.0.1:1", "--num-ranks", "2"]
    for flags, is_reported in (([], True), (cluster, False), (PROGRAM, False)):
        made = job(parse([path, *flags]), config, 2)
        environment = made["runtime_env"]["env_vars"]
        assert (" --submitted 1" in made["entrypoint"]) == (flags != PROGRAM)
        assert (reported.items() <= environment.items()) == is_reported


def test_what_travels_with_a_job_is_what_can_be_imported(tmp_path: Path) -> None:
    folder = write_rewards(tmp_path / "mine")
    package, module = folder / "my_rewards", folder / "my_numbers.py"
    assert included_modules([folder]) == [module, package] and import_roots([module, package]) == [str(folder)]
    assert included_modules([package, module]) == [package, module] and included_modules([]) == import_roots([]) == []
    assert as_packages([package]) == [package]
    copied, same = as_packages([module, package])
    assert same == package and copied.name == "my_numbers"
    assert (copied / "__init__.py").read_text() == module.read_text()
    refuse_excluded([module, package], ["/docs", "/.venv"])
    (package / "docs").mkdir()
    with pytest.raises(ConfigError, match="docs in it would not travel"):
        refuse_excluded([module, package], ["/docs", "/.venv"])


def test_default_num_ranks_leaves_the_trainer_a_gpu() -> None:
    config = Config(rollout=RolloutConfig(replicas=2, tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"rollout\.replicas"):
        default_num_ranks(config, gpus=4)
    sharing = Config(rollout=RolloutConfig(placement="colocated", replicas=2, tensor_parallel=2))
    assert default_num_ranks(sharing, gpus=4) == 4


# Somebody's cluster, started here, where nothing else runs beside it.


def write_rewards(folder: Path) -> Path:
    """A folder with a package and a module of somebody's."""
    (folder / "my_rewards").mkdir(parents=True)
    (folder / "my_rewards" / "__init__.py").write_text("from my_rewards.inner import score\n")
    (folder / "my_rewards" / "inner.py").write_text("import my_numbers\ndef score(sample): return my_numbers.SEVEN\n")
    (folder / "my_numbers.py").write_text("SEVEN = 7.0\n")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("what", ["succeed", "raise", "die", "code"])
def test_cluster_gets_the_repository_and_gives_the_exit_code(cluster: Cluster, what: str, tmp_path: Path) -> None:
    path = ROOT / "tests" / "data" / "submit.yaml"
    arguments = [str(path), f"run.name={what}", "--num-ranks", "2", "--address", cluster.address, *PROGRAM]
    if what == "code":
        arguments += ["--include", str(write_rewards(tmp_path / "mine")), "rollout.reward=my_rewards:score"]
    done = submit(*arguments, environment=ENVIRONMENT | cluster.token)
    expected = {
        "succeed": (0, "rank 1 counts 2 ranks"),
        "raise": (1, "ValueError: broken on purpose"),
        "die": (1, "trainer rank 1 failed:\nThe actor "),
        "code": (7, "rank 1 says why: its reward is 7.0"),
    }
    code, message = expected[what]
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stdout


@pytest.mark.long
def test_cluster_that_refuses_the_token(cluster: Cluster) -> None:
    stranger = ENVIRONMENT | cluster.token | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = ROOT / "tests" / "data" / "submit.yaml"
    done = submit(str(path), "--address", cluster.address, "--num-ranks", "2", *PROGRAM, environment=stranger)
    assert done.returncode == 1
    assert f"{cluster.address}: the cluster refuses this user" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def cut(address: str, *, unanswered: bytes = b"POST /nothing") -> Iterator[tuple[str, Any]]:
    """Another address of a server, and what cuts all connections through it. `unanswered`: a request that comes no answer to."""
    target = ("127.0.0.1", int(address.rpartition(":")[2]))
    ends: list[socket.socket] = []
    silent: set[socket.socket] = set()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if data.startswith(unanswered):
                    silent.add(sink)
                if source not in silent or not data.startswith(b"HTTP/1.1 200"):  # an agent may not be there yet
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                pair = [listener.accept()[0], socket.create_connection(target)]
                ends.extend(pair)
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=pump, args=(source, sink), daemon=True).start()

    def cut_all() -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends.append(listener)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut_all


def is_driver(process: psutil.Process, job: str) -> bool:
    """And not the shell that Ray runs it in."""
    try:
        is_of_job = job in process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
        return is_of_job and "megasync.launch.driver" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


@pytest.mark.long
def test_a_lost_connection_is_no_end_of_the_job_and_a_killed_driver_is_one_of_its_ranks(cluster: Cluster) -> None:
    path = ROOT / "tests" / "data" / "submit.yaml"
    with cut(cluster.address) as (address, cut_all):
        command = [sys.executable, "-m", "megasync.submit", str(path), "run.name=hang", "--num-ranks", "2", "--address", address]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        with subprocess.Popen([*command, *PROGRAM], env=ENVIRONMENT | cluster.token, **options) as process:
            assert process.stdout is not None
            lines = list(itertools.takewhile(lambda line: "counts 2 ranks" not in line, process.stdout))
            cut_all()
            output, _ = process.communicate(timeout=400)
    assert process.returncode == 1, output
    (job,) = {word for line in lines if "submitted" in line for word in line.split() if word.startswith("raysubmit_")}
    assert "the connection is lost" in output and f"{job} may go on; follow it with: ray job logs" in output, output
    assert "no job server" not in output and "go on from it" not in output
    family = psutil.Process().children(recursive=True)
    ranks = [each for each in family if name_of(each).startswith("ray::TrainerRan")]
    drivers = [each for each in family if is_driver(each, job)]
    driver = min(drivers, key=psutil.Process.create_time)  # a child has its command until it runs one of its own
    assert len(ranks) == 2
    driver.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []


@pytest.mark.long
def test_a_job_that_is_interrupted_before_it_is_known_to_run_is_stopped(cluster: Cluster) -> None:
    """The cluster has it, and its answer is on the way."""
    path, name = ROOT / "tests" / "data" / "submit.yaml", f"run.name=hang_{secrets.token_hex(4)}"
    me = psutil.Process()

    def drivers() -> list[psutil.Process]:
        return [each for each in me.children(recursive=True) if is_driver(each, "raysubmit_") and name in each.cmdline()]

    with cut(cluster.address, unanswered=b"POST /api/jobs/ HTTP") as (address, _):
        command = [sys.executable, "-m", "megasync.submit", str(path), name, "--num-ranks", "1", "--address", address, *PROGRAM]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        with subprocess.Popen(command, env=ENVIRONMENT | cluster.token, **options) as process:
            deadline = time.monotonic() + 60
            while not (found := drivers()) and time.monotonic() < deadline:
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=400)
            (driver,) = found
    assert process.returncode == 130 and "stopping raysubmit_" in output, output
    psutil.wait_procs([driver], timeout=60)
    assert not drivers()
