"""Protobuf messages of Tinker's client (0.38): passes and samples, and their validation.

The messages are built from a table of field numbers, which protobuf never changes, so that the client's package need not be
installed here. Nothing from the wire is unpickled. Leaves out JSON (bodies.py) and routes (http.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from bridge.generation import Completion, TokenScores
from engine.driven import Datum
from engine.objective.token_losses import TOKEN_LOSSES
from megasync.service.bodies import BadRequestError

PROTOBUF = "application/x-protobuf"
FLOAT32, INT64 = 1, 2  # the client's enum DType
NUMPY: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
NO_LOG_PROB = -99999.0  # the client's, of places without log-probs
STOP_REASONS = {"stop": 0, "length": 1}
_TYPES = {
    "bytes": 12,
    "string": 9,
    "int32": 5,
    "int64": 3,
    "uint32": 13,
    "bool": 8,
    "double": 1,
    "enum": 5,
}  # an enum's bytes are an int's
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
    "TopkLogprobs": [("token_ids", 1, "bytes"), ("logprobs", 2, "bytes"), ("k", 3, "uint32"), ("length", 4, "uint32")],
    "SampledSequence": [
        *(("stop_reason", 1, "enum"), ("tokens", 2, "bytes"), ("logprobs", 3, "bytes")),
        ("topk_sampled_logprobs", 4, "TopkLogprobs"),
    ],
    "SampleResponse": [
        *(("sequences", 1, "[SampledSequence]"), ("prompt_logprobs", 2, "bytes"), ("topk_prompt_logprobs", 3, "TopkLogprobs")),
    ],
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
    if message.seq_id < 0:
        raise BadRequestError(f"seq_id = {message.seq_id}: it is negative")
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
        if value.text:
            raise BadRequestError(f"loss_fn_config.{name} = {value.text[:80]!r}: a number is expected")
        given[name] = value.number
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
    if arrays["target_tokens"].dtype != np.int64:
        raise BadRequestError("loss_fn_inputs.target_tokens is float32: int64 is expected")
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


def loss_sum(body: bytes) -> float:
    """The sum of losses of a ForwardBackwardOutput."""
    return float(MESSAGES["ForwardBackwardOutput"].FromString(body).metrics["loss:sum"])


def num_sampled(body: bytes) -> int:
    """Tokens of a SampleResponse."""
    message = MESSAGES["SampleResponse"].FromString(body)
    return sum(len(each.tokens) for each in message.sequences) // np.dtype(np.int32).itemsize


def sample_response(sequences: Sequence[Completion], scores: TokenScores | None, num_scored: int | None, num_top: int) -> bytes:
    """`scores`: of the prompt from its second token on; the last `num_scored` are returned, None: all."""
    message = MESSAGES["SampleResponse"]()
    for each in sequences:
        reason = STOP_REASONS["length" if each.finish_reason == "length" else "stop"]
        added = message.sequences.add(stop_reason=reason, tokens=each.token_ids.tobytes(), logprobs=each.log_probs.tobytes())
        if each.top[0].size:
            _add_top(added.topk_sampled_logprobs, *each.top)
    if scores is None:
        return bytes(message.SerializeToString())
    length = len(scores.log_probs) + 1
    first = 1 if num_scored is None else length - num_scored
    log_probs = np.full(length, np.nan, np.float32)
    log_probs[first:] = scores.log_probs[first - 1 :]
    message.prompt_logprobs = log_probs.tobytes()
    if num_top:
        ids, tops = np.zeros((length, num_top), np.int32), np.full((length, num_top), NO_LOG_PROB, np.float32)
        ids[first:], tops[first:] = scores.top_ids[first - 1 :], scores.top_log_probs[first - 1 :]
        _add_top(message.topk_prompt_logprobs, ids, tops)
    return bytes(message.SerializeToString())


def _add_top(message: Any, ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> None:
    """Both [places, k]. Tokens that `top_p` and `top_k` leave out have no log-prob."""
    is_kept = np.isfinite(log_probs)
    message.token_ids = np.where(is_kept, ids, 0).astype(np.int32).tobytes()
    message.logprobs = np.where(is_kept, log_probs, NO_LOG_PROB).astype(np.float32).tobytes()
    message.length, message.k = ids.shape
