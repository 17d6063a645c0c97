"""Compiled kernels once a plan has been traced in the same process: prints those that torch's compiler leaves alone.

    python -m tests.megasync.planning.kernels_after_plan MODEL_FOLDER
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters

torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]  # no C++ compiler is needed

from engine.attention import fused  # noqa: E402
from engine.config import EngineConfig, ModelConfig  # noqa: E402
from megasync.planning.meta import stand_ins  # noqa: E402
from megasync.planning.meta.activations import trace  # noqa: E402
from megasync.planning.meta.ranks import build_rank, world  # noqa: E402

NUMBER = torch.tensor(1.0)
QUERY, TABLE, LOGITS, ROWS = torch.ones(4, 2, 8), torch.ones(4, 1, 4), torch.ones(4, 16), torch.ones(4)
PAIRS, HALF, WEIGHTS = torch.ones(4, 8), torch.ones(4, 4), torch.ones(4, 1)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_rotate": (QUERY, QUERY, TABLE, TABLE),
    "_log_sum_exp": (LOGITS, NUMBER),
    "_logits_gradient": (LOGITS, torch.ones(4, dtype=torch.int64), ROWS, ROWS, NUMBER),
    "_within_fused": (LOGITS, NUMBER),
    "swiglu": (PAIRS,),
    "swiglu_back": (HALF, PAIRS),
    "weighted_swiglu": (PAIRS, WEIGHTS),
    "weighted_swiglu_back": (HALF, PAIRS, WEIGHTS),
}


def is_compiled(function: Any, arguments: tuple[Any, ...]) -> bool:
    counters.clear()
    function(*arguments)
    return counters["frames"]["ok"] > 0


def main(folder: str) -> None:
    engine = EngineConfig.model_validate({"wrap": "ddp", "fusions": "all", "logits_chunk_tokens": 16})
    model = ModelConfig.model_validate({"path": folder, "dtype": "bfloat16"})
    with world(1, 0, engine.parallel):
        trace(build_rank(model, engine), engine, (24, 24), has_entropy=True)
    assert fused.problem()
    functions = {name: getattr(module, name) for module, names in stand_ins.COMPILED for name in names}
    left = [name for name, function in functions.items() if not is_compiled(function, ARGUMENTS[name])]
    print(f"not compiled: {left}")
    assert left or not fused.problem()


if __name__ == "__main__":
    main(sys.argv[1])
