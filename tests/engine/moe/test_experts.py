"""Mixtures of experts: grouped products against one expert after another, and experts over ranks against all on one.

Against transformers, with resuming and offloading, in test_engine.py; on their way to vLLM in test_sync_trainer.py.

    python -m pytest tests/engine/moe/test_experts.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3MoeConfig

from engine.moe import experts
from engine.config import ModelConfig, ParallelConfig
from tests.engine.engine_cases import GATHER_BYTES
from tests.support.squares import COLOURS, squares
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model
from tests.runs.train_cases import metrics, train, write_config

STRATEGY = "data_parallel_sharding_strategy"
ADAPTED: dict[str, Any] = {"lora": "as a test has it"}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        *({"wrap": wrap, "expert": 2, **ADAPTED} for wrap in ("ddp", "megatron_fsdp")),
        {"wrap": "ddp", "expert": 2},
        {"wrap": "ddp", "expert": 2, "fusions": "all", "recompute": "full"},
        {"wrap": "megatron_fsdp", "expert": 2, "recompute": "selective"},
        {"wrap": "megatron_fsdp", "expert": 2},
        *({"wrap": "megatron_fsdp", "expert": 2, "overrides": {STRATEGY: value}} for value in ("optim", "optim_grads")),
    ],
    4: [
        {"wrap": "ddp", "expert": 2, "tensor": 2, "sequence": True, **ADAPTED},
        {"wrap": "megatron_fsdp", "expert": 2, "pipeline": 2},
        {"wrap": "ddp", "expert": 2, "tensor": 2, "sequence": True},
    ],
}
MORE: list[dict[str, Any]] = [  # on four ranks
    {"wrap": "ddp", "expert": 2, "overrides": {"overlap_param_gather": True}},
    {"wrap": "ddp", "expert": 4},
    {"wrap": "megatron_fsdp", "expert": 2},
    {"wrap": "megatron_fsdp", "expert": 2, "tensor": 2, "sequence": True, **ADAPTED},
    {"wrap": "ddp", "expert": 2},
    {"wrap": "ddp", "expert": 2, "pipeline": 2},
    {"wrap": "megatron_fsdp", "expert": 2, "tensor": 2, "sequence": True},
]
RANKS = pytest.mark.parametrize(
    ("num_ranks", "layouts"), [(2, LAYOUTS[2]), (4, LAYOUTS[4]), pytest.param(4, MORE, marks=pytest.mark.long)]
)
COUNTS = ([3, 0, 5, 1], [0, 0, 0, 7], [0, 0, 0, 0], [9])
NUM_SAMPLES = 24
EXPERT_BYTES = 4 * 2 * 64 * 128  # of the larger parameter of an expert
LAYER_BYTES = 8 * EXPERT_BYTES // 2 * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """More experts than are chosen: some get no token in a micro-batch. Two ranks pad the vocabulary."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 131}
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **sizes))


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", "float32", 1e-6),
        ("cpu", "bfloat16", 1e-6),
        pytest.param("cuda", "bfloat16", 2e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", "float32", 1e-2, marks=pytest.mark.gpu),
    ],
)
def test_grouped_experts_equal_sequential_ones(device: str, dtype: str, bound: float) -> None:
    for counts in COUNTS:
        arguments = {"device": device, "dtype": dtype, "tokens_per_expert": counts}
        (found,) = run_ranks(1, "tests.engine.moe.expert_cases:against_sequential", arguments)
        print(counts, found)
        assert found.pop("empty") == 0.0, "experts without tokens have a gradient, of zeros"
        assert max(found.values()) <= bound


@pytest.mark.parametrize(
    ("family", "layout", "words"),
    [
        ({}, {"tensor": 2}, "sequence=true"),
        ({"num_experts": 6}, {"expert": 4}, "expert = 4: does not divide the model's num_experts = 6"),
        ({"moe_intermediate_size": 12}, {}, "moe_intermediate_size = 12: experts' rows have 24 bytes .*multiples of 16"),
        ({"moe_intermediate_size": 24}, {"tensor": 2, "sequence": True}, "have 24"),
    ],
)
def test_layouts_that_do_not_go_with_experts_are_refused(family: dict[str, int], layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experts.check(Qwen3MoeConfig(**family), ModelConfig(), ParallelConfig(**layout))


def test_layouts_of_dense_models() -> None:
    experts.check(Qwen3Config(), ModelConfig(), ParallelConfig(tensor=2))
    with pytest.raises(ValueError, match=r"has no experts; write engine\.parallel\.expert=1"):
        experts.check(Qwen3Config(), ModelConfig(), ParallelConfig(expert=2))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_tokens_come_back_as_the_sum_of_their_copies(num_tokens: int, num_experts: int, chosen: int, seed: int) -> None:
    """Copies are sorted by expert, then by token; the two permutations are each other's transposes."""
    chosen = min(chosen, num_experts)
    generator = torch.Generator().manual_seed(seed)
    of_tokens = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :chosen].sort().values
    permutation = experts.Permutation.sort(of_tokens)
    chosen_rows = zip(permutation.choices, permutation.rows, strict=True)
    pairs = [(int(of_tokens.flatten()[choice]), int(row)) for choice, row in chosen_rows]
    assert pairs == sorted((int(expert), row) for row, those in enumerate(of_tokens) for expert in those)
    tokens = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64).requires_grad_()
    copies = experts.permute(tokens, permutation)
    assert torch.equal(copies, tokens[permutation.rows])
    torch.testing.assert_close(experts.unpermute(copies, permutation), chosen * tokens)
    upstream = torch.randn(copies.shape, generator=generator, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(copies, tokens, upstream, retain_graph=True)
    assert torch.equal(gradient, experts.unpermute(upstream, permutation))
    (back,) = torch.autograd.grad(experts.unpermute(upstream, permutation), upstream, tokens)
    assert torch.equal(back, copies)


def gradients(num_ranks: int, model: str, folder: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all micro-batches of a step; the first call's are written, those of the others compared with them."""
    each = [{"tokens": 60, **case} for case in cases]
    arguments = {"path": model, "folder": str(folder), "cases": each, "num_samples": NUM_SAMPLES}
    ranks = run_ranks(num_ranks, "tests.engine.moe.expert_cases:gradients_against_folder", arguments, alone=num_ranks == 4)
    return [_merged([rank[number] for rank in ranks]) for number in range(len(cases))]


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {**ranks[0], "worst": {name: worst for rank in ranks for name, worst in rank["worst"].items()}}


def test_selective_recompute_keeps_routers_and_shared_experts(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, "qwen2_moe", num_hidden_layers=1))
    plain = {"path": path, "name": "grpo", "load_balancing": 0.1, "tokens": 60}
    chosen = [{"recompute": "selective"}, {"recompute": "selective", "recompute_modules": ("layernorm", "moe")}]
    cases = [plain, *({**plain, **each} for each in chosen)]
    first, *others = run_ranks(1, "tests.engine.engine_cases:losses", {"cases": cases, "num_steps": 2})[0]
    for history in others:
        assert history == [pytest.approx(step, rel=1e-5, abs=1e-5) for step in first]


@RANKS
def test_gradients_of_experts_over_ranks_are_those_of_one_rank(
    model: str, tmp_path: Path, num_ranks: int, layouts: list[dict[str, Any]]
) -> None:
    """Each tensor's, unclipped, over several micro-batches, and the norm; also with as many expert- as data-parallel ranks.

    With adapters, also of the experts, what a step adds to each merged tensor.
    """
    from tests.engine.model.lora_cases import write_peft_adapter

    parameters = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    adapter = write_peft_adapter(tmp_path / "adapter", model, shared=True, parameters=parameters)
    lora = {"rank": 4, "alpha": 8.0, "adapter_path": str(adapter)}
    plain, with_lora = gradients(1, model, tmp_path, {"tokens": 1000}, {"tokens": 1000, "lora": lora})
    layouts = [{**layout, "lora": lora} if "lora" in layout else layout for layout in layouts]
    for layout, found in zip(layouts, gradients(num_ranks, model, tmp_path, *layouts), strict=True):
        alone, bound = (with_lora, 1e-5) if "lora" in layout else (plain, 1e-6)
        print(layout, found["num_microbatches"], found["norm"], max(found["worst"].values()))
        assert found["num_microbatches"] >= 3
        assert found["num_local_experts"] == 8 // layout.get("expert", 1)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert max(found["worst"].values()) < bound
        for mine, other in zip(found["log_probs"], alone["log_probs"], strict=True):
            assert mine == pytest.approx(other, abs=1e-4), "after the step, by another layout"


def test_clipped_training_with_experts_over_ranks_is_that_of_one_rank(model: str) -> None:
    """GRPO with a KL term, two optimizer steps a batch, gradients far above the norm that they are clipped to."""
    grpo = {"name": "grpo", "num_minibatches": 2, "kl_coefficient": 0.1, "optimizer": {"clip_grad_norm": 0.05}}
    common = {"path": model, "tokens": 60, **grpo}
    cases = [{**common, "wrap": wrap, "expert": 2} for wrap in ("ddp", "megatron_fsdp")]
    target = "tests.engine.engine_cases:losses"
    (alone,) = run_ranks(1, target, {"cases": [common], "num_steps": 3})[0]
    assert min(norm for _, norm in alone) > 0.1
    for case, history in zip(cases, run_ranks(2, target, {"cases": cases, "num_steps": 3})[0], strict=True):
        print(case, history)
        for mine, other in zip(history, alone, strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


@RANKS
def test_export_of_experts_over_ranks_equals_the_folder_bit_for_bit(
    model: str, num_ranks: int, layouts: list[dict[str, Any]]
) -> None:
    """Before a step the file's, after it mbridge's conversions; no rank gathers more than a bound, or than one expert a rank."""
    cases = [{"path": model, **layout} for layout in layouts if not {"recompute", "lora"} & layout.keys()]
    ranks = run_ranks(num_ranks, "tests.engine.engine_cases:export_differences", {"cases": cases}, alone=num_ranks == 4)
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        senders = [result for result in results if result["sender"]]
        assert sorted(name for result in senders for name in result["names"]) == results[0]["disk"]
        assert len(senders) == case.get("pipeline", 1)
        for result in results:
            gathered = [size for name, size in result["scratch_bytes"].items() if name.startswith("gathered experts")]
            assert max(gathered, default=0) <= max(GATHER_BYTES, EXPERT_BYTES * case["expert"]) < LAYER_BYTES
            assert result["differing"] == [] and result["specs_match"] and result["copied"]
            assert result["sender"] or not result["names"]
            assert not result["sender"] or result["moved"] == len(result["names"]), "training moved every tensor"


@COLOURS
def test_a_run_with_experts_over_ranks_resumes_bit_for_bit(model: str, tmp_path: Path, is_black: bool) -> None:
    pairs = squares(("ddp", "megatron_fsdp"), ("bfloat16", "float32"), is_black=is_black)
    cases = [{"wrap": wrap, "expert": 2, "dtype": dtype} for wrap, dtype in pairs]
    arguments = {"path": model, "root": str(tmp_path), "cases": cases, "steps": 4, "stop": 2}
    for case, result in zip(cases, run_ranks(2, "tests.engine.engine_cases:resumed_losses", arguments)[0], strict=True):
        print(case)
        assert result["resumed"] == result["whole"]
        assert case["dtype"] == "bfloat16" or result["worst"] < 1e-4


def test_offload_with_experts_over_ranks_changes_nothing(model: str) -> None:
    cases = [{"path": model, "wrap": wrap, "expert": 2, "dtype": "bfloat16"} for wrap in ("ddp", "megatron_fsdp")]
    for case, result in zip(cases, run_ranks(2, "tests.engine.engine_cases:offloaded_losses", {"cases": cases})[0], strict=True):
        print(case, result)
        assert result["same"] and result["left"] == 0 and result["freed"] > 0


def test_every_rank_exports_all_experts_where_it_has_a_worker(model: str) -> None:
    cases = [{"expert": 2, "wrap": wrap} for wrap in ("ddp", "megatron_fsdp")]
    for rank in run_ranks(2, "tests.engine.moe.expert_cases:exports_everywhere", {"path": model, "cases": cases}):
        assert rank == [[], []]


def test_the_bench_compares_with_an_export_of_the_same_experts(model: str) -> None:
    cases: list[dict[str, Any]] = [{}, {"expert": 2}, {"tensor": 2, "sequence": True}]
    for rank in run_ranks(2, "tests.engine.moe.expert_cases:mbridge_exports", {"path": model, "cases": cases}):
        assert rank == [[], [], []]


def test_a_whole_run_with_experts_over_ranks_goes_on_in_another_layout(model: str, tmp_path: Path) -> None:
    """By the program that users start; the checkpoint is a whole model."""
    engine = {"wrap": "megatron_fsdp", "parallel": {"expert": 2}}
    sections = {"model": {"path": model, "dtype": "float32"}, "algorithm": {"name": "sft", "num_minibatches": 1}}
    config = write_config(tmp_path, engine=engine, checkpoint={"every_steps": 2}, **sections)
    code, said = train(config, "run.steps=2")
    assert code == 0, said
    saved = tmp_path / "runs" / "run" / "checkpoints" / "step_00000002" / "hf" / "model.safetensors"
    disk = load_file(Path(model) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in load_file(saved).items()} == {name: disk[name].shape for name in disk}
    code, said = train(config, "run.steps=3", "engine.parallel.expert=1", "checkpoint.asynchronous=true")
    assert code == 0, said
    assert "resumed with another layout (expert 2 -> 1)" in said
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_00000003" / "index.json").is_file()
    assert [line["step"] for line in metrics(tmp_path / "runs" / "run")] == [1, 2, 3]


@pytest.mark.gpu(2)
def test_experts_over_gpus_train_as_on_one(model: str) -> None:
    """bf16, the losses of 6 steps of several micro-batches; over one GPU, and over two with NCCL.

    Also of adapters, and of sequences that two ranks share.
    """
    target, common = "tests.engine.engine_cases:losses", {"path": model, "name": "sft", "tokens": 120, "dtype": "bfloat16"}
    lora = {"lora": {"rank": 8, "alpha": 16.0}, "optimizer": {"learning_rate": 1e-2}}
    plain, adapted = run_ranks(1, target, {"cases": [common, {**common, **lora}], "num_steps": 6})[0]
    layouts: list[dict[str, Any]] = [{"expert": 2}, {"expert": 2, **lora}, {"expert": 2, "context": 2}]
    cases = [{**common, "wrap": wrap, **layout} for wrap in ("ddp", "megatron_fsdp") for layout in layouts]
    for case, history in zip(cases, run_ranks(2, target, {"cases": cases, "num_steps": 6})[0], strict=True):
        print(case, history)
        for (loss, norm), (expected_loss, expected_norm) in zip(history, adapted if "lora" in case else plain, strict=True):
            assert loss == pytest.approx(expected_loss, rel=5e-3)
            assert norm == pytest.approx(expected_norm, rel=5e-2)
