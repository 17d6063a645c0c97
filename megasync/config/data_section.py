"""Keys of the YAML section `data`, and the sampling bounds that evaluation sets share with `rollout`. No torch in here.

Leaves out reading the files (megasync/data/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag
from pydantic_core import PydanticCustomError

from engine.config import FilePath, OneOrMore, Section

Share = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2  # vLLM raises lower values and refuses higher ones (sampling_params.py)
ANSWER_KEY = "answer"
EVAL_NAME = re.compile(r"[\w-]+")
TRAIN_SET = "train"  # `set` of training samples in samples.jsonl; evaluation samples have the name of their set
TURN_REWARDS = "turn_rewards"  # in `info` of an episode in samples.jsonl: the reward of each step of its environment


def _eval_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        choices = f"0 (greedy), {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        message = "vLLM does not support this temperature"
        raise PydanticCustomError("temperature", message, {"choices": choices, "example": "0"})
    return value


def _eval_sets(value: dict[str, EvalSet]) -> dict[str, EvalSet]:
    for name, each in value.items():
        if not EVAL_NAME.fullmatch(name):
            choices = "names of letters, digits, - and _"
            lines = {"name": name, "choices": choices, "example": "held_out.jsonl"}
            raise PydanticCustomError("eval_name", "the set name {name} is not usable in names of metrics", lines)
        if name == TRAIN_SET:
            example = f"'{{{name}_set: {{path: {each.path}}}}}'"
            lines = {"name": name, "choices": "any other name", "example": example}
            raise PydanticCustomError("eval_name", "samples.jsonl uses the name {name} for training samples", lines)
    return value


def _eval_names(value: object) -> object:
    """Refuses names that YAML does not read as text, such as `on`; load.py has turned whole numbers into texts."""
    for name in value if isinstance(value, Mapping) else ():
        if not isinstance(name, str):
            lines = {"name": str(name), "choices": "names in quotes", "example": "'{\"on\": {path: held_out.jsonl}}'"}
            raise PydanticCustomError("eval_name", "YAML reads the name of a set as {name}, which is not a text", lines)
    return value


def _eval_form(value: object) -> str:
    return "*sets" if isinstance(value, Mapping) else "*path"


class DataFile(Section):
    """One of several files or folders."""

    path: FilePath = ""
    """The file or folder, as in data.train."""
    split: str = ""
    """Split to read, if the folder has several."""
    prompt_key: str = ""
    """Column of prompts; empty: data.prompt_key."""
    answer_key: str = ""
    """Column of answers; empty: data.answer_key."""
    limit: PositiveInt | None = None
    """Use only the first so many examples; null: all."""
    rewards: Annotated[tuple[str, ...], OneOrMore[0]] = ()
    """The names of rollout.reward that score these examples, such as [math_verify]; empty: all."""


class TrainSource(DataFile):
    """One of several sources of training data, whose prompts take turns by weight. Its metrics are source/NAME/reward and
    source/NAME/prompts.
    """

    weight: PositiveFloat = 1.0
    """The source's share of the prompts is this over the sum of all weights; a smaller source is repeated more often."""


class EvalSet(DataFile):
    """One of several evaluation sets. Its metrics are eval/NAME/avg@K, the mean reward, and eval/NAME/pass@K."""

    samples: PositiveInt = 1
    """Responses per prompt: the largest K of avg@K and pass@K."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(_eval_temperature)] = 0.0
    """Sampling temperature; 0: greedy, with one sample per prompt."""
    top_p: Share = 1.0
    """Like rollout.top_p."""
    top_k: NonNegativeInt = 0
    """Like rollout.top_k."""
    min_p: MinP = 0.0
    """Like rollout.min_p."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of generated tokens per sample; null: rollout.max_new_tokens."""
    pass_reward: PositiveFloat = 1.0
    """Smallest reward that counts as passed in pass@K."""


def _source_names(value: dict[str, TrainSource]) -> dict[str, TrainSource]:
    for name in value:
        if not EVAL_NAME.fullmatch(name):
            lines = {"name": name, "choices": "names of letters, digits, - and _", "example": "'{math: {path: math.jsonl}}'"}
            raise PydanticCustomError("eval_name", "the source name {name} is not usable in names of metrics", lines)
    if not value:
        raise PydanticCustomError("no_sources", "there is no source", {"choices": "", "example": "'{math: {path: math.jsonl}}'"})
    return value


TrainSources = Annotated[dict[str, TrainSource], BeforeValidator(_eval_names), AfterValidator(_source_names)]
EvalSets = Annotated[dict[str, EvalSet], BeforeValidator(_eval_names), AfterValidator(_eval_sets)]


class DataConfig(Section):
    """Training and evaluation data: JSONL, JSON, CSV, Parquet or Arrow files, folders of shards, or folders that
    datasets.save_to_disk wrote.
    """

    train: Annotated[
        Annotated[FilePath, Tag("*path")] | Annotated[TrainSources, Tag("*sets")], Discriminator(_eval_form)
    ] = ""
    """File or folder to train on. Or several sources by name, such as {math: {path: math.jsonl, weight: 2}, code: {path:
    code.jsonl}}."""
    sampler: str = ""
    """Which prompts come next: empty, all in turn (shuffle); difficulty, all but those whose rewards were all equal at their last
    visits, for a while; or package.module:Class of your own."""
    sampler_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the sampler; of difficulty {visits: 2, rest_steps: 20}."""
    split: str = ""
    """Split of data.train to read, such as train, if the folder has several."""
    eval: Annotated[Annotated[FilePath, Tag("*path")] | Annotated[EvalSets, Tag("*sets")], Discriminator(_eval_form)] = ""
    """Held-out data. A path: eval/reward is the mean reward of greedy responses (sft: eval/loss). Or several sets by name, such
    as {math: {path: math.jsonl, samples: 4, temperature: 1.0}}. Empty: no evaluation."""
    prompt_key: str = "question"
    """Column of prompts: texts or lists of messages (sft: also whole conversations); a.b is field b of column a."""
    answer_key: str = ANSWER_KEY
    """Column of answers, which are passed to the reward (sft: texts or messages to train on); a.b is field b of column a."""
    batch_size: PositiveInt = 256
    """Prompts per step; sft: examples per step."""
    shuffle: bool = True
    """true: shuffle the examples in each epoch; false: keep the order of the file."""
    too_long: Literal["drop", "refuse"] = "drop"
    """Examples with more tokens than the model, vLLM or a micro-batch allows: drop them, or refuse to start."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a text becomes one user turn."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}."""
    system_prompt: str = ""
    """With chat_template: system turn for prompts that have none."""

    @property
    def train_sources(self) -> dict[str, TrainSource]:
        """Sources of training data by name; empty if `train` is a path."""
        return {} if isinstance(self.train, str) else self.train

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """Evaluation sets by name; empty if `eval` is a path."""
        return {} if isinstance(self.eval, str) else self.eval

    @property
    def chosen_rewards(self) -> dict[str, tuple[str, ...]]:
        """By full key, where examples are scored by some of the rewards."""
        files: dict[str, TrainSource | EvalSet] = {f"data.train.{name}": each for name, each in self.train_sources.items()}
        files |= {f"data.eval.{name}": each for name, each in self.eval_sets.items()}
        return {f"{key}.rewards": each.rewards for key, each in files.items() if each.rewards}

    @property
    def paths(self) -> dict[str, str]:
        """All paths that are set, by full key."""
        sets = {f"data.eval.{name}.path": each.path for name, each in self.eval_sets.items()}
        held_out = {"data.eval": self.eval} if isinstance(self.eval, str) else sets
        sources = {f"data.train.{name}.path": each.path for name, each in self.train_sources.items()}
        trained = {"data.train": self.train} if isinstance(self.train, str) else sources
        return {key: path for key, path in {**trained, **held_out}.items() if path}
