"""LoRA in the engine: against PEFT, in every layout, merged, saved and resumed. Real ranks; a tiny Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from bridge.export.merge import merge_into, squared_error
from engine.config import DELTA_NET_TARGETS, LATENT_TARGETS, TARGET_OF
from engine.model.lora_linears import GroupedProduct, product
from tests.support.ranks import run_ranks
from tests.support.tiny_models import publish, write_tiny_model

LORA = {"rank": 4, "alpha": 8.0}
FAST = {"learning_rate": 1e-2}
PAIRS: list[dict[str, Any]] = [
    {"wrap": "ddp"},
    {"wrap": "megatron_fsdp"},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"tensor": 2, "sequence": True, "wrap": "megatron_fsdp"},
    {"pipeline": 2},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(write_tiny_model(root / "qwen3", "qwen3", True))


@pytest.fixture(scope="module")
def shallow(root: Path) -> str:
    """For long runs of many cases: a layer for each of two stages."""
    return str(write_tiny_model(root / "shallow", "qwen3", True, num_hidden_layers=2))


@pytest.fixture(scope="module")
def shared(root: Path, model: str) -> str:
    """A PEFT folder in which fused linears have one A."""
    from tests.engine.model.lora_cases import write_peft_adapter

    return str(write_peft_adapter(root / "shared", model, shared=True))


@pytest.fixture(scope="module")
def apart(root: Path, model: str) -> str:
    """A PEFT folder as PEFT trains it, on some linears."""
    from tests.engine.model.lora_cases import write_peft_adapter

    return str(write_peft_adapter(root / "apart", model, shared=False, modules=("q_proj", "v_proj", "down_proj")))


@pytest.fixture(scope="module")
def gemma(root: Path) -> tuple[str, str]:
    """A model with norms after its linears, and a PEFT folder for it."""
    from tests.engine.model.lora_cases import write_peft_adapter

    path = str(write_tiny_model(root / "gemma", "gemma3_text", True, num_hidden_layers=2))
    return path, str(write_peft_adapter(root / "gemma_shared", path, shared=True))


@pytest.fixture(scope="module")
def within(root: Path) -> list[tuple[str, str]]:
    """Folders with vision layers, which have linears of the same names, and PEFT folders for them as transformers loads them."""
    from tests.engine.model.lora_cases import write_peft_adapter

    found = []
    for family in ("gemma3", "qwen2_5_vl", "qwen3_vl"):
        path = str(publish(write_tiny_model(root / family, family, True, num_hidden_layers=2)))
        modules = r".*\.language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
        found.append((path, str(write_peft_adapter(root / f"{family}_shared", path, shared=True, modules=modules))))
    return found


@pytest.fixture(scope="module")
def latent(root: Path) -> tuple[str, dict[str, Any]]:
    """A model with multi-latent attention, and adapters beside all of its linears."""
    from tests.engine.model.lora_cases import write_peft_adapter

    path = str(write_tiny_model(root / "latent", "deepseek_v3", num_hidden_layers=2))
    modules = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    adapter = str(write_peft_adapter(root / "latent_adapter", path, shared=False, modules=modules))
    return path, {**LORA, "targets": LATENT_TARGETS, "adapter_path": adapter}


# ------------------------------------------------------------------------------------------------------ against PEFT


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_log_probs_equal_peft(
    root: Path,
    model: str,
    shared: str,
    apart: str,
    gemma: tuple[str, str],
    within: list[tuple[str, str]],
    latent: tuple[str, dict[str, Any]],
    num_ranks: int,
) -> None:
    """fp32, to 1e-5; and the adapter written again is the one that was read."""
    layouts = PAIRS if num_ranks == 2 else PAIRS[:2]
    cases = [{"path": model, "lora": {**LORA, "adapter_path": shared}, **layout} for layout in layouts]
    stacked = {"rank": 8, "alpha": 16.0, "adapter_path": apart}  # q and v keep an A of their own
    cases.append({"path": model, "lora": stacked, **(layouts[2] if num_ranks == 2 else {})})
    cases += [{"path": gemma[0], "lora": {**LORA, "adapter_path": gemma[1]}, **layouts[1]}] if num_ranks == 1 else []
    alone = [{"path": path, "lora": {**LORA, "adapter_path": adapter}} for path, adapter in within]
    cases += alone if num_ranks == 1 else []
    cases += [{"path": latent[0], "lora": latent[1], **layout} for layout in (layouts[0], layouts[-2])]
    arguments = {"cases": cases, "folder": str(root / f"again_{num_ranks}")}
    for case, result in zip(cases, run_ranks(num_ranks, "tests.engine.model.lora_cases:against_peft", arguments)[0], strict=True):
        print(case, result)
        assert result["on"] < 1e-5
        assert result["again"] < 1e-5
        assert result["effect"] > 0.1


def test_experts_equal_peft(root: Path) -> None:
    """Log-probs, loss and each gradient to 1e-5 in fp32; merged bit for bit; the adapter written is the one read.

    Also of shared experts and of layers without experts, and with one of the two parameters adapted.
    """
    from tests.engine.model.lora_cases import write_peft_adapter

    experts, cases = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), []
    shared = tuple(f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))
    biased = [name.replace("shared_expert", "shared_experts") for name in shared]
    biased += [name.replace("mlp.shared_expert", "layers.0.mlp") for name in shared]
    adapted = {"qwen3_moe": experts, "qwen2_moe": (*experts, *shared), "mixtral": experts[1:], "glm4_moe": (*experts, *biased)}
    for family, parameters in adapted.items():
        layers = 2 if family == "glm4_moe" else 1  # the first has no experts
        path = str(write_tiny_model(root / f"{family}_experts", family, num_hidden_layers=layers))
        adapter = str(write_peft_adapter(root / f"{family}_adapter", path, shared=True, parameters=parameters))
        cases.append({"path": path, "lora": {**LORA, "adapter_path": adapter}})
    cases[2]["lora"]["targets"] = ("linear_qkv", "linear_proj", "linear_fc2")
    cases.append({**cases[0], "wrap": "megatron_fsdp", "recompute": "selective"})
    arguments = {"cases": cases, "folder": str(root / "experts_again")}
    results = run_ranks(1, "tests.engine.model.expert_lora_cases:experts_against_peft", arguments)[0]
    for case, result in zip(cases, results, strict=True):
        print(case, {name: value for name, value in result.items() if isinstance(value, float)})
        assert max(result[name] for name in ("log_probs", "again", "loss", "gradients")) < 1e-5
        assert result["rewritten"] == [] and result["unmerged"] == []
        assert any("mlp.experts.lora_A" in name for name in result["compared"])


def test_every_layout_trains_alike(shallow: str, latent: tuple[str, dict[str, Any]]) -> None:
    """Loss and gradient norm equal to 1e-5; the KL is to the model with its adapters off."""
    common = {"path": shallow, "lora": LORA, "name": "grpo", "num_minibatches": 2, "optimizer": FAST, "kl_coefficient": 0.1}
    of_latent = {**common, "path": latent[0], "lora": latent[1]}
    one = [{**common, **layout} for layout in ({}, {"wrap": "megatron_fsdp", "recompute": "full"})] + [of_latent]
    two = [{**common, **layout} for layout in PAIRS]
    two.append({**two[3], "recompute": "full", "recompute_inputs": "host"})
    two += [{**of_latent, **layout} for layout in PAIRS[3:5]]
    results = run_ranks(1, "tests.engine.engine_cases:losses", {"cases": one, "num_steps": 2})[0]
    results += run_ranks(2, "tests.engine.engine_cases:losses", {"cases": two, "num_steps": 2})[0]
    references = {shallow: results[0], latent[0]: results[2]}
    for reference in references.values():
        assert abs(reference[-1][1] - reference[0][1]) > 0.01
    for case, result in zip([*one, *two], results, strict=True):
        for (loss, norm), (loss_there, norm_there) in zip(result, references[case["path"]], strict=True):
            assert abs(loss - loss_there) < 1e-5, case
            assert abs(norm - norm_there) < 1e-5 * max(1.0, norm_there), case


# ------------------------------------------------------------------------------------------------------------- merged


def test_export_equals_the_merge_of_peft(root: Path, model: str) -> None:
    for number, (num_ranks, layout) in enumerate([(1, {}), (2, PAIRS[4]), (2, PAIRS[5])]):
        case = {"name": "sft", "lora": LORA, "optimizer": FAST, **layout}
        arguments = {"path": model, "folder": str(root / f"trained_{number}"), "case": case}
        ranks = run_ranks(num_ranks, "tests.engine.model.lora_cases:merged_export", arguments)
        disk = load_file(Path(model) / "model.safetensors")
        assert sorted(name for rank in ranks if rank["sender"] for name in rank["names"]) == sorted(disk)
        for rank in ranks:
            assert rank["in_order"] and rank["copied"]
            assert rank["worst"] < 1e-6
            assert not [name for name in rank["unmoved"] if "proj" in name]
            assert all("proj" in name or name in rank["unmoved"] for name in rank["names"] if rank["sender"])
            assert rank["merge_error"] < 1e-3


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("qwen2_moe", ("linear_qkv", "linear_proj"), marks=pytest.mark.long),
        ("qwen2_moe", ("linear_fc1", "linear_fc2")),
        ("deepseek_v3", LATENT_TARGETS),
        ("glm4_moe_lite", (*LATENT_TARGETS, "linear_fc1", "linear_fc2")),
        pytest.param("gpt_oss", ("linear_qkv", "linear_proj"), marks=pytest.mark.long),
        ("qwen3_5_moe_text", (*DELTA_NET_TARGETS, "linear_qkv", "linear_fc1")),
        pytest.param("qwen3_next", (*DELTA_NET_TARGETS, "linear_qkv", "linear_proj"), marks=pytest.mark.long),
    ],
)
def test_a_mixture_of_experts_is_merged_as_by_peft(root: Path, family: str, targets: tuple[str, ...]) -> None:
    path = str(write_tiny_model(root / family, family))
    case = {"name": "sft", "lora": {**LORA, "targets": targets}, "optimizer": FAST, "tensor": 2, "sequence": True}
    arguments = {"path": path, "folder": str(root / "trained_experts"), "case": case}
    rank = run_ranks(2, "tests.engine.model.lora_cases:merged_export", arguments)[0]
    assert rank["in_order"] and rank["copied"]
    assert rank["worst"] < 1e-6
    linears = {name: name.removesuffix(".weight").rpartition(".")[2] for name in rank["names"]}
    adapted = [name for name, linear in linears.items() if TARGET_OF.get(linear) in targets]
    assert sorted(rank["names"]) == sorted([*adapted, *rank["unmoved"]])


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_repeated_merged_exports_drift_by_no_bit(root: Path, times: int) -> None:
    from tests.engine.model.lora_cases import write_peft_adapter

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    small = str(write_tiny_model(root / f"small_{times}", "qwen3", False, dtype=torch.bfloat16, **sizes))
    adapter = str(write_peft_adapter(root / f"small_adapter_{times}", small, shared=True))
    lora = {**LORA, "adapter_path": adapter}
    cases = [{"path": small, "lora": lora, "wrap": wrap, "dtype": "bfloat16"} for wrap in ("megatron_fsdp", "ddp")]
    for result in run_ranks(1, "tests.engine.model.lora_cases:repeated_exports", {"cases": cases, "times": times})[0]:
        assert result == {"changed": [], "drifted": [], "num_tensors": result["num_tensors"]}
        assert result["num_tensors"] == 14


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_merge_rounds_once_and_leaves_the_base_alone(rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, columns), (rank, columns), (rows, rank))
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    before = weight.clone()
    merged = merge_into(torch.empty_like(weight), weight, a, b, 0.25)
    assert torch.equal(weight, before)
    exact = weight.double() + 0.25 * (b.double() @ a.double())
    unit = torch.finfo(dtype).eps
    assert bool(((merged.double() - exact).abs() <= unit * exact.abs() + 1e-5).all())
    lost, moved = squared_error(merged, weight, a, b, 0.25).tolist()
    if rows <= 64:
        assert lost == pytest.approx(float((merged.double() - exact).square().sum()), rel=1e-2, abs=1e-9)
        assert moved == pytest.approx(float((0.25 * (b.double() @ a.double())).square().sum()), rel=1e-4)


def test_merge_error_tells_that_bfloat16_swallows_the_update() -> None:
    weight, a = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
    for size, expected in ((1e-4, 1.0), (0.5, 0.0)):
        b = torch.full((64, 1), size, dtype=torch.bfloat16)
        merged = merge_into(torch.empty_like(weight), weight, a, b, 1.0)
        lost, moved = squared_error(merged, weight, a, b, 1.0).tolist()
        assert (lost / moved) ** 0.5 == pytest.approx(expected, abs=1e-2)


# ----------------------------------------------------------------------------------------------------- saved, resumed


RESUMED = [("float32", PAIRS[1:2] + PAIRS[3:]), ("bfloat16", PAIRS[:2])]
MORE_RESUMED = [("float32", PAIRS[:1] + PAIRS[2:3]), ("bfloat16", [layout for layout in PAIRS[2:] if "tensor" not in layout])]


@pytest.mark.parametrize(
    ("dtype", "layouts"), [*RESUMED, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_RESUMED)]
)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, shallow: str, dtype: str, layouts: list[dict[str, Any]]
) -> None:
    """Bit for bit, dropout too; a checkpoint holds the adapter once and no base weights."""
    cases = [{**layout, "dtype": dtype, "lora": {**LORA, "dropout": 0.1}, "optimizer": FAST} for layout in layouts]
    arguments = {"path": shallow, "root": str(tmp_path), "cases": cases, "steps": 4, "stop": 2}
    for case, result in zip(cases, run_ranks(2, "tests.engine.model.lora_cases:resumed", arguments)[0], strict=True):
        assert result["rest"] == result["whole"][2:], case
        assert result["end"] == 0
        assert result["files"] == [
            "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "index.json",
            "random_00000.pt", "random_00001.pt", "rank_00000-000.safetensors", "rank_00001-000.safetensors",
        ]  # fmt: skip
        assert result["adapter_bytes"] < 0.1 * (Path(shallow) / "model.safetensors").stat().st_size


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trained_state_is_that_of_the_adapters(model: str, num_ranks: int) -> None:
    cases = [{"path": model, "lora": LORA, "wrap": wrap, "dtype": "bfloat16"} for wrap in ("ddp", "megatron_fsdp")]
    for rank in run_ranks(num_ranks, "tests.engine.model.lora_cases:trained_state", {"cases": cases}):
        for case, counts in zip(cases, rank, strict=True):
            trained = counts["trained"]
            assert trained == 4 * 4 * ((128 + 256) + (128 + 128) + (128 + 512) + (256 + 128)), "4 layers of rank 4"
            assert counts["frozen"] > 20 * trained
            assert counts["main"] == trained / num_ranks
            assert counts["state"] == 2 * trained / num_ranks
            assert counts["gradients"] == (trained if case["wrap"] == "ddp" else trained / num_ranks)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_fused_rows_are_split_without_loss(groups: int, queries: int, head_size: int, tensor_size: int) -> None:
    from engine.peft.factors import Heads, split_rows

    of_delta = tuple(size * tensor_size for size in (2, 2, 6, 6, 3, 3))
    for linear, rows, sizes, key_heads in (
        ("a.linear_qkv", groups * (queries + 2) * head_size, (), 0),
        ("a.linear_qkv", groups * (2 * queries + 2) * head_size, of_delta, 0),
        ("a.in_proj", sum(of_delta), of_delta, 0),
        ("a.in_proj", sum(of_delta), of_delta, tensor_size),
        ("a.linear_fc1", 2 * tensor_size * head_size, (), 0),
        ("a.linear_fc2", head_size, (), 0),
    ):
        heads = Heads(groups * queries, groups, sizes, key_heads)
        numbers = torch.arange(rows)[:, None].expand(rows, 3).contiguous()
        parts = [part.reshape(-1, 3) for part in split_rows(linear, numbers, heads, tensor_size)]
        assert sorted(torch.cat(parts)[:, 0].tolist()) == list(range(rows))


# ------------------------------------------------------------------------------------------------------------ refused


def changed(folder: str, to: Path, *, fields: dict[str, Any] | None = None, drop: str = "", reshape: bool = False) -> str:
    """A copy of an adapter folder with something else in it."""
    to.mkdir()
    config = json.loads((Path(folder) / "adapter_config.json").read_text()) | (fields or {})
    (to / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not drop or drop not in name}
    if reshape:
        tensors = {name: t[:, :-1].contiguous() if "lora_A" in name else t for name, t in tensors.items()}
    save_file(tensors, to / "adapter_model.safetensors")
    return str(to)


def test_what_does_not_fit_is_refused(root: Path, model: str, shared: str, apart: str) -> None:
    cases = {
        "engine.lora.rank=129 is larger than a dimension of decoder.layers.0.self_attention.linear_proj (128)": {"rank": 129},
        "has rank 4; write engine.lora.rank=4": {"rank": 5, "adapter_path": shared},
        "write engine.lora.alpha=8": {"alpha": 16.0, "adapter_path": shared},
        "write engine.lora.rank=8 engine.lora.alpha=16": {"adapter_path": apart},
        "holds no adapter_config.json": {"adapter_path": model},
        "needs linear_fc2 in engine.lora.targets": {"targets": ("linear_qkv",), "adapter_path": apart},
        "another base model, elsewhere/other": {
            "adapter_path": changed(shared, root / "base", fields={"base_model_name_or_path": "elsewhere/other"})
        },
        "use_dora = True is not supported": {"adapter_path": changed(shared, root / "dora", fields={"use_dora": True})},
        "has only lora_A": {"adapter_path": changed(shared, root / "half", drop="layers.2.mlp.down_proj.lora_B")},
        "has A [4, 255] and B [128, 4], [4, 256]": {"adapter_path": changed(shared, root / "narrow", reshape=True)},
    }
    arguments = {"path": model, "cases": [{**LORA, **case} for case in cases.values()]}
    for words, message in zip(cases, run_ranks(1, "tests.engine.model.lora_cases:refusals", arguments)[0], strict=True):
        assert words in message, (words, message)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("size", "rank"), [(64, 4), (4, 64), (4, 192)])
def test_a_kept_adapter_multiplies_as_a_trained_one(batch: int, size: int, rank: int) -> None:
    inputs, factor = torch.randn(batch, 61, size).transpose(0, 1), torch.randn(rank, size)
    kept, trained = product(inputs, factor), product(inputs.detach().requires_grad_(), factor.clone().requires_grad_())
    assert kept.shape == (61, batch, rank) and torch.equal(kept, trained.detach())


@given(
    counts=st.lists(st.sampled_from([16, 48, 128]), min_size=1, max_size=5),
    sizes=st.tuples(*[st.sampled_from([8, 24, 64])] * 2),
    is_scaled=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_one_product_of_all_blocks_is_that_of_each(counts: list[int], sizes: tuple[int, int], is_scaled: bool) -> None:
    """With gradients."""
    generator, (num_in, num_out) = torch.Generator().manual_seed(0), sizes
    inputs = torch.randn(sum(counts), 1, num_in, generator=generator, requires_grad=True)
    factors = [torch.randn(num_out, num_in, generator=generator, requires_grad=True) for _ in counts]
    scales = [1.0 + number / 3 for number in range(len(counts))]
    wanted = [
        product(part, factor) * (scale if is_scaled else 1.0)
        for part, factor, scale in zip(inputs.split(counts), factors, scales, strict=True)
    ]
    found = GroupedProduct.of(counts, scales, inputs.device).product(inputs, factors, is_scaled=is_scaled)
    weights = torch.randn(found.shape, generator=generator)
    leaves = [inputs, *factors]
    for one, other in zip(
        [found, *torch.autograd.grad((found * weights).sum(), leaves)],
        [torch.cat(wanted), *torch.autograd.grad((torch.cat(wanted) * weights).sum(), leaves)],
        strict=True,
    ):
        torch.testing.assert_close(one, other)
