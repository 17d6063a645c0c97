"""Keys of evaluation sets, episodes and vLLM's arguments. No torch in here.

`ask_vllm` constructs vLLM's own config in a subprocess, which takes the seconds of its import; for `--check` only, since a run's
replicas do the same when they start. It does not see what vLLM refuses on a device, such as a block size that no attention kernel
has. Leaves out reading the data (megasync/data/load.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge.vllm.serving import arguments
from megasync.checks.served_sizes import is_served_here
from megasync.config.data_section import EvalSet
from megasync.config.errors import ConfigError, nearest_name, refuse, refuse_if, wrong
from megasync.config.load import save_config
from megasync.config.replica_keys import ReplicaKeys
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.resolve import resolve_episode

EPISODE_KEYS = [name for name in RolloutConfig.model_fields if name.startswith("episode_")]
BESIDE = {"gpu_memory_utilization": "gpu_memory_utilization", "model": "path", "tensor_parallel_size": "tensor_parallel"}
ASKED, REFUSED = "megasync.run.argument_check", 3
SECONDS, SHOWN = 180.0, 600


def check_data(config: Config) -> None:
    """ConfigError where an evaluation set has no file, no room for a prompt, or samples that cannot differ."""
    sets, name = config.data.eval_sets, config.algorithm.name
    headline = f"data.eval = {', '.join(sets)}: sets are for algorithm.name = grpo, which generates"
    refuse_if(sets and name == "sft", headline, algorithm=name, remedy="write data.eval=FILE for the accuracy on one file")
    unset = [f"data.train.{name}.path" for name, source in config.data.train_sources.items() if not source.path]
    refuse(
        [
            *(ConfigError(f"{key} is not set", remedy=f"write {key}=FILE") for key in unset),
            *(error for name in sets for error in _set_errors(config, name)),
        ]
    )


def _set_errors(config: Config, name: str) -> Iterator[ConfigError]:
    key, given = f"data.eval.{name}", config.data.eval_sets[name]
    longest, limit = config.rollout.max_model_len, given.max_new_tokens
    if not given.path:
        yield ConfigError(f"{key}.path is not set", remedy=f"write {key}.path=FILE")
    if given.temperature == 0:
        if given.samples > 1:
            remedy = f"write {key}.temperature=1.0 or {key}.samples=1"
            yield ConfigError(f"{key}.samples = {given.samples}: at {key}.temperature = 0 they are all the same", remedy=remedy)
        for cut in ("top_p", "top_k", "min_p"):
            if (value := getattr(given, cut)) != EvalSet.model_fields[cut].default:
                remedy = f"write {key}.temperature=1.0, or leave {key}.{cut} out"
                yield ConfigError(f"{key}.{cut} = {value}: has no effect at {key}.temperature = 0", remedy=remedy)
    if longest is not None and limit is not None and limit >= longest:
        remedy = f"write less, such as {key}.max_new_tokens={max(1, longest // 2)}"
        headline = f"{key}.max_new_tokens = {limit}: leaves no room for a prompt"
        yield ConfigError(headline, allowed=f"less than rollout.max_model_len = {longest}", remedy=remedy)


def check_engine_arguments(config: Config) -> None:
    """ConfigError for a field that the installed vLLM does not have, or that a config may not set."""
    refuse(_argument_errors(config))


def _argument_errors(config: Config) -> Iterator[ConfigError]:
    for name, value in config.rollout.engine_arguments.items():
        key, reason = f"rollout.engine_arguments.{name}", arguments.refusal(name, value)
        lines = {"remedy": f"leave {key} out"}
        if name in arguments.OWN_KEYS:
            lines = {"remedy": f"write {arguments.OWN_KEYS[name]} instead"}
        elif name in arguments.fields() and name not in arguments.REFUSED:
            lines = {"remedy": f"write a value of that kind, or leave {key} out"}
        elif name not in arguments.REFUSED and (near := nearest_name(name, arguments.settable())):
            lines = {"nearest": near, "remedy": f"write rollout.engine_arguments.{near}"}
        if name == "kv_sharing_fast_prefill" and value and config.sync.canary_tolerance:
            reason = "vLLM's log-probs of prompts are wrong, which sync.canary_tolerance needs"
            lines = {"remedy": f"leave {key} out, or write sync.canary_tolerance=0"}
        if reason:
            yield ConfigError(f"{key} = {value!r:.80}: {reason}", **lines)


def beside_errors(key: str, own: ReplicaKeys) -> Iterator[ConfigError]:
    """The same of replicas beside the policy's, which may have what vLLM has. `key`: of their section."""
    for name, value in own.engine_arguments.items():
        full = f"{key}.engine_arguments.{name}"
        headline, remedy = f"{full} = {value!r:.80}", f"leave {full} out"
        if name in BESIDE:
            own_key = f"{key}.{BESIDE[name]}"
            yield ConfigError(f"{headline}: {own_key} sets it", remedy=f"write {own_key} instead")
        elif reason := arguments.wrong_kind(name, value):
            near = "" if name in arguments.fields() else nearest_name(name, arguments.fields())
            remedy = f"write {key}.engine_arguments.{near}, or {remedy}" if near else remedy
            yield ConfigError(f"{headline}: {reason}", nearest=near, remedy=remedy)


def check_episodes(config: Config) -> None:
    """ConfigError for keys of episodes without one, and for an episode that cannot be imported or called."""
    if config.rollout.episode:
        resolve_episode(config.rollout.episode)
        return
    given = [name for name in EPISODE_KEYS if getattr(config.rollout, name) != RolloutConfig.model_fields[name].default]
    remedy = "write rollout.episode=package.module:name, or leave rollout.{} out"
    refuse(wrong(config, f"rollout.{name}", "rollout.episode is empty", remedy=remedy.format(name)) for name in given)


def ask_vllm(config: Config) -> None:
    """ConfigError where vLLM refuses rollout.engine_arguments. Nothing where replicas are elsewhere, or it does not answer."""
    rollout = config.rollout
    if config.algorithm.name != "grpo" or not rollout.engine_arguments or not is_served_here(config):
        return
    with tempfile.TemporaryDirectory(prefix="megasync-check-") as folder:
        file = Path(folder) / "config.yaml"
        save_config(config, file)
        command, quiet = [sys.executable, "-m", ASKED, str(file)], subprocess.DEVNULL
        try:
            asked = subprocess.run(command, stdout=subprocess.PIPE, stderr=quiet, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return
    if asked.returncode == REFUSED:
        names = ", ".join(rollout.engine_arguments)
        message = f"rollout.engine_arguments ({names}): vLLM refuses them"
        raise ConfigError(message, vllm_says=asked.stdout[:SHOWN].strip(), remedy="write what vLLM takes, or take them out")
