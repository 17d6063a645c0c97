"""The quickstart's model folder loads as any other, its data sets do not overlap, its overrides go where they should.

Leaves out the two training phases: a whole quickstart is minutes long.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from megasync.tools.assets.small_qwen3 import EOS
from megasync.tools.assets.command import main as write_any_assets
from megasync.tools.assets.command import CHARACTERS, NUM_HELD_OUT, NUM_OPERANDS, VOCABULARY, Assets, write_assets
from megasync.config.errors import ConfigError
from megasync.tools.assets.small_qwen3 import write_small_qwen3
from megasync.launch.processes import STOPPED
from megasync.tools.quickstart.command import (
    MARKER,
    RL,
    WARM_UP,
    Phase,
    afresh,
    for_machine,
    num_quickstart_ranks,
    rl_phase,
    shared_overrides,
    show_summary,
    warm_up_phase,
)
from tests.support.file_limit import file_limit, umask

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return write_assets(tmp_path_factory.mktemp("quick start") / "assets", seed=0)


def test_the_small_models_weights_are_those_of_transformers_class(tmp_path: Path) -> None:
    """small_qwen3.py draws them itself, without the class, whose import takes seconds."""
    write_small_qwen3(tmp_path, VOCABULARY, 7, "float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = Qwen3ForCausalLM(AutoConfig.from_pretrained(tmp_path)).state_dict()
    del expected["lm_head.weight"]
    held = load_file(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_model_loads_and_is_tied(assets: Assets) -> None:
    model = AutoModelForCausalLM.from_pretrained(assets.model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in load_file(assets.model / "model.safetensors")
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 13]])).logits
    assert logits.shape == (1, 3, len(VOCABULARY))
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    assert 0.9e6 < model.num_parameters() < 1.1e6


def test_tokenizer_round_trips_every_character(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    assert tokenizer.vocab_size == len(tokenizer) == len(VOCABULARY) == 32
    for text in ("12+34=", "0+0=", CHARACTERS, "  7 "):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("7@")[1] == tokenizer.unk_token_id
    assert tokenizer.decode([*tokenizer.encode("46"), tokenizer.eos_token_id], skip_special_tokens=True) == "46"
    assert tokenizer.eos_token == EOS
    assert tokenizer.eos_token_id == json.loads((assets.model / "config.json").read_text())["eos_token_id"]


def test_data_is_right_and_nothing_held_out_is_trained_on(assets: Assets) -> None:
    train, held_out = read(assets.train), read(assets.held_out)
    assert len(held_out) == NUM_HELD_OUT
    assert len(train) + len(held_out) == NUM_OPERANDS**2
    assert not {one["question"] for one in train} & {one["question"] for one in held_out}
    for one in train + held_out:
        left, right = one["question"].rstrip("=").split("+")
        assert int(one["answer"]) == int(left) + int(right)


def test_seed_decides_everything(assets: Assets, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = write_assets(tmp_path / "again", seed=0)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    other = write_assets(tmp_path / "other", seed=1)
    weights = [load_file(one.model / "model.safetensors") for one in (assets, again, other)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert assets.held_out.read_text() == again.held_out.read_text() != other.held_out.read_text()


def test_dtype(tmp_path: Path) -> None:
    folder = write_assets(tmp_path, seed=0, dtype="bfloat16").model
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_overrides_go_to_the_phases_they_are_for(assets: Assets, tmp_path: Path) -> None:
    both = ["engine.wrap=ddp", "engine.parallel.tensor=2", "run.seed=1", "model.dtype=float32"]
    rl_alone = ["engine.optimizer.learning_rate=1e-4", "rollout.max_staleness=1", "run.steps=7", "run.name=mine"]
    given = [*both, *rl_alone]
    assert shared_overrides(given) == both
    warm_up, rl = warm_up_phase(given, tmp_path, assets), rl_phase(given, tmp_path, assets, assets.model)
    for phase in (warm_up, rl):
        phase.check(num_ranks=2)
        assert phase.config.engine.wrap == "ddp"
        assert phase.config.run.seed == 1
        assert phase.config.run.folder.parent == tmp_path
        assert phase.config.data.eval == str(assets.held_out)
    assert warm_up.config.algorithm.name == "sft"
    assert warm_up.config.run.stop_at_accuracy > 0
    assert warm_up.config.run.export_hf
    assert warm_up.config.run.steps > 7
    assert (rl.config.run.steps, rl.config.run.name, rl.config.rollout.max_staleness) == (7, "mine", 1)
    assert WARM_UP.name == "quickstart_sft.yaml"


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "placement", "dtype"),
    [
        (0, 2, "separate", "float32"),
        (1, 1, "colocated", "bfloat16"),
        (2, 1, "separate", "bfloat16"),
        (8, 2, "separate", "bfloat16"),
    ],
)
def test_placement_and_ranks_suit_the_gpus(
    assets: Assets, tmp_path: Path, gpus: int, num_ranks: int, placement: str, dtype: str
) -> None:
    overrides = for_machine(["run.steps=7"], gpus)
    assert num_quickstart_ranks(overrides, gpus) == num_ranks
    warm_up, rl = warm_up_phase(overrides, tmp_path, assets), rl_phase(overrides, tmp_path, assets, assets.model)
    for phase in (warm_up, rl):
        phase.check(num_ranks)
        assert phase.config.model.dtype == dtype
    assert (rl.config.rollout.placement, rl.config.run.steps) == (placement, 7)
    mine = for_machine(["rollout.placement=colocated", "model.dtype=float32"], gpus)
    rl = rl_phase(mine, tmp_path, assets, assets.model)
    assert (rl.config.rollout.placement, rl.config.model.dtype) == ("colocated", "float32"), "what the user says wins"


def test_only_what_a_quickstart_made_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "quick"
    with afresh(folder, ["rl"]):
        pass
    for name in ("rl", "other"):
        (folder / name).mkdir()
    with afresh(folder, ["rl"]):
        pass
    assert sorted(entry.name for entry in folder.iterdir() if entry.suffix != ".lock") == [MARKER, "other"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rl").touch()
    with pytest.raises(ConfigError, match="no quickstart made"):
        afresh(tmp_path / "mine", ["rl"]).__enter__()
    assert (tmp_path / "mine" / "rl").exists()


NAMES = ["assets", "rl", "summary.json"]


def former_quickstart(folder: Path) -> dict[str, str]:
    for name in ("rl/checkpoints/step_00000001/index.json", "assets/former", "summary.json", MARKER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("former")
    return content(folder)


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize("error", [ConfigError("wrong"), KeyboardInterrupt()])
def test_former_results_are_there_until_both_phases_are_checked(tmp_path: Path, error: BaseException) -> None:
    def check(ends: BaseException | None) -> None:
        with afresh(tmp_path, NAMES) as new:
            (new / "assets").mkdir()
            (new / "assets" / "new").touch()
            if ends is not None:
                raise ends

    former = former_quickstart(tmp_path)
    with pytest.raises(type(error)):
        check(error)
    assert content(tmp_path) == former
    check(None)
    assert content(tmp_path).keys() == {str(tmp_path / "assets" / "new"), str(tmp_path / MARKER)}


def test_after_a_sigkill_former_results_are_there(tmp_path: Path) -> None:
    former = former_quickstart(tmp_path)
    script = """
import os, sys
from pathlib import Path
from megasync.tools.quickstart.command import afresh
with afresh(Path(sys.argv[1]), sys.argv[2:]) as new:
    Path(new, "assets").mkdir()
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), *NAMES], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL and content(tmp_path) == former
    with pytest.raises(ConfigError), afresh(tmp_path, NAMES):
        raise ConfigError("wrong")
    assert content(tmp_path) == former


def test_a_phase_that_was_stopped_says_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = [sys.executable, "-c", f"raise SystemExit({STOPPED})"]
    monkeypatch.setattr("megasync.tools.quickstart.command.torchrun", lambda *_: stopped)
    (tmp_path / "rl" / "checkpoints" / "step_00000003").mkdir(parents=True)
    assert Phase(RL, [f"run.dir={tmp_path}"]).run(2) == STOPPED
    reported = capsys.readouterr().out
    assert f"go on from it: megasync train {RL} run.dir={tmp_path} --nproc 2 checkpoint.resume=auto\n" in reported
    assert "a quickstart in this folder starts afresh" in reported


@pytest.mark.parametrize("held_out", [{}, {"eval_reward_before": 0.25, "eval_reward_after": 0.5}])
@pytest.mark.parametrize("num_syncs", [0, 3])
def test_the_summary_has_what_was_measured(
    capsys: pytest.CaptureFixture[str], held_out: dict[str, float], num_syncs: int
) -> None:
    """With data.eval empty, or sets, there is no reward of one file; with algorithm.name=sft there are no syncs."""
    measured = {"sync_seconds_median": 0.012, "sync_bytes": 2**20} if num_syncs else {}
    places = {"summary": "a", "report": "b", "timeline": "c"}
    show_summary({**held_out, "num_syncs": num_syncs, **measured, "seconds_total": 1.0, **places})
    reported = capsys.readouterr().out
    assert ("(+0.250)" in reported) == bool(held_out) and ("12 ms" in reported) == bool(num_syncs)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("engine.wrap=fsdp2", "engine.wrap"), ("run.nam=x", "run.name"), ("engine.parallel.tensor=4", "tensor")],
)
def test_wrong_overrides_start_nothing(tmp_path: Path, wrong: str, words: str) -> None:
    former = tmp_path / "run" / "rl" / "checkpoints" / "step_00000001"
    former.mkdir(parents=True)
    (tmp_path / "run" / MARKER).touch()
    command = [sys.executable, "-m", "megasync", "quickstart", wrong, f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("run/*/metrics.jsonl"))
    assert former.is_dir(), "what a former quickstart has made is still there"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_phase_ends_with_the_quickstart(kind: signal.Signals) -> None:
    child = "import time; print('up', flush=True); time.sleep(600)"
    run = f"code = run_to_end([sys.executable, '-c', {child!r}]); print('over', flush=True); time.sleep(0.5); sys.exit(code)"
    parent = f"import sys, time; from megasync.launch.processes import run_to_end; {run}"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(kind)
        if kind != signal.SIGKILL:
            assert process.stdout.readline() == "over\n"
            process.send_signal(kind)  # that of an impatient user changes nothing
        assert process.wait(timeout=120) == (-kind if kind == signal.SIGKILL else 128 + kind)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_assets_of_another_size_end_responses_by_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--to", str(tmp_path), "--shapes", "tiny", "--dtype", "float32", "--mean-response-tokens"]
    assert write_any_assets([*arguments, "8"]) == 0
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
    ends = json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert ends[0] == VOCABULARY.index(EOS)
    assert len(ends) == config["vocab_size"] // 8
    assert f"data.train={tmp_path}" in capsys.readouterr().out
    for wrong in ([*arguments, "-1"], ["--to", str(tmp_path), "--mean-response-tokens", "8"]):
        with pytest.raises(SystemExit) as stop:
            write_any_assets(wrong)
        assert stop.value.code == 2
        assert "with --shapes only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--to", "/proc/x"], "/proc/x: No such file or directory"),
        (["--to", "{file}"], "{file}: File exists"),
        (["--to", "{file}.new", "--num-train", "40"], "--num-train, --num-held-out and --task-options need --task"),
        (["--to", "{file}.new", "--num-held-out", "256"], "need --task: without it there are 9500 and 500 sums"),
        (["--to", "{file}.new", "--task-options", "max_digits=2"], "--task-options need --task"),
        (["--to", "{file}.new", "--task", "chain_sum", "--num-train", "0"], "--num-train 0 --num-held-out 256: at least 1 each"),
        (["--to", "{file}.new", "--task", "chain_sum", "--num-held-out", "-1"], "--num-train 4000 --num-held-out -1: at least 1"),
    ],
)
def test_assets_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reported: str
) -> None:
    (file := tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        write_any_assets([each.replace("{file}", str(file)) for each in arguments])
    assert stop.value.code == 2 and reported.replace("{file}", str(file)) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("num_bytes", [1000, 400_000])  # less than the data, less than the model
def test_assets_on_a_full_disk_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int) -> None:
    with pytest.raises(SystemExit) as stop, file_limit(num_bytes):
        write_any_assets(["--to", str(tmp_path), "--shapes", "tiny"])
    assert stop.value.code == 2 and f"{tmp_path}" in (said := capsys.readouterr().err) and "File too large" in said, said
