"""A run's checkpoint becomes a Hugging Face folder: which one, whole or not at all, and what errors say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.layout.manifest import read_folder_manifest
from bridge.versions.writer import VersionWriter
from engine.peft.folder import fingerprint
from megasync.tools.bisect.reference import Weights
from megasync.config.errors import ConfigError
from megasync.tools.export.command import export, main
from megasync.tools.serving.send import FolderSource
from tests.engine.model.test_gpt_oss import write_packed
from tests.support.file_limit import file_limit, umask, without_override
from tests.support.tiny_models import write_templates, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10 and 20 with different weights, one that was cut off, one that is no checkpoint."""
    folder = tmp_path_factory.mktemp("my runs") / "rl"
    for step in (10, 20):
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        write_tiny_model(checkpoint / "hf", "qwen3", tied=True, seed=step)
        write_templates(checkpoint / "hf")
        torch.save({}, checkpoint / "rank_00000.pt")
    write_tiny_model(folder / "checkpoints" / ".partial_step_00000030" / "hf", "qwen3", seed=30)
    (folder / "checkpoints" / "step_by_step").mkdir()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    a, b = weights(left), weights(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_newest_checkpoint_becomes_a_folder_that_transformers_loads(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "model"
    assert main([str(run), "--to", str(target)]) == 0
    source = run / "checkpoints" / "step_00000020" / "hf"
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()}
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    expected = AutoModelForCausalLM.from_pretrained(source)(torch.tensor([[5, 6, 7]])).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(target)(torch.tensor([[5, 6, 7]])).logits, expected)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode([5, 6, 7]) == '"#$'
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


def test_a_step_can_be_chosen(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, tmp_path / "old", step=10) == run / "checkpoints" / "step_00000010" / "hf"
    assert same(tmp_path / "old", run / "checkpoints" / "step_00000010" / "hf")
    text = complaint(capsys, run, "--to", tmp_path / "new", "--step", "30")
    assert "no checkpoint of step 30" in text
    assert "10, 20" in text
    assert not (tmp_path / "new").exists()


def test_without_checkpoints_the_exported_folder_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "sft"
    (run / "checkpoints").mkdir(parents=True)
    assert "run.export_hf=true" in complaint(capsys, run, "--to", tmp_path / "model")
    write_tiny_model(run / "hf", "llama")
    assert "steps:  none" in complaint(capsys, run, "--to", tmp_path / "model", "--step", "1")
    assert export(run, tmp_path / "model") == run / "hf"
    assert same(run / "hf", tmp_path / "model")


def test_an_unknown_run_is_named_with_the_nearest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(capsys, run.parent / "rl2", "--to", "anywhere")
    assert "no such run folder" in text
    assert str(run) in text


def test_only_an_empty_target_is_taken(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    export(run, empty)
    assert same(empty, run / "checkpoints" / "step_00000020" / "hf")
    assert "is not empty" in complaint(capsys, run, "--to", full)
    assert "is a file" in complaint(capsys, run, "--to", file)
    assert [p.name for p in full.iterdir()] == ["mine.txt"]


def test_a_cut_off_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "run" / "checkpoints" / "step_00000001" / "hf")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    text = complaint(capsys, tmp_path / "run", "--to", tmp_path / "model")
    assert "cut off, or not a safetensors file" in text and "--step" in text.partition("remedy:")[2]
    assert not (tmp_path / "model").exists()


def test_a_cut_off_adapter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    path = run / "checkpoints" / "step_00000003" / "adapter" / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    for flag in ("--merge", "--adapter"):
        text = complaint(capsys, run, "--to", tmp_path / "model", flag)
        assert str(path.name) in text and "--step" in text.partition("remedy:")[2] and "hf download" not in text


def test_a_copy_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        export(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_source_that_cannot_be_read_is_not_the_targets_fault(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "run" / "hf") / "tokenizer.json"
    source.chmod(0)
    command = [sys.executable, "-m", "megasync", "export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=without_override)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{source}: cannot be read: Permission denied\n")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("what", ["--merge", "--version"])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    run = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    log = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=2)
    log.write(0, iter(weights(tmp_path / "base").items()))
    with file_limit(10_000):
        text = complaint(capsys, run, "--to", tmp_path / "out", what, *(["0"] if what == "--version" else []))
    assert f"{tmp_path / 'out'}: cannot be written: File too large\n  needed:" in text
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_versions_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    others = {"wider": {"intermediate_size": 320}, "shorter": {"num_hidden_layers": 2}, "longer": {"num_hidden_layers": 5}}
    for version, (name, fields) in enumerate(others.items()):
        other = weights(write_tiny_model(tmp_path / name, "qwen3", **fields))
        log = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=1)
        log.write(version, iter(other.items()))
        text = complaint(capsys, run, "--to", tmp_path / "out", "--version", str(version))
        expected = ("has the shape [320, 128], and by config.json [256, 128]", "lack 22 of", "hold 11 tensors")[version]
        assert f"{run / 'versions'}, version {version}: " in text and expected in text, text
        assert not (tmp_path / "out").exists()


def test_versions_of_a_base_in_mxfp4_are_written_in_the_models_dtype(tmp_path: Path) -> None:
    packed, plain = write_packed(tmp_path), weights(tmp_path / "plain")
    run = adapted(tmp_path, packed.with_name("plain"), "bfloat16", target_modules=["q_proj"])
    (run / "config.yaml").write_text(f"model: {{path: {packed}, dtype: bfloat16}}\n")
    VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=1).write(3, iter(plain.items()))
    assert main([str(run), "--to", str(tmp_path / "out"), "--version", "3"]) == 0
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert own.keys() == plain.keys() and all(torch.equal(own[name], plain[name]) for name in own)


def test_the_command_needs_no_torch(run: Path, tmp_path: Path) -> None:
    script = "import sys; from megasync.tools.export.command import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, str(run), "--to", str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MiB" in done.stdout


# ----------------------------------------------------------------------------------------------------------- adapters


def adapter_run(folder: Path, family: str, dtype: str, **lora: object) -> Path:
    """A run's folder with a checkpoint of a PEFT adapter, all of whose numbers are random."""
    return adapted(folder, write_tiny_model(folder / "base", family, seed=1), dtype, **lora)


def adapted(folder: Path, base: Path, dtype: str, **lora: object) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(r=4, lora_alpha=6, **lora))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "run" / "checkpoints" / "step_00000003" / "adapter")
    (folder / "run" / "config.yaml").write_text(f"model: {{path: {base}, dtype: {dtype}}}\n")
    return folder / "run"


def test_a_checkpoint_may_be_named_as_for_evaluate(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / "step_00000010"
    assert export(checkpoint, tmp_path / "old") == checkpoint / "hf"
    assert "is the checkpoint of step 10" in complaint(capsys, checkpoint, "--to", tmp_path / "new", "--step", 20)
    lora = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    assert main([str(lora / "checkpoints" / "step_00000003"), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert main([str(lora), "--to", str(tmp_path / "of_run"), "--merge"]) == 0
    assert same(tmp_path / "merged", tmp_path / "of_run")


def test_files_beside_the_weights_have_no_part_in_them(tmp_path: Path) -> None:
    """Mistral's folders hold all weights once more, under other names; nothing that is read from a folder is of such files."""
    run = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    base = tmp_path / "base"
    expected = load_file(base / "model.safetensors")
    for name in ("consolidated.safetensors", "other.safetensors"):
        save_file({"norm.weight": torch.ones(3), "model.norm.weight": torch.full((3,), 7.0)}, base / name)
    norm = Weights(base, torch.float32, torch.device("cpu"))["model.norm"]["weight"]
    assert torch.equal(norm, expected["model.norm.weight"].double())
    assert main([str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert weights(tmp_path / "merged").keys() == expected.keys()
    source = FolderSource()
    source.folder = base
    assert source.manifest() == read_folder_manifest(base)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "dtype", "lora"),
    [
        ("qwen3", "float32", {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("llama", "bfloat16", {"target_modules": ["k_proj", "down_proj"], "use_rslora": True}),
        ("qwen3_moe", "float32", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_a_merged_adapter_is_what_peft_merges(tmp_path: Path, family: str, dtype: str, lora: dict[str, object]) -> None:
    run = adapter_run(tmp_path, family, dtype, **lora)
    assert main([str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert [path.name for path in tmp_path.iterdir() if "merged" in path.name] == ["merged"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype)).float()
    peft = PeftModel.from_pretrained(base, run / "checkpoints" / "step_00000003" / "adapter").merge_and_unload()
    assert (tmp_path / "merged" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == getattr(torch, dtype)
    own, expected = merged.state_dict(), peft.state_dict()
    assert own.keys() == expected.keys()
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    assert any(not torch.equal(expected[name], untouched[name]) for name in expected)
    for name, tensor in own.items():
        rounded = expected[name].to(tensor.dtype)
        torch.testing.assert_close(tensor, rounded, rtol=1.6e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6, msg=name)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([5, 6, 7]) == '"#$'


def test_biases_of_routers_stay_float32_in_a_merge(tmp_path: Path) -> None:
    run = adapter_run(tmp_path, "glm4_moe_lite", "bfloat16", target_modules=["o_proj"])
    assert main([str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    own, base = weights(tmp_path / "merged"), weights(tmp_path / "base")
    biases = [name for name in own if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(own[name], base[name]) for name in biases)
    assert {tensor.dtype for name, tensor in own.items() if name not in biases} == {torch.bfloat16}


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_base_in_mxfp4_is_merged_as_its_numbers(tmp_path: Path, num_files: int) -> None:
    """Also where blocks and scales lie in two files."""
    packed, plain = write_packed(tmp_path), tmp_path / "plain"
    if num_files == 2:
        held = weights(packed)
        parts = [{name: tensor for name, tensor in held.items() if name.endswith("_scales") is each} for each in (True, False)]
        names = [f"model-{number}.safetensors" for number in range(num_files)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, packed / name, {"format": "pt"})
        weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (packed / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (packed / "model.safetensors").unlink()
    run = adapted(tmp_path, plain, "bfloat16", target_modules=["q_proj", "o_proj"])
    for name, base in (("of_plain", plain), ("of_packed", packed)):
        (run / "config.yaml").write_text(f"model: {{path: {base}, dtype: bfloat16}}\n")
        assert main([str(run), "--to", str(tmp_path / name), "--merge"]) == 0
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "of_packed", dtype="auto").state_dict()
    expected = weights(tmp_path / "of_plain")
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(own[query], weights(plain)[query])


def test_an_adapter_that_cannot_be_merged_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave --merge out: it holds all weights" in complaint(capsys, run, "--to", tmp_path / "out", "--merge")
    own = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    assert "write --merge for base and adapter" in complaint(capsys, own, "--to", tmp_path / "out")
    (tmp_path / "base").rename(tmp_path / "moved")
    assert f"its base model is not in {tmp_path / 'base'}" in complaint(capsys, own, "--to", tmp_path / "out", "--merge")
    write_tiny_model(tmp_path / "base", "qwen3", seed=5)
    weights = own / "checkpoints" / "step_00000003" / "adapter" / "adapter_model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt", "base_fingerprint": fingerprint(tmp_path / "moved")})
    stray = tmp_path / "moved" / "consolidated.safetensors"
    before = fingerprint(tmp_path / "moved")
    save_file({"tok_embeddings.weight": torch.ones(3)}, stray)
    assert fingerprint(tmp_path / "moved") == before, "of the files that are the model's weights"
    assert "was trained on other weights" in complaint(capsys, own, "--to", tmp_path / "out", "--merge")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["rows", "half", "rank", "dtype", "layer"])
def test_an_adapter_that_does_not_fit_its_base_is_refused_by_its_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """And leaves nothing."""
    own = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"])
    path = own / "checkpoints" / "step_00000003" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in sorted(tensors) if ".lora_B." in key)
    tensor = tensors.pop(key)
    changed = {"rows": tensor[:-1], "rank": tensor[:, :-1], "dtype": tensor.int(), "layer": tensor}
    if damage in changed:
        tensors[key.replace(".layers.0.", ".layers.9.") if damage == "layer" else key] = changed[damage].clone()
    save_file(tensors, path)
    linear = key.removeprefix("base_model.model.").partition(".lora_B")[0]
    message = complaint(capsys, own, "--to", tmp_path / "out", "--merge")
    assert linear.partition(".layers.0.")[2] in message and "remedy" in message
    assert not (tmp_path / "out").exists()
