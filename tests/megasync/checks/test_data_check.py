"""Data of a run: files that cannot be read, and prompts that are too long. Real files throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.data.load import load_data
from tests.support.config_files import cannot_run, command, refusal, write, write_model


def write_prompts(path: Path, *lengths: int) -> Path:
    """Prompts of so many characters, each a token of the quickstart's tokenizer."""
    return write(path, "".join(json.dumps({"question": "1" * length, "answer": "2"}) + "\n" for length in lengths))


def test_prompts_that_are_too_long_are_dropped_with_their_number(runnable: Path, tmp_path: Path) -> None:
    train = write_prompts(tmp_path / "long.jsonl", 3, 29, 28, 40, 5, 6)
    fits = [f"data.train={train}", f"data.eval={train}", "rollout.max_new_tokens=4", "rollout.max_model_len=32"]
    data = load_data(load_config(runnable, fits))
    assert [len(example.prompt) for example in data.train] == [3, 28, 5, 6] == [len(example.prompt) for example in data.held_out]
    assert data.notes == [
        f"{key}: 2 of 6 examples are too long and dropped: prompt and rollout.max_new_tokens = 4 together have more than "
        "rollout.max_model_len = 32 tokens"
        for key in ("data.train", "data.eval")
    ]
    raised = "shorten longer examples, or lower rollout.max_new_tokens, or raise rollout.max_model_len"
    assert raised in cannot_run(runnable, *fits, "data.batch_size=5")
    message = cannot_run(runnable, *fits, "data.too_long=refuse")
    assert message.startswith("data.train: 2 of 6 examples are too long")
    assert "longest: line 4, 44 tokens" in message and "allowed: 32 tokens: rollout.max_model_len" in message
    write_model(runnable.parent / "model", max_position_embeddings=40)
    message = cannot_run(runnable, *fits, "data.batch_size=5")
    assert "left:    4, 5 are needed" in message and message.endswith("or lower rollout.max_new_tokens"), "44 do not fit at all"
    longer = write_prompts(tmp_path / "longer.jsonl", 50, 60)
    message = cannot_run(runnable, *fits, f"data.train={longer}")
    assert message.startswith("data.train: 2 of 2 examples are too long") and "left:    0, 2 are needed" in message
    assert "data.eval: 2 of 2 examples" in cannot_run(runnable, *fits, f"data.eval={longer}")


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_run_without_a_prompt_that_fits_ends_before_it_starts(runnable: Path, flags: list[str]) -> None:
    done = command("-m", "megasync.train", str(runnable), "rollout.max_new_tokens=4", "rollout.max_model_len=7", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.train: 2 of 2 examples are too long\n  longest: line 1, 8 tokens" in done.stderr


def test_a_column_of_the_evaluation_alone_is_named_there(runnable: Path, tmp_path: Path) -> None:
    """data.prompt_key is that of the training data, too."""
    held_out = write(tmp_path / "held_out.jsonl", '{"questions": "1+1=", "answer": "2"}\n')
    assert refusal(runnable, f"data.eval={held_out}").remedy.startswith("write data.eval.NAME.prompt_key=questions, or ")
    check_config(load_config(runnable, [f"data.eval={{a: {{path: {held_out}, prompt_key: questions}}}}"]), 2)


def test_every_limit_counts(runnable: Path, tmp_path: Path) -> None:
    """Positions for all, a micro-batch for what is trained on; of a supervised example the answer and the end too."""
    train = write_prompts(tmp_path / "long.jsonl", *[10] * 4, 20, 30)
    data = [f"data.train={train}", f"data.eval={train}", "rollout.max_new_tokens=4"]
    numbers = {}
    for name, more in {"grpo": [], "sft": ["algorithm.name=sft"]}.items():
        kept = load_data(load_config(runnable, [*data, *more, "engine.tokens_per_microbatch=22"]))
        numbers[name] = (len(kept.train), len(kept.held_out))
    assert numbers == {"grpo": (4, 6), "sft": (5, 5)}
    write_model(runnable.parent / "model", max_position_embeddings=32)
    kept = load_data(load_config(runnable, data))
    assert (len(kept.train), len(kept.held_out)) == (5, 5)
    assert "the model's max_position_embeddings = 32" in kept.notes[0]
    refused = cannot_run(runnable, *data, "data.batch_size=6")
    assert refused.endswith("shorten longer examples, or lower rollout.max_new_tokens"), "a model has the positions that it has"
    tokenizer = runnable.parent / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 16}))
    assert len(load_data(load_config(runnable, data)).held_out) == 5, "vLLM takes no limit from the tokenizer"


def test_answers_are_there_for_what_needs_them(runnable: Path, tmp_path: Path) -> None:
    """Supervised steps would train on the end of the sequence alone, and every reward would be 0."""
    empty = write(tmp_path / "empty.jsonl", '{"question": "1+1=", "answer": " "}\n' * 4)
    sft, is_empty = ["algorithm.name=sft"], "data.train: all 4 answers are empty, and "
    assert cannot_run(runnable, f"data.train={empty}", *sft).startswith(f"{is_empty}supervised steps train on them")
    assert "answer key: none" in cannot_run(runnable, "data.answer_key=", *sft)
    message = cannot_run(runnable, f"data.train={empty}")
    assert message.startswith(f"{is_empty}rollout.reward = exact_match is always 0 without")
    for reward in ("token_count", "{exact_match: 1, token_count: 0.1}"):
        assert load_data(load_config(runnable, [f"data.train={empty}", f"rollout.reward={reward}"])).train
    assert "is always 0" in cannot_run(runnable, f"data.eval={empty}", "rollout.reward={exact_match: 1, token_count: 0}")


def test_lengths_are_those_of_the_samples(runnable: Path) -> None:
    data = load_data(load_config(runnable, ["algorithm.name=sft"]))
    samples = [data.prompts.supervised(example) for example in data.train]
    assert list(data.prompts.lengths(data.train, with_answers=True)) == [sample.num_tokens for sample in samples]
    prompts = list(data.prompts.lengths(data.train, with_answers=False))
    assert prompts == [len(data.prompts.prompt_ids(example)) for example in data.train]


def test_a_model_without_a_tokenizer(runnable: Path) -> None:
    for file in (runnable.parent / "model").glob("tokenizer*"):
        file.unlink()
    assert "the folder holds no tokenizer.json" in cannot_run(runnable)


@pytest.mark.parametrize("override", ["data.train=nowhere", "data.eval=nowhere", "data.split=x", "data.prompt_key=x"])
def test_an_error_of_a_data_file_has_its_remedy(runnable: Path, override: str) -> None:
    (part,) = refusal(runnable, override).parts
    assert part.key.startswith("data.") and part.remedy and part.headline.count("\n") == 0


def test_data_errors_name_key_file_and_line(runnable: Path, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.jsonl", '{"question": "a", "answer": "b"}\n{"question": \n')
    assert "data.train is not set" in cannot_run(runnable, "data.train=")
    for key in ("train", "eval"):
        assert f"data.{key}: {broken}:2: not JSON" in cannot_run(runnable, f"data.{key}={broken}")
        assert f"data.{key}: {tmp_path}/no.jsonl: there is no" in cannot_run(runnable, f"data.{key}={tmp_path}/no.jsonl")
    message = cannot_run(runnable, "data.prompt_key=quesion")
    assert "train.jsonl:1: has no key 'quesion'" in message
    assert "keys:    question, answer" in message
    assert "data.prompt_key=question" in message
    assert "data.answer_key=answer" in cannot_run(runnable, "data.answer_key=answers")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train=PARQUET"], "data.train: PARQUET: cut off, or not a Parquet file"),
        (["data.eval={a: {path: TRAIN, split: test}}"], "data.eval.a: TRAIN: is one file, and data.eval.a.split = 'test' is for"),
        (["rollout.engine_arguments.model=x"], "rollout.engine_arguments.model = 'x': model.path sets it"),
    ],
)
def test_what_is_wrong_with_the_data_is_said_with_exit_code_2(runnable: Path, overrides: list[str], words: str) -> None:
    names = {"PARQUET": str(write(runnable.parent / "a.parquet", "nonsense")), "TRAIN": str(runnable.parent / "train.jsonl")}
    for name, path in names.items():
        overrides, words = [each.replace(name, path) for each in overrides], words.replace(name, path)
    done = command("-m", "megasync.train", "--check", str(runnable), *overrides)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words) and "Traceback" not in done.stderr
