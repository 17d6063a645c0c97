"""LoRA in the benches: an engine with adapters, a vLLM that serves them, and both methods to bring them there.

Leaves out what is measured (sync/, generation/).
"""

from __future__ import annotations

from engine.config import LoraConfig
from engine.model.lora import adapted_linears
from megasync.bench.common.rank import BenchRank
from megasync.run.weights import build_adapter_source, build_exporter, uses_ipc


class LoraSide:
    """Adapters of rank `bench.lora_rank` on all linears.

    `merged` and `adapter` are the two weight sources; `pool` and `publisher` are for the adapter alone.
    """

    def __init__(self, bench: BenchRank) -> None:
        rank = bench.config.bench.lora_rank
        lora = LoraConfig(rank=rank, alpha=2.0 * rank)
        self.engine = bench.build_engine(bench.config.engine.model_copy(update={"lora": lora}))
        self.merged = build_exporter(self.engine, on_all_ranks=uses_ipc(bench.config))
        self.adapter = build_adapter_source(self.engine)
        self.pool = bench.start_pool(adapter_rank=rank)
        self.publisher = bench.publisher(self.adapter, self.pool)
        stage_bytes = sum(  # of what is trained: an A and a B for each linear, over all tensor-parallel ranks
            rank * (linear.input_size + linear.output_size) * linear.lora_a.element_size()
            for _, linear in adapted_linears(self.engine.chunks)
        )
        self.adapter_bytes = sum(bench.from_all(stage_bytes if self.adapter.is_sender else 0))
