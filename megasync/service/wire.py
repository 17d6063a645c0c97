"""What Tinker's client (0.38) sends and expects: protobuf messages, JSON bodies, and what they are refused for.

The messages are built from a table of field numbers, which protobuf never changes, so that the client's package need not be
installed here. Nothing from the wire is unpickled. Leaves out routes (http.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.driven import Datum
from engine.objective.token_losses import TOKEN_LOSSES

PROTOBUF = "application/x-protobuf"
FLOAT32, INT64 = 1, 2  # the client's enum DType
NUMPY: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
STOP_REASONS = {"stop": 0, "length": 1}
_TYPES = {"bytes": 12, "string": 9, "int32": 5, "int64": 3, "bool": 8, "double": 1, "enum": 5}  # an enum's bytes are an int's
# message -> (field, number, type or message, in brackets where repeated, in braces for a map from strings)
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "SparseCsr": [("values", 1, "bytes"), ("crow_indices", 2, "bytes"), ("col_indices", 3, "bytes")],
    "Tensor": [("dense", 1, "bytes"), ("sparse_csr", 2, "SparseCsr"), ("dtype", 3, "enum"), ("shape", 4, "[int64]")],
    "EncodedText": [("tokens", 1, "bytes")],
    "Opaque": [],
    "Chunk": [("encoded_text", 1, "EncodedText"), ("image", 2, "Opaque"), ("dmel", 3, "Opaque")],
    "Datum": [("model_input", 1, "[Chunk]"), ("loss_fn_inputs", 2, "{Tensor}")],
    "LossConfigValue": [("number", 1, "double"), ("text", 2, "string")],
    "ForwardBackwardRequest": [
        *(("model_id", 1, "string"), ("seq_id", 2, "int32"), ("data", 3, "[Datum]"), ("loss_fn", 4, "string")),
        *(("loss_fn_config", 5, "{double}"), ("forward_only", 6, "bool"), ("loss_fn_config_v2", 7, "{LossConfigValue}")),
    ],
    "BatchedTensor": [("data", 1, "bytes"), ("offsets", 2, "bytes"), ("dtype", 3, "enum"), ("trailing_shape", 4, "[int64]")],
    "ArrayRecord": [("type_tag", 1, "string"), ("fields", 2, "{BatchedTensor}"), ("num_datums", 3, "int64")],
    "ForwardBackwardOutput": [
        *(("loss_fn_output_type", 1, "string"), ("loss_fn_outputs", 2, "[ArrayRecord]"), ("metrics", 3, "{double}")),
    ],
    "SampledSequence": [("stop_reason", 1, "enum"), ("tokens", 2, "bytes"), ("logprobs", 3, "bytes")],
    "SampleResponse": [("sequences", 1, "[SampledSequence]"), ("prompt_logprobs", 2, "bytes")],
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="megasync_service.proto", package="megasync_service", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: message for name, message in found.items()}


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    inner = kind.strip("[]{}")
    if kind.startswith("{"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, inner)
        inner = f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=number, label=3 if kind[0] in "[{" else 1)
    if inner in _TYPES:
        field.type = _TYPES[inner]
    else:
        field.type, field.type_name = 11, f".megasync_service.{inner}"


MESSAGES = _classes()
Sampled = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], str]  # tokens, log-probs, stop reason


class BadRequestError(ValueError):
    """A request that says what it must not, by name. Nothing has been done."""


# ------------------------------------------------------------------------------------------------ JSON bodies


class Body(BaseModel):
    """Unknown fields are refused: nothing that a client asks for is skipped in silence."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True, allow_inf_nan=False)

    type: str = ""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Lora(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora
    optimizer_config: Optimizer = Optimizer()


class Adam(Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class OfModel(Body):
    model_id: str
    seq_id: int = Field(ge=0)


class OptimStep(OfModel):
    adam_params: Adam


class SaveWeights(OfModel):
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
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
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    # what the hosted service has besides
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: None = None
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class GetInfo(Body):
    model_id: str


class WeightsInfo(Body):
    tinker_path: str


def parse(kind: type[Body], body: bytes) -> Any:
    """BadRequestError names the field and what is wrong with it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadRequestError(f"{where} = {str(first.get('input'))[:80]}: {first['msg']}") from error


# ------------------------------------------------------------------------------------------------ protobuf


@dataclass(frozen=True)
class ForwardBackward:
    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


def parse_forward_backward(body: bytes, vocabulary_size: int, max_tokens: int) -> ForwardBackward:
    """BadRequestError: no such message, an unknown loss or option, arrays that do not fit, tokens out of vocabulary."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequestError("the body is no ForwardBackwardRequest in protobuf") from error
    name = message.loss_fn
    if name not in TOKEN_LOSSES:
        raise BadRequestError(f"loss_fn = {name!r}: this server has {', '.join(TOKEN_LOSSES)}")
    if not message.data:
        raise BadRequestError("data is empty")
    options = _options(message, name)
    data = []
    for number, each in enumerate(message.data):
        try:
            data.append(_datum(each, name, vocabulary_size, max_tokens))
        except BadRequestError as error:
            raise BadRequestError(f"data[{number}].{error}") from error
    return ForwardBackward(message.model_id, message.seq_id, data, name, options, message.forward_only)


def _options(message: Any, loss: str) -> dict[str, float]:
    known = TOKEN_LOSSES[loss].options
    given = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        given[name] = value.number  # 0 where it is a text, which no option here is
    for name, value in given.items():
        if name not in known:
            raise BadRequestError(f"loss_fn_config.{name}: {loss} has {', '.join(known) or 'no options'}")
        if not np.isfinite(value):
            raise BadRequestError(f"loss_fn_config.{name} = {value}: a finite number is expected")
    return given


def _datum(message: Any, loss: str, vocabulary_size: int, max_tokens: int) -> Datum:
    for number, chunk in enumerate(message.model_input):
        if not chunk.HasField("encoded_text"):
            raise BadRequestError(f"model_input.chunks[{number}]: only text is trained on here")
    parts = [_array(each.encoded_text.tokens, np.dtype(np.int32), "tokens") for each in message.model_input]
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not 0 < len(tokens) <= max_tokens:
        raise BadRequestError(f"model_input has {len(tokens)} tokens: from 1 to {max_tokens} are possible")
    arrays = {name: _tensor(tensor, name) for name, tensor in message.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        arrays.setdefault("weights", np.ones(len(tokens), np.float32))
    _check_arrays(arrays, loss, len(tokens))
    targets = arrays.pop("target_tokens").astype(np.int64)
    for name, ids in (("model_input", tokens), ("loss_fn_inputs.target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            outside = ids.min() if ids.min() < 0 else ids.max()
            raise BadRequestError(f"{name} has token {outside}: the vocabulary is 0 to {vocabulary_size - 1}")
    return Datum(tokens.astype(np.int32), targets, {name: array.astype(np.float32) for name, array in arrays.items()})


def _check_arrays(arrays: dict[str, npt.NDArray[Any]], loss: str, num_tokens: int) -> None:
    """BadRequestError where they are not exactly those of the loss, a finite value for each token."""
    known = ("target_tokens", *TOKEN_LOSSES[loss].inputs)
    if unknown := sorted(arrays.keys() - set(known)):
        raise BadRequestError(f"loss_fn_inputs.{unknown[0]}: {loss} takes {', '.join(known)}")
    for name in known:
        if name not in arrays:
            raise BadRequestError(f"loss_fn_inputs.{name} is missing, which {loss} needs")
        if len(arrays[name]) != num_tokens:
            raise BadRequestError(f"loss_fn_inputs.{name} has {len(arrays[name])} values for {num_tokens} tokens")
        if not np.isfinite(arrays[name]).all():
            raise BadRequestError(f"loss_fn_inputs.{name} has values that are not finite")


def _tensor(message: Any, name: str) -> npt.NDArray[Any]:
    """One dimension; sparse ones are refused, since only two dimensions have them."""
    if message.HasField("sparse_csr") or len(message.shape) > 1:
        raise BadRequestError(f"loss_fn_inputs.{name} has the shape {list(message.shape)}: one value for each token is expected")
    if message.dtype not in NUMPY:
        raise BadRequestError(f"loss_fn_inputs.{name} has dtype {message.dtype}: float32 (1) or int64 (2) are expected")
    array = _array(message.dense, NUMPY[message.dtype], f"loss_fn_inputs.{name}")
    if list(message.shape) not in ([], [len(array)]):
        raise BadRequestError(f"loss_fn_inputs.{name} has {len(array)} values in the shape {list(message.shape)}")
    return array


def _array(raw: bytes, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise BadRequestError(f"{name} has {len(raw)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype)


def forward_backward_output(log_probs: Sequence[npt.NDArray[np.float32]], metrics: dict[str, float]) -> bytes:
    """Each metric's name ends with how the client joins those of several requests, such as `:sum`."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    batched = record.fields["logprobs"]
    batched.data = np.concatenate(log_probs).tobytes()
    batched.offsets = (4 * np.cumsum([0, *map(len, log_probs)])).astype(np.int64).tobytes()
    batched.dtype = FLOAT32
    return bytes(output.SerializeToString())


def sample_response(sequences: Sequence[Sampled], prompt_log_probs: npt.NDArray[np.float32] | None) -> bytes:
    message = MESSAGES["SampleResponse"]()
    for tokens, log_probs, reason in sequences:
        message.sequences.add(stop_reason=STOP_REASONS[reason], tokens=tokens.tobytes(), logprobs=log_probs.tobytes())
    if prompt_log_probs is not None:
        message.prompt_logprobs = np.concatenate([[np.nan], prompt_log_probs]).astype(np.float32).tobytes()
    return bytes(message.SerializeToString())
