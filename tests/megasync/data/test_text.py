"""Texts to ids to texts, for every kind of tokenizer: what rewards, stop texts, logs and episodes see, and what is trained.

python -m pytest tests/megasync/data/test_text.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megasync.config.data_section import DataConfig
from megasync.data.data import Example
from megasync.data.prompts import Prompts
from megasync.episodes.tokens import Tokens
from tests.support.config_files import write
from tests.support.tokenizer_kinds import EXTRA, KINDS, OF_WORDS, WITH_BYTES, byte_level, prompts_of

KNOWN = "abcdefghijklmnopqrstuvwxyz0123456789+=!?.,:' \n\t"
ANY = "é東🙂́—\u200d"
WORDS = ("12+30=42,", "the", "answer", "!=", "x", "don't", "'no'", ".", "tell:")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prompts(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return prompts_of(kind, tmp_path_factory.mktemp("kinds"))


def texts(kind: str, *, specials: bool = True) -> st.SearchStrategy[str]:
    """That the kind has tokens for and whose white space it keeps."""
    extra = EXTRA if specials else ()
    if kind in OF_WORDS:
        return st.lists(st.sampled_from([*WORDS, *extra]), max_size=8).map(" ".join)
    letters = KNOWN + (ANY if kind in WITH_BYTES else "")
    parts = st.one_of(st.text(letters, max_size=6), st.sampled_from([" ", "  ", " 42", "x != y", *extra]))
    return st.lists(parts, max_size=6).map("".join)


def ids_of(prompts: Prompts, text: str) -> list[int]:
    """As a model samples it behind a prompt."""
    return list(prompts.encoder.continuing.encode(text, add_special_tokens=False).ids)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


@settings(max_examples=40)
@given(st.data())
def test_a_text_comes_back_and_its_end_token_is_no_part_of_it(kind: str, prompts: Prompts, data: st.DataObject) -> None:
    text = data.draw(texts(kind))
    ids = ids_of(prompts, text)
    assert prompts.text(array(ids)) == text
    assert prompts.text(array([*ids, prompts.stop_token_ids[0]])) == text
    assert "".join(prompts.token_texts(ids)) == text


@settings(max_examples=40)
@given(st.data())
def test_pieces_streams_batches_and_episodes_say_the_same_of_any_ids(prompts: Prompts, data: st.DataObject) -> None:
    """Also of bytes that are no characters; those can change what stands before them, which a stream has handed out."""
    size = len(prompts.tokenizer)
    many = data.draw(st.lists(st.lists(st.integers(0, size - 1), max_size=12), max_size=3))
    tokens = Tokens(prompts.tokenizer, prompts.stop_token_ids)
    for ids, text in zip(many, prompts.texts([array(ids) for ids in many]), strict=True):
        assert text == prompts.text(array(ids)) == tokens.decode(tokens.without_stop(ids))
        whole, pieces = prompts.detokenizer.text(ids), prompts.token_texts(ids)
        assert "".join(pieces) == whole and len(pieces) == len(ids)
        stream = prompts.detokenizer.stream()
        streamed = "".join(stream.step(each) for each in ids)
        assert streamed == whole or "\ufffd" in whole


@settings(max_examples=40)
@given(st.data())
def test_a_response_says_what_follows_the_prompt(kind: str, prompts: Prompts, data: st.DataObject) -> None:
    prompt, response = "12+30=42," if kind in OF_WORDS else "12+30=", data.draw(texts(kind))
    first, then = prompts.prompt_ids(Example(prompt, "", 1)), ids_of(prompts, response)
    joiner = " " if kind in OF_WORDS and response else ""
    asked = prompts.detokenizer.whole(first)
    assert asked.strip() == prompt and prompts.detokenizer.whole([*first, *then]) == f"{asked}{joiner}{response}"


@settings(max_examples=40)
@given(st.data())
def test_an_answer_is_trained_as_the_text_that_goes_on_from_the_prompt(kind: str, prompts: Prompts, data: st.DataObject) -> None:
    """With the tokens of the text of both, where those begin with the prompt's."""
    prompt, answer = (
        data.draw(texts(kind, specials=False).filter(str.strip)),
        data.draw(texts(kind, specials=False).filter(str.strip)),
    )
    example = Example(prompt, answer, 1)
    sample = prompts.supervised(example)
    asked, said = sample.prompt_ids.tolist(), sample.response_ids.tolist()
    assert said[-1] == prompts.stop_token_ids[0] and list(prompts.lengths([example], with_answers=True)) == [len(asked + said)]
    assert prompts.text(sample.response_ids) == answer or kind == "word_piece"
    whole = prompts.tokenizer.encode(prompt + answer)
    if whole[: len(asked)] == asked:
        assert whole == asked + said[:-1]


def test_prompts_are_neither_cut_nor_filled(prompts: Prompts) -> None:
    """Saved truncation and padding are off, wherever a text becomes ids; it is noted."""
    text = "the answer is 42 . x != y"
    ids = Tokens(prompts.tokenizer, prompts.stop_token_ids).encode(text)
    assert len(ids) > 4 and prompts.detokenizer.whole(ids).strip() == text == prompts.tokenizer.decode(ids).strip()
    assert list(prompts.prompt_ids(Example(text, "", 1))) == ids
    short = Tokens(prompts.tokenizer, prompts.stop_token_ids).encode("x")
    assert prompts.tokenizer.pad_token_id not in short
    assert {"truncation to 4 tokens", "padding to 8 tokens", "clean_up_tokenization_spaces"} <= {
        note.partition("ask for ")[2].partition(";")[0] for note in prompts.notes
    }


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "metaspace_first"])
def test_a_text_has_one_tokenization_whatever_dropout_was_saved(kind: str, tmp_path: Path) -> None:
    expected = prompts_of(kind, tmp_path)
    state = json.loads((tmp_path / kind / "tokenizer.json").read_text())
    state["model"]["dropout"] = 0.3
    write(tmp_path / "dropout" / "tokenizer.json", json.dumps(state))
    shutil.copy(tmp_path / kind / "tokenizer_config.json", tmp_path / "dropout")
    prompts, examples = Prompts(str(tmp_path / "dropout"), DataConfig()), [Example("the answer is 42", "42", 1)] * 20
    assert len(set(prompts.lengths(examples, with_answers=True))) == 1
    for example in examples:
        made, right = prompts.supervised(example), expected.supervised(example)
        assert [*made.prompt_ids, *made.response_ids] == [*right.prompt_ids, *right.response_ids]
    assert any("BPE dropout of 0.3;" in note for note in prompts.notes)


def test_a_number_behind_an_equals_sign_has_no_space_in_it(kind: str, prompts: Prompts) -> None:
    if kind in OF_WORDS:
        pytest.skip("its tokens are words")
    sample = prompts.supervised(Example("12+30=", "42", 1))
    whole = prompts.detokenizer.whole([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])
    assert whole.strip() == "12+30=42</s>"
    spaced = prompts.supervised(Example("12+30=", " 42", 1))
    assert prompts.text(spaced.response_ids) == " 42" != prompts.text(sample.response_ids)
    assert spaced.response_ids.tolist() != sample.response_ids.tolist()
    for answer in ("42</answer>", "<tool>42</answer>x", " <tool> 42"):  # nor has one behind an added token
        assert prompts.text(prompts.supervised(Example("12+30=", answer, 1)).response_ids) == answer


@pytest.mark.parametrize("answer", ["42", " 4 2", "東京 42", "\\boxed{\\frac{1}{2}}"])
def test_a_tokenizer_that_puts_spaces_between_digits_trains_none(answer: str, tmp_path: Path) -> None:
    """A byte-level prefix space behind a split is put before each part."""
    made = byte_level()
    parts = [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    prompts = Prompts(str(tmp_path), DataConfig())
    assert prompts.text(prompts.supervised(Example("12+30=", answer, 1)).response_ids) == answer


def test_special_tokens_are_read_as_they_are(prompts: Prompts, kind: str) -> None:
    between = " " if kind in (*OF_WORDS, "llama2") else ""
    text = between.join(["the", EXTRA[0], EXTRA[1], EXTRA[2], "x"])
    ids = ids_of(prompts, text)
    assert prompts.text(array(ids)) == text
    assert set(EXTRA) <= {piece.strip() for piece in prompts.token_texts(ids)}


def test_a_character_of_several_tokens_is_its_last_ones(tmp_path: Path) -> None:
    for kind in WITH_BYTES:
        prompts = prompts_of(kind, tmp_path)
        ids = ids_of(prompts, "🙂")
        assert prompts.token_texts(ids) == [""] * (len(ids) - 1) + ["🙂"] and len(ids) > 1
        assert prompts.text(array(ids[:-1])).strip("\ufffd") == ""
