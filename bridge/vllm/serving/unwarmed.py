"""A worker on a GPU that compiles kernels when requests need them, not all at its start.

vLLM's own start compiles some twenty kernels of its second model runner, for penalties, top-k and grammars too: 20 seconds on a
machine where it has not run before (vllm 0.26, v1/worker/gpu/warmup.py). Leaves out graphs, which its engine must do without.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes


class UnwarmedWorker(Worker):  # type: ignore[misc]
    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)
