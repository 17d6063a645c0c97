"""Which weights generate and evaluate serve, how they ask, and what they print. With replicas: tests/runs/test_train.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bridge.generation import Completion, GenerationRequest
from bridge.versions.writer import VersionWriter
from megasync.tools.evaluate import command as evaluate
from megasync.tools.generate import command as generate
from megasync.tools.bisect.choose import choose
from megasync.config.data_section import EvalSet
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.tools.export.command import export
from megasync.rollouts.turns import episode_settings
from megasync.tools.serving import answers, options
from megasync.tools.serving.source import Source, find_source, versions_of
from tests.megasync.test_export_cli import adapter_run
from tests.support.config_files import write, write_runnable
from tests.support.rewards import until
from tests.support.tiny_models import write_tiny_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
EPISODE = "rollout.episode=tests.support.episodes:two_turns"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints and exported weights, of a config with sets of its own."""
    overrides = ["rollout.placement=colocated", "rollout.temperature=0.7", "rollout.max_new_tokens=8", "model.dtype=float32"]
    config = load_config(write_runnable(tmp_path), overrides)
    held_out = write(tmp_path / "test.jsonl", "".join(f'{{"q": "{n}+1=", "a": {n + 1}}}\n' for n in range(9)))
    sets = {"sums": {"path": str(held_out), "prompt_key": "q", "answer_key": "a"}}
    data = config.data.model_validate(config.data.model_dump() | {"eval": sets})
    folder = tmp_path / "runs" / "rl"
    for name in ("checkpoints/step_00000005", "checkpoints/step_00000010", "."):
        write_tiny_model(folder / name / "hf", "qwen3")
    save_config(config.model_copy(update={"data": data}), folder / "config.yaml")
    return folder


def test_weights_are_those_of_the_run_checkpoint_or_folder_that_is_named(run: Path, tmp_path: Path) -> None:
    newest, older = (run / "checkpoints" / name for name in ("step_00000010", "step_00000005"))
    named = {run: newest, newest: newest, older: older, older / "hf": older, run / "hf": run}
    for target, expected in named.items():
        source = find_source(target, tmp_path, None, [])
        assert Path(source.config.model.path) == expected / "hf" and source.is_of_run, target
        assert source.config.rollout.temperature == 0.7 and not source.config.rollout.is_colocated
        assert source.config.model.dtype == "float32"
    assert Path(find_source(run, tmp_path, 5, []).config.model.path) == older / "hf"
    assert find_source(run, tmp_path, None, ["rollout.replicas=2"]).config.rollout.replicas == 2
    assert Path(find_source(run, tmp_path, 0, []).config.model.path) == tmp_path / "model", "the model that it starts from"
    with pytest.raises(ConfigError, match="no checkpoint of step 7"):
        find_source(run, tmp_path, 7, [])


def test_a_step_beside_weights_of_another_is_refused(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints" / "step_00000010"
    for target in (run / "hf", newest, newest / "hf"):
        with pytest.raises(ConfigError, match=rf"--step 5: {target} names the weights itself\n.*leave --step out"):
            find_source(target, tmp_path, 5, [])
    assert Path(find_source(newest, tmp_path, 10, []).config.model.path) == newest / "hf", "it is this one's"


def test_a_folder_is_asked_by_its_own_dtype_and_chat_template(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama")
    plain = find_source(model, tmp_path, None, ["rollout.stop=[x]"])
    assert (plain.config.data.chat_template, plain.config.model.dtype, plain.config.rollout.stop) == (False, "float32", ("x",))
    assert plain.config.model.path == str(model) and not plain.is_of_run
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert find_source(model, tmp_path, None, []).config.data.chat_template


def test_an_adapter_is_served_merged(tmp_path: Path) -> None:
    run, scratch = adapter_run(tmp_path, "qwen3", "float32", target_modules=["q_proj"]), tmp_path / "scratch"
    scratch.mkdir()
    export(run, tmp_path / "expected", merge=True)
    for target in (run, run / "checkpoints/step_00000003", run / "checkpoints/step_00000003/adapter"):
        source = find_source(target, scratch, None, [])
        assert source.config.model.path == str(scratch / "merged") and source.name.endswith("adapter merged")
        ours, expected = (load_file(folder / "model.safetensors") for folder in (scratch / "merged", tmp_path / "expected"))
        assert ours.keys() == expected.keys() and all((ours[name] == expected[name]).all() for name in ours)
        (scratch / "merged").rename(scratch / f"merged {target.name}")
    alone = tmp_path / "alone"
    (run / "checkpoints/step_00000003/adapter").rename(alone)
    with pytest.raises(ConfigError, match="an adapter alone"):
        find_source(alone, scratch, None, [])


def test_a_run_that_starts_from_an_adapter_has_its_first_weights_in_the_log_alone(tmp_path: Path) -> None:
    """Version 0 is the model folder's weights and the adapter's together."""
    config = load_config(write_runnable(tmp_path), ["engine.lora.rank=4", "engine.lora.adapter_path=adapter", "sync.log=deltas"])
    run, scratch = config.run.folder, tmp_path / "scratch"
    scratch.mkdir()
    save_config(config, run / "config.yaml")
    assert versions_of(run) == set()
    merged = write_tiny_model(tmp_path / "merged", "qwen3", seed=3) / "model.safetensors"
    tensors = {name: torch.from_numpy(value) for name, value in load_file(merged).items()}
    writer = VersionWriter(run / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=9)
    writer.write(0, iter(tensors.items()))
    assert versions_of(run) == {0}
    found = load_file(Path(find_source(run, scratch, 0, []).config.model.path) / "model.safetensors")
    assert found.keys() == tensors.keys() and all(np.array_equal(found[name], tensors[name].numpy()) for name in found)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ConfigError, match=r"neither a run.*\n.*holds:.*notes"):
        find_source(tmp_path, tmp_path, None, [])
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_source(tmp_path / "nowhere", tmp_path, None, [])
    with pytest.raises(ConfigError, match="is no run"):
        find_source(tmp_path, tmp_path, 3, [])


def test_sets_are_the_runs_own_or_the_file_given(run: Path, tmp_path: Path) -> None:
    source, file = find_source(run, tmp_path, None, []), str(tmp_path / "more.jsonl")

    def sets(*arguments: str) -> dict[str, tuple[str, int, float, int | None]]:
        config = evaluate.with_sets(source, evaluate.parse([str(run), *arguments]))
        return {name: (each.path, each.samples, each.temperature, each.limit) for name, each in config.data.eval_sets.items()}

    own = str(tmp_path / "test.jsonl")
    assert sets() == {"sums": (own, 1, 0.0, None)}
    assert sets("--samples", "4", "--limit", "3") == {"sums": (own, 4, 0.7, 3)}, "several samples are drawn as in training"
    assert sets("--data", file, "--samples", "2", "--temperature", "1.5") == {"more": (file, 2, 1.5, None)}
    two = {"sums": EvalSet(path=own), "hot": EvalSet(path=own, samples=2, temperature=1.3)}
    source = of_sets(source, two)
    assert sets("--samples", "4") == {"sums": (own, 4, 0.7, None), "hot": (own, 4, 1.3, None)}, "and the greedy set as well"
    assert sets("--samples", "1") == {"sums": (own, 1, 0.0, None), "hot": (own, 1, 1.3, None)}
    config = of_sets(source, "").config
    nothing = type(source)(config, "runs/rl", is_of_run=True)
    with pytest.raises(ConfigError, match="write --data FILE"):
        evaluate.with_sets(nothing, evaluate.parse([str(run)]))


def of_sets(source: Source, sets: dict[str, EvalSet] | str) -> Source:
    data = source.config.data.model_copy(update={"eval": sets})
    return replace(source, config=source.config.model_copy(update={"data": data}))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "{folder}/gone.jsonl"], "there is no such data file"),
        (["--reward", "exact_matches"], "nearest:  *exact_match"),
        (["--samples", "0"], "at least 1"),
        (["--samples", "4", "--temperature", "0"], "they are all the same"),
        (["--split", "test"], "--split test: is of --data"),
        (["--pass-reward", "0"], "0: a number above 0"),
        (["--pass-reward", "nan"], "nan: a number above 0"),
        (["--to", "{folder}/test.jsonl/x"], "cannot be written"),
        (["rollout.temprature=1"], "rollout.temperature"),
        (["rollout.tensor_parallel=3"], "rollout.tensor_parallel = 3: does not divide the model's"),
        (["rollout.max_model_len=100000"], "more than the model has positions"),
        (["rollout.kv_cache_bytes=64"], "too small for one sequence"),
        (["model.exact=true", "rollout.top_k=4"], "rollout.top_k = 4: is not exact"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    given = [word.replace("{folder}", str(tmp_path)) for word in arguments]
    assert code(evaluate, [str(run), *given], no_replicas) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_a_folder_that_vllm_cannot_serve_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = write_tiny_model(tmp_path / "small", "qwen3", head_dim=16)
    good = write_tiny_model(tmp_path / "good", "qwen3")
    cases = (([small], "head_dim = 16: "), ([good, "rollout.kv_cache_bytes=64"], "too small for one sequence"))
    for arguments, expected in cases:
        assert code(generate, [*map(str, arguments), "--prompt", "1+1=", "--max-new-tokens", "8"], no_replicas) == 2
        assert expected in capsys.readouterr().err


def test_errors_of_a_file_name_the_options_that_mend_them(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no key of a set that --data takes the place of."""
    write(tmp_path / "more/a.jsonl", '{"problem": "1+1=", "solution": 2}\n')
    write(tmp_path / "more/b.jsonl", '{"problem": "1+1=", "solution": 2}\n')

    def output(*arguments: str) -> str:
        assert code(evaluate, [str(run), "--data", str(tmp_path / "more"), *arguments], no_replicas) == 2
        return capsys.readouterr().err

    assert "remedy: write --split=NAME" in output()
    keys = ["--split", "a", "data.prompt_key=problem"]
    assert "write data.prompt_key=" in output(*keys[:2]) and "write data.answer_key=" in output(*keys)
    assert code(evaluate, [str(run), "--data", str(tmp_path / "more"), *keys, "data.answer_key=solution"]) == 1


def no_gpu(config: object) -> Any:
    raise RuntimeError("the replicas did not start")


def code(command: Any, arguments: list[str], serve: Callable[[Any], Any] = no_gpu) -> int:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments, serve=serve)
    return int(stop.value.code or 0)


def no_replicas(config: object) -> object:
    raise AssertionError("nothing is to be started")


def test_former_answers_stay_until_there_are_others(run: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "answers.jsonl", "former\n" * 9)
    assert code(evaluate, [str(run), "--to", str(file)]) == 1
    assert code(generate, [str(run), "--prompt", "1+1=", "--to", str(file)]) == 1
    assert file.read_text() == "former\n" * 9
    with answers.opened(file) as opened:
        answers.write(opened, iter([{"a": 1}]), empties=True)
        answers.write(opened, iter([{"b": 2}]), empties=False)
    assert file.read_text() == '{"a": 1}\n{"b": 2}\n'
    with answers.opened(Path("/dev/null")) as opened:
        answers.write(opened, iter([{"a": 1}]), empties=True)


FIRST = {"evaluate": "find_source", "generate": "find_source", "replay": "load_config", "bisect": "choose"}


@pytest.mark.parametrize(("command", "first"), FIRST.items())
def test_what_is_made_on_the_way_goes_with_sigterm(run: Path, tmp_path: Path, command: str, first: str) -> None:
    """A merged model is as large as the model, and merging takes minutes."""
    code = f"import sys, time; from megasync.tools.{command} import command as own; "
    code += f"own.{first} = lambda *_, **__: print(time.sleep(600)); "
    folder = tmp_path / "temporary"
    folder.mkdir()
    more = {"generate": ["--prompt", "1+1="], "replay": ["--step", "5"]}.get(command, [])
    started = subprocess.Popen(
        [sys.executable, "-c", f"{code}own.main(sys.argv[1:])", str(run), *more], env=os.environ | {"TMPDIR": str(folder)}
    )
    try:
        until(lambda: bool(list(folder.glob(f"megasync-serve-{started.pid}-*"))))  # megasync doctor knows it by that name
        time.sleep(0.5)
        started.terminate()
        assert started.wait(120) == 128 + signal.SIGTERM and not list(folder.iterdir())
    finally:
        started.kill()
        started.wait()


class Replicas:
    """Say one token to whatever they are asked."""

    def generate(self, requests: Sequence[GenerationRequest]) -> SimpleNamespace:
        output = Completion(np.array([5], np.int32), np.array([-0.5], np.float32), np.array([0], np.int32), "stop")
        return SimpleNamespace(result=lambda: [[output] * request.num_samples for request in requests])


@pytest.mark.parametrize("command", [evaluate, generate])
def test_a_full_disk_is_reported(run: Path, capsys: pytest.CaptureFixture[str], command: Any) -> None:
    prompts = ["--prompt", "1+1="] if command is generate else []
    assert code(command, [str(run), *prompts, "--to", "/dev/full"], lambda config: nullcontext(Replicas())) == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("command", [evaluate, generate])
def test_keys_of_training_have_no_effect_and_are_named(run: Path, capsys: pytest.CaptureFixture[str], command: Any) -> None:
    prompts = ["--prompt", "1+1="] if command is generate else []
    keys = ["run.steps=3", "engine.optimizer.learning_rate=1e-3", "data.batch_size=4", "teacher.path=models/teacher"]
    used = ["run.seed=1", "rollout.temperature=1", "run={seed: 2}", "engine.head_dtype=model"]
    code(command, [str(run), *prompts, *keys, *used])
    expected = f"without effect: {', '.join(key.partition('=')[0] for key in keys)}: nothing is trained here\n"
    assert expected in capsys.readouterr().err
    code(command, [str(run), *prompts, *used])
    assert "without effect" not in capsys.readouterr().err


@pytest.mark.parametrize("key", options.TRAINING_KEYS)
def test_keys_of_training_are_keys(key: str) -> None:
    found: Any = Config()
    for name in key.split("."):
        found = getattr(found, name)


def test_prompts_that_do_not_fit_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--prompt", "1+1="], ["--data", str(tmp_path / "test.jsonl"), "data.prompt_key=q"]):
        assert code(generate, [str(run), *arguments, "--max-new-tokens", "100000"], no_replicas) == 2
        assert "write --max-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-new-tokens", "1024"], ["--data", "--max-new-tokens 1024", "lower --max-new-tokens"]),
        (["--max-new-tokens", "64", "rollout.max_model_len=32"], ["--max-new-tokens 64: "]),
        (["--samples", "4", "--temperature", "0"], ["--samples 4: at --temperature 0 ", "--temperature 1.0", "--samples 1"]),
    ],
)
def test_errors_of_an_evaluation_name_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: list[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3")
    file = write(tmp_path / "a.b.jsonl", '{"question": "1+1=", "answer": 2}\n')
    assert code(evaluate, [str(model), "--data", str(file), *options], no_replicas) == 2
    said = capsys.readouterr().err
    assert "data.eval" not in said and [text for text in named if text not in said] == [], said


@pytest.mark.parametrize("command", [evaluate, generate])
def test_a_folder_answers_with_as_many_tokens_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Any) -> None:
    """Of a model with 512 positions, behind prompts of 4 and 300 tokens; where a number is asked for, it is not changed."""
    model, longest = write_tiny_model(tmp_path / "model", "qwen3"), list[int]()
    lines = "".join(f'{{"question": "{text}", "answer": 2}}\n' for text in ("1+1=", "1" * 300))
    given = [str(model), "--data", str(write(tmp_path / "a.jsonl", lines))]

    def serve(config: Config) -> object:
        longest.append(config.rollout.max_new_tokens)
        return no_gpu(config)

    assert code(command, given, serve) == 1 and longest == [212]
    assert "300 tokens, of 512 that fit: responses of up to 212" in capsys.readouterr().err
    assert code(command, [*given, "--limit", "1"], serve) == 1 and longest[1] == 508
    assert code(command, [*given, "rollout.max_new_tokens=200"], serve) == 1 and longest[2] == 200
    assert code(command, [*given, "--max-new-tokens", "511"], no_replicas) == 2


@pytest.mark.parametrize(("prompt", "expected"), [("", "2: is empty"), (" ", "2: is empty"), ("1\udcff", "2: is not UTF-8")])
def test_a_prompt_that_is_no_text_is_refused(run: Path, capsys: pytest.CaptureFixture[str], prompt: str, expected: str) -> None:
    assert code(generate, [str(run), "--prompt", "1+1=", "--prompt", prompt], no_replicas) == 2
    assert f"--prompt {expected}" in capsys.readouterr().err


def test_episodes_of_a_folder_have_room_for_their_turns(tmp_path: Path) -> None:
    """As in a run, where nothing is given: a sequence is as long as a micro-batch and the model take."""
    model = write_tiny_model(tmp_path / "model", "qwen3")
    file = write(tmp_path / "a.jsonl", '{"question": "1+1=", "answer": 2}\n')
    lengths = list[int]()

    def serve(config: Config) -> object:
        lengths.append(config.rollout.max_model_len or 0)
        assert episode_settings(config).max_tokens == lengths[-1] or not config.rollout.episode
        return no_gpu(config)

    given = [str(model), "--data", str(file), "--max-new-tokens", "8"]
    teacher = [f"teacher.path={tmp_path}/gone"]  # which a run had
    for more in ([], [EPISODE], [EPISODE, "engine.tokens_per_microbatch=300"], [EPISODE, "rollout.max_model_len=40", *teacher]):
        assert code(evaluate, [*given, *more], serve) == 1
    assert lengths == [12, 512, 300, 40]


def test_prompts_may_be_messages_with_a_template_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "turns.jsonl", '{"q": [{"role": "user", "content": "1+1="}]}\n')
    assert code(generate, [str(run), "--data", str(file), "data.prompt_key=q"], no_replicas) == 2
    assert "line 1 holds a list of messages" in capsys.readouterr().err


def test_the_held_out_conversations_of_a_supervised_run_are_answered(tmp_path: Path) -> None:
    overrides = ["algorithm.name=sft", "model.dtype=float32", "data.chat_template=true", "data.prompt_key=messages"]
    turns = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"))]
    file = write(tmp_path / "turns.jsonl", json.dumps({"messages": turns}))
    config = load_config(write_runnable(tmp_path), [*overrides, "rollout.max_new_tokens=8", f"data.eval={file}"])
    model = write_tiny_model(config.run.folder / "checkpoints/step_00000005/hf", "qwen3")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    save_config(config, config.run.folder / "config.yaml")
    source = find_source(config.run.folder, tmp_path, None, [])
    for arguments in ([], ["--data", str(file)]):
        _, data = evaluate.prepared(source, evaluate.parse([str(config.run.folder), *arguments]))
        assert [(each.prompt, each.answer) for each in next(iter(data.eval_sets.values()))] == [("1+1=", "2")]
    asked = generate.prepared(source, generate.parse([str(config.run.folder), "--data", str(file)]))[2]
    assert [each.turns for each in asked.examples] == [(("user", "1+1="),)]


def test_the_first_prompts_of_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "prompts.jsonl", "".join(f'{{"question": "{number}+1="}}\n' for number in range(5)))
    given = generate.parse([str(run), "--data", str(file), "--limit", "2"])
    assert [example.prompt for example in generate.examples(load_config(run / "config.yaml"), given)] == ["0+1=", "1+1="]
    with pytest.raises(SystemExit):
        generate.parse([str(run), "--prompt", "1+1=", "--limit", "2"])
    assert "--limit is for --data" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.parse([str(run), "--prompt", "1+1=", "--split", "test"])
    assert "--split is for --data" in capsys.readouterr().err


def test_a_run_that_goes_on_may_remove_the_checkpoint_that_was_found(run: Path, tmp_path: Path) -> None:
    """As with checkpoint.keep: 1: what was found stays readable, for the processes that this one starts, too."""
    newest, former = (run / "checkpoints" / name for name in ("step_00000010", "step_00000005"))
    expected = {path.name: path.read_bytes() for path in (newest / "hf").iterdir()}
    hold = f"from pathlib import Path; from megasync.config.files import lock; lock(Path({str(run)!r})); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{hold}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        source, chosen = find_source(run, tmp_path, None, []), choose(run, tmp_path, None, [])
        for folder in (newest, former):
            shutil.rmtree(folder)
        found = Path(source.config.model.path)
        assert source.name.endswith("step_00000010") and chosen.step == 10
        for folder in (found, chosen.base, Path(chosen.served.model.path)):
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
        read = f"from safetensors.torch import load_file; print(len(load_file({str(found / 'model.safetensors')!r})))"
        done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
        assert int(done.stdout) > 5
        with pytest.raises(ConfigError, match="no checkpoint of step 10"):
            find_source(run, tmp_path, 10, [])
        holder.communicate()
