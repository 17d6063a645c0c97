"""A whole run whose samples are episodes: one step off, with failures, branches, evaluations, and a checkpoint in its midst.

Its records are sampled again. One module of its own, since what a run's samples are is the same from its first step to its last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from bridge.replicas.pool import ReplicaPool
from megasync.config.schema import Config
from megasync.tools.evaluate import command as evaluate
from megasync.tools.assets.command import build_tokenizer
from megasync.episodes.task import EpisodeResult
from megasync.report.log import read_evaluations, read_samples
from megasync.rollouts.progress import load_progress
from megasync.rollouts.records import load_record, paths_of
from megasync.tools.replay import command as replay
from megasync.tools.serving.replicas import Serve, replicas
from megasync.tools.serving.send import sender
from megasync.tools.serving.source import find_source
from tests.runs.train_cases import cut_off_copy, metrics, train, write_config

pytestmark = pytest.mark.vllm_on_cpu

NUM_EPISODES = 8 * 4
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}<eos>"
    "{% else %}({{ message.content }})={% endif %}{% endfor %}"
)


def config_of(folder: Path) -> Path:
    rollout = {"max_staleness": 1, "on_update": "continue", "max_new_tokens": 6, "evaluate_every_steps": 3}
    rollout |= {"speculation": {"method": "ngram", "num_tokens": 2, "prompt_lookup_min": 1}}
    episode = {"episode": "tests.support.episodes:unsteady", "episode_max_turns": 2, "episode_on_failure": "drop"}
    sections = {"rollout": {**rollout, **episode}, "algorithm": {"credit": "turn"}, "data": {"shuffle": False}}
    config = write_config(folder, num_layers=2, run={"log_samples": 8}, **sections)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "assets" / "model")
    data = folder / "held_out.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n' * 4)
    config.write_text(config.read_text().replace("data:\n", f"data:\n  eval: {data}\n"))
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("episodes")
    code, said = train(config_of(folder))
    assert code == 0, said
    return folder / "runs" / "run", said


def test_what_was_sampled_is_what_is_trained(run: tuple[Path, str]) -> None:
    """In the first step, whose tokens are of the weights that train on them, trainer and vLLM agree on each token."""
    lines = metrics(run[0])
    assert lines[0]["logprob_gap/max"] < 1e-4 and lines[0]["staleness/max"] == 0
    assert all(line["staleness/max"] <= 1 for line in lines) and any(line["staleness/max"] == 1 for line in lines)
    for line in lines:
        assert line["train/response_tokens"] == pytest.approx(NUM_EPISODES * line["episode/sampled_tokens"])
        assert 0 < line["episode/given_tokens"] < 3 and 0.8 < line["episode/branches"] < 2
        assert line["episode/tool_seconds"] > 0 and 0 < line["episode/tool_share"] < 1 and line["episode/first"] >= 1
    assert any(line["loss/policy"] != 0 for line in lines) and all(line["grad_norm"] > 0 for line in lines)


def test_episodes_are_kept_with_the_rewards_of_their_turns(run: tuple[Path, str]) -> None:
    """Where they have given any: not by the reward of the run, nor by a client's program, nor where they were dropped."""
    for record in (load_record(path) for path in paths_of(run[0]).values()):
        for played in (one for group in record.groups for one in group.members.values()):
            assert isinstance(played, EpisodeResult)
            line = played.info.get("line", 0)
            own = tuple(turn.length / 6 for turn in sorted(played.turns, key=lambda turn: turn.number))
            assert played.turn_rewards == (own if line and line % 7 else ())
            assert not played.turn_rewards or played.reward == pytest.approx(sum(played.turn_rewards))


def test_drafts_are_verified_and_counted(run: tuple[Path, str]) -> None:
    """A pass over drafts adds one to three tokens to a sample. A step may have none."""
    lines = metrics(run[0])
    assert all(line["rollout/drafted_tokens"] >= line["rollout/accepted_tokens"] >= 0 for line in lines)
    assert sum(line["rollout/accepted_tokens"] for line in lines) > 0
    lengths = [line["rollout/accepted_length"] for line in lines if line["rollout/drafted_tokens"]]
    assert lengths and all(1 <= length <= 3 for length in lengths)


def test_episodes_that_fail_are_counted_and_have_no_part_in_their_groups(run: tuple[Path, str]) -> None:
    lines = metrics(run[0])
    assert sum(line["episode/dropped"] for line in lines) == sum(line["episode/failures"] for line in lines) == 6 * 4
    assert "drop: an episode raised RuntimeError: broken on purpose" in run[1]
    assert all(line["episode/turns_mean"] == pytest.approx(2 - line["episode/dropped"] / 16) for line in lines)


def test_samples_show_their_turns(run: tuple[Path, str]) -> None:
    lines = [line for line in read_samples(run[0]) if line["set"] == "train"]
    assert {line["line"] for line in lines} >= {1, 2, 3, 5} and all(line["line"] % 8 or not line["branches"] for line in lines)
    for line in lines:
        kinds = [[piece["sampled"] for piece in branch] for branch in line["branches"]]
        wanted = [[False, True]] * 2 if line["line"] % 3 == 0 and line["line"] % 7 else [[False, True, False, True]]
        assert kinds == (wanted if line["line"] % 8 else [])
        is_chat = line["line"] % 7 == 0
        wanted_prompt = f"({line['prompt']})=" if is_chat else line["prompt"]
        assert line["line"] % 8 == 0 or line["branches"][0][0]["text"] == wanted_prompt
        for piece in (piece for branch in line["branches"] for piece in branch if piece["sampled"]):
            fields = ("token_texts", "rollout_log_probs", "trainer_log_probs")
            assert [len(piece[field]) for field in fields] == [piece["tokens"]] * 3
            if line["step"] == 1:
                assert piece["trainer_log_probs"] == pytest.approx(piece["rollout_log_probs"], abs=2e-4)
        assert sum(piece["tokens"] for branch in line["branches"] for piece in branch if piece["sampled"]) == line["tokens"]
    assert [line["step"] for line in read_evaluations(run[0])] == [0, 3, 6]


@pytest.fixture(scope="module")
def resumed(run: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    copy = cut_off_copy(run[0], folder)
    assert list(paths_of(copy)) == list(range(1, 7))
    code, said = train(config_of(folder), "run.steps=7")
    assert code == 0, said
    return copy


def test_a_resumed_run_goes_on_with_the_episodes_and_their_turns(run: tuple[Path, str], resumed: Path) -> None:
    kept = load_progress(run[0] / "checkpoints" / "step_00000003")
    assert kept is not None
    saved = [sample for group in kept.groups for sample in group.samples]
    assert all(isinstance(one.completion, EpisodeResult) for one in saved)
    lines = metrics(resumed)
    in_midst = [sample for sample in saved if not sample.is_over]
    assert sum(line["episode/resumed"] for line in lines[3:]) == len(in_midst)
    assert all(line["episode/restarted"] == 0 for line in lines)
    assert [line["step"] for line in lines] == list(range(1, 8)) and lines[:3] == metrics(run[0])[:3]
    assert sum(line["episode/dropped"] for line in lines) == 7 * 4, "each prompt is trained once"


@pytest.mark.long
def test_each_step_leaves_a_record_and_each_prompt_is_in_one(resumed: Path) -> None:
    records = [load_record(path) for path in paths_of(resumed).values()]
    assert [record.step for record in records] == list(range(1, 8))
    ordinals = [group.key for record in records for group in record.groups]
    assert sorted(ordinals) == list(range(7 * 8))
    for record, line in zip(records, metrics(resumed), strict=True):
        played = [one for group in record.groups for one in group.members.values()]
        assert len(played) == NUM_EPISODES and all(isinstance(one, EpisodeResult) for one in played)
        assert sum(one.num_sampled for one in played if isinstance(one, EpisodeResult)) == line["train/response_tokens"]


@pytest.fixture(scope="module")
def serve(run: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """For all commands one replica, which is sent the weights of each one's config."""
    first = find_source(run[0], tmp_path_factory.mktemp("served"), None, []).config
    versions = count(1)
    with replicas(first) as pool:

        @contextmanager
        def with_weights(config: Config) -> Iterator[ReplicaPool]:
            with sender(config, pool) as send:
                send(next(versions), Path(config.model.path))
            yield pool

        yield with_weights


@pytest.mark.long
def test_evaluate_plays_the_runs_episodes(
    run: tuple[Path, str], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the last checkpoint it finds what the run found."""
    file = tmp_path / "answers.jsonl"
    assert evaluate.main([str(run[0]), "--json", "--to", str(file)], serve=serve) == 0
    (values,) = json.loads(capsys.readouterr().out)["sets"].values()
    assert values["avg@1"]["mean"] == pytest.approx(read_evaluations(run[0])[-1]["eval/reward"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3, 4] and all(line["turns"] == 2 and line["branches"] for line in lines)


@pytest.mark.long
def test_what_was_trained_is_sampled_again(resumed: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """As far as there are checkpoints: by the model's folder and by that of step 3, from which the run was resumed."""
    assert replay.main([str(resumed), "--step", "1-4", "--json"], serve=serve) == 0
    reported = json.loads(capsys.readouterr().out)
    first, *_, last = reported["steps"]
    assert reported["same"] and first["compared_tokens"] == first["tokens"] > 0 and first["largest_gap"] < 1e-5
    assert not first["without_weights"] and set(last["without_weights"]) <= {"2"}
    assert last["compared_tokens"] + last["later_tokens"] + last["without_weights"].get("2", 0) == last["tokens"]
