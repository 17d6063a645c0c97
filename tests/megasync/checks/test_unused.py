"""Keys without effect beside others: each rule of the tables refuses or notes its keys, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.algorithm import ADVANTAGES, LOSSES
from megasync.checks.check import check_config
from megasync.checks.unused import NOTED, REFUSED, unused_errors, unused_keys
from megasync.config.errors import shown_value
from megasync.config.keys import choices, kind_of
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from tests.support.config_files import KEYS, cannot_run

NAMES = {"algorithm.loss": LOSSES, "algorithm.advantage": ADVANTAGES}  # keys that also take the user's own functions


def with_value(section: Any, key: str, value: object) -> Any:
    """A copy with any value, which is not validated."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("key", "owner", "values"), [(key, owner, values) for keys, owner, values, _ in REFUSED for key in keys], ids=str
)
def test_a_key_is_refused_where_its_owner_has_another_value(key: str, owner: str, values: tuple[Any, ...]) -> None:
    def errors(value: object) -> list[str]:
        config = with_value(with_value(Config(), owner, value), key, "given")
        return [each.remedy for each in unused_errors(config) if each.key == key and f": {owner} = " in each.headline]

    (remedy,) = errors("other")
    assert remedy.startswith(f"write {owner}={shown_value(values[0])}, or ")
    assert not any(errors(value) for value in values)


def test_a_key_of_the_preset_goes_back_to_its_default(runnable: Path) -> None:
    message = cannot_run(runnable, "algorithm.preset=dapo", "algorithm.truncated=keep")
    assert "algorithm.overlong_buffer" in message and "or algorithm.overlong_buffer=" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.name=sft", "rollout.group_size=4", "sync.verify=none"], "rollout.group_size, sync.verify: supervised steps"),
        (["algorithm.name=sft", "rollout.temperature=0.5"], "rollout.temperature: supervised steps have"),
        (["algorithm.clip_low=0.1", "algorithm.ratio_level=sequence"], "ratio_level: with one optimizer step a batch every"),
        (["rollout.evaluate_every_steps=3"], "rollout.evaluate_every_steps: data.eval is empty"),
        (["rollout.on_update=continue", "rollout.cache_on_update=recompute"], "on_update, rollout.cache_on_update: rollout"),
        (["checkpoint.keep=2"], "checkpoint.keep: checkpoint.every_steps = 0 writes no checkpoint"),
        (["rollout.top_k=5", "rollout.top_p=0.8"], "rollout.top_p, rollout.top_k: the trainer normalises over all tokens"),
        (["data.sampler=difficulty", "data.shuffle=false"], "data.shuffle: data.sampler chooses the prompts"),
        (["run.steps=4", "engine.optimizer.warmup_steps=5"], "optimizer step 4 of engine.optimizer.warmup_steps = 5"),
    ],
)  # fmt: skip
def test_keys_without_effect_have_a_note(runnable: Path, overrides: list[str], words: str) -> None:
    config = load_config(runnable, overrides)
    check_config(config, 2)
    (note,) = unused_keys(config)
    assert words in note


RULED = {  # by owner, keys of it that a rule must not lose
    "algorithm.name": "baseline clip_low dual_clip importance_cap importance_correction kl_coefficient loss old_log_probs "
    "ratio_level router_replay sampler truncated",
    "algorithm.loss": "clip_low dual_clip sapo_temperature_negative",
    "algorithm.advantage": "baseline pass_k",
    "algorithm.importance_correction": "importance_cap importance_floor importance_level",
    "algorithm.truncated": "overlong_buffer",
    "algorithm.filter_groups": "filter_factor",
    "algorithm.router_replay": "log_router_gap",
    "engine.optimizer.decay": "decay_steps min_learning_rate",
    "rollout.on_update": "cache_on_update",
    "rollout.placement": "offload_trainer",
    "rollout.speculation.method": "num_tokens path prompt_lookup_max prompt_lookup_min",
    "sync.log": "log_full_every log_keep",
    "sync.transport": "lanes",
    "teacher.objective": "divergence top_k",
}


def test_rules_are_about_keys_that_there_are() -> None:
    ruled = {(owner, key.rpartition(".")[2]) for keys, owner, *_ in REFUSED for key in keys}
    assert ruled >= {(owner, key) for owner, keys in RULED.items() for key in keys.split()}
    assert not {key for keys, *_ in (*REFUSED, *NOTED) for key in keys} - set(KEYS)
    for _, owner, values, _ in REFUSED:
        assert kind_of(KEYS[owner]) is bool or set(values) < set(choices(KEYS[owner]) or NAMES[owner])


def test_defaults_are_never_without_effect(runnable: Path) -> None:
    """Also those that a config says: a run's own config.yaml has all keys."""
    for name in ("sft", "grpo"):
        config = load_config(runnable, [f"algorithm.name={name}"])
        save_config(config, runnable.parent / "saved.yaml")
        saved = load_config(runnable.parent / "saved.yaml")
        check_config(saved, 2)
        assert not unused_keys(saved)
