"""What the YAML key `data` means, and the bounds of sampling that evaluation sets share with `rollout`. No torch in here.

Leaves out reading the files (megasync/data/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag
from pydantic_core import PydanticCustomError

from engine.config import FilePath, Section

Share = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2  # vLLM raises what is lower and refuses what is higher (sampling_params.py)
EVAL_NAME = re.compile(r"[\w-]+")
TRAIN_SET = "train"  # in samples.jsonl what an evaluation set's name is for its samples
TURN_REWARDS = "turn_rewards"  # in `info` of an episode in samples.jsonl: what its environment's steps gave, in their order


def _eval_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        choices = f"0 (greedy), {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        raise PydanticCustomError("temperature", "vLLM samples at no such temperature", {"choices": choices, "example": "0"})
    return value


def _eval_sets(value: dict[str, EvalSet]) -> dict[str, EvalSet]:
    for name, each in value.items():
        if not EVAL_NAME.fullmatch(name):
            choices = "names of letters, digits, - and _"
            lines = {"name": name, "choices": choices, "example": "held_out.jsonl"}
            raise PydanticCustomError("eval_name", "the set {name} cannot name its metrics", lines)
        if name == TRAIN_SET:
            example = f"'{{{name}_set: {{path: {each.path}}}}}'"
            lines = {"name": name, "choices": "any other name", "example": example}
            raise PydanticCustomError("eval_name", "{name} is what samples.jsonl calls the samples of the training", lines)
    return value


def _eval_names(value: object) -> object:
    """What YAML reads as no text, such as `on`, could have been any name; of whole numbers load.py has made texts."""
    for name in value if isinstance(value, Mapping) else ():
        if not isinstance(name, str):
            lines = {"name": str(name), "choices": "names in quotes", "example": "'{\"on\": {path: held_out.jsonl}}'"}
            raise PydanticCustomError("eval_name", "YAML reads the name of a set as {name}, which is no text", lines)
    return value


def _eval_form(value: object) -> str:
    return "*sets" if isinstance(value, Mapping) else "*path"


class EvalSet(Section):
    """One of several evaluation sets. Its metrics are eval/NAME/avg@K, the mean reward, and eval/NAME/pass@K."""

    path: FilePath = ""
    """A file or folder, as data.train."""
    split: str = ""
    """Of a folder with several."""
    prompt_key: str = ""
    """Empty: data.prompt_key."""
    answer_key: str = ""
    """Empty: data.answer_key."""
    limit: PositiveInt | None = None
    """So many first examples of it; null: all."""
    samples: PositiveInt = 1
    """Responses a prompt: the largest K."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(_eval_temperature)] = 0.0
    """0: greedy, for one sample."""
    top_p: Share = 1.0
    """As rollout.top_p; so the next two."""
    top_k: NonNegativeInt = 0
    min_p: MinP = 0.0
    max_new_tokens: PositiveInt | None = None
    """null: rollout.max_new_tokens."""
    pass_reward: PositiveFloat = 1.0
    """A sample with this reward or more counts as passed in pass@K."""


EvalSets = Annotated[dict[str, EvalSet], BeforeValidator(_eval_names), AfterValidator(_eval_sets)]


class DataConfig(Section):
    """JSONL, JSON, CSV, Parquet or Arrow files, folders of their shards, or folders that datasets.save_to_disk wrote."""

    train: FilePath = ""
    """The file or folder to train on."""
    split: str = ""
    """Of data.train where it is a folder with several, such as train."""
    eval: Annotated[Annotated[FilePath, Tag("*path")] | Annotated[EvalSets, Tag("*sets")], Discriminator(_eval_form)] = ""
    """Held-out file; eval/reward is its mean reward of greedy responses (sft: eval/loss); or sets by name, such as
    {math: {path: math.jsonl, samples: 4, temperature: 1.0}}; empty: none."""
    prompt_key: str = "question"
    """Column of prompts: texts, or lists of messages (sft: also whole conversations); a.b is field b of column a."""
    answer_key: str = "answer"
    """Column of answers, which the reward gets (sft: which are trained, texts or messages); a.b is field b of column a."""
    batch_size: PositiveInt = 256
    """Prompts a step; sft: examples a step."""
    shuffle: bool = True
    """Another order in each epoch; false: the file's."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to examples that have more tokens than model, vLLM or a micro-batch take."""
    chat_template: bool = False
    """Put prompts through the tokenizer's chat template, a text as one user turn."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""
    system_prompt: str = ""
    """With chat_template: the system turn of prompts that bring none."""

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """By name; none where `eval` is one path."""
        return {} if isinstance(self.eval, str) else self.eval

    @property
    def paths(self) -> dict[str, str]:
        """Of all that is given, by full key."""
        sets = {f"data.eval.{name}.path": each.path for name, each in self.eval_sets.items()}
        held_out = {"data.eval": self.eval} if isinstance(self.eval, str) else sets
        return {key: path for key, path in {"data.train": self.train, **held_out}.items() if path}
