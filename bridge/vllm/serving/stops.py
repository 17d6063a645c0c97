"""Stop texts are looked for in the text that rewards see, by the trainer's own detokenizer; with vLLM 0.26 and 0.32.

vLLM's (v1/engine/detokenizer.py) would leave out special tokens, so that `</answer>` as one ends nothing, and take its tokenizer
from AutoTokenizer, which for some classes makes another one than tokenizer.json says. Replicas alone import this.

    look_for_stops(engine, request)    # once the output processor has the request
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

from bridge.detokenizer import Detokenizer, TextStream, load


class StopDetokenizer(BaseIncrementalDetokenizer):  # type: ignore[misc] # mypy does not follow vLLM
    """vLLM's search for stop texts over our text of each token."""

    def __init__(self, request: Any, stream: TextStream) -> None:
        super().__init__(request)
        self._stream = stream

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Token by token. Of several that come at once, as with speculation, those behind the end of a stop text are dropped;
        vLLM 0.26 keeps them.
        """
        last = len(new_token_ids) - 1
        for place, token in enumerate(new_token_ids):
            if stop := super().update([token], stop_terminated and place == last):
                return str(stop)
        return None

    def decode_next(self, next_token_id: int) -> str:
        return self._stream.step(next_token_id)


@functools.cache
def detokenizer(folder: str) -> Detokenizer:
    """The detokenizer of a model's folder, read once."""
    return Detokenizer(load(folder)[0])


def look_for_stops(engine: Any, request: Any) -> None:
    """`request`: an EngineCoreRequest that `engine.output_processor` was given."""
    if request.sampling_params.stop:
        state = engine.output_processor.request_states[request.request_id]
        state.detokenizer = StopDetokenizer(request, detokenizer(engine.model_config.model).stream())
