"""JSON bodies of Tinker's client (0.38), as pydantic models, and their validation.

Leaves out passes, which come in protobuf (wire.py), and routes (http.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class BadRequestError(ValueError):
    """An invalid request. The message names the field; nothing has been done."""


Number = Annotated[int, Field(ge=0, lt=2**63)]


class Body(BaseModel):
    """Unknown fields and other types are refused: nothing that a client asks for is skipped in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True, allow_inf_nan=False)

    type: str = ""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Lora(Body):
    rank: int
    seed: Annotated[int, Field(gt=-(2**63), lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora
    optimizer_config: Optimizer = Optimizer()


class Adam(Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=1e-30)  # float32 has no smaller ones
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OfModel(Body):
    model_id: str
    seq_id: Number


class OptimStep(OfModel):
    adam_params: Adam


class SaveWeights(OfModel):
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(OfModel):
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: None = None


class Delete(Body):
    path: str


class FinishSession(Body):
    session_id: str


class Heartbeat(Body):
    session_id: str


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: Number | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | Annotated[list[int], Field(max_length=1024)] | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)  # vLLM's own limit
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class TextChunk(Body):
    tokens: list[int]


class ModelInput(Body):
    chunks: list[TextChunk]


class Sample(Body):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=4096)
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=20)  # vLLM's own limit
    topk_sample_logprobs: int = Field(default=0, ge=0, le=20)
    prompt_logprobs_last_n: int | None = None
    # what the hosted service has besides
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class GetInfo(Body):
    model_id: str


class WeightsInfo(Body):
    tinker_path: str


def parse(kind: type[Body], body: bytes) -> Any:
    """BadRequestError names the field and its fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadRequestError(f"{where} = {str(first.get('input'))[:80]}: {first['msg']}") from error
