"""Mistral's own tokenizers, which vLLM's dependency mistral-common ships: sentencepiece's BPE with bytes, in both forms.

python -m pytest tests/megasync/data/test_real_tokenizers.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from megasync.config.data_section import DataConfig
from megasync.data.data import Example
from megasync.data.prompts import Prompts

FILES = {"first": "tokenizer.model.v1", "third": "mistral_instruct_tokenizer_240323.model.v3"}
TEXTS = (
    *("42", " 42", "  two  spaces ", "x != y  and\n\n\tdon't", "naïve Brücke 東京 🙂‍↔️", "答案是42。"),
    *("\\boxed{\\frac{1}{2}}", "<answer>42</answer>", "</think>\n\n<tool_call>\n{}\n</tool_call>"),
)


def read(path: Path, *, prepends: bool) -> Tokenizer:
    """As tokenizer.json has it: the space at the beginning is the normalizer's, or the pre-tokenizer's."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(path.read_bytes())
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    merges = generate_merges(ids, {piece.piece: piece.score for piece in model.pieces})
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepends:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(piece.piece, special=True) for piece in model.pieces if piece.type in (2, 3)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("prepends", [True, False])
def test_texts_come_back_and_answers_go_on_from_prompts(version: str, prepends: bool, tmp_path: Path) -> None:
    package = find_spec("mistral_common")
    if package is None or not package.submodule_search_locations or not find_spec("sentencepiece"):
        pytest.skip("mistral-common and sentencepiece are not installed")
    path = Path(package.submodule_search_locations[0]) / "data" / FILES[version]
    tokenizer = read(path, prepends=prepends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    prompts = Prompts(str(tmp_path), DataConfig())
    for answer in TEXTS:
        sample = prompts.supervised(Example("12+30=", answer, 1))
        prompt_ids, response_ids = sample.prompt_ids.tolist(), sample.response_ids.tolist()
        assert prompts.text(sample.response_ids) == "".join(prompts.token_texts(response_ids[:-1])) == answer
        assert prompts.detokenizer.whole([*prompt_ids, *response_ids]) == f"<s> 12+30={answer}</s>"
        whole = tokenizer.encode(f"12+30={answer}").ids
        assert whole[: len(prompt_ids)] != prompt_ids or whole == [*prompt_ids, *response_ids[:-1]]
        stream = prompts.detokenizer.stream()
        assert "".join(stream.step(each) for each in response_ids[:-1]) == answer
    responses = [np.arange(begin, begin + 50, dtype=np.int32) for begin in range(300, 1000, 50)]
    for ids, text in zip(responses, prompts.texts(responses), strict=True):
        assert text == "".join(prompts.token_texts(ids.tolist()))
