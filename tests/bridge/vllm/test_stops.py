"""Stop texts in vLLM's front end are found in the text that rewards see, for every kind of tokenizer.

python -m pytest tests/bridge/vllm/test_stops.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tokenizer_kinds import EXTRA, KINDS, WITH_BYTES, prompts_of, write_kind

TEXT = "the answer is 42 "


def looking_for(folder: Path, stop: str) -> Any:
    """vLLM is imported here: every worker of a parallel run collects this file."""
    from vllm import SamplingParams

    from bridge.vllm.serving.stops import StopDetokenizer, detokenizer

    return StopDetokenizer(SimpleNamespace(sampling_params=SamplingParams(stop=[stop])), detokenizer(str(folder)).stream())


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_ends_where_its_text_has_the_stop(kind: str, tmp_path: Path) -> None:
    """Special, added and plain ones; by a special token in the middle of it, after half a character."""
    prompts = prompts_of(kind, tmp_path)
    more = ("x🙂y",) if kind in WITH_BYTES else ()
    for stop in (*EXTRA, "42", *more):
        ids = prompts.encoder.continuing.encode(f"{TEXT}{stop} x {stop} 12+30=42,", add_special_tokens=False).ids
        found = looking_for(tmp_path / kind, stop)
        ended = next(place for place, each in enumerate(ids) if found.update([each], stop_terminated=False) == stop)
        seen = prompts.detokenizer.text(ids[: ended + 1])
        assert seen.endswith(stop) and seen.count(stop) == 1
        assert stop not in prompts.detokenizer.text(ids[:ended])
        at_once = looking_for(tmp_path / kind, stop)
        assert at_once.update(ids, stop_terminated=False) == stop and at_once.output_token_ids == ids[: ended + 1]


def test_the_token_that_ends_a_response_is_not_looked_at(tmp_path: Path) -> None:
    folder = write_kind("byte_level", tmp_path / "model")
    found = looking_for(folder, "</s>")
    assert found.update([2], stop_terminated=True) is None and found.output_text == ""
