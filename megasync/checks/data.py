"""Do the keys of data, evaluation sets, episodes and vLLM's arguments fit each other? No torch in here.

`ask_vllm` asks vLLM itself for `rollout.engine_arguments`, in a process of its own, for the seconds of its import. It is for
`--check` alone: a run's replicas ask the same when they start. What vLLM refuses only once it has a device, such as a block size
that no attention kernel has, is not seen. Leaves out reading the data (megasync/data/load.py), and what an episode does, which
its own failures tell (rollouts/turns.py).
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

from bridge.vllm.serving import arguments
from megasync.checks.sizes import is_served_here
from megasync.config.data_section import EvalSet
from megasync.config.errors import ConfigError, Found, nearest_name, refuse_if
from megasync.config.load import save_config
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.resolve import resolve_episode

SHOWN_FIELDS = 8
EPISODE_KEYS = [name for name in RolloutConfig.model_fields if name.startswith("episode_")]
ASKED, REFUSED = "megasync.run.argument_check", 3
SECONDS, SHOWN = 180.0, 600


def check_data(config: Config) -> None:
    """Every evaluation set has a file, room for a prompt, and samples that differ."""
    data = config.data
    message = f"data.eval = {', '.join(data.eval_sets)}: sets are for algorithm.name = grpo, which generates"
    remedy = "write data.eval=FILE for the accuracy on one file"
    refuse_if(data.eval_sets and config.algorithm.name == "sft", message, algorithm=config.algorithm.name, remedy=remedy)
    found = Found()
    for name, each in data.eval_sets.items():
        with found.more():
            _check_set(config, f"data.eval.{name}", each)
    found.stop()


def _check_set(config: Config, key: str, given: EvalSet) -> None:
    refuse_if(not given.path, f"{key}.path is not set", remedy=f"write {key}.path=FILE")
    message = f"{key}.samples = {given.samples}: at {key}.temperature = 0 they are all the same"
    refuse_if(given.samples > 1 and given.temperature == 0, message, remedy=f"write {key}.temperature=1.0 or {key}.samples=1")
    cut = next((name for name in ("top_p", "top_k", "min_p") if getattr(given, name) != EvalSet.model_fields[name].default), "")
    message = f"{key}.{cut} has no effect at {key}.temperature = 0"
    refuse_if(cut and given.temperature == 0, message, remedy=f"write {key}.temperature=1.0, or take {key}.{cut} out")
    longest, limit = config.rollout.max_model_len, given.max_new_tokens
    is_long = longest is not None and limit is not None and limit >= longest
    message = f"{key}.max_new_tokens = {limit}: leaves no room for a prompt"
    remedy = f"write less, or rollout.max_model_len={(limit or 0) + 256}"
    refuse_if(is_long, message, allowed=f"less than rollout.max_model_len = {longest}", remedy=remedy)


def check_engine_arguments(config: Config) -> None:
    """ConfigError for a field that the installed vLLM does not have, or that a config may not set."""
    found = Found()
    for name, value in config.rollout.engine_arguments.items():
        if reason := arguments.refusal(name, value):
            key = f"rollout.engine_arguments.{name}"
            found.errors.append(ConfigError(f"{key} = {value!r:.80}: {reason}", **_way_out(name, key)))
    found.stop()
    name = "kv_sharing_fast_prefill"
    message = f"rollout.engine_arguments.{name} = true: vLLM's log-probs of prompts are wrong, which sync.canary_tolerance needs"
    is_wrong = config.rollout.engine_arguments.get(name) and config.sync.canary_tolerance
    refuse_if(is_wrong, message, remedy=f"take rollout.engine_arguments.{name} out, or write sync.canary_tolerance=0")


def _way_out(name: str, key: str) -> dict[str, str]:
    if name in arguments.OWN_KEYS:
        return {"remedy": f"write {arguments.OWN_KEYS[name]} instead"}
    if name in arguments.REFUSED:
        return {"remedy": f"take {key} out"}
    if name in arguments.fields():
        return {"remedy": f"write a value of that kind, or take {key} out"}
    choices = arguments.settable()
    near = nearest_name(name, choices)
    alike = difflib.get_close_matches(name, choices, SHOWN_FIELDS, cutoff=0.4)
    remedy = f"write rollout.engine_arguments.{near}" if near else f"take {key} out"
    return {"nearest": near, "choices": ", ".join(alike), "remedy": remedy}


def check_episodes(config: Config) -> None:
    """ConfigError for keys of episodes without one, and for an episode that cannot be imported or called."""
    rollout = config.rollout
    if not rollout.episode:
        found = Found()
        for name in EPISODE_KEYS:
            value = getattr(rollout, name)
            if value != RolloutConfig.model_fields[name].default:
                message = f"rollout.{name} = {value}: rollout.episode is empty, and samples have one turn"
                remedy = f"write rollout.episode=package.module:name, or leave rollout.{name} out"
                found.errors.append(ConfigError(message, remedy=remedy))
        found.stop()
        return
    resolve_episode(rollout.episode)


def ask_vllm(config: Config) -> None:
    """Where replicas will be on this machine, and there is something to ask. Silent if vLLM cannot be asked: the run tells."""
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
