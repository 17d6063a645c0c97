"""Keys of one judge, `judges.NAME`: a model whose reply to a prompt scores a response. No torch in here.

Leaves out rendering the prompt, reading the score and asking the model (megasync/rewards/judges/).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from engine.config import FilePath, OneOrMore
from megasync.config.data_section import MAX_TEMPERATURE
from megasync.config.replica_keys import ReplicaKeys

VARIABLES = ("prompt", "response", "answer", "extra")
JSON_FIELD = re.compile(r"json:(.+)", re.DOTALL)
# as transformers renders chat templates (utils/chat_template_utils.py), but a variable without a value is an error
ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
TEMPLATE_EXAMPLE = """'{{ response }} Rate it as "Score: N", N from 0 to 10.'"""
URL = re.compile(r"https?://[^\s/,]+(/[^\s,]*)?")
SCORE_CHOICES = "a regular expression with one group, json:FIELD"


@lru_cache(maxsize=100)
def compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


def _template(value: str) -> str:
    lines = {"choices": "{{ prompt }}, {{ response }}, {{ answer }}, {{ extra.COLUMN }}", "example": TEMPLATE_EXAMPLE}
    try:
        compiled(value)
        unknown = meta.find_undeclared_variables(ENVIRONMENT.parse(value)) - {*VARIABLES, *ENVIRONMENT.globals}
    except TemplateSyntaxError as error:
        message = "is no Jinja template: line {line}: {problem}"
        raise PydanticCustomError("template", message, {**lines, "line": error.lineno, "problem": str(error.message)}) from error
    if unknown:
        raise PydanticCustomError("template", "there is no variable {name}", {**lines, "name": min(unknown)})
    return value


def _score(value: str) -> str:
    lines = {"choices": SCORE_CHOICES, "example": "json:score"}
    if JSON_FIELD.fullmatch(value):
        return value
    try:
        num_groups = re.compile(value).groups
    except re.error as error:
        raise PydanticCustomError("score", "is no regular expression: {problem}", {**lines, "problem": str(error)}) from error
    if num_groups != 1:
        message = "a regular expression with one group is expected, this one has {number}"
        raise PydanticCustomError("score", message, {**lines, "number": num_groups})
    return value


def _scale(value: object) -> object:
    if value is None:
        return None
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or any(type(each) not in (int, float) for each in numbers) or numbers[0] >= numbers[1]:
        lines = {"choices": "[LOWEST, HIGHEST]", "example": "[0,10]"}
        raise PydanticCustomError("scale", "two numbers are expected, the first below the second", lines)
    return tuple(numbers)


def _urls(value: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [url for url in value if not URL.fullmatch(url)]:
        lines = {"url": wrong[0], "choices": "http://HOST:PORT/v1, https://HOST/v1", "example": "http://localhost:8000/v1"}
        raise PydanticCustomError("url", "{url} is no URL of a server", lines)
    return tuple(url.rstrip("/") for url in value)


class JudgeConfig(ReplicaKeys):
    """A model that scores responses, served by replicas of its own (path) or elsewhere (endpoint). `rollout.reward` names it
    judge:NAME.
    """

    path: FilePath = ""
    """Model folder, which replicas of its own serve."""
    endpoint: Annotated[tuple[str, ...], OneOrMore[0], AfterValidator(_urls)] = ()
    """URLs of servers with OpenAI's chat API and the same model, such as http://host:8000/v1. A call that one does not answer
    goes to the next. OPENAI_API_KEY is sent where it is set."""
    model: str = ""
    """endpoint: the model's name there; empty: the first that the server lists."""
    prompt: Annotated[str, AfterValidator(_template)] = ""
    """Jinja template of the user's turn, with the variables prompt, response, answer and extra, the data's other columns."""
    system: Annotated[str, AfterValidator(_template)] = ""
    """Template of the system's turn, with the same variables; empty: no such turn."""
    score: Annotated[str, AfterValidator(_score)] = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Where the score stands in the reply: a regular expression whose one group is the number (its last match counts), or
    json:FIELD, a field of the last JSON object."""
    scale: Annotated[tuple[float, float] | None, BeforeValidator(_scale)] = None
    """Lowest and highest score, which become rewards of 0 and 1; a score outside of them counts as unparsed. null: the score is
    the reward."""
    on_unparsed: Literal["stop", "zero", "retry"] = "stop"
    """If a reply holds no score. stop: the run stops; zero: the reward is 0; retry: the judge is asked again with another seed,
    and after `retries` calls rollout.reward_on_failure decides."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens of a reply."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 0.0
    """Sampling temperature; 0: greedy, so that on_unparsed=retry is of use only above 0."""
    retries: NonNegativeInt = 3
    """How often a reply without a score is asked for again. Calls that fail are repeated for (1 + retries) x timeout_seconds."""
    timeout_seconds: PositiveFloat = 120.0
    """endpoint: time limit for one call; replicas have rollout.answer_timeout_seconds."""
    concurrency: PositiveInt = 64
    """Maximum number of concurrent calls."""
    cache: bool = True
    """Keep the replies in the run's folder, so that the same prompt is asked once, also after a resume."""

    @property
    def asked(self) -> tuple[object, ...]:
        """The model and its sampling, which a reply depends on beside the messages."""
        return (self.path or self.model or self.endpoint, self.max_new_tokens, self.temperature)

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that determine the reward of a response."""
        return (*self.asked, self.prompt, self.system, self.score, self.scale, self.on_unparsed)


def _names(value: Any) -> Any:
    """Refuses names that cannot be part of a metric's name."""
    for name in value if isinstance(value, dict) else ():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            lines = {"name": str(name), "choices": "names of letters, digits, - and _"}
            lines["example"] = "'{quality: {path: models/judge}}'"
            raise PydanticCustomError("judge_name", "the name {name} is not usable in names of metrics", lines)
    return value


JudgeConfigs = Annotated[dict[str, JudgeConfig], BeforeValidator(_names)]
