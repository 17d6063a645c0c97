"""Judges before a start: keys that do not go together, prompts without a text, and endpoints that are tried with one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.checks.judges import check_judges
from megasync.checks.own_answers import score_own_answers, try_judges
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.launch.num_ranks import num_teacher_gpus
from megasync.served.pool import chat_form
from megasync.tools.assets.command import build_tokenizer
from tests.support.config_files import refusal, write_model, write_runnable
from tests.support.judge_server import MODEL, expected, judge_server, requests_of

NOBODY = "http://127.0.0.1:9/v1"
REWARD = "rollout.reward={judge:quality: 0.5, exact_match: 1}"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
QUALITY = ["judges.quality.prompt='{{ prompt }}{{ response }}'", REWARD]


def tried(path: Path, *overrides: str, world_size: int = 1) -> list[str]:
    config = load_config(path, [*QUALITY, *overrides])
    data = check_config(config, world_size)
    assert data is not None
    assert [scores.reward for scores in score_own_answers(config, data)] == ["exact_match"]
    return try_judges(config, data)


def test_an_endpoint_is_asked_once_about_an_answer_of_the_data(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with judge_server(tmp_path / "log") as (url, _):
        (line,) = tried(path, f"judges.quality.endpoint={url}")
    assert line.startswith(f"judges.quality.endpoint = {url}") and f"{expected('1+1=2')}" in line
    assert [one["text"] for one in requests_of(tmp_path / "log")] == ["1+1=2"]
    assert not (tmp_path / "runs").exists()


def test_an_endpoint_that_is_not_reachable_is_named(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        tried(path, f"judges.quality.endpoint={NOBODY}")
    assert (caught.value.key, caught.value.value) == ("judges.quality.endpoint", NOBODY)
    assert caught.value.remedy
    with judge_server(tmp_path / "log") as (url, _):  # one of two
        lines = tried(path, f"judges.quality.endpoint=[{NOBODY},{url}]")
    assert [NOBODY in line for line in lines] == [True, False]


def test_a_reply_without_a_score_is_refused_where_it_would_stop_the_run(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with judge_server(tmp_path / "log", unparsed=1.0) as (url, _):
        with pytest.raises(ConfigError) as caught:
            tried(path, f"judges.quality.endpoint={url}")
        assert caught.value.lines["reply"] == "'I cannot say.'"
        (line,) = tried(path, f"judges.quality.endpoint={url}", "judges.quality.on_unparsed=zero")
        assert "I cannot say." in line


def test_a_prompt_that_reads_a_missing_column_is_refused(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        tried(path, f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt='{{ response }}{{ extra.rubric }}'")
    assert caught.value.key == "judges.quality.prompt"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.reward=judge:qualty"], "rollout.reward"),
        ([], "judges.quality"),  # neither a path nor an endpoint
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.path=models/judge"], "judges.quality"),
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt='{response}'"], "judges.quality.prompt"),
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt="], "judges.quality.prompt"),
        (["judges.quality.path=models/judge"], "judges.quality.path"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, overrides: list[str], key: str) -> None:
    error = refusal(write_runnable(tmp_path), *QUALITY, *overrides, world_size=1)
    assert key in [part.key for part in error.parts]
    assert all(part.remedy for part in error.parts)


def test_replicas_of_a_judge_have_gpus_of_their_own_where_the_reward_names_it(tmp_path: Path) -> None:
    own = ["judges.quality.path=model", "judges.quality.replicas=2", "judges.quality.tensor_parallel=2"]
    own += ["judges.other.path=model"]
    config = load_config(write_runnable(tmp_path), [*QUALITY, *own])
    assert list(config.pooled_judges) == ["quality"] and num_teacher_gpus(config) == 4
    assert num_teacher_gpus(load_config(write_runnable(tmp_path), [*own, "algorithm.name=sft"])) == 0


def write_judge(folder: Path, **fields: object) -> str:
    build_tokenizer().save_pretrained(write_model(folder, **fields))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return f"judges.quality.path={folder}"


def test_a_judge_of_any_family_can_be_asked(tmp_path: Path) -> None:
    """Its tokenizer is there, has a chat template, and this takes the roles of the prompt."""
    path, judge = write_runnable(tmp_path), write_judge(tmp_path / "judge")
    config = tmp_path / "judge" / "config.json"
    config.write_text(config.read_text().replace("qwen3", "phi3"))
    check_config(load_config(path, [*QUALITY, judge]), 1)
    assert chat_form(tmp_path / "judge")[2] == (build_tokenizer().eos_token_id,)
    system = "judges.quality.system=Be strict."
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    (tmp_path / "judge" / "chat_template.jinja").write_text(refuses)
    check_config(load_config(path, [*QUALITY, judge]), 1)
    assert refusal(path, *QUALITY, judge, system).remedy.startswith("leave judges.quality.system out")
    for name in ("chat_template.jinja", "tokenizer.json"):
        (tmp_path / "judge" / name).unlink()
        error = refusal(path, *QUALITY, judge)
        assert error.key == "judges.quality.path" and error.remedy


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("engine_arguments.max_model_lenn=5", "write judges.quality.engine_arguments.max_model_len"),
        ("engine_arguments.max_model_len=many", "leave"),
        ("engine_arguments.tensor_parallel_size=2", "write judges.quality.tensor_parallel"),
        ("tensor_parallel=3", "write judges.quality.tensor_parallel=2"),
    ],
)
def test_replicas_of_a_judge_that_vllm_would_not_start(tmp_path: Path, override: str, remedy: str) -> None:
    judge = write_judge(tmp_path / "judge")
    error = refusal(write_runnable(tmp_path), *QUALITY, judge, f"judges.quality.{override}", world_size=1)
    assert error.key == f"judges.quality.{override.partition('=')[0]}" and error.remedy.startswith(remedy)
    check_config(load_config(write_runnable(tmp_path), [*QUALITY, judge, "judges.quality.engine_arguments.quantization=fp8"]), 1)


@pytest.mark.parametrize(
    ("override", "is_of_path"),
    [(f"model={MODEL}", True), ("timeout_seconds=5", True), ("on_unparsed=retry", True), ("on_unparsed=retry", False)],
)
def test_keys_of_a_judge_without_effect_are_refused(tmp_path: Path, override: str, is_of_path: bool) -> None:
    place = write_judge(tmp_path / "judge") if is_of_path else f"judges.quality.endpoint={NOBODY}"
    given, key = [*QUALITY, place, f"judges.quality.{override}"], f"judges.quality.{override.partition('=')[0]}"
    error = refusal(write_runnable(tmp_path), *given, world_size=1)
    assert error.key == key and error.remedy
    elsewhere = [f"judges.quality.endpoint={NOBODY}", "judges.quality.path="] if is_of_path else []
    check_judges(load_config(write_runnable(tmp_path), [*given, *elsewhere, "judges.quality.temperature=1"]))


def test_a_judges_weights_are_whole(tmp_path: Path) -> None:
    judge, weights = write_judge(tmp_path / "judge"), tmp_path / "judge" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    error = refusal(write_runnable(tmp_path), *QUALITY, judge, world_size=1)
    assert error.headline.startswith(f"{weights}: ") and error.lines["named_by"] == "judges.quality.path"


@pytest.mark.vllm_on_cpu
def test_heads_of_a_judge_that_vllm_has_no_kernels_for(tmp_path: Path) -> None:
    error = refusal(write_runnable(tmp_path), *QUALITY, write_judge(tmp_path / "judge", head_dim=48), world_size=1)
    assert (error.key, error.value, error.lines["named_by"]) == ("head_dim", "48", "judges.quality.path")


@pytest.mark.parametrize("scale", ["[1]", "[1,2,3]", "[a,b]", "[1,null]", "[5,1]", "[true,2]", "5"])
def test_a_scale_has_two_numbers(tmp_path: Path, scale: str) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"judges.quality.scale={scale}"])
    assert (caught.value.key, caught.value.remedy) == ("judges.quality.scale", "write for example judges.quality.scale=[0,10]")
    assert load_config(path, [caught.value.remedy.rpartition(" ")[2]]).judges["quality"].scale == (0, 10)


def test_what_is_written_for_a_name_that_cannot_be_is_read(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["judges={a b: {path: x}}"])
    example = caught.value.remedy.removeprefix("write for example ").replace("'", "")
    assert load_config(path, [example]).judges["quality"].path == "models/judge"
