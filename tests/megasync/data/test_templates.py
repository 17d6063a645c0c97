"""Chat templates as models bring them: what ends a turn, contents as parts, beginnings of a sequence, prompts that end.

python -m pytest tests/megasync/data/test_templates.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from megasync.config.data_section import DataConfig
from megasync.config.errors import ConfigError
from megasync.data.data import Example
from megasync.data.prompts import Prompts
from megasync.data.template import ChatTemplate
from tests.support.chat_families import FAMILIES
from tests.support.tokenizer_kinds import write_kind

CHATML = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
PARTS = CHATML.replace(
    "{{ m.content }}", "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
MIXED = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content + '' }}{% endif %}"
)
EXAMPLE = Example("1+1=", "2", 1)
ENDED_TWICE = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}")


def qwen_base(folder: Path, template: str = CHATML, **fields: str) -> Prompts:
    """As Qwen2.5's base models: turns end with <|im_end|>, and the end of the sequence is <|endoftext|>."""
    made = FAMILIES["qwen3"].tokenizer()
    built = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token="<|endoftext|>", **fields)
    built.chat_template = template
    built.save_pretrained(folder)
    return Prompts(str(folder), DataConfig(chat_template=True))


def trained(prompts: Prompts, example: Example = EXAMPLE) -> str:
    """What a supervised step trains, special tokens included."""
    sample = prompts.supervised(example)
    assert list(prompts.lengths([example], with_answers=True)) == [len(sample.prompt_ids) + len(sample.response_ids)]
    assert int(sample.response_ids[-1]) in prompts.stop_token_ids
    return prompts.detokenizer.text(sample.response_ids.tolist())


def test_a_turn_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    prompts = qwen_base(tmp_path)
    names = [prompts.tokenizer.convert_ids_to_tokens(each) for each in prompts.stop_token_ids]
    assert names == ["<|endoftext|>", "<|im_end|>"] and trained(prompts) == "2<|im_end|>"
    assert any("<|im_end|>" in note for note in prompts.notes)
    without = Prompts(str(tmp_path), DataConfig())
    assert len(without.stop_token_ids) == 1 and trained(without) == "2<|endoftext|>" and without.notes == []
    assert Prompts(str(tmp_path), DataConfig(), has_turns=True).stop_token_ids == prompts.stop_token_ids


@pytest.mark.parametrize(
    ("template", "response"),
    [
        (CHATML.replace("<|im_end|>\n", "{{ eos_token }}"), "2<|endoftext|>"),
        (CHATML.replace("<|im_end|>", "<|im_end|>\n<|endoftext|>"), "2<|im_end|>"),  # several tokens
        (ENDED_TWICE, "2<|im_end|>"),  # Phi 3's: the end of the sequence behind the last turn alone
        (CHATML.replace("<|im_end|>", ""), "2<|endoftext|>"),  # a line break
        (CHATML.replace("{{ m.content }}", "{{ ' ' + m.content + ' ' }}"), " 2 <|im_end|>"),  # Llama 2's
        (CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"),
         "<think>\n\n</think>\n\n2<|im_end|>"),
        (CHATML.replace("{%- if add_generation_prompt -%}", "{%- if false -%}"), "<|im_start|>assistant\n2<|im_end|>"),
    ],
)  # fmt: skip
def test_an_answer_is_trained_as_the_template_writes_it(tmp_path: Path, template: str, response: str) -> None:
    prompts = qwen_base(tmp_path, template)
    assert trained(prompts) == response
    lead = response.partition("2")[0]
    assert any(repr(lead) in note for note in prompts.notes) == bool(lead.strip())


def test_a_text_that_ends_a_turn_and_is_no_token_is_noted(tmp_path: Path) -> None:
    prompts = qwen_base(tmp_path, CHATML.replace("<|im_end|>", "\n### End"))
    assert trained(prompts) == "2<|endoftext|>" and len(prompts.stop_token_ids) == 1
    assert any("rollout.stop=['### End']" in note for note in prompts.notes)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_published_templates_end_with_tokens_that_stop(name: str) -> None:
    family = FAMILIES[name]
    end = ChatTemplate(family.tokenizer(), {}).turn.end
    assert end in family.stops or (name == "glm4" and end == "")


@pytest.mark.parametrize("template", [PARTS, MIXED])
def test_contents_are_given_as_parts_where_a_text_would_be_lost(tmp_path: Path, template: str) -> None:
    prompts, plain = qwen_base(tmp_path / "parts", template), qwen_base(tmp_path / "plain")
    turns = (("system", "Add."), ("user", "1+1="), ("assistant", "2"), ("user", "1+2="))
    messages = tuple({"role": role, "content": content} for role, content in turns)
    for example in (EXAMPLE, Example("1+2=", "3", 2, messages)):
        assert prompts.prompt_text(example) == plain.prompt_text(example)
        assert trained(prompts, example) == trained(plain, example)
    assert any("parts" in note for note in prompts.notes) and not any("parts" in note for note in plain.notes)


def test_a_template_that_ends_the_prompt_is_refused(tmp_path: Path) -> None:
    for number, end in enumerate(("{{ eos_token }}", "<|im_end|>")):
        template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
        prompts = qwen_base(tmp_path / str(number), template)
        with pytest.raises(ConfigError, match="template ends the prompt with"):
            list(prompts.lengths([EXAMPLE], with_answers=False))


def bos_adding(folder: Path, **fields: Any) -> Path:
    write_kind("llama2", folder)
    path = folder / "tokenizer.json"
    built = PreTrainedTokenizerFast.from_pretrained(folder)
    built.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    built.backend_tokenizer.save(str(path))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def test_a_beginning_of_the_sequence_is_there_once(tmp_path: Path) -> None:
    """The tokenizer adds one, and data or the template has one."""
    prompts = Prompts(str(bos_adding(tmp_path / "plain")), DataConfig())
    one, other = (prompts.prompt_ids(Example(text, "", 1)) for text in ("1+1=", "<s>1+1="))
    assert one == other and one.count(1) == 1
    assert any("'<s>'" in note for note in prompts.notes)
    assert trained(prompts, Example("<s>12+30=", "42", 1)) == "42</s>"
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    folder = bos_adding(tmp_path / "templated", chat_template=template)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    templated = Prompts(str(folder), DataConfig(chat_template=True))
    for text in ("1+1=", "<s>1+1="):
        assert templated.prompt_ids(Example(text, "", 1)).count(1) == 1
    assert any("'<s>'" in note for note in templated.notes)


def test_ends_that_the_model_has_no_token_for_are_left_out(tmp_path: Path) -> None:
    """Of a list, and of any of its places; vLLM would refuse each request."""
    from tests.support.config_files import write_model

    folder = write_model(tmp_path / "model")
    write_kind("characters", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 128, -1, 2]}')
    prompts = Prompts(str(folder), DataConfig())
    assert prompts.stop_token_ids == (2, 3)
    assert sum("generation_config.json" in note for note in prompts.notes) == 2


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, {"eos_token_id": [2, 5, 128]}, (2, 5)),
        ({"temperature": 0.6}, {"eos_token_id": 5}, (2,)),
        ({"eos_token_id": [3]}, {"eos_token_id": 5}, (2, 3)),
        (None, {"text_config": {"eos_token_id": 7}}, (2, 7)),
        (None, {"eos_token_id": 6, "text_config": {"eos_token_id": 7}}, (2, 6)),
        (None, {"eos_token_id": None}, (2,)),
    ],
)
def test_ends_are_those_of_config_json_where_there_is_no_generation_config(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], ends: tuple[int, ...]
) -> None:
    """As transformers and vLLM take them; a service has the same as training."""
    from megasync.service.front import _ends_of
    from tests.support.config_files import write_model

    folder = write_model(tmp_path, **config)
    write_kind("characters", folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Prompts(str(folder), DataConfig()).stop_token_ids == ends == _ends_of(folder, 128)


def test_answers_behind_an_opened_thought_are_noted(tmp_path: Path) -> None:
    """As of reasoning models whose template ends prompts with <think>, and writes finished turns without it."""
    opened = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    template = qwen_base(tmp_path, opened).template
    assert template is not None and any("<think>" in note for note in template.supervised_notes())
    closed = qwen_base(tmp_path / "closed").template
    assert closed is not None and not closed.supervised_notes()
