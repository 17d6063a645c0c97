"""A whole run on a vision-language model's folder: it is evaluated on its way, killed, and resumed; its vision layers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_folder.layout import own_name, read_folder_layout
from megasync.config.files import CHECKPOINTS
from megasync.models.folder import check_model_folder
from megasync.report.log import read_evaluations
from tests.runs.exact_cases import KEPT, exact_config, scored
from tests.runs.train_cases import TORCHRUN, endless_run, exact, launch, metrics, train, write_config
from tests.support.tiny_models import load_model, publish, write_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

NUM_STEPS, KILLED_AFTER = 6, 4


def config_of(folder: Path) -> Path:
    model = publish(write_tiny_model(folder / "model", "qwen2_5_vl", num_hidden_layers=2))
    held_out = folder / "held_out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    return write_config(
        folder,
        run={"deterministic": True},
        model={"path": str(model)},
        engine={"wrap": "ddp", "optimizer": {"learning_rate": 1e-3}},
        rollout={"evaluate_every_steps": 2},
        data={"eval": str(held_out)},
        checkpoint={"every_steps": 3},
    )


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Bit for bit, with each evaluation once; a run that goes on evaluates where it starts, too."""
    whole = config_of(tmp_path / "whole")
    done = launch(whole, f"run.steps={NUM_STEPS}", ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    config = config_of(tmp_path / "killed")
    with endless_run(TORCHRUN, config, "--nproc", "1") as run:
        run.wait_for(KILLED_AFTER)
        run.ranks()[0].kill()
        assert run.process.wait(300) != 0
    again = launch(config, f"run.steps={NUM_STEPS}", ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    folders = (tmp_path / "whole" / "runs" / "run", run.folder)
    assert exact(folders[0]) == exact(folders[1])
    assert max(line["logprob_gap/max"] for line in metrics(run.folder)) < 1e-4
    for folder in folders:
        evaluated = [line["step"] for line in read_evaluations(folder)]
        assert evaluated == sorted(set(evaluated)) and {0, 2, 4, 6} <= set(evaluated)
    ends = [folder / CHECKPOINTS / f"step_{NUM_STEPS:08d}" / "hf" for folder in folders]
    check_model_folder(ends[0])
    first, second = ({name: each for path in end.glob("*.safetensors") for name, each in load_file(path).items()} for end in ends)
    start, folder_layout = load_file(tmp_path / "whole" / "model" / "model.safetensors"), read_folder_layout(ends[0])
    assert first.keys() == second.keys() == start.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert own_name(name, folder_layout) or torch.equal(tensor, start[name]), name
    assert not torch.equal(first["model.layers.1.mlp.down_proj.weight"], start["model.layers.1.mlp.down_proj.weight"])
    assert all(bool(torch.isfinite(each).all()) for each in load_model(ends[0]).state_dict().values())


def test_no_token_differs_under_exact(tmp_path: Path) -> None:
    """Nor when they are replayed."""
    sizes = {"lengths": (20, 40), "tokens": 16, "pages": 28}
    config = exact_config(tmp_path, "qwen3_vl", **sizes, run={"steps": 2}, rollout=KEPT["rollout"], sync=KEPT["sync"])
    code, said = train(config, ranks=1)
    assert code == 0, said
    lines, found = metrics(tmp_path / "runs" / "run"), scored(tmp_path / "runs" / "run")
    assert sum(line["exact/differing_tokens"] for line in lines) == 0
    assert found["steps"] == 2 and found["tokens"] == sum(line["exact/compared_tokens"] for line in lines) > 2 * 8 * 8
    assert (found["compared_tokens"], found["differing_tokens"]) == (found["tokens"], 0)
