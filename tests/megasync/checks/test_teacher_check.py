"""The section `teacher` against the rest of a config and against folders, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from megasync.checks.check import check_config
from megasync.checks.teacher import teacher_errors
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.data.lengths import scored_tokens
from megasync.data.load import load_data
from megasync.rollouts.turns import episode_settings
from megasync.run.replica_start import teacher_replica_config
from megasync.tools.assets.command import build_tokenizer
from tests.support.config_files import cannot_run, refusal, refused, write_model
from tests.support.tiny_models import write_tiny_model

ENDPOINT = "teacher.endpoint=http://host:8000/v1"
START = "teacher.version=start"
SFT = "algorithm.name=sft"


def write_teacher(folder: Path, **changes: object) -> Path:
    build_tokenizer().save_pretrained(write_model(folder, **changes))
    return folder


REFUSED = {
    "teacher.weight = 2.0": ["teacher.weight=2"],
    "teacher.version = start": [ENDPOINT, START],
    "teacher.place = replicas": [START, "teacher.place=replicas"],
    "teacher.place = trainer": [ENDPOINT, "teacher.place=trainer"],
    "teacher.adapter_path = adapter": ["teacher.adapter_path=adapter"],
    "teacher.replicas = 2": [START, "teacher.replicas=2"],
    "teacher.divergence = jsd": [START, "teacher.divergence=jsd"],
    "teacher.top_k = 5": [START, "teacher.top_k=5", "teacher.objective=full"],
    "teacher.jsd_beta = 0.1": [START, "teacher.jsd_beta=0.1", "teacher.objective=full"],
    "teacher.objective = sampled": [START, SFT],
    "teacher.objective = full": [ENDPOINT, "teacher.objective=full"],
    "rollout.temperature = 0.7": [ENDPOINT, "rollout.temperature=0.7"],
    "algorithm.support_replay = true": [START, "algorithm.support_replay=true", "rollout.top_k=8"],
    "teacher.top_k = 129": [START, "teacher.objective=top_k", "teacher.top_k=129"],
    "teacher.version = 3": ["teacher.version=3"],
}


@pytest.mark.parametrize(("headline", "overrides"), list(REFUSED.items()))
def test_what_does_not_go_together_is_refused_by_name(runnable: Path, headline: str, overrides: list[str]) -> None:
    message = cannot_run(runnable, *overrides)
    assert f"{headline}: " in message and "remedy" in message


def test_sft_takes_no_served_teacher(runnable: Path) -> None:
    message = cannot_run(runnable, SFT, ENDPOINT, "teacher.objective=top_k")
    assert message.startswith("teacher.place = auto: ") and "choices: trainer" in message.replace("  ", " ")


@pytest.mark.parametrize(
    ("teacher", "policy", "more", "most"),
    [
        (64, 64, [], 63),
        (64, 64, ["rollout.max_model_len=63"], 63),
        (48, 64, [], 47),
        (64, 0, [], 63),
        (128, 64, ["rollout.max_model_len=32"], 32),
        (128, 64, ["teacher.engine_arguments.max_model_len=20"], 19),
        (16, 64, ["teacher.place=trainer"], 0),
    ],
)
def test_samples_are_no_longer_than_a_served_teacher_can_score(
    runnable: Path, tmp_path: Path, teacher: int, policy: int, more: list[str], most: int
) -> None:
    """vLLM scores a prompt only where it has room for one token more."""
    folder = write_teacher(tmp_path / "teacher", max_position_embeddings=teacher)
    write_model(runnable.parent / "model", **({"max_position_embeddings": policy} if policy else {}))
    train = tmp_path / "train.jsonl"
    lengths = (4, 8, 12, 14, 15, 16, 20, 28, 29, 40, 43, 44, 59, 60, 61)
    train.write_text("".join(json.dumps({"question": "1" * each, "answer": "2"}) + "\n" for each in lengths))
    given = [f"teacher.path={folder}", f"data.train={train}", "data.batch_size=1", "rollout.max_new_tokens=4", *more]
    config = load_config(runnable, given)
    assert scored_tokens(config) == most
    limit = min(most or policy, policy or most, config.rollout.max_model_len or 64)
    assert [len(each.prompt) + 4 for each in load_data(config).train] == [each + 4 for each in lengths if each + 4 <= limit]
    assert episode_settings(config).max_tokens == limit
    if most:
        assert teacher_replica_config(config, str(folder)).max_model_len == most + 1


def test_versions_are_start_or_a_number(runnable: Path) -> None:
    for value in ("first", "-1", "1.5", "true"):
        assert refused(runnable, f"teacher.version={value}").startswith("teacher.version = ")
    for value in ("start", "12", "'12'"):
        assert load_config(runnable, [f"teacher.version={value}"]).teacher.version == value.strip("'")


def test_where_a_teacher_is(runnable: Path, tmp_path: Path) -> None:
    def place(*overrides: str) -> tuple[bool, bool]:
        teacher = load_config(runnable, overrides).teacher
        return teacher.is_in_trainer, teacher.is_served

    assert place() == (False, False) and not Config().teacher.is_set
    assert place(START) == place("teacher.adapter_path=a") == place("teacher.path=m", "teacher.place=trainer") == (True, False)
    assert place(ENDPOINT) == place("teacher.path=m") == place("teacher.path={math: m, code: n}") == (False, True)
    by_source = load_config(runnable, ["teacher.path={math: m, code: n}"])
    assert by_source.input_paths.items() >= {"teacher.path.math": "m", "teacher.path.code": "n"}.items()
    message = cannot_run(runnable, "teacher.path={math: m, code: n}", "teacher.place=trainer")
    assert message.startswith("teacher.place = trainer: ")


@pytest.mark.parametrize(
    ("sources", "key", "value"),
    [("", "teacher.path.math", "m"), ("math", "teacher.path.code", "n"), ("math code words", "teacher.path", "math, code")],
)
def test_each_source_has_its_teacher_and_each_teacher_a_source(runnable: Path, sources: str, key: str, value: str) -> None:
    file = runnable.parent / "train.jsonl"
    data = [f"data.train={{{', '.join(f'{name}: {{path: {file}}}' for name in sources.split())}}}"] if sources else []
    errors = list(teacher_errors(load_config(runnable, ["teacher.path={math: m, code: n}", *data])))
    assert (errors[0].key, errors[0].value) == (key, value) and errors[0].remedy
    whole = [f"data.train={{math: {{path: {file}}}, code: {{path: {file}}}}}", "teacher.path={math: m, code: n}"]
    assert not list(teacher_errors(load_config(runnable, whole)))


def test_a_folder_of_the_policys_shape_can_teach_in_the_trainer(runnable: Path, tmp_path: Path) -> None:
    write_teacher(tmp_path / "same", transformers_version="5.0", initializer_range=0.5)
    for overrides in (["teacher.objective=full"], ["teacher.objective=full", SFT], ["rollout.group_size=1"]):
        check_config(load_config(runnable, [f"teacher.path={tmp_path / 'same'}", "teacher.place=trainer", *overrides]), 2)
    write_teacher(tmp_path / "said", rms_norm_eps=1e-6, layer_types=["full_attention"] * 4, tie_word_embeddings=False)
    check_config(load_config(runnable, [f"teacher.path={tmp_path / 'said'}", "teacher.place=trainer"]), 2)
    others = {"num_hidden_layers": 2, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}, "rms_norm_eps": 1e-3}
    for name, value in others.items():  # rms_norm_eps is missing in the policy's config.json
        folder = write_teacher(tmp_path / name, **{name: value})
        message = cannot_run(runnable, f"teacher.path={folder}", "teacher.place=trainer")
        assert message.startswith(f"teacher.path = {folder}: ") and name in message
        assert "teacher.place=replicas" in message
    larger = write_teacher(tmp_path / "larger", num_hidden_layers=8)
    check_config(load_config(runnable, [f"teacher.path={larger}"]), 2)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("smollm3", "no_rope_layers", [1, 1, 1, 1]),
        ("smollm3", "no_rope_layer_interval", 2),
        ("olmo3", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gemma3_text", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gemma3_text", "query_pre_attn_scalar", 24),
    ],
)
def test_a_field_that_one_config_leaves_out_is_the_familys_default(
    runnable: Path, tmp_path: Path, family: str, name: str, value: object
) -> None:
    """The trainer would compute the teacher with the policy's."""
    own = {"model_type": family, "rope_parameters": None}
    build_tokenizer().save_pretrained(write_model(runnable.parent / "model", **own))
    for folder, more in ((tmp_path / "same", {}), (tmp_path / "other", {name: value})):
        write_teacher(folder, **own, **more)
    check_config(load_config(runnable, [f"teacher.path={tmp_path / 'same'}", "teacher.place=trainer"]), 2)
    message = cannot_run(runnable, f"teacher.path={tmp_path / 'other'}", "teacher.place=trainer")
    assert message.startswith(f"teacher.path = {tmp_path / 'other'}: ") and name.replace("_layer_interval", "_layers") in message


def test_another_tokenizer_is_refused_by_its_first_difference(runnable: Path, tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"7":', '"seven":'))
    for place in ("trainer", "replicas"):
        message = cannot_run(runnable, f"teacher.path={folder}", f"teacher.place={place}")
        assert message.startswith(f"teacher.path = {folder}: ") and "'7'" in message


def test_a_served_teacher_has_the_policys_tokens(runnable: Path, tmp_path: Path) -> None:
    """And may have more: Qwen2.5-7B has 152064 embeddings, 1.5B 151936, for one tokenizer."""
    for size in (129, 127):
        write_teacher(tmp_path / str(size), vocab_size=size)
    check_config(load_config(runnable, [f"teacher.path={tmp_path / '129'}", "rollout.max_new_tokens=16"]), 2)
    error = refusal(runnable, f"teacher.path={tmp_path / '127'}")
    assert (error.key, error.lines["vocab_size"]) == ("teacher.path", "127") and "128" in error.remedy


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("engine_arguments.max_model_length=8", "write teacher.engine_arguments.max_model_len"),
        ("engine_arguments.max_model_len=many", "leave"),
        ("engine_arguments.gpu_memory_utilization=0.5", "write teacher.gpu_memory_utilization"),
        ("tensor_parallel=3", "write teacher.tensor_parallel=2"),
    ],
)
def test_replicas_of_a_teacher_that_vllm_would_not_start(runnable: Path, override: str, remedy: str) -> None:
    folder = write_teacher(runnable.parent / "teacher")
    error = refusal(runnable, f"teacher.path={folder}", f"teacher.{override}")
    assert error.key == f"teacher.{override.partition('=')[0]}" and error.remedy.startswith(remedy)
    given = [f"teacher.path={folder}", "teacher.engine_arguments.max_model_len=512", "rollout.max_new_tokens=16"]
    check_config(load_config(runnable, given), 2)


@pytest.mark.vllm_on_cpu
@pytest.mark.parametrize(
    ("family", "sizes", "wrong"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 64}, {"kv_lora_rank": "32"}),
        ("seed_oss", {"head_dim": 48}, {"head_dim": "48"}),
        ("qwen3_5_text", {"linear_key_head_dim": 128}, {"linear_value_head_dim": "24", "model.dtype": "float32"}),
    ],
)
def test_sizes_of_a_teacher_that_vllm_has_no_kernels_for(
    runnable: Path, tmp_path: Path, family: str, sizes: dict[str, int], wrong: dict[str, str]
) -> None:
    folder = write_tiny_model(tmp_path, family, num_hidden_layers=2, **sizes)
    build_tokenizer().save_pretrained(folder)
    errors = refusal(runnable, "model.dtype=float32", f"teacher.path={folder}").parts
    assert {error.key: error.value for error in errors} == wrong
    assert all(error.lines["named_by"] == "teacher.path" and error.remedy for error in errors)


def test_a_teachers_weights_are_whole(runnable: Path) -> None:
    folder = write_teacher(runnable.parent / "teacher")
    tensors = load_file(folder / "model.safetensors")
    gone = "model.layers.0.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, folder / "model.safetensors")
    error = refusal(runnable, f"teacher.path={folder}")
    assert (error.lines["missing"], error.lines["named_by"]) == (gone, "teacher.path")


def test_what_is_written_for_an_adapter_without_adapters_is_a_config(runnable: Path) -> None:
    error = refusal(runnable, "teacher.adapter_path=adapter")
    written = error.remedy.rpartition("write ")[2].split()
    assert load_config(runnable, written).teacher.is_in_trainer
    error = refusal(runnable, "teacher.adapter_path=adapter", "engine.lora.rank=8")
    assert error.key == "teacher.adapter_path" and "engine.lora.adapter_path" not in error.headline
