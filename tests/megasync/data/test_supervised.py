"""Conversations as training samples: each of the assistant's turns is trained once, by the tokens that a rollout would sample.

python -m pytest tests/megasync/data/test_supervised.py
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from engine.sample import Sample
from megasync.config.data_section import DataConfig
from megasync.data.data import Example, load_examples
from megasync.data.prompts import Prompts
from tests.support.chat_families import FAMILIES

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "callid000", "type": "function", "function": {"name": "add", "arguments": {"x": 8}}}
PLAIN = [
    {"role": "user", "content": "the answer"},
    {"role": "assistant", "content": "It is 42"},
    {"role": "user", "content": "call it"},
    {"role": "assistant", "content": "True"},
]
CALLING = [
    PLAIN[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "callid000", "name": "add"},
    *PLAIN[1:],
]
# the texts that are trained, one list a sample; of a template that drops thinking or moves tools there are several
CALLED = {
    "qwen3": [
        ['<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"x": 8}}\n</tool_call><|im_end|>'],
        ["<think>\n\n</think>\n\nIt is 42<|im_end|>"],
        ["<think>\n\n</think>\n\nTrue<|im_end|>"],
    ],
    "llama3": [['{"name": "add", "parameters": {"x": 8}}<|eot_id|>', "It is 42<|eot_id|>", "True<|eot_id|>"]],
    "mistral": [
        ['[TOOL_CALLS] [{"name": "add", "arguments": {"x": 8}, "id": "callid000"}]</s>', " It is 42</s>"],
        [" True</s>"],
    ],
    "glm4": [
        [
            "\n<think></think>\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>8</arg_value>\n</tool_call><|observation|>",
            "\n<think></think>\nIt is 42<|user|>",
            "\n<think></think>\nTrue<|user|>",
        ]
    ],
}
WROTE = {
    "qwen3": [["<think>\n\n</think>\n\nIt is 42<|im_end|>"], ["<think>\n\n</think>\n\nTrue<|im_end|>"]],
    "llama3": [["It is 42<|eot_id|>", "True<|eot_id|>"]],
    "mistral": [[" It is 42</s>", " True</s>"]],
    "gemma3": [["It is 42<end_of_turn>", "True<end_of_turn>"]],
    "glm4": [["\n<think></think>\nIt is 42<|user|>", "\n<think></think>\nTrue<|user|>"]],
}


UP_TO_CALL = next(number for number, message in enumerate(CALLING, 1) if message.get("tool_calls"))  # type: ignore[attr-defined]


def call_of(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def prompts_of(folder: Path, family: str, template: str = "") -> Prompts:
    made = FAMILIES[family]
    made.tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": made.stop_token_ids()}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return Prompts(str(folder), DataConfig(chat_template=True))


def conversation(folder: Path, messages: list[dict[str, Any]], **row: Any) -> Example:
    path = folder / "data.jsonl"
    path.write_text(json.dumps({"messages": messages, **row}))
    (example,) = load_examples(path, "messages", "completion" if "completion" in row else "", is_supervised=True)
    return example


def runs(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Token ids of the response, trained and given ones in turns."""
    mask = sample.is_sampled.tolist() or [True] * len(sample.response_ids)
    pairs = groupby(zip(mask, sample.response_ids.tolist(), strict=True), key=lambda pair: pair[0])
    return [(is_trained, [each for _, each in own]) for is_trained, own in pairs]


def trained(prompts: Prompts, samples: list[Sample]) -> list[list[str]]:
    """The byte tokens of the families with pieces of words are added ones, which are texts of their own."""
    return [[as_bytes(prompts.detokenizer.text(ids)) for is_trained, ids in runs(each) if is_trained] for each in samples]


def as_bytes(text: str) -> str:
    return re.sub("<0x([0-9A-F]{2})>", lambda found: chr(int(found[1], 16)), text)


def check_contexts(prompts: Prompts, example: Example) -> None:
    """Before each trained turn stand the tokens that a rollout's prompt of the messages before it has."""
    history, turns = list(example.messages), iter(example.completion)
    for sample in prompts.samples(example):
        ids = sample.prompt_ids.tolist()
        for is_trained, own in runs(sample):
            if is_trained:
                message = next(turns)
                while message["role"] != "assistant":
                    history.append(message)
                    message = next(turns)
                asked = Example("?", "", 1, tuple(history), tools=example.tools)
                assert prompts.detokenizer.whole(ids) == prompts.detokenizer.whole(prompts.prompt_ids(asked))
                history.append(message)
            ids += own
    assert not list(turns)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_turns_of_the_assistant_are_trained_once(tmp_path: Path, family: str) -> None:
    prompts, example = prompts_of(tmp_path, family), conversation(tmp_path, PLAIN)
    assert trained(prompts, prompts.samples(example)) == WROTE[family]
    check_contexts(prompts, example)
    assert (example.prompt, example.answer) == ("the answer", "True")
    assert list(prompts.lengths([example], with_answers=True)) == [max(s.num_tokens for s in prompts.samples(example))]


@pytest.mark.parametrize("family", CALLED)
def test_calls_are_trained_and_results_are_not(tmp_path: Path, family: str) -> None:
    prompts, example = prompts_of(tmp_path, family), conversation(tmp_path, CALLING, tools=[TOOL])
    assert trained(prompts, prompts.samples(example)) == CALLED[family]
    check_contexts(prompts, example)
    batch = prompts.supervised_batch([example, conversation(tmp_path, PLAIN)])
    assert [sample.group for sample in batch] == [0] * len(CALLED[family]) + [1] * len(WROTE[family])
    is_noted = any("line 1 is the first of those that become several sequences" in note for note in prompts.notes)
    assert is_noted == (len(CALLED[family]) > 1)


@pytest.mark.parametrize("family", CALLED)
def test_a_conversation_that_ends_with_a_call_has_the_end_of_a_call(tmp_path: Path, family: str) -> None:
    """The one that the same turn has before its result."""
    prompts = prompts_of(tmp_path, family)
    whole, cut = (conversation(tmp_path, messages, tools=[TOOL]) for messages in (CALLING, CALLING[:UP_TO_CALL]))
    (whole_first, *_), (cut_first, *_) = (trained(prompts, prompts.samples(each))[0] for each in (whole, cut))
    assert whole_first == cut_first


def test_of_a_prompt_with_its_completion_the_completion_is_trained(tmp_path: Path) -> None:
    """Both of TRL's forms; a text behind a list of messages is the same as a message."""
    prompts = prompts_of(tmp_path, "llama3")
    of_messages = conversation(tmp_path, PLAIN[:3], completion=PLAIN[3:])
    of_text = conversation(tmp_path, PLAIN[:3], completion="True")
    for example in (of_messages, of_text):
        (sample,) = prompts.samples(example)
        assert trained(prompts, [sample]) == [["True<|eot_id|>"]]
        assert sample.prompt_ids.tolist() == list(prompts.prompt_ids(example)) and example.answer == "True"
    longer = conversation(tmp_path, PLAIN[:1], completion=[*CALLING[1:]], tools=[TOOL])
    assert trained(prompts, prompts.samples(longer)) == CALLED["llama3"]


def test_thinking_is_trained_where_the_template_writes_it(tmp_path: Path) -> None:
    """Qwen3 keeps that of the turns behind the last question alone: the first turn is trained in a sample of its own."""
    messages = [{**each, "reasoning_content": "so"} if each["role"] == "assistant" else each for each in PLAIN]
    prompts = prompts_of(tmp_path, "qwen3")
    first, second = trained(prompts, prompts.samples(conversation(tmp_path, messages)))
    assert first == ["<think>\nso\n</think>\n\nIt is 42<|im_end|>"] and second == ["<think>\nso\n</think>\n\nTrue<|im_end|>"]


def test_a_template_that_ends_no_turn_is_ended_by_the_sequence(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    prompts = prompts_of(tmp_path, "llama3", template)
    assert trained(prompts, prompts.samples(conversation(tmp_path, PLAIN))) == [["It is 42<|eot_id|>"], ["True<|eot_id|>"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_continues_behind_an_end_token_is_noted_once(tmp_path: Path, family: str) -> None:
    """A model would never sample what follows it. A prompt may hold one."""
    prompts, end = prompts_of(tmp_path, family), FAMILIES[family].stops[0]
    for number, texts in enumerate([("1?", "2"), (f"{end}?", "2"), ("1?", f"2{end} or 3"), ("2?", f"{end}4")]):
        question, answer = ({"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True))
        prompts.samples(conversation(tmp_path, [question, answer]))
        found = [note for note in prompts.notes if "continues behind" in note]
        assert len(found) == (number > 1) and all(f"{end!r}, where a response ends" in note for note in found)


def test_an_answer_that_begins_as_no_prompt_ends_is_refused(tmp_path: Path) -> None:
    """DeepSeek's distilled models have a prompt that begins the thinking, and a history without."""
    template = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>think{% endif %}{% if tools %}{% endif %}"
    )
    prompts = prompts_of(tmp_path, "llama3", template)
    assert trained(prompts, prompts.samples(conversation(tmp_path, PLAIN))) == [["It is 42<|eot_id|>"], ["True<|eot_id|>"]]
    with pytest.raises(ValueError, match="line 1: the model's chat template begins an answer with other text than it writes"):
        prompts.samples(conversation(tmp_path, CALLING, tools=[TOOL]))


@pytest.mark.parametrize(
    ("messages", "row", "words"),
    [
        (PLAIN[1:], {}, "begins with the assistant's turn"),
        (PLAIN[:3], {"completion": PLAIN[2:]}, "'completion' begins with the user's turn and ends with the assistant's"),
        (PLAIN[:3], {"completion": PLAIN[1:3]}, "'completion' begins with the assistant's turn and ends with the user's"),
        (PLAIN[:3], {"completion": []}, "'completion' is a list without messages"),
        ([*PLAIN[:3], {"role": "assistant", "content": None, "tool_calls": "add"}], {}, "message 4 has "),
        ([*PLAIN[:3], {"role": "assistant", "content": "1", "weight": 0}], {}, "message 4 has 'weight'"),
        (PLAIN[:3], {}, "ends with the user's turn, and there is no answer to train on"),
        ([*PLAIN[:3], {"role": "assistant", "tool_calls": [call_of('{"x": 1')]}], {}, "not with arguments as a JSON object"),
        ([*PLAIN[:3], {"role": "assistant", "tool_calls": [call_of([1])]}], {}, "not with arguments as a JSON object"),
    ],
)
def test_a_conversation_that_cannot_be_trained_is_named(
    tmp_path: Path, messages: list[dict[str, Any]], row: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r"data\.jsonl:1: ") as caught:
        conversation(tmp_path, messages, **row)
    assert words in str(caught.value)


def test_where_nothing_is_trained_the_last_answer_is_asked_for(tmp_path: Path) -> None:
    """With all that comes before it as the prompt, in each form of supervised data."""
    path, asked = tmp_path / "data.jsonl", {"role": "user", "content": "8?"}
    rows: list[dict[str, Any]] = [{"q": [*CALLING, asked, PLAIN[1]]}, {"q": [asked], "answer": 9}]
    rows.insert(1, {"q": CALLING[:1], "answer": [*CALLING[1:], asked, PLAIN[1]]})
    for row, answer in zip(rows, ("It is 42", "It is 42", "9"), strict=True):
        path.write_text(json.dumps(row))
        (example,) = load_examples(path, "q", "answer", is_supervised=True, trains=False)
        roles = [role for role, _ in example.turns]
        assert (example.prompt, example.answer, roles[-1]) == ("8?", answer, "user")
        assert len(roles) == (len(CALLING) + 1 if example.completion else 1)
    path.write_text(json.dumps({**rows[0], "answer": "42"}))
    assert load_examples(path, "q", "answer", is_supervised=True, trains=False)[0].answer == "42", "a column of its own"
    path.write_text(json.dumps({"q": [asked]}))
    assert load_examples(path, "q", "", is_supervised=True, trains=False)[0].answer == "", "prompts alone"


def test_an_answer_key_that_no_conversation_has_is_not_missed(tmp_path: Path) -> None:
    """Its default is for rows of question and answer."""
    path = tmp_path / "data.jsonl"
    for row in ({}, {"answer": None}):
        path.write_text(json.dumps({"messages": PLAIN[:3], **row}))
        with pytest.raises(ValueError, match="ends with the user's turn, and there is no answer to train on"):
            load_examples(path, "messages", "answer", is_supervised=True)
    with pytest.raises(ValueError, match="anser"):  # of a key that was written, the nearest column is named
        load_examples(path, "messages", "anser", is_supervised=True)
    path.write_text(json.dumps({"messages": PLAIN[:3], "answer": "42"}))
    assert load_examples(path, "messages", "answer", is_supervised=True)[0].answer == "42"
