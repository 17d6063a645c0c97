"""Converts keys of another project's config; every key is carried over or listed with a reason. No torch in here.

megasync/config/others.py gives the key with the same meaning; CHOICES and CONVERSIONS, which are the same for all projects,
convert the value. A rule replaces both if the meaning of a value depends on other values: it gets the value and all given ones,
and returns keys of megasync. Leaves out the rules (verl.py, trl.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasync.config.keys import all_keys
from megasync.config.others import meaning
from megasync.config.schema import Config

Given = Mapping[str, Any]  # values by full key, with the defaults of the other project
Rule = Callable[[Any, Given], dict[str, Any]]
OFF: tuple[object, ...] = (None, False, 0, -1, "", [], {}, "null", "None", "disabled", "disable", "no", "none")
PEFT_TARGETS = {  # our linears: those of PEFT in them
    "linear_qkv": {"q_proj", "k_proj", "v_proj"},
    "linear_proj": {"o_proj"},
    "linear_fc1": {"gate_proj", "up_proj"},
    "linear_fc2": {"down_proj"},
}
CHOICES: dict[str, dict[str, Any]] = {  # of our keys: other projects' values in lower case, and ours; None: no key is needed
    "algorithm.loss_aggregation": {
        "token_mean": "token_mean", "seq_mean_token_mean": "sequence_mean", "seq_mean_token_sum_norm": "constant_length",
        "dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant_length",
    },
    "algorithm.normalize_advantage_by_std": {"true": True, "group": True, "false": False, "none": False},
    "algorithm.ratio_level": {"vanilla": None, "token": "token", "sequence": "sequence", "gspo": "sequence"},
    "algorithm.router_replay": {"true": "rollout", "r3": "rollout", "false": None, "disabled": "off"},
    "algorithm.truncated": {"true": "mask", "false": None},
    "checkpoint.resume": {"auto": "auto", "disable": "never"},
    "engine.head_dtype": {"true": "float32", "false": None},
    "engine.optimizer.decay": {
        "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine", "none": None,
    },
    "engine.recompute": {"true": "full", "false": "none"},
    "engine.wrap": {"fsdp": "megatron_fsdp", "fsdp2": "megatron_fsdp", "megatron": "ddp"},
    "model.dtype": {
        "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "auto": None, "none": None,
    },
    "rollout.placement": {"true": "colocated", "false": None, "colocate": "colocated", "server": "separate"},
}  # fmt: skip
KEYS = frozenset(all_keys(Config))
LOGGERS = ("wandb", "tensorboard", "trackio")


class NotCarriedError(ValueError):
    """A value has no counterpart; the text is the reason, or advice."""


@dataclass
class Carried:
    """The result. `keys`: values of megasync's keys. `left`: keys of the other project that were not carried over, with the
    reason. `off`: their keys that need none here, because they switch something off, have no effect, or were read with another.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)


def carry(given: Given, defaults: Given, rules: Mapping[str, Rule]) -> Carried:
    """Converts all given keys, and the `defaults` of the other project that differ from megasync's."""
    carried, everything = Carried(), {**defaults, **given}
    for name, value in everything.items():
        shown = f"{name}={value}" + ("" if name in given else " (the default there)")
        key, advice = _meaning(name)
        try:
            found = rules[name](value, everything) if name in rules else same(key, value)
        except NotCarriedError as reason:
            carried.left[shown] = str(reason) or advice or "nothing here has this meaning"
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            carried.left[shown] = f"no such value is known of it ({type(error).__name__}: {error})"
        else:
            if any(carried.keys.get(key, value) != value for key, value in found.items()) and name not in rules:
                carried.left[shown] = advice or "another key that was read before it has this meaning"
                continue
            carried.keys |= found
            carried.off += [] if found else [shown]
    if not carried.keys.get("engine.lora.rank"):
        for key in [key for key in carried.keys if key.startswith("engine.lora.")]:
            carried.off.append(f"{key}={carried.keys.pop(key)}, without an adapter")
    return carried


def _meaning(name: str) -> tuple[str, str]:
    """(key, advice) as others.meaning; also for a path that ends with a full key of megasync, such as rollout.max_num_seqs."""
    parts, known = name.split("."), meaning(name)
    own = next((end for start in range(len(parts) - 1) if (end := ".".join(parts[start:])) in KEYS), "")
    return known if any(known) else (own, "")


def same(key: str, value: Any) -> dict[str, Any]:
    """The key with its converted value; empty if no key is needed.

    Raises:
        NotCarriedError: the value has no counterpart; without a text if `key` is empty.
    """
    if value in OFF and (not key or value in (None, "")):
        return {}
    if not key or "NAME" in key:
        raise NotCarriedError
    convert = CONVERSIONS.get(key)
    ours = convert(value) if convert else value
    if values := CHOICES.get(key):
        name = str(value).lower().replace("-", "_")
        if name not in values:
            raise NotCarriedError(f"{key} has no such value; counterparts exist for {', '.join(values)}")
        ours = values[name]
    return {} if ours is None else {key: ours}


def read_with_another(_: Any, __: Given) -> dict[str, Any]:
    """A rule for a key that the rule of another key reads."""
    return {}


def loggers(value: Any) -> list[str]:
    """Names of run.loggers; `console` needs none."""
    names = [value] if isinstance(value, str) else list(value)
    if others := [name for name in names if name not in (*LOGGERS, "console", "none", "all")]:
        raise NotCarriedError(f"there is no logger {', '.join(others)}; run.loggers takes {', '.join(LOGGERS)}")
    return list(LOGGERS) if "all" in names else [name for name in names if name in LOGGERS]


def lora_targets(value: Any) -> list[str] | None:
    """Linears by PEFT's names or megatron-core's."""
    names = {value} if isinstance(value, str) else set(value)
    if names & {"all-linear", "all_linear"} or names >= set().union(*PEFT_TARGETS.values()):
        return list(PEFT_TARGETS)
    found = [ours for ours, theirs in PEFT_TARGETS.items() if ours in names or theirs <= names]
    if left := names - set(found) - set().union(*(PEFT_TARGETS[one] for one in found)):
        raise NotCarriedError(
            f"adapters apply to fused linears (q, k and v; gate and up): {', '.join(sorted(left))} cannot have one alone"
        )
    return found or None


def adam(value: Any) -> str:
    if not str(value).lower().startswith("adam"):
        raise NotCarriedError("the optimizer is AdamW")
    return "adam"


def count(value: Any) -> int:
    """The value as a whole number; NotCarriedError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise NotCarriedError("no whole number; write it into the file that was imported, and import it again")
    return int(value)


def above_zero(value: Any) -> int:
    """The value as a whole number; 0 for -1, which switches off."""
    return max(0, count(value))


def quotient(whole: Any, part: Any, words: str) -> int:
    """`whole` / `part`; NotCarriedError if it is not a whole number."""
    number, size = count(whole), count(part)
    if size < 1 or number % size:
        raise NotCarriedError(f"{words}: {number} / {size} is no whole number")
    return number // size


CONVERSIONS: dict[str, Callable[[Any], Any]] = {  # of our keys: of other projects' values
    "checkpoint.every_steps": above_zero,
    "engine.lora.targets": lora_targets,
    "engine.optimizer.name": adam,
    "rollout.evaluate_every_steps": above_zero,
    "rollout.top_k": above_zero,
    "run.loggers": loggers,
    "sync.bucket_bytes": lambda megabytes: count(megabytes) * 2**20,
}
