"""What modules should give is what they give, in every family; which response and weights are taken; what is said.

With faults and replicas: tests/runs/test_bisect.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bridge.versions.writer import VersionWriter
from megasync import bisect
from megasync.comparing import formulas
from megasync.comparing import reference as ref
from megasync.comparing.compare import fits, spread
from megasync.comparing.judge import local_error, systematic
from megasync.comparing.response import Response, check_length, generated, recorded
from megasync.comparing.shape import Parameters, Shape
from megasync.comparing.weights import choose
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.data.prompts import Prompts
from megasync.serving.source import find_source
from tests.support.config_files import write_runnable
from tests.support.ranks import run_ranks
from tests.support.tiny_models import LLAMA3, YARN, write_tiny_model

FAMILIES = {
    "qwen3": ("qwen3", "float32", {}),
    "qwen3 bf16": ("qwen3", "bfloat16", {}),
    "qwen2 biases": ("qwen2", "float32", {}),
    "llama scaled": ("llama", "float32", {"rope_parameters": LLAMA3, "tied": True}),
    "llama yarn": ("llama", "float32", {"rope_parameters": YARN}),
    "mistral window": ("mistral", "bfloat16", {"sliding_window": 8}),
}


def test_small_faults_are_not_taken_for_rounding_of_another_dtype(tmp_path: Path) -> None:
    """Each as large as what bfloat16 rounds."""
    folder = write_tiny_model(tmp_path, "qwen2", num_attention_heads=4, num_key_value_heads=1)
    (found,) = run_ranks(1, "tests.megasync.comparing.family_cases:faults", {"folder": folder})
    layer = "model.layers.1"
    assert found["norm"] == (f"{layer}.post_attention_layernorm", "wrong scale", "times 1.01")
    assert found["product"] == (f"{layer}.mlp.down_proj", "wrong scale", "times 0.998")
    assert found["bias"][:2] == (f"{layer}.self_attn.q_proj", "one element") and "of the bias: [5] is" in found["bias"][2]
    assert found["row"][:2] == ("model.embed_tokens", "wrong weights") and "token 52 alone" in found["row"][2], found


@pytest.mark.parametrize("fusions", ["none", "all"])
def test_every_module_is_within_rounding_of_its_reference(tmp_path: Path, fusions: str) -> None:
    folders = {}
    for name, (family, dtype, fields) in FAMILIES.items():
        folders[name] = write_tiny_model(tmp_path / name, family, dtype=getattr(torch, dtype), **fields), dtype
    (found,) = run_ranks(1, "tests.megasync.comparing.family_cases:judged", {"folders": folders, "fusions": fusions})
    assert all(each["traced"] and each["ratio"] < 0.9 for each in found.values()), found
    assert found["qwen3"]["modules"] == 4 * 17 + 5 and found["qwen2 biases"]["modules"] == 4 * 15 + 5


def test_so_it_is_by_exact_functions_and_with_other_dtypes(tmp_path: Path) -> None:
    names = {"float32": {"exact": True}, "bfloat16": {"head_dtype": "float32"}, "float16": {}}
    for dtype, options in names.items():
        folders = {dtype: (write_tiny_model(tmp_path / dtype, "qwen3", dtype=getattr(torch, dtype)), dtype)}
        arguments = {"folders": folders, "fusions": "none", **options}
        (found,) = run_ranks(1, "tests.megasync.comparing.family_cases:judged", arguments)
        assert found[dtype]["traced"] and found[dtype]["ratio"] < 0.9, found


def test_a_fault_that_is_less_than_rounding_everywhere_is_seen_over_all(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    ((site, kind, detail),) = run_ranks(1, "tests.megasync.comparing.family_cases:small_fault", {"folder": folder})
    assert (site, kind) == ("model.layers.0.input_layernorm", "wrong eps")
    assert float(detail.split()[0]) == pytest.approx(1e-5, rel=0.3)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([131, 5000, 49152, 151936]), st.floats(0.1, 4), st.floats(0, 24), st.integers(0, 2**32 - 1))
def test_log_probs_of_large_vocabularies_are_within_rounding(size: int, scale: float, peak: float, seed: int) -> None:
    """One likely token beside many unlikely ones, which float32's sum loses."""
    logits = scale * torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    logits[:, 5] += peak
    tokens = torch.full((4,), 5)
    error = (formulas.log_probs(logits, tokens, 1.0).double() - formulas.log_probs(logits.double(), tokens, 1.0)).abs()
    others = 16 * 2.0**-24 * (1 + logits.double().abs().amax(-1))
    assert (error < others + formulas.sum_of_exps_bound(logits.double())).all()
    assert float(formulas.sum_of_exps_bound(logits.double()).max()) < size * 2.0**-24 / 7


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_rows_after_a_cached_prefix_are_those_of_the_whole(num_tokens: int, window: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(num_tokens, heads, 8, generator=generator, dtype=torch.double) for heads in (4, 2, 2))
    positions = torch.arange(num_tokens)
    whole, _ = formulas.attend(query, key, value, positions, 0.3, window)
    first = seed % num_tokens
    part, _ = formulas.attend(query[first:], key, value, positions[first:], 0.3, window)
    torch.testing.assert_close(part, whole[first:])
    turned = formulas.rotate(query, positions, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.double))
    torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1))
    torch.testing.assert_close(turned[0], query[0])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_what_a_cache_had_was_rounded_in_another_pass(seed: int) -> None:
    """Keys and values of a cache differ by roundings from those of the pass that they are judged by; of other weights by more."""
    generator, layer, first, count = torch.Generator().manual_seed(seed), "model.layers.0.self_attn", 32, 40

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.double)

    sizes = {f"{layer}.rotary_emb.k": torch.ones(2, 16), f"{layer}.v_proj": 10 ** normal(2, 16)}  # of channels
    sizes[f"{layer}.v_proj"][0, :2] = torch.tensor([0.01, 10.0])
    shape = Shape(1, 4, 2, 16, 1e-6, torch.ones(8), 1.0, 1e4, windows=(0,), has_head_norms=False, is_tied=True)
    reference = ref.Reference(shape, Parameters(Path("none"), torch.bfloat16, torch.device("cpu")), 1.0)
    true = {name: size * normal(2, 16) for name, size in sizes.items()}  # of one token, said again and again
    query, positions, tokens = normal(count - first, 4, 16), torch.arange(first, count), torch.zeros(count, dtype=torch.long)

    def rounded() -> dict[str, torch.Tensor]:
        return {name: (each + 0.005 * normal(2, 16)).expand(count, -1, -1) for name, each in true.items()}

    def stale() -> dict[str, torch.Tensor]:
        return {name: (each + 0.5 * sizes[name]).expand(count, -1, -1) for name, each in true.items()}

    whole, trainer = rounded(), rounded()
    whole[f"{layer}.v_proj"] = whole[f"{layer}.v_proj"].clone()
    whole[f"{layer}.v_proj"][:, 0, 0] = trainer[f"{layer}.v_proj"][:, 0, 0]  # a channel in which the two agree by chance
    apart = {name: spread(whole[name] - trainer[name]) for name in whole}

    def ratio(
        cached: dict[str, torch.Tensor], apart: dict[str, torch.Tensor], trainer: dict[str, torch.Tensor] | None = None
    ) -> float:
        own = {name: each[first:] for name, each in whole.items()}
        keys, values = (torch.cat([cached[name][:first], own[name]]) for name in sizes)
        out, _ = formulas.attend(query, keys, values, positions, 0.25, 0)
        tensors = {**own, f"{layer}.rotary_emb.q": query, f"{layer}.attn": out.bfloat16()}
        earlier = {name: each[:first] for name, each in whole.items()}
        other = {name: each[:first] for name, each in (trainer or {}).items()}
        side = ref.Side("replica", tensors, positions, tokens, count - 1, earlier, apart, other)
        return local_error(f"{layer}.attn", reference, side).ratio

    cached = rounded()
    cached[f"{layer}.v_proj"] = cached[f"{layer}.v_proj"].clone()
    cached[f"{layer}.v_proj"][:, 0, 0] = whole[f"{layer}.v_proj"][:, 0, 0] + 0.01
    assert ratio(cached, apart) <= 1 < min(ratio(cached, {}), ratio(stale(), apart))
    assert ratio(cached, apart, trainer) <= 1, "all elements together, too"
    moved = {name: each + 0.1 * sizes[name] * (-1) ** torch.arange(16) for name, each in cached.items()}
    assert ratio(moved, apart, trainer) > 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_rows_of_one_token_are_rounded_alike(num_tokens: int, seed: int) -> None:
    """A response that says one token again and again is not a norm's fault."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.arange(256) % num_tokens
    value = torch.randn(num_tokens, 64, generator=generator, dtype=torch.double)[token_ids]
    assert systematic(value.bfloat16().double(), [value], torch.bfloat16, token_ids) <= 1
    assert systematic(value * 1.01, [value], torch.bfloat16, token_ids) > 1


@settings(deadline=None, max_examples=30)
@given(st.floats(0.99, 1.01), st.sampled_from(["at its end", "before its weights", "sum in float32"]), st.integers(0, 2**32 - 1))
def test_a_norm_that_nearly_multiplies_by_a_power_of_two_is_no_fault(rms: float, way: str, seed: int) -> None:
    """All roundings then go the same way: in a random model of 3 B parameters at the layer where the rms reaches 1."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(32, 1024, generator=generator, dtype=torch.double)
    whole *= rms / whole.square().mean(-1, keepdim=True).sqrt()
    weight = 1 + 0.1 * torch.randn(1024, generator=generator, dtype=torch.double).bfloat16().double()
    shape = Shape(1, 1, 1, 64, 1e-6, torch.ones(32), 1.0, 1e4, windows=(0,), has_head_norms=False, is_tied=True)
    tokens, parameters = torch.arange(32), cast(Parameters, {"model.norm.weight": weight})
    reference = ref.Reference(shape, parameters, 1.0)

    def ratio(eps: float) -> float:
        x = whole if way == "sum in float32" else whole.bfloat16().double()
        normed = formulas.rms_norm(x, torch.ones(1024).double(), eps)
        out = normed.bfloat16().double() * weight if way == "before its weights" else normed * weight
        tensors = {"model.norm:in": whole.bfloat16(), "model.norm": out.bfloat16()}
        side = ref.Side("replica", tensors, torch.arange(32), tokens, 31, {})
        return local_error("model.norm", reference, side).ratio

    assert ratio(1e-6) <= 1 < ratio(0.03)


@pytest.mark.parametrize(
    ("swap", "expected"),
    [
        ("mlp.act_fn", True),
        ("model.layers.3", True),
        ("model.layers.3.mlp.act_fn", True),
        ("act", False),
        ("model.layers.1", False),
    ],
)
def test_what_a_swap_fits(swap: str, expected: bool) -> None:
    assert fits("model.layers.3.mlp.act_fn", swap) == expected


# ---------------------------------------------------------------------------------------------------- which weights and response


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load_config(write_runnable(tmp_path), ["run.name=rl", "rollout.max_new_tokens=8"])
    save_config(config, config.run.folder / "config.yaml")
    return config.run.folder


def test_a_recorded_response_is_that_of_the_step_with_its_own_tokens(run: Path, tmp_path: Path) -> None:
    prompts = Prompts(str(tmp_path / "model"), load_config(run / "config.yaml").data)
    assert recorded(run, prompts, 3, None) is None
    text = "12+3"
    ids = prompts.tokenizer.encode(text, add_special_tokens=False)
    line = {"set": "train", "line": 7, "prompt": "1+1=", "response": text, "tokens": len(ids)}
    known = {
        "token_texts": prompts.token_texts(ids),
        "rollout_log_probs": [-0.5] * len(ids),
        "trainer_log_probs": [-0.4] * len(ids),
    }
    lines = [{"step": step, "versions": [step - 1] * 2, **line, **known} for step in (3, 4, 4)]
    lines[2]["token_texts"] = ["other"]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = recorded(run, prompts, 3, None)
    assert found is not None and found.token_ids == tuple(ids) and found.rollout == [-0.5] * len(ids)
    assert prompts.tokenizer.decode(list(found.prompt_ids)) == "1+1=" and "line 7 of step 4" in found.told
    newest = recorded(run, prompts, 9, None)
    assert newest is not None and newest.rollout is None, "of other weights"
    with pytest.raises(ConfigError, match=r"--prompt 5: .*\n.*0 to 1"):
        recorded(run, prompts, 3, 5)


def test_without_a_checkpoint_the_model_is_that_of_the_start(run: Path, tmp_path: Path) -> None:
    chosen = choose(run, tmp_path, None, [])
    assert chosen.base == tmp_path / "model" and chosen.step == 0 and "starts from" in chosen.name
    write_tiny_model(run / "checkpoints/step_00000004/hf", "qwen3")
    write_tiny_model(run / "checkpoints/step_00000002/hf", "qwen3", seed=1)
    newest = choose(run, tmp_path, None, [])
    assert newest.base == run / "checkpoints/step_00000004/hf" == Path(newest.served.model.path)
    assert newest.config.model.path == str(newest.base), "also where the run's model is elsewhere by now"
    assert newest.formers == {"step 2": run / "checkpoints/step_00000002/hf"}
    assert choose(run, tmp_path, 0, []).base == tmp_path / "model"
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=2)
    assert choose(run, tmp_path, 0, [f"model.path={other}"]).base == other
    with pytest.raises(ConfigError, match=r"model.path = .*other: the weights are those of .*, step 4\n.*--step 0"):
        choose(run, tmp_path, None, [f"model.path={other}"])


def test_a_step_without_a_checkpoint_comes_out_of_the_log(run: Path, tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / f"v{seed}", "qwen3", seed=seed) for seed in range(3)]
    versions = [load_file(folder / "model.safetensors") for folder in folders]
    writer = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=9)
    for number, tensors in enumerate(versions):
        writer.write(number, iter(tensors.items()))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    chosen, source = choose(run, tmp_path / "a", 2, []), find_source(run, tmp_path / "b", 1, [])
    assert chosen.step == 2 and "version 2" in chosen.name
    assert Path(chosen.served.model.path) == chosen.base == Path(chosen.config.model.path)
    assert source.name.endswith("version 1")
    for folder, expected in ((chosen.base, versions[2]), (Path(source.config.model.path), versions[1])):
        own = load_file(folder / "model.safetensors")
        assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    with pytest.raises(ConfigError, match=r"model.path = .*other: the weights are those of .*, step 2\n"):  # merged
        choose(run, tmp_path / "c", 2, ["engine.lora.rank=4", f"model.path={tmp_path / 'other'}"])
    with pytest.raises(ConfigError, match=r"has no version 7; the last there are: 0, 1, 2"):
        choose(run, tmp_path / "c", 7, [])


def test_responses_fit_into_what_the_replica_takes(run: Path) -> None:
    config = load_config(run / "config.yaml", ["rollout.max_model_len=12", "rollout.max_new_tokens=4"])
    check_length(Response((1,) * 8, (2,) * 4, "line 1"), config)
    with pytest.raises(ConfigError, match=r"line 1: with its prompt 13 tokens, more than rollout.max_model_len = 12"):
        check_length(Response((1,) * 8, (2,) * 5, "line 1"), config)
    pool = MagicMock()
    completion = SimpleNamespace(token_ids=np.array([5, 6]), log_probs=np.zeros(2, np.float32))
    pool.generate.return_value.result.return_value = [[completion]]
    found = generated(pool, Prompts(config.model.path, config.data), config)
    ((request,),) = pool.generate.call_args.args
    assert found.prompt_ids == request.prompt_ids and len(request.prompt_ids) + request.max_new_tokens == 12


def test_wrong_use_starts_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "experts", "qwen3_moe")
    for arguments, told in (
        ([str(tmp_path)], "is no run"),
        ([str(run), "--step", "7"], "has no checkpoint of step 7"),
        ([str(run), f"model.path={tmp_path / 'experts'}"], "its modules are not followed one by one"),
        ([str(run), "--prompt", "3"], "has no such response"),
        ([str(run), "rollout.kv_cache_bytes=1KiB", "rollout.max_model_len=64"], "too small for one sequence"),
        ([str(run), "--swap", "self_atn.attn"], "the model has no such module\n  nearest: self_attn.attn\n"),
        ([str(run), "--swap", "model.layers.9"], "the model has no such module"),
        (
            [str(run), "--swap", "rotary_emb.q", "model.exact=true", "model.dtype=float32"],
            "attention turns queries and keys itself",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            bisect.main(arguments)
        assert caught.value.code == 2
        assert told in capsys.readouterr().err
