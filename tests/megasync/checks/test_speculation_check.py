"""What `rollout.speculation` refuses, by name and with a remedy, what it lets through, and what vLLM gets of it.

python -m pytest tests/megasync/checks/test_speculation_check.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge.vllm.serving.speculation import engine_arguments
from engine.config import DELTA_NET_FAMILIES, FAMILIES, LATENT_FAMILIES
from megasync.checks.check import check_config
from megasync.checks.served_sizes import cache_bytes_per_token
from megasync.checks.speculation import DRAFT_FAMILIES, speculation_errors
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.models.folder import model_shape
from megasync.models.tensors import num_parameters
from megasync.run.replica_start import replica_config
from megasync.tools.assets.command import write_assets
from megasync.tools.plan.hardware import hardware
from megasync.tools.plan.replicas import worker_memory
from tests.support.tiny_models import SERVED, write_tiny_model

KEY = "rollout.speculation"
NGRAM, DRAFT = (f"{KEY}.method={method}" for method in ("ngram", "draft_model"))
NONE = f"or write {KEY}.method=none"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculation")
    for name, family, more in (("model", "qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}), ("draft", "llama", {}),
                               ("delta", "qwen3_5", {}), ("other", "llama", {"vocab_size": 64}),
                               ("padded", "llama", {"vocab_size": 192})):  # fmt: skip
        write_tiny_model(folder / name, family, **more)
    data = write_assets(folder / "assets", seed=0).train
    lines = [f"run: {{dir: {folder}}}", f"model: {{path: {folder}/model}}", f"data: {{train: {data}, batch_size: 4}}"]
    (folder / "config.yaml").write_text("\n".join([*lines, "rollout: {max_new_tokens: 8, reward: token_count}", ""]))
    return folder


def overrides_of(folder: Path, texts: list[str]) -> list[str]:
    return [text.replace("FOLDER", str(folder)) for text in texts]


@pytest.mark.parametrize(
    "more",
    [
        [NGRAM, f"{KEY}.num_tokens=8", f"{KEY}.prompt_lookup_max=3", f"{KEY}.prompt_lookup_min=3"],
        [NGRAM, "rollout.max_staleness=2", "rollout.on_update=continue", "rollout.stop=[x]", "algorithm.filter_groups=true"],
        [NGRAM, "rollout.top_k=8", "rollout.top_p=0.9", "algorithm.support_replay=true"],
        [NGRAM, "rollout.dtype=fp8", "model.dtype=bfloat16"],
        [NGRAM, "engine.lora.rank=4", "engine.lora.sync=adapter"],
        [DRAFT, f"{KEY}.path=FOLDER/draft", "rollout.placement=colocated"],
        [DRAFT, f"{KEY}.path=FOLDER/model", "engine.parallel.tensor=2", "rollout.tensor_parallel=2"],
    ],
)
def test_a_run_can_start(folder: Path, more: list[str]) -> None:
    check_config(load_config(folder / "config.yaml", overrides_of(folder, more)), 2)


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        ([NGRAM, "rollout.min_p=0.1"], "rollout.min_p", f"leave rollout.min_p out, {NONE}"),
        ([NGRAM, "data.eval={a: {path: FOLDER/assets/held_out.jsonl, min_p: 0.1, temperature: 1.0}}"], "data.eval.a.min_p",
         f"leave data.eval.a.min_p out, {NONE}"),
        ([NGRAM, "algorithm.router_replay=rollout"], "algorithm.router_replay", f"write algorithm.router_replay=off, {NONE}"),
        ([NGRAM, f"{KEY}.prompt_lookup_min=5"], f"{KEY}.prompt_lookup_min", f"write {KEY}.prompt_lookup_min=4 or less"),
        ([NGRAM, f"{KEY}.path=FOLDER/draft"], f"{KEY}.path", f"write {KEY}.method=draft_model, or leave {KEY}.path out"),
        ([f"{KEY}.num_tokens=2"], f"{KEY}.num_tokens", f"write {KEY}.method=ngram, or leave {KEY}.num_tokens out"),
        ([NGRAM, "model.exact=true", "model.dtype=float32"], f"{KEY}.method", f"write {KEY}.method=none, or model.exact=false"),
        ([NGRAM, "run.deterministic=true"], f"{KEY}.method", f"write {KEY}.method=none, or run.deterministic=false"),
        ([NGRAM, "model.path=FOLDER/delta", "model.dtype=bfloat16"], f"{KEY}.method", f"write {KEY}.method=none"),
        ([DRAFT], f"{KEY}.path", f"write {KEY}.path=FOLDER"),
        *(([DRAFT, f"{KEY}.path=FOLDER/{name}"], f"{KEY}.path",
           "name a draft model whose config.json has vocab_size = 128, padding included") for name in ("other", "padded")),
        ([DRAFT, f"{KEY}.path=FOLDER/delta"], f"{KEY}.path", "name a model of one of these families"),
        ([DRAFT, f"{KEY}.path=FOLDER/draft", "rollout.dtype=fp8", "model.dtype=bfloat16"], f"{KEY}.method",
         f"write {KEY}.method=ngram"),
    ],
)  # fmt: skip
def test_keys_that_it_excludes(folder: Path, overrides: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(load_config(folder / "config.yaml", overrides_of(folder, overrides)), 2)
    found = {re.split(" = |: ", part.headline)[0]: part.lines.get("remedy") for part in error.value.parts}
    assert found[key] == remedy.replace("=FOLDER/", f"={folder}/")


def test_a_draft_model_that_is_not_there_and_one_that_workers_do_not_divide(folder: Path) -> None:
    for path, workers, key in (("missing", 1, f"{KEY}.path"), ("draft", 8, "rollout.tensor_parallel")):
        given = [DRAFT, f"{KEY}.path={folder}/{path}", f"rollout.tensor_parallel={workers}"]
        with pytest.raises(ConfigError) as error:
            check_config(load_config(folder / "config.yaml", given), 4)
        assert any(part.headline.startswith(key) for part in error.value.parts), error.value


@pytest.mark.parametrize("named", ["moved", "added", "none", "broken"])
def test_a_draft_has_the_tokens_of_the_model(tmp_path: Path, folder: Path, named: str) -> None:
    """Those that both tokenizers have; it may have others besides, or no tokenizer."""
    file = write_tiny_model(tmp_path / "draft", "llama") / "tokenizer.json"
    fields = json.loads(file.read_text())
    tokens = fields["model"]["vocab"]
    if named == "moved":
        tokens["1"], tokens["2"] = tokens["2"], tokens["1"]
    elif named == "added":
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": len(tokens), "content": "<think>"})
    elif named == "broken":
        del fields["model"]
    file.write_text(json.dumps(fields))
    if named == "none":
        file.unlink()
    given = load_config(folder / "config.yaml", [DRAFT, f"{KEY}.path={tmp_path}/draft"])
    if named in ("added", "none"):
        check_config(given, 2)
        return
    with pytest.raises(ConfigError) as error:
        check_config(given, 2)
    assert named == "broken" or (error.value.key == f"{KEY}.path" and "'1'" in error.value.headline), error.value
    assert error.value.remedy


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, folder: Path, family: str) -> None:
    model = write_tiny_model(tmp_path, family, **(SERVED if family in LATENT_FAMILIES else {}))
    given = load_config(folder / "config.yaml", [NGRAM, f"model.path={model}"])
    assert bool(list(speculation_errors(given, model_shape(model), on_gpus=True))) == (family in DELTA_NET_FAMILIES)
    given = load_config(folder / "config.yaml", [DRAFT, f"{KEY}.path={model}"])
    errors = map(str, speculation_errors(given, model_shape(folder / "model"), on_gpus=True))
    assert any(f"draft models of {family}" in error for error in errors) == (family not in DRAFT_FAMILIES)


def test_vllm_takes_a_path_with_another_methods_name_for_that_method(tmp_path: Path, folder: Path) -> None:
    draft = write_tiny_model(tmp_path / "Eagle-runs" / "draft", "llama")
    given = load_config(folder / "config.yaml", [DRAFT, f"{KEY}.path={draft}"])
    (error,) = speculation_errors(given, model_shape(folder / "model"), on_gpus=True)
    assert str(error).startswith(f"{KEY}.path = ")


@pytest.mark.vllm_on_cpu
def test_a_draft_whose_heads_vllm_has_on_gpus_alone(tmp_path: Path, folder: Path) -> None:
    draft = write_tiny_model(tmp_path / "draft", "llama", num_hidden_layers=1, head_dim=48)
    given, shape = load_config(folder / "config.yaml", [DRAFT, f"{KEY}.path={draft}"]), model_shape(folder / "model")
    assert list(speculation_errors(given, shape, on_gpus=True)) == []
    (error,) = speculation_errors(given, shape, on_gpus=False)
    assert (error.key, error.value, error.lines["named_by"]) == ("head_dim", "48", f"{KEY}.path")


def test_a_path_without_a_draft_model_is_not_read(folder: Path) -> None:
    given = load_config(folder / "config.yaml", [NGRAM, f"{KEY}.path=/nowhere"])
    plain = load_config(folder / "config.yaml", [NGRAM])
    shape = model_shape(folder / "model")
    assert cache_bytes_per_token(given, shape) == cache_bytes_per_token(plain, shape)


def test_vllm_gets_the_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert engine_arguments(replica_config(load_config(folder / "config.yaml"))) == {}
    given = replica_config(load_config(folder / "config.yaml", [NGRAM, f"{KEY}.num_tokens=6"]))
    own = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert engine_arguments(given) == {"speculative_config": own}
    given = replica_config(load_config(folder / "config.yaml", [DRAFT, f"{KEY}.path=draft", "rollout.tensor_parallel=2"]))
    own = {"method": "draft_model", "num_speculative_tokens": 4, "model": f"{folder}/draft", "draft_tensor_parallel_size": 2}
    assert engine_arguments(given) == {"speculative_config": own}


def test_a_plan_has_the_memory_of_a_draft_model(folder: Path) -> None:
    plain, drafted = (load_config(folder / "config.yaml", more) for more in ([], [DRAFT, f"{KEY}.path={folder}/draft"]))
    shape, draft = model_shape(folder / "model"), model_shape(folder / "draft")
    more = cache_bytes_per_token(drafted, shape) - cache_bytes_per_token(plain, shape)
    assert more == 2 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim * 2
    before, after = (worker_memory(each, shape, num_parameters(folder / "model"), hardware("h200")) for each in (plain, drafted))
    assert after.parts["draft model"] == 2 * num_parameters(folder / "draft") and "draft model" not in before.parts
    assert after.cache_tokens < before.cache_tokens


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "olmo3"])
def test_windows_in_some_of_the_layers_exclude_draft_models(folder: Path, tmp_path: Path, family: str) -> None:
    path, draft = write_tiny_model(tmp_path / "model", family), [DRAFT, f"{KEY}.path={folder}/draft"]
    errors = [list(speculation_errors(load_config(folder / "config.yaml", [f"model.path={path}", *given]), model_shape(path),
                                      on_gpus=False)) for given in (draft, [NGRAM])]  # fmt: skip
    assert [error.key for error in errors[0]] == [f"{KEY}.method"] and errors[0][0].remedy == f"write {NGRAM}" and not errors[1]
