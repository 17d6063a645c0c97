"""A client's request as a call: where it stands in its client's order, and what the worker is to do.

Reading depends on the bytes and on former requests alone, so that a restart reads the same out of the log. Leaves out the order
of execution (work_queue.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megasync.service import bodies, wire
from megasync.service.bodies import BadRequestError

OF_MODELS = ("create_model", "forward_backward", "optim_step", "load_weights")
CREATING = ("create_model", "load_weights")
SAVES = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights", "save_weights_external": "external_weights"}
DELETE, FINISH = "delete_checkpoint", "finish_session"
TRAINING = (*OF_MODELS, *SAVES, DELETE, FINISH)  # all that the worker does, in one order
OVERTAKEN = (*OF_MODELS, "save_weights_for_sampler", "save_weights_external")  # by later passes of other clients
SAMPLE = "asample"
MODEL = re.compile(r"[\w-]+:train:\d+", re.ASCII)
NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)  # of a folder
BASE = ""  # the version of the base model


@dataclass(frozen=True)
class Call:
    kind: str
    scope: str  # whose order `seq` is of
    seq: int | None
    arguments: dict[str, Any] = field(default_factory=dict)  # of the worker's method, or of sampling
    version: str = BASE  # of a sample: BASE, or the path of saved weights; of a deletion the path
    count: int = 1  # of samples


@dataclass
class Reader:
    """Knows the sessions and models of former requests. `base_models`: names of the one that is served."""

    base_models: tuple[str, ...]
    vocabulary_size: int
    max_tokens: int
    frozen_unembed: bool
    is_full: bool = False  # all parameters are trained
    sessions: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)  # some of these
    models: set[str] = field(default_factory=set)  # all requested ones, created or refused
    samplers: dict[str, str] = field(default_factory=dict)  # sampling sessions and their versions

    def read(self, kind: str, body: bytes) -> Call:
        """BadRequestError names the field and its fault."""
        return getattr(self, f"_{kind}")(body)  # type: ignore[no-any-return]

    def accepted(self, call: Call, name: str) -> None:
        """Call it for each that `read` gave and that was accepted. `name`: the request's."""
        if call.kind == "create_session":
            self.sessions.add(name)
        elif call.kind == FINISH:
            self.finished.add(call.scope.partition(":")[0])
        elif call.kind == "create_sampling_session":
            self.samplers[call.scope + f":{call.seq}"] = call.version
        elif call.kind in ("create_model", "load_weights"):
            self.models.add(call.scope)
        elif (sampler := call.arguments.get("sampler")) is not None:
            self.samplers[sampler] = path_of(call.arguments["model"], "sampler_weights", call.arguments["name"])

    # ------------------------------------------------------------------------------------------------ one method a kind

    def _create_session(self, body: bytes) -> Call:
        bodies.parse(bodies.CreateSession, body)
        return Call("create_session", "", None)

    def _create_model(self, body: bytes) -> Call:
        given: bodies.CreateModel = bodies.parse(bodies.CreateModel, body)
        self._check_session(given.session_id)
        self._check_base(given.base_model)
        lora = given.lora_config
        for name in ("train_attn", "train_mlp", "train_unembed"):
            if self.is_full and not getattr(lora, name):
                raise BadRequestError(f"lora_config.{name} = false: all parameters are trained here (service.full_parameters)")
        if lora.train_unembed and not (self.frozen_unembed or self.is_full):
            raise BadRequestError(
                "lora_config.train_unembed = true: the output layer has no adapter here; pass train_unembed=False, or let the "
                "server leave it frozen (service.frozen_unembed=true)"
            )
        model = f"{given.session_id}:train:{given.model_seq_id}"
        spec = {
            "rank": 0 if self.is_full else lora.rank,
            "train_attn": lora.train_attn,
            "train_mlp": lora.train_mlp,
            "seed": lora.seed or 0,
        }
        return Call("create_model", model, 0, {"model": model, "spec": spec})

    def _forward_backward(self, body: bytes) -> Call:
        given = wire.parse_forward_backward(body, self.vocabulary_size, self.max_tokens)
        arguments: dict[str, Any] = {"model": given.model_id, "data": given.data, "loss": given.loss}
        arguments |= {"options": given.options, "has_gradients": not given.forward_only}
        return Call("forward_backward", self._model(given.model_id), given.seq_id, arguments)

    def _optim_step(self, body: bytes) -> Call:
        given: bodies.OptimStep = bodies.parse(bodies.OptimStep, body)
        parameters = given.adam_params.model_dump(exclude={"type"})
        arguments = {"model": given.model_id, "parameters": parameters}
        return Call("optim_step", self._model(given.model_id), given.seq_id, arguments)

    def _save_weights(self, body: bytes) -> Call:
        return self._save("save_weights", bodies.parse(bodies.SaveWeights, body))

    def _save_weights_for_sampler(self, body: bytes) -> Call:
        given: bodies.SaveForSampler = bodies.parse(bodies.SaveForSampler, body)
        sampler = None
        if given.sampling_session_seq_id is not None:
            sampler = f"{given.model_id.partition(':')[0]}:sample:{given.sampling_session_seq_id}"
        return self._save("save_weights_for_sampler", given, sampler=sampler, overwrite=False)

    def _save_weights_external(self, body: bytes) -> Call:
        return self._save("save_weights_external", bodies.parse(bodies.SaveExternal, body), overwrite=False)

    def _save(self, kind: str, given: Any, **others: Any) -> Call:
        """Without a path: a name by the request's place, which no other request has."""
        name = _name(given.path or f"seq-{given.seq_id}")
        arguments = {"model": given.model_id, "name": name, "seq": given.seq_id}
        arguments |= others or {"overwrite": given.overwrite}
        return Call(kind, self._model(given.model_id), given.seq_id, arguments)

    def _delete_checkpoint(self, body: bytes) -> Call:
        path = bodies.parse(bodies.Delete, body).path
        saved_in(path)
        return Call(DELETE, "", None, {"path": path}, version=path)

    def _finish_session(self, body: bytes) -> Call:
        session = bodies.parse(bodies.FinishSession, body).session_id
        self._check_session(session)
        return Call(FINISH, f"{session}:finish", 0, {"session": session})

    def _load_weights(self, body: bytes) -> Call:
        given: bodies.LoadWeights = bodies.parse(bodies.LoadWeights, body)
        is_new = given.session_id is not None
        if is_new:
            self._check_session(given.session_id or "")
            if given.model_seq_id is None:
                raise BadRequestError("model_seq_id is needed beside session_id")
        if given.base_model is not None:
            self._check_base(given.base_model)
        model = f"{given.session_id}:train:{given.model_seq_id}" if is_new else self._model(given.model_id or "")
        arguments = {"model": model, "path": given.path, "with_optimizer": given.optimizer, "is_new": is_new}
        saved_in(given.path, "weights")
        if not is_new and given.seq_id is None:
            raise BadRequestError("seq_id is needed, or session_id and model_seq_id of a new client")
        return Call("load_weights", model, 0 if is_new else given.seq_id, arguments)

    def _create_sampling_session(self, body: bytes) -> Call:
        given: bodies.CreateSamplingSession = bodies.parse(bodies.CreateSamplingSession, body)
        self._check_session(given.session_id)
        version = self._version(given.base_model, given.model_path)
        return Call("create_sampling_session", f"{given.session_id}:sample", given.sampling_session_seq_id, version=version)

    def _asample(self, body: bytes) -> Call:
        given: bodies.Sample = bodies.parse(bodies.Sample, body)
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
        if params.stop and not isinstance(params.stop, str):
            ids = [each for each in params.stop if isinstance(each, int)]
            if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary_size:
                raise BadRequestError(
                    f"sampling_params.stop has tokens out of vocabulary, which is 0 to {self.vocabulary_size - 1}"
                )
        last = given.prompt_logprobs_last_n
        if last is not None and not 1 <= last < len(prompt):
            raise BadRequestError(f"prompt_logprobs_last_n = {last}: from 1 to {len(prompt) - 1} are possible")
        if (params.max_tokens or 1) > most:
            raise BadRequestError(f"sampling_params.max_tokens = {params.max_tokens}: the prompt leaves room for {most}")
        arguments = {"prompt": prompt, "params": params, "num_samples": given.num_samples, "most": most}
        arguments |= {"has_prompt_log_probs": bool(given.prompt_logprobs), "num_top": given.topk_prompt_logprobs, "last": last}
        arguments["num_top_sampled"] = given.topk_sample_logprobs
        seq = given.seq_id if given.sampling_session_id else None
        return Call(SAMPLE, given.sampling_session_id or "", seq, arguments, version, given.num_samples)

    # ------------------------------------------------------------------------------------------------ inside

    def _check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise BadRequestError(f"session_id = {session!r}: there is no such session")

    def _model(self, model: str) -> str:
        if model not in self.models:
            raise BadRequestError(f"model_id = {model!r}: there is no such model")
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


def saved_in(path: str, kind: str = "") -> tuple[str, str, str]:
    """Model, kind and name of the weights that were saved there, all of them names of folders. `kind`: the one that is wanted."""
    scheme, _, rest = path.partition("://")
    model, _, tail = rest.partition("/")
    found, _, name = tail.partition("/")
    if scheme != "tinker" or not MODEL.fullmatch(model) or found not in ([kind] if kind else SAVES.values()):
        raise BadRequestError(f"path = {path[:200]!r}: tinker://MODEL/{kind or 'KIND'}/NAME is expected")
    return model, found, _name(name)


def _name(name: str) -> str:
    if not NAME.fullmatch(name) or name.startswith("."):
        raise BadRequestError(f"path = {name[:200]!r}: a name of up to 100 letters, digits, - and _ is expected")
    return name
