"""Requests of vLLM's engine and what comes of them, with 0.26 and 0.32; file:line notes as in api.py.

    made = await core_requests(engine, request, {"7/0": 0, "7/1": 1}, version=3)    # by id the number of the sample
    await submit(engine, made, sink)                                                # whose `put` gets each final output
    completion = to_completion(output, marks=[], version=3)

Leaves out the engine (api.py), and who asks when (bridge/replicas/generator.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.generation import (
    MAX_SUPPORT,
    NO_ADAPTER,
    NO_EXPERTS,
    NO_SUPPORT,
    NO_TOP,
    Completion,
    GenerationRequest,
    ScoreRequest,
    TokenScores,
)
from bridge.layout.splitmix import GAMMA, mix64
from bridge.vllm.serving import routing
from bridge.vllm.weights import adapter as vllm_adapter

SEED_MASK = 2**63 - 1
MAX_LOG_PROBS = 2 * MAX_SUPPORT  # of a token, for its support: twice `top_k`, since others may tie with the last one


def mix_seed(seed: int, sample: int) -> int:
    """A seed for one sample that shares no noise with its neighbours'."""
    state = (seed * GAMMA + sample * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    return int(mix64(np.array([state], np.uint64))[0]) & SEED_MASK


async def core_requests(
    engine: Any,
    request: GenerationRequest,
    samples: Mapping[str, int],
    *,
    version: int,
    slot: int = NO_ADAPTER,
    returns_experts: bool = False,
    returns_support: bool = False,
) -> list[Any]:
    """vLLM's EngineCoreRequests of samples by id: checked once, then copied, as vLLM does (v1/engine/parallel_sampling.py:55).

    Prefixes are shared with requests of the same `version` only: those of held requests outlast an update. Where the prompt's
    own log-probs are wanted, vLLM reads none. `slot`: of the adapter that is served, or NO_ADAPTER.

    Raises:
        ValueError: vLLM refuses the request, such as for a token that it does not have.
    """
    from vllm.inputs import tokens_input

    size, lowest, highest = engine.model_config.get_vocab_size(), min(request.prompt_ids), max(request.prompt_ids)
    if lowest < 0 or highest >= size:  # vLLM would ask a tokenizer, and has none
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"the prompt's token {outside} is out of vocabulary: the model has embeddings for 0 to {size - 1}")
    prompt, tasks = tokens_input(list(request.prompt_ids), cache_salt=str(version)), await engine.get_supported_tasks()
    adapter = vllm_adapter.request(slot)
    with value_errors():
        parameters = sampling_parameters(request, 0, returns_experts=returns_experts)
        if returns_support and request.temperature > 0:
            parameters.logprobs = max(min(2 * request.top_k, MAX_LOG_PROBS, size), request.num_top)
        made = engine.input_processor.process_inputs("", prompt, parameters, supported_tasks=tasks, lora_request=adapter)
    found = []
    for name, sample in samples.items():
        one = copy.copy(made)
        one.request_id = one.external_req_id = name
        one.sampling_params = copy.copy(made.sampling_params)
        if made.sampling_params.seed is not None:
            one.sampling_params.seed = mix_seed(request.seed, sample)
        found.append(one)
    return found


@contextmanager
def value_errors() -> Iterator[None]:
    """vLLM refuses a request by a ValueError in 0.26, and by a class of its own in 0.32 (vllm/exceptions.py:20)."""
    from vllm import exceptions

    try:
        yield
    except getattr(exceptions, "VLLMClientError", ValueError) as error:
        raise ValueError(str(error)) from error


async def submit(engine: Any, requests: Sequence[Any], sink: Any) -> None:
    """Hand requests of the core to the engine; comes back once they are on their way. `sink.put` gets each one's final output, or
    what ended the engine. AsyncLLM.add_request (v1/engine/async_llm.py:388) would have a queue and an event for each.
    """
    from bridge.vllm.serving import stops  # imports vLLM

    for request in requests:
        engine.output_processor.add_request(request, None, queue=sink)
        stops.look_for_stops(engine, request)
        await engine.engine_core.add_request_async(request)


def sampling_parameters(request: GenerationRequest, sample: int, *, returns_experts: bool = False) -> Any:
    """vLLM's SamplingParams of one sample of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    is_scored = isinstance(request, ScoreRequest)
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=max(1, request.max_new_tokens),
        seed=mix_seed(request.seed, sample) if request.temperature > 0 else None,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        ignore_eos=True,
        logprobs=0 if is_scored else request.num_top,
        prompt_logprobs=request.num_top if is_scored else None,
        flat_logprobs=True,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **(routing.sampling_arguments() if returns_experts else {}),
    )


def token_scores(output: Any, num_top: int) -> TokenScores:
    """Scores of a prompt's tokens, from a ScoreRequest's output: at each place the token itself is first, then the top ones."""
    flat = output.prompt_logprobs
    shape = len(flat.start_indices) - 1, num_top + 1
    log_probs = np.array(flat.logprobs, np.float32).reshape(shape)
    ids = np.array(flat.token_ids, np.int32).reshape(shape)
    return TokenScores(log_probs[:, 0].copy(), ids[:, 1:].copy(), log_probs[:, 1:].copy())


def to_completion(
    output: Any, marks: Sequence[tuple[int, int]], version: int, routed_experts: Any = NO_EXPERTS, num_top: int = 0
) -> Completion:
    """From a finished RequestOutput with one sample.

    `marks`: up to which token it was made by which version; the rest is `version`'s. vLLM 0.32 stamps outputs by itself.
    """
    sample = output.outputs[0]
    tokens = np.array(sample.token_ids, np.int32)
    # the sampled token comes first at its position (vllm/v1/engine/logprobs.py:110); 0.26 has more behind a stop text (stops.py)
    firsts = sample.logprobs.start_indices[: len(tokens)]
    log_probs = np.array(sample.logprobs.logprobs, np.float32)[firsts]
    assert len(tokens) == len(log_probs), "vLLM gave a log-prob for each token"
    versions = np.full(len(tokens), version, np.int32)
    begin = 0
    for end, former in marks:
        versions[begin:end], begin = former, end
    if num_top:
        support, top = NO_SUPPORT, _top(sample.logprobs, firsts, num_top)
    else:
        support, top = _support(sample.logprobs, len(tokens)), NO_TOP
    return Completion(tokens, log_probs, versions, str(sample.finish_reason), routed_experts, support, top)


def _top(log_probs: Any, firsts: Sequence[int], num_top: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """See Completion.top: at each place they follow the sampled token."""
    places = np.array(firsts, np.int64)[:, None] + np.arange(1, num_top + 1)
    return np.array(log_probs.token_ids, np.int32)[places], np.array(log_probs.logprobs, np.float32)[places]


def _support(log_probs: Any, num_tokens: int) -> npt.NDArray[np.int32]:
    """See Completion.support. Of each token vLLM gives itself and the most likely ones, -inf where the sampler left one out."""
    firsts, ends = (np.array(part[:num_tokens]) for part in (log_probs.start_indices, log_probs.end_indices))
    num_values = int(ends.max(initial=0))
    ids = np.array(log_probs.token_ids[:num_values], np.int32)
    if len(ids) == len(firsts):
        return NO_SUPPORT  # it was not asked for
    owner = np.repeat(np.arange(len(firsts)), ends - firsts)
    is_kept = np.isfinite(np.array(log_probs.logprobs[:num_values])) & (ids != ids[firsts][owner])
    is_kept[firsts] = True
    counts = np.bincount(owner[is_kept], minlength=len(firsts))
    return np.concatenate([counts.astype(np.int32), ids[is_kept]])
