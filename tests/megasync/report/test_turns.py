"""Episodes in the report: messages of a given text, and a card with turns."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megasync.report.html.samples import HEADER, branches, given_turns
from megasync.report.page import write_report
from tests.megasync.report.test_report import data_of, fake_run, log_of, text_of

HEADERS = ("<|im_start|>user\n", "<|start_header_id|>tool<|end_header_id|>\n\n", "<start_of_turn>model\n", "<|tool|>", "[INST]")


@given(st.lists(st.one_of(st.sampled_from(HEADERS), st.text("ab<|>\n", max_size=5)), max_size=8))
def test_turns_are_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    turns = given_turns(text)
    assert "".join(each for _, each in turns) == text
    assert len(turns) <= max(1, len(HEADER.findall(text)))


def test_roles_are_those_of_the_templates() -> None:
    chatml = "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert [role for role, _ in given_turns(chatml)] == ["tool"]
    llama = "<|start_header_id|>system<|end_header_id|>\n\nA<|start_header_id|>ipython<|end_header_id|>\n\n3"
    assert [role for role, _ in given_turns(llama)] == ["system", "tool"]
    assert [role for role, _ in given_turns("[AVAILABLE_TOOLS] x [INST] Hello [TOOL_RESULTS] 3")] == ["tools", "user", "tool"]
    assert given_turns(":3876;") == [("context", ":3876;")] and given_turns("") == []


EPISODE = {
    "set": "train", "line": 1, "prompt": "?", "response": "", "answer": "3876", "reward": 1.0, "tokens": 3, "versions": [3, 5],
    "finish_reason": "stop", "turns": 2, "metrics": {"calls": 1.0}, "info": {"turn_rewards": [0.25, 0.75]}, "failures": 1,
    "branches": [[
        {"sampled": False, "text": "<|user|>57*68<eos><|assistant|>", "tokens": 8},
        {"sampled": True, "text": "<b>", "tokens": 1, "token_texts": ["<b>"], "rollout_log_probs": [-0.1],
         "version_runs": [[3, 1]]},
        {"sampled": False, "text": "<|tool|>3876<eos><|assistant|>", "tokens": 7},
        {"sampled": True, "text": "38", "tokens": 2, "token_texts": ["3", "8"], "rollout_log_probs": [-0.1, -0.2],
         "trainer_log_probs": [-0.1, -0.3], "version_runs": [[5, 2]]},
    ]],
}  # fmt: skip


def test_a_sample_is_shown_as_its_turns(tmp_path: Path) -> None:
    fake_run(tmp_path)
    with log_of(tmp_path) as log:
        log.samples(5, [EPISODE, {**EPISODE, "branches": [], "info": {"turn_rewards": [None, "x"]}}])
    page = write_report(tmp_path).read_text()
    text = text_of(page)
    roles = ["user <i>given, not trained", "assistant <i>sampled, 1", "tool <i>given, not trained", "assistant <i>sampled, 2"]
    places = [text.index(role) for role in roles]
    assert places == sorted(places) and "57*68" in text and "2 turns" in text and "calls 1" in text and "1 failed before" in text
    assert text.count("rewards of turns 0.25 + 0.75") == 1 == text.count("rewards of turns")
    assert "it failed before it had tokens" in text and ">&lt;b&gt;<" in text
    first, second = (each for each in data_of(page, "tokens") if "version_span" in each)
    assert first["token_texts"] == ["<b>"] and first["version_span"] == second["version_span"] == [3, 5]
    assert second["trainer_log_probs"] == [-0.1, -0.3] and "trainer_log_probs" not in first


def test_branches_are_numbered() -> None:
    pieces = EPISODE["branches"][0]  # type: ignore[index]
    headings = [part.heading for part in branches({"branches": [pieces, pieces[:2]]}, [])]
    assert "branch 1 of 2" in headings and "branch 2 of 2" in headings
