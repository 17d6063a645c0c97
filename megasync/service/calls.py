"""A client's request as a call: where it stands in its client's order, and what the worker is to do.

Reading depends on the bytes and on former requests alone, so that a restart reads the same out of the log. Leaves out the order
of execution (desk.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megasync.service import wire
from megasync.service.wire import BadRequestError

TRAINING = ("create_model", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights")
SAMPLE = "asample"
SESSIONS = ("create_session", "create_sampling_session")
NAME = re.compile(r"[\w.-]{1,100}")
BASE = ""  # the version of the base model


@dataclass(frozen=True)
class Call:
    kind: str
    scope: str  # whose order `seq` is of
    seq: int | None
    arguments: dict[str, Any] = field(default_factory=dict)  # of the worker's method, or of sampling
    version: str = BASE  # of a sample: BASE, or the path of saved weights


@dataclass
class Reader:
    """Knows the sessions of former requests. `base_models`: names of the one that is served."""

    base_models: tuple[str, ...]
    vocabulary_size: int
    max_tokens: int
    frozen_unembed: bool
    sessions: set[str] = field(default_factory=set)
    samplers: dict[str, str] = field(default_factory=dict)  # sampling sessions and their versions

    def read(self, kind: str, body: bytes) -> Call:
        """BadRequestError says by name what is wrong."""
        return getattr(self, f"_{kind}")(body)  # type: ignore[no-any-return]

    def accepted(self, call: Call, name: str) -> None:
        """Call it for each that `read` gave and that was accepted. `name`: the request's."""
        if call.kind == "create_session":
            self.sessions.add(name)
        elif call.kind == "create_sampling_session":
            self.samplers[call.scope + f":{call.seq}"] = call.version
        elif (sampler := call.arguments.get("sampler")) is not None:
            self.samplers[sampler] = path_of(call.arguments["model"], "sampler_weights", call.arguments["name"])

    # ------------------------------------------------------------------------------------------------ one method a kind

    def _create_session(self, body: bytes) -> Call:
        wire.parse(wire.CreateSession, body)
        return Call("create_session", "", None)

    def _create_model(self, body: bytes) -> Call:
        given: wire.CreateModel = wire.parse(wire.CreateModel, body)
        self._check_session(given.session_id)
        self._check_base(given.base_model)
        lora = given.lora_config
        if lora.train_unembed and not self.frozen_unembed:
            raise BadRequestError(
                "lora_config.train_unembed = true: the output layer has no adapter here; pass train_unembed=False, or let the "
                "server leave it frozen (service.frozen_unembed=true)"
            )
        model = f"{given.session_id}:train:{given.model_seq_id}"
        spec = {"rank": lora.rank, "train_attn": lora.train_attn, "train_mlp": lora.train_mlp, "seed": lora.seed or 0}
        return Call("create_model", model, 0, {"model": model, "spec": spec})

    def _forward_backward(self, body: bytes) -> Call:
        given = wire.parse_forward_backward(body, self.vocabulary_size, self.max_tokens)
        arguments: dict[str, Any] = {"model": given.model_id, "data": given.data, "loss": given.loss}
        arguments |= {"options": given.options, "has_gradients": not given.forward_only}
        return Call("forward_backward", self._model(given.model_id), given.seq_id, arguments)

    def _optim_step(self, body: bytes) -> Call:
        given: wire.OptimStep = wire.parse(wire.OptimStep, body)
        parameters = given.adam_params.model_dump(exclude={"type"})
        arguments = {"model": given.model_id, "parameters": parameters}
        return Call("optim_step", self._model(given.model_id), given.seq_id, arguments)

    def _save_weights(self, body: bytes) -> Call:
        given: wire.SaveWeights = wire.parse(wire.SaveWeights, body)
        name = _name(given.path or f"seq-{given.seq_id}")
        arguments = {"model": given.model_id, "name": name, "overwrite": given.overwrite, "seq": given.seq_id}
        return Call("save_weights", self._model(given.model_id), given.seq_id, arguments)

    def _save_weights_for_sampler(self, body: bytes) -> Call:
        given: wire.SaveForSampler = wire.parse(wire.SaveForSampler, body)
        name = _name(given.path or f"seq-{given.seq_id}")
        sampler = None
        if given.sampling_session_seq_id is not None:
            sampler = f"{given.model_id.partition(':')[0]}:sample:{given.sampling_session_seq_id}"
        arguments = {"model": given.model_id, "name": name, "sampler": sampler, "overwrite": False, "seq": given.seq_id}
        return Call("save_weights_for_sampler", self._model(given.model_id), given.seq_id, arguments)

    def _load_weights(self, body: bytes) -> Call:
        given: wire.LoadWeights = wire.parse(wire.LoadWeights, body)
        is_new = given.session_id is not None
        if is_new:
            self._check_session(given.session_id or "")
        if given.base_model is not None:
            self._check_base(given.base_model)
        model = f"{given.session_id}:train:{given.model_seq_id}" if is_new else self._model(given.model_id or "")
        arguments = {"model": model, "path": given.path, "with_optimizer": given.optimizer, "is_new": is_new}
        saved_in(given.path, "weights")
        return Call("load_weights", model, 0 if is_new else given.seq_id, arguments)

    def _create_sampling_session(self, body: bytes) -> Call:
        given: wire.CreateSamplingSession = wire.parse(wire.CreateSamplingSession, body)
        self._check_session(given.session_id)
        version = self._version(given.base_model, given.model_path)
        return Call("create_sampling_session", f"{given.session_id}:sample", given.sampling_session_seq_id, version=version)

    def _asample(self, body: bytes) -> Call:
        given: wire.Sample = wire.parse(wire.Sample, body)
        if given.sampling_session_id is not None:
            if given.sampling_session_id not in self.samplers:
                raise BadRequestError(f"sampling_session_id = {given.sampling_session_id!r}: there is no such session")
            version = self.samplers[given.sampling_session_id]
        else:
            version = self._version(given.base_model, given.model_path)
        prompt = [token for chunk in given.prompt.chunks for token in chunk.tokens]
        most = self.max_tokens - len(prompt)
        if not prompt or most < 1:
            raise BadRequestError(f"prompt has {len(prompt)} tokens: from 1 to {self.max_tokens - 1} are possible")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary_size:
            raise BadRequestError(f"prompt has tokens out of vocabulary, which is 0 to {self.vocabulary_size - 1}")
        params = given.sampling_params
        if (params.max_tokens or 1) > most:
            raise BadRequestError(f"sampling_params.max_tokens = {params.max_tokens}: the prompt leaves room for {most}")
        arguments = {"prompt": prompt, "params": params, "num_samples": given.num_samples, "most": most}
        arguments["has_prompt_log_probs"] = bool(given.prompt_logprobs)
        seq = given.seq_id if given.sampling_session_id else None
        return Call(SAMPLE, given.sampling_session_id or "", seq, arguments, version)

    # ------------------------------------------------------------------------------------------------ inside

    def _check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise BadRequestError(f"session_id = {session!r}: there is no such session")

    def _model(self, model: str) -> str:
        self._check_session(model.partition(":")[0])
        return model

    def _check_base(self, name: str) -> None:
        if name not in self.base_models:
            raise BadRequestError(f"base_model = {name!r}: this server has {self.base_models[0]!r}")

    def _version(self, base_model: str | None, path: str | None) -> str:
        if path is not None:
            saved_in(path, "sampler_weights")
            return path
        if base_model is None:
            raise BadRequestError("base_model or model_path is needed")
        self._check_base(base_model)
        return BASE


def path_of(model: str, kind: str, name: str) -> str:
    return f"tinker://{model}/{kind}/{name}"


def saved_in(path: str, kind: str) -> tuple[str, str]:
    """Model and name of the weights that were saved there, both of them names of folders."""
    scheme, _, rest = path.partition("://")
    model, _, tail = rest.partition("/")
    found, _, name = tail.partition("/")
    if scheme != "tinker" or found != kind or not re.fullmatch(r"[\w-]+:train:\d+", model):
        raise BadRequestError(f"path = {path!r}: tinker://MODEL/{kind}/NAME is expected")
    return model, _name(name)


def _name(name: str) -> str:
    if not NAME.fullmatch(name) or name.startswith("."):
        raise BadRequestError(f"path = {name!r}: a name of letters, digits, - and _ is expected")
    return name
