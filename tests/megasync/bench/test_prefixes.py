"""Costs of shared prefixes against a count token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megasync.bench.training.flops import attention_flops
from megasync.bench.training.prefixes import Cost, costs_of, dropped_thinking, group_of
from megasync.hf.model_shape import SHAPES

TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6)


@given(TOKENS)
def test_a_tree_has_each_prefix_once(sequences: list[list[int]]) -> None:
    flat, tree = costs_of([[(token, 1) for token in one] for one in sequences])
    every = [tuple(one[:length]) for one in sequences for length in range(1, len(one) + 1)]
    assert flat == (len(every), sum(map(len, every)))
    assert tree == (len(set(every)), sum(map(len, set(every))))


@given(st.integers(1, 9), st.integers(0, 50), st.integers(1, 50))
def test_pieces_cost_what_their_tokens_cost(members: int, prompt: int, response: int) -> None:
    flat, tree = costs_of(group_of(members, prompt, response))
    tokens = [[*[("prompt", 1)] * prompt, *[(member, 1)] * response] for member in range(members)]
    numbered = [[((place, name), length) for place, (name, length) in enumerate(one)] for one in tokens]
    assert (flat, tree) == costs_of(numbered)
    assert tree.tokens == prompt + members * response


def test_operations_are_those_of_the_training_bench() -> None:
    shapes, length = SHAPES["3b"], 100
    pairs_alone = Cost(0, length * (length + 1) // 2).flops(shapes)
    assert pairs_alone == length * attention_flops(shapes, length)


def test_branches_of_a_conversation_share_what_was_answered_before() -> None:
    flat, tree = costs_of(dropped_thinking(1, 3, prompt=10, thinking=5, answer=3, given=2))
    assert flat.tokens == 3 * 10 + 3 * 8 + (1 + 2) * 5
    assert tree.tokens == 10 + 3 * 8 + 2 * 5
