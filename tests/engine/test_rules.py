"""What goes together in an engine: who does as a remedy says has one problem less.

python -m pytest tests/engine/test_rules.py
"""

from __future__ import annotations

from types import SimpleNamespace

import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DTYPE_BYTES, EXPERT_ROW_BYTES, LoraConfig, ParallelConfig
from engine.rules import Problem, context_problem, experts_lora_problem, experts_problem

SIZES, DTYPES = st.integers(1, 16), st.sampled_from(sorted(DTYPE_BYTES))


def values(found: Problem) -> dict[str, object]:
    """The key and value that the remedy tells to write, by the key's last name; {}: it tells of several ways."""
    key, _, value = found.remedy.removeprefix("write ").partition(",")[0].rpartition("=")
    assert found.message and found.remedy in str(found)
    return {key.rpartition(".")[2]: yaml.safe_load(value)} if key.startswith("engine.") else {}


@given(st.integers(0, 64), SIZES, SIZES, st.booleans(), st.integers(1, 96), st.integers(1, 96), DTYPES)
def test_layouts_with_experts(
    num_experts: int, expert: int, tensor: int, has_sequence: bool, hidden: int, inner: int, dtype: str
) -> None:
    sizes = SimpleNamespace(model_type="qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner)
    keys = {"expert": expert, "tensor": tensor, "sequence": has_sequence}
    seen = []
    while found := experts_problem(sizes, num_experts, dtype, ParallelConfig.model_validate(keys)):
        seen.append(found)
        if not (written := values(found)):
            break
        keys |= written
        assert len(seen) <= 2
    rows = (hidden, inner // tensor)
    has_odd_rows = num_experts > 0 and any(size * DTYPE_BYTES[dtype] % EXPERT_ROW_BYTES for size in rows)
    assert (found is not None) == has_odd_rows


@given(st.integers(1, 100), st.sampled_from([0.0, 0.1]), DTYPES)
def test_adapters_of_experts(rank: int, dropout: float, dtype: str) -> None:
    lora, num_found = LoraConfig(rank=rank, dropout=dropout), 0
    while found := experts_lora_problem(lora, "linear_fc1", dtype):
        lora, num_found = LoraConfig.model_validate(lora.model_dump() | values(found)), num_found + 1
    assert num_found <= 2 and lora.dropout == 0 and rank <= lora.rank < rank + EXPERT_ROW_BYTES


@given(SIZES, SIZES, SIZES, st.sampled_from(["allgather", "ulysses"]))
def test_context_attention(heads: int, tensor: int, context: int, kind: str) -> None:
    keys = {"tensor": tensor, "context": context, "context_attention": kind}
    found = context_problem("qwen3", heads * tensor, ParallelConfig.model_validate(keys))
    assert (found is not None) == (kind == "ulysses" and heads % context > 0)
    assert found is None or context_problem("qwen3", heads * tensor, ParallelConfig.model_validate(keys | values(found))) is None
    of_delta = context_problem("qwen3_5_text", heads * tensor, ParallelConfig.model_validate(keys))
    assert of_delta == found if context == 1 else of_delta is not None and values(of_delta) == {"context": 1}
