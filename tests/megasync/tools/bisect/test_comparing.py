"""The trainer's modules give what transformers' do, in every family; the response and weights that are taken; errors.

With faults and replicas: tests/runs/test_bisect.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.versions.writer import VersionWriter
from megasync.tools.bisect import command as bisect
from megasync.tools.bisect.compare import fits
from megasync.tools.bisect.response import Response, check_length, generated, recorded
from megasync.tools.bisect.choose import choose
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.data.prompts import Prompts
from megasync.tools.serving.source import find_source
from tests.support.config_files import write_runnable
from tests.support.ranks import run_ranks
from tests.support.tiny_models import LLAMA3, YARN, write_tiny_model

FAMILIES = {
    "qwen3": ("qwen3", "float32", {}),
    "qwen3 bf16": ("qwen3", "bfloat16", {}),
    "qwen2 biases": ("qwen2", "float32", {}),
    "llama scaled": ("llama", "float32", {"rope_parameters": LLAMA3, "tied": True}),
    "llama yarn": ("llama", "float32", {"rope_parameters": YARN}),
    "mistral window": ("mistral", "bfloat16", {"sliding_window": 8}),
}


def test_small_faults_of_the_trainers_model_are_seen(tmp_path: Path) -> None:
    """Each as large as what bfloat16 rounds, and in no module after it."""
    folder = write_tiny_model(tmp_path, "qwen2", num_attention_heads=4, num_key_value_heads=1)
    layer = "decoder.layers.1"
    faults = {
        "bias": (f"{layer}.self_attention.linear_qkv.bias/5", 1.05),
        "norm": (f"{layer}.pre_mlp_layernorm.weight", 1.01),
        "row": ("embedding.word_embeddings.weight/52", 1.01),
        "product": (f"{layer}.mlp.linear_fc2.weight", 0.998),
    }
    arguments = {"folder": folder, "faults": faults, "dtype": "float32"}
    (found,) = run_ranks(1, "tests.megasync.tools.bisect.family_cases:wrong_with", arguments)
    assert found == {
        "bias": ["model.layers.1.self_attn.q_proj"],
        "norm": ["model.layers.1.post_attention_layernorm"],
        "row": ["model.embed_tokens"],
        "product": ["model.layers.1.mlp.down_proj"],
    }


@pytest.mark.parametrize("fusions", ["none", "all"])
def test_every_module_is_within_rounding_of_its_reference(tmp_path: Path, fusions: str) -> None:
    folders = {}
    for name, (family, dtype, fields) in FAMILIES.items():
        folders[name] = write_tiny_model(tmp_path / name, family, dtype=getattr(torch, dtype), **fields), dtype
    (found,) = run_ranks(1, "tests.megasync.tools.bisect.family_cases:judged", {"folders": folders, "fusions": fusions})
    assert all(each["traced"] and each["ratio"] < 0.9 for each in found.values()), found
    assert found["qwen3"]["modules"] == 4 * 17 + 5 and found["qwen2 biases"]["modules"] == 4 * 15 + 5


def test_so_it_is_by_exact_functions_and_with_other_dtypes(tmp_path: Path) -> None:
    names = {"float32": {"exact": True}, "bfloat16": {"head_dtype": "float32"}, "float16": {}}
    for dtype, options in names.items():
        folders = {dtype: (write_tiny_model(tmp_path / dtype, "qwen3", dtype=getattr(torch, dtype)), dtype)}
        arguments = {"folders": folders, "fusions": "none", **options}
        (found,) = run_ranks(1, "tests.megasync.tools.bisect.family_cases:judged", arguments)
        assert found[dtype]["traced"] and found[dtype]["ratio"] < 0.9, found


def test_a_fault_that_is_less_than_rounding_everywhere_is_seen_over_all(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    arguments = {"folder": folder, "faults": {"eps": ("decoder.layers.0.input_layernorm.eps", 10.0)}, "dtype": "bfloat16"}
    (found,) = run_ranks(1, "tests.megasync.tools.bisect.family_cases:wrong_with", arguments)
    assert found == {"eps": ["model.layers.0.input_layernorm"]}


@pytest.mark.parametrize(
    ("swap", "expected"),
    [
        ("mlp.act_fn", True),
        ("model.layers.3", True),
        ("model.layers.3.mlp.act_fn", True),
        ("act", False),
        ("model.layers.1", False),
    ],
)
def test_what_a_swap_fits(swap: str, expected: bool) -> None:
    assert fits("model.layers.3.mlp.act_fn", swap) == expected


# ---------------------------------------------------------------------------------------------------- which weights and response


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load_config(write_runnable(tmp_path), ["run.name=rl", "rollout.max_new_tokens=8"])
    save_config(config, config.run.folder / "config.yaml")
    return config.run.folder


def test_a_recorded_response_is_that_of_the_step_with_its_own_tokens(run: Path, tmp_path: Path) -> None:
    prompts = Prompts(str(tmp_path / "model"), load_config(run / "config.yaml").data)
    assert recorded(run, prompts, 3, None) is None
    text = "12+3"
    ids = prompts.tokenizer.encode(text, add_special_tokens=False)
    line = {"set": "train", "line": 7, "prompt": "1+1=", "response": text, "tokens": len(ids)}
    known = {
        "token_texts": prompts.token_texts(ids),
        "rollout_log_probs": [-0.5] * len(ids),
        "trainer_log_probs": [-0.4] * len(ids),
    }
    lines = [{"step": step, "versions": [step - 1] * 2, **line, **known} for step in (3, 4, 4)]
    lines[2]["token_texts"] = ["other"]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = recorded(run, prompts, 3, None)
    assert found is not None and found.token_ids == tuple(ids) and found.rollout == [-0.5] * len(ids)
    assert prompts.tokenizer.decode(list(found.prompt_ids)) == "1+1=" and "line 7 of step 4" in found.description
    newest = recorded(run, prompts, 9, None)
    assert newest is not None and newest.rollout is None, "of other weights"
    with pytest.raises(ConfigError, match=r"--prompt 5: .*\n.*0 to 1"):
        recorded(run, prompts, 3, 5)


def test_without_a_checkpoint_the_model_is_that_of_the_start(run: Path, tmp_path: Path) -> None:
    chosen = choose(run, tmp_path, None, [])
    assert chosen.base == tmp_path / "model" and chosen.step == 0 and "starts from" in chosen.name
    write_tiny_model(run / "checkpoints/step_00000004/hf", "qwen3")
    write_tiny_model(run / "checkpoints/step_00000002/hf", "qwen3", seed=1)
    newest = choose(run, tmp_path, None, [])
    assert newest.base == run / "checkpoints/step_00000004/hf" == Path(newest.served.model.path)
    assert newest.config.model.path == str(newest.base), "also where the run's model is elsewhere by now"
    assert choose(run, tmp_path, 0, []).base == tmp_path / "model"
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=2)
    assert choose(run, tmp_path, 0, [f"model.path={other}"]).base == other
    with pytest.raises(ConfigError, match=r"model.path = .*other: the weights are those of .*, step 4\n.*--step 0"):
        choose(run, tmp_path, None, [f"model.path={other}"])


def test_a_step_without_a_checkpoint_comes_out_of_the_log(run: Path, tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / f"v{seed}", "qwen3", seed=seed) for seed in range(3)]
    versions = [load_file(folder / "model.safetensors") for folder in folders]
    writer = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=9)
    for number, tensors in enumerate(versions):
        writer.write(number, iter(tensors.items()))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "d").mkdir()
    chosen, source = choose(run, tmp_path / "a", 2, []), find_source(run, tmp_path / "b", 1, [])
    assert chosen.step == 2 and "version 2" in chosen.name
    assert Path(chosen.served.model.path) == chosen.base == Path(chosen.config.model.path)
    assert source.name.endswith("version 1")
    for folder, expected in ((chosen.base, versions[2]), (Path(source.config.model.path), versions[1])):
        own = load_file(folder / "model.safetensors")
        assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    with pytest.raises(ConfigError, match=r"model.path = .*other: the weights are those of .*, step 2\n"):  # merged
        choose(run, tmp_path / "c", 2, ["engine.lora.rank=4", f"model.path={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match=r"has no version 7; the last there are: 0, 1, 2"):
        choose(run, tmp_path / "d", 7, [])


def test_responses_fit_into_what_the_replica_takes(run: Path) -> None:
    config = load_config(run / "config.yaml", ["rollout.max_model_len=12", "rollout.max_new_tokens=4"])
    check_length(Response((1,) * 8, (2,) * 4, "line 1"), config)
    with pytest.raises(ConfigError, match=r"line 1: with its prompt 13 tokens, more than rollout.max_model_len = 12"):
        check_length(Response((1,) * 8, (2,) * 5, "line 1"), config)
    pool = MagicMock()
    completion = SimpleNamespace(token_ids=np.array([5, 6]), log_probs=np.zeros(2, np.float32))
    pool.generate.return_value.result.return_value = [[completion]]
    found = generated(pool, Prompts(config.model.path, config.data), config)
    ((request,),) = pool.generate.call_args.args
    assert found.prompt_ids == request.prompt_ids and len(request.prompt_ids) + request.max_new_tokens == 12


def test_wrong_use_starts_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "experts", "qwen3_moe")
    write_tiny_model(tmp_path / "seed", "seed_oss")
    for arguments, expected in (
        ([str(tmp_path)], "is no run"),
        ([str(run), "--step", "7"], "has no checkpoint of step 7"),
        ([str(run), f"model.path={tmp_path / 'experts'}"], "its modules are not followed one by one"),
        ([str(run), f"model.path={tmp_path / 'seed'}"], "model_type = 'seed_oss': its modules are not followed one by one"),
        ([str(run), "--prompt", "3"], "has no such response"),
        ([str(run), "rollout.kv_cache_bytes=1KiB", "rollout.max_model_len=64"], "too small for one sequence"),
        ([str(run), "--swap", "self_atn.attn"], "the model has no such module\n  nearest: self_attn.attn\n"),
        ([str(run), "--swap", "model.layers.9"], "the model has no such module"),
        (
            [str(run), "--swap", "rotary_emb.q", "model.exact=true", "model.dtype=float32"],
            "the rotary embedding is a part of attention",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            bisect.main(arguments)
        assert caught.value.code == 2
        assert expected in capsys.readouterr().err
