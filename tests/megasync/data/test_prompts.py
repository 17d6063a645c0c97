"""Prompts through a chat template: turns, system prompts, the template's variables, and what is refused before anything starts.

python -m pytest tests/megasync/data/test_prompts.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.data.load import RunData, load_data
from tests.support.config_files import cannot_run, write, write_runnable

TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('a system turn comes first') }}{%- endif -%}
{%- if message.content == '9' -%}{{ raise_exception('no nines here') }}{%- endif -%}
<{{ message.role[0] }}>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<a>{%- if enable_thinking is defined and not enable_thinking -%}={%- endif -%}{%- endif -%}"""
TEMPLATED = ["data.chat_template=true"]


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """A config whose model has the template. The tokenizer knows digits, + and =, and nothing of what is in brackets."""
    path = write_runnable(tmp_path)
    set_template(path, TEMPLATE)
    return path


def set_template(runnable: Path, template: object) -> None:
    tokenizer = runnable.parent / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": template}))


def write_turns(path: Path, *prompts: list[tuple[str, str]]) -> Path:
    rows = [{"question": [{"role": r, "content": c} for r, c in turns], "answer": "2"} for turns in prompts]
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def data_of(runnable: Path, *overrides: str) -> RunData:
    return load_data(load_config(runnable, [*TEMPLATED, *overrides]))


def templated(runnable: Path, *overrides: str) -> list[str]:
    data = data_of(runnable, *overrides)
    return data.prompts._templated(data.train)


def test_a_text_is_one_user_turn(runnable: Path) -> None:
    assert templated(runnable) == ["<u>1+1=<a>", "<u>1+2=<a>"]
    assert templated(runnable, "data.system_prompt=7") == ["<s>7<u>1+1=<a>", "<s>7<u>1+2=<a>"]
    assert templated(runnable, "data.chat_template_arguments={enable_thinking: false}")[0] == "<u>1+1=<a>="
    assert templated(runnable, "data.chat_template_arguments.enable_thinking=true")[0] == "<u>1+1=<a>"


def test_turns_go_as_they_are_and_bring_their_own_system_prompt(runnable: Path, tmp_path: Path) -> None:
    with_system = [("system", "0"), ("user", "1"), ("assistant", "2"), ("user", "3")]
    train = write_turns(tmp_path / "turns.jsonl", with_system, [("user", "4")])
    chosen = (f"data.train={train}", "data.system_prompt=7")
    assert templated(runnable, *chosen) == ["<s>0<u>1<a>2<u>3<a>", "<s>7<u>4<a>"]
    data = data_of(runnable, *chosen)
    assert [example.prompt for example in data.train] == ["3", "4"]
    assert list(data.prompts.lengths(data.train, with_answers=False)) == [len(data.prompts.prompt_ids(e)) for e in data.train]
    assert [len(data.prompts.prompt_ids(example)) for example in data.train] == [19, 11]


def test_special_tokens_of_a_plain_prompt_are_the_tokenizers(runnable: Path) -> None:
    data = load_data(load_config(runnable))
    assert [data.prompts.prompt_text(example) for example in data.train] == ["1+1=", "1+2="]


def test_texts_of_many_responses_are_those_of_each(runnable: Path) -> None:
    prompts = load_data(load_config(runnable)).prompts
    size = len(prompts.tokenizer)
    responses = [np.arange(begin, size, dtype=np.int32) for begin in range(3)] + [np.zeros(0, np.int32)]
    assert prompts.texts(responses) == [prompts.text(ids) for ids in responses]
    assert "1" in prompts.texts(responses)[0] and prompts.texts([]) == []


TEXT = "Two plus two  is four, naïvely.\n 2+2=4"


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: a token is bytes, a space belongs to the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet))
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2's: its decoder strips the first space of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["<eos>", "<unk>"]))
    return tokenizer


@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_texts_of_tokens_make_the_text(build: Callable[[], Tokenizer], runnable: Path) -> None:
    prompts = load_data(load_config(runnable)).prompts
    prompts.tokenizer = PreTrainedTokenizerFast(tokenizer_object=build(), eos_token="<eos>")
    prompts.stop_token_ids = (prompts.tokenizer.eos_token_id,)
    ids = [*prompts.tokenizer.encode(TEXT, add_special_tokens=False), prompts.tokenizer.eos_token_id]
    texts = prompts.token_texts(ids)
    assert texts[-1] == "<eos>" and len(texts) == len(ids) > 3
    assert "".join(texts[:-1]).strip() == TEXT and prompts.token_texts(ids[2:5]) == texts[2:5]
    assert prompts.token_texts([]) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"eos_token_id": "2"}', "eos_token_id = '2': a token's number, or a list of them, is expected"),
        (b'{"eos_token_id": [2, true]}', "eos_token_id = [2, True]"),
    ],
)
def test_a_broken_generation_config_is_named(runnable: Path, content: bytes, words: str) -> None:
    path = runnable.parent / "model" / "generation_config.json"
    path.write_bytes(content)
    message = cannot_run(runnable)
    assert message.startswith(f"{path}: ") and words in message and "download the model again" in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", '{"model_max_length": "long"}', "model_max_length = 'long': a number of tokens"),
        ("tokenizer.json", "{}", "model: its tokenizer cannot be read: KeyError"),
        ("tokenizer.json", '{"added_tokens": [', "model: its tokenizer cannot be read: JSONDecodeError"),
    ],
)
def test_a_broken_tokenizer_is_named(runnable: Path, name: str, content: str, words: str) -> None:
    (runnable.parent / "model" / name).write_text(content)
    message = cannot_run(runnable)
    assert words in message and "download the model again" in message


def test_the_end_of_a_sequence_is_a_token_that_the_model_has(runnable: Path) -> None:
    """Supervised answers end with the tokenizer's; others may stop a response, and may be of no use."""
    folder = runnable.parent / "model"
    (folder / "generation_config.json").write_text('{"eos_token_id": [128, 1]}')
    check_config(load_config(runnable), 2)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": None}))
    message = cannot_run(runnable)
    assert "eos_token_id is the token 128, and the model has embeddings for 0 to 127" in message
    assert "take tokenizer and model of one folder" in message


def test_prompts_are_of_tokens_that_the_model_has(runnable: Path, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model; and one that has no token for what it does not know."""
    path, train = runnable.parent / "model" / "tokenizer.json", tmp_path / "train.jsonl"
    fields = json.loads(path.read_text())
    fields["model"]["vocab"]["3"] = 500
    path.write_text(json.dumps(fields))
    train.write_text('{"question": "1", "answer": "2"}\n{"question": "1+3=", "answer": "4"}\n')
    message = cannot_run(runnable, f"data.train={train}")
    assert "data.train: line 2: holds the token 500, '3', and the model has embeddings for 0 to 127" in message
    fields["model"]["vocab"]["3"] = 7
    path.write_text(json.dumps(fields | {"model": {"type": "BPE", "vocab": fields["model"]["vocab"], "merges": []}}))
    train.write_text('{"question": "1", "answer": "2"}\n{"question": "\u00e4", "answer": "2"}\n')
    assert "data.train: line 2: the tokenizer makes no token of the prompt" in cannot_run(runnable, f"data.train={train}")


@pytest.mark.parametrize("model", [models.WordLevel, models.Unigram])
@pytest.mark.parametrize(("overrides", "column"), [([], "question"), (TEMPLATED, "question"), (["algorithm.name=sft"], "answer")])
def test_a_text_that_the_tokenizer_cannot_encode_is_named(
    runnable: Path, tmp_path: Path, model: type[models.Model], overrides: list[str], column: str
) -> None:
    """Of a tokenizer without a token for what it does not know."""
    folder, train, characters = runnable.parent / "model", tmp_path / "train.jsonl", ["<eos>", *"0123456789+=<>uas"]
    ids = {letter: number for number, letter in enumerate(characters)}
    built = Tokenizer(models.WordLevel(ids, "<none>") if model is models.WordLevel else models.Unigram([(c, -1.0) for c in ids]))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>").save_pretrained(folder)
    set_template(runnable, TEMPLATE)
    lines = [{"question": "1", "answer": "2"}, {"question": "1", "answer": "2"} | {column: "\u00e4"}]
    train.write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = cannot_run(runnable, f"data.train={train}", *overrides)
    assert message.startswith("data.train: line 2: the tokenizer cannot encode ") and "\u00e4" in message.splitlines()[0]
    assert "remedy: take the line out, or give the tokenizer an unknown token" in message


def test_a_tokenizer_that_ends_prompts_is_refused(runnable: Path, tmp_path: Path) -> None:
    """It adds the end of the sequence by itself, after which a model is to answer. What a prompt says itself stays."""
    path, train = runnable.parent / "model" / "tokenizer.json", tmp_path / "train.jsonl"
    built = Tokenizer.from_file(str(path))
    built.post_processor = processors.TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", 1)])
    built.save(str(path))
    message = cannot_run(runnable)
    assert message.startswith("data.train: line 1: the tokenizer ends the prompt with '<eos>', after which there is nothing more")
    assert "take it out of post_processor in tokenizer.json" in message
    check_config(load_config(runnable, TEMPLATED), 2)  # whose text has all special tokens
    built.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    built.save(str(path))
    train.write_text('{"question": "1<eos>", "answer": "2"}\n')
    assert load_data(load_config(runnable, [f"data.train={train}", "data.batch_size=1"])).prompts is not None


def test_messages_need_the_template(runnable: Path, tmp_path: Path) -> None:
    train = write_turns(tmp_path / "turns.jsonl", [("user", "4")])
    message = cannot_run(runnable, f"data.train={train}")
    assert message.startswith(f"data.train: {train}: line 1 holds a list of messages, and data.chat_template = false")
    assert "write data.chat_template=true" in message


def test_what_the_template_refuses_is_named_by_its_line(runnable: Path, tmp_path: Path) -> None:
    train = write_turns(tmp_path / "turns.jsonl", [("user", "4")], [("user", "5"), ("assistant", "9"), ("user", "6")])
    message = cannot_run(runnable, *TEMPLATED, f"data.train={train}")
    assert message.startswith("data.train: line 2: the model's chat template refuses the prompt: no nines here")
    assert "roles:  user, assistant, user" in message
    for error, words in (("{{ messages + 3 }}", "can only concatenate list"), ("{{ 1 / 0 }}", "division by zero")):
        set_template(runnable, error)
        assert f"line 1: the model's chat template refuses the prompt: {words}" in cannot_run(runnable, *TEMPLATED)
    set_template(runnable, [{"name": "rag", "template": "x"}])
    assert "the model's template is broken: This model has multiple" in cannot_run(runnable, *TEMPLATED)
    set_template(runnable, "{% for message in messages %}")
    assert "data.chat_template = true: the model's template is broken" in cannot_run(runnable, *TEMPLATED)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.system_prompt=7"], "data.system_prompt = 7: data.chat_template = false does not use it"),
        (["data.chat_template_arguments.a=1"], "data.chat_template_arguments = {'a': 1}: data.chat_template = false"),
        (
            [*TEMPLATED, "data.chat_template_arguments.enable_thinkin=false"],
            "reads no such variable\n  choices: enable_thinking\n  nearest: enable_thinking",
        ),
        ([*TEMPLATED, "data.chat_template_arguments.tokenize=true"], "reads no such variable"),
        ([*TEMPLATED, "data.chat_template_arguments.add_generation_prompt=false"], "reads no such variable"),
    ],
)
def test_keys_of_the_template_without_effect_are_refused(runnable: Path, overrides: list[str], words: str) -> None:
    message = cannot_run(runnable, *overrides)
    assert words in message and "remedy:" in message
