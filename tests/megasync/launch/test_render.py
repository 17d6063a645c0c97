"""Job files for Slurm and KubeRay: made from three configs, read by bash and a YAML schema; refused where a run cannot fit."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.load import load_config
from megasync.launch.cluster_room import Demand, Pool, placement_problem
from megasync.launch.render import main

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ["configs/grpo_fsdp.yaml", "configs/smollm2.yaml", "configs/quickstart.yaml"]
POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers", "volumes"],
            "properties": {
                "containers": {"type": "array", "items": {"type": "object", "required": ["name", "image", "resources"]}},
                "terminationGracePeriodSeconds": {"type": "integer"},
            },
        }
    },
}
# what of KubeRay's RayJob (ray.io/v1) the file uses; nothing else may stand beside it
SPEC: dict[str, Any] = {
    "submissionMode": {"enum": ["K8sJobMode"]}, "entrypoint": {"type": "string"}, "shutdownAfterJobFinishes": {"type": "boolean"},
    "ttlSecondsAfterFinished": {"type": "integer"}, "backoffLimit": {"type": "integer"},
    "rayClusterSpec": {
        "type": "object", "additionalProperties": False, "required": ["headGroupSpec", "workerGroupSpecs", "rayVersion"],
        "properties": {
            "rayVersion": {"type": "string"},
            "headGroupSpec": {
                "type": "object", "additionalProperties": False,
                "properties": {"rayStartParams": {"additionalProperties": {"type": "string"}}, "template": POD},
            },
            "workerGroupSpecs": {
                "type": "array",
                "items": {
                    "type": "object", "additionalProperties": False,
                    "properties": {
                        "groupName": {"type": "string"}, "replicas": {"type": "integer"}, "minReplicas": {"type": "integer"},
                        "maxReplicas": {"type": "integer"}, "rayStartParams": {"type": "object"}, "template": POD,
                    },
                },
            },
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "properties": {"name": {"pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 47}}},
        "spec": {"type": "object", "additionalProperties": False, "required": list(SPEC), "properties": SPEC},
    },
}


@pytest.mark.parametrize("config", CONFIGS)
def test_slurm_file_parses(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["checkpoint.resume=auto", "run.name=a b", "data.system_prompt='1\n2'", "data.chat_template=true"]
    assert main(["slurm", config, "--nodes", "2", "--gpus", "8", "--sbatch=--partition=gpu", *overrides]) == 0
    text = capsys.readouterr().out
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=2" in text and "#SBATCH --gpus-per-node=8" in text and "#SBATCH --partition=gpu" in text
    assert "#SBATCH --signal=B:USR1@300" in text and "'run.name=a b'" in text and "--nproc 7" in text
    assert "@{" not in text
    script.write_text(text.partition("set -euo pipefail")[0])
    assert subprocess.run(["bash", str(script)], check=True, capture_output=True).stderr == b"", "comments alone"
    options = [line.split() for line in text.splitlines() if line.startswith("#SBATCH")]
    assert ["#SBATCH", "--job-name=a-b"] in options and all(len(words) == 2 for words in options)


def test_a_slurm_job_works_in_the_folder_where_it_was_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are the config, its data and modules; blanks stay in their option of sbatch."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    Path("mine.yaml").write_text("run: {name: mine}")
    assert main(["slurm", "mine.yaml", "--nodes", "2", "--gpus", "2", "--sbatch=--comment=two words"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [shlex.split(line.removesuffix("\\")) for line in lines if line.startswith(("#SBATCH", "cd", "srun"))]
    assert ["#SBATCH", "--comment=two words"] in words and ["cd", str(tmp_path / "a b")] in words
    assert words[-1][3:] == [str(ROOT / "launch" / "torchrun_nodes.sh"), "mine.yaml"]
    with pytest.raises(SystemExit):
        main(["kuberay", "mine.yaml", "--nodes", "2", "--gpus", "2", "--image", "image", "--claim", "shared"])
    assert str(ROOT) in capsys.readouterr().err


def test_a_job_that_would_start_over_each_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = [CONFIGS[0], "--nodes", "2", "--gpus", "8", "checkpoint.resume=never"]
    with pytest.raises(SystemExit) as refused:
        main(["slurm", *command])
    said = capsys.readouterr()
    assert refused.value.code == 2 and not said.out
    assert "checkpoint.resume = never: " in said.err and "write checkpoint.resume=auto" in said.err
    assert main(["kuberay", *command, "--image", "image", "--claim", "shared"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["slurm", CONFIGS[0], "--nodes", "2", "--gpus", "8", f"--port={port}"])
    assert refused.value.code == 2 and f"--port {port}: 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-p gpu", "--partition gpu", "--partition=gpu\n#SBATCH --exclusive", "gpu", ""])
def test_an_option_of_sbatch_is_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["slurm", CONFIGS[0], "--nodes", "2", "--gpus", "8", f"--sbatch={option}"])
    assert refused.value.code == 2 and f"--sbatch {option!r}" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS)
def test_rayjob_file_is_by_the_schema(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "2", "--gpus", "8", "--image", "registry/image:1", "--claim", "it's: #1", 'run.name=a "b"']
    assert main(["kuberay", config, *flags, 'data.system_prompt="say \\"yes\\""', "data.chat_template=true"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    jsonschema.validate(job, SCHEMA)
    driver = "python -m megasync.launch.driver --num-ranks 14 --trainer-nodes 2 --pool rollout 1 1"
    assert job["spec"]["entrypoint"].startswith(driver)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["workingDir"] == str(ROOT)
    assert group["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "it's: #1"
    stop = worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert shlex.split(stop.partition(";")[0]) == ["touch", str(ROOT / load_config(config).run.dir / 'a "b"' / "stop")]
    assert group["replicas"] == 2 and worker["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize("name", ["2026-11-26", "GRPO_3B.v2", "-a" * 40, "a" * 46 + "_b", "\u00fcbung", "\u6a21\u578b"])
def test_a_rayjob_may_have_the_name_of_any_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """KubeRay v1.4.2 takes an RFC 1035 label of 47 characters at most. Runs of different names are different jobs."""
    names = []
    for run_name in (name, f"{name}2", name.swapcase()):
        command = ["--nodes", "1", "--gpus", "8", "--image", "image", "--claim", "shared", f"run.name={run_name}"]
        assert main(["kuberay", CONFIGS[0], *command]) == 0
        job = yaml.safe_load(capsys.readouterr().out)
        jsonschema.validate(job, SCHEMA)
        names.append(job["metadata"]["name"])
    assert len(set(names)) == len({name, f"{name}2", name.swapcase()})


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["slurm", CONFIGS[0], "--nodes", "2", "--gpus", "8", "--nproc", "8"])
    assert refused.value.code == 2
    assert "there is room for 0" in capsys.readouterr().err


FEW = st.integers(0, 4)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(1, 16), FEW, FEW, st.integers(1, 4))
def test_what_fits_has_a_place_for_each(gpus: list[int], ranks: int, spread: int, replicas: int, width: int) -> None:
    nodes = {f"node{number}": {"CPU": 16.0, "GPU": float(count)} for number, count in enumerate(gpus)}
    problem = placement_problem(nodes, Demand(ranks, spread, (Pool("rollout", replicas, width),)))
    if not any(gpus):
        is_uneven = bool(spread) and (ranks % spread > 0 or spread > len(gpus))
        assert bool(problem) == (is_uneven or ranks > 16 * len(gpus))
        return
    if ranks + replicas * width > sum(gpus):
        assert problem
    if not problem:
        assert not spread or ranks % spread == 0
        assert ranks <= sum(gpus)
    if problem:
        assert "no room" in problem and "node0" in problem
