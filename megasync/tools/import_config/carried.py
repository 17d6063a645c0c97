"""What is carried over of another project's config: no key is dropped without a word. No torch in here.

A rule reads one value, with all others beside it, and returns keys of ours. A key without a rule has the value that it has there,
under the name that megasync/config/others.py knows. Leaves out the rules (verl.py, trl.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasync.config.others import meaning

Given = Mapping[str, Any]  # by full key, defaults of the other project with it
Rule = Callable[[Any, Given], dict[str, Any]]
OFF: tuple[object, ...] = (None, False, 0, -1, "", [], {}, "null", "None", "disabled", "disable", "no", "none")
PEFT_TARGETS = {  # our linears: those of PEFT in them
    "linear_qkv": {"q_proj", "k_proj", "v_proj"},
    "linear_proj": {"o_proj"},
    "linear_fc1": {"gate_proj", "up_proj"},
    "linear_fc2": {"down_proj"},
}


class NotCarriedError(ValueError):
    """Why a value has no counterpart, or what to do in its stead."""


@dataclass
class Carried:
    """`keys`: ours, by full name. `left`: their keys, with value and reason. `off`: those that need no key of ours, since they
    switch off what is not here, have no effect there, or were read with another.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)


def carry(given: Given, defaults: Given, rules: Mapping[str, Rule]) -> Carried:
    """Every key that is given, and those of `defaults` (theirs that differ from ours) that are not."""
    carried, everything = Carried(), {**defaults, **given}
    for name, value in everything.items():
        shown = f"{name}={value}" + ("" if name in given else " (the default there)")
        key, advice = meaning(name)
        try:
            if rule := rules.get(name):
                found = rule(value, everything)
                carried.keys |= found
                carried.off += [] if found else [shown]
            elif value in OFF and not (key and value not in (None, "", -1)):
                carried.off.append(shown)
            elif key and "NAME" not in key and carried.keys.setdefault(key, value) == value:
                continue
            else:
                carried.left[shown] = advice or "nothing here has this meaning"
        except NotCarriedError as reason:
            carried.left[shown] = str(reason)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            carried.left[shown] = f"no such value is known of it ({type(error).__name__}: {error})"
    return carried


def choice(key: str, **values: Any) -> Rule:
    """A rule: the value's counterpart, under the key; None: nothing is to be said."""

    def rule(value: Any, _: Given) -> dict[str, Any]:
        name = str(value).lower().replace("-", "_")
        if name not in values:
            raise NotCarriedError(f"{key} has no such value; there are those for {', '.join(values)}")
        return {} if values[name] is None else {key: values[name]}

    return rule


def same(key: str) -> Rule:
    """A rule: the same value under the key; null leaves ours."""
    return lambda value, _: {} if value is None else {key: value}


def nothing(_: Any, __: Given) -> dict[str, Any]:
    """A rule for a key that another one's rule has read."""
    return {}


def loggers(value: Any, _: Given) -> dict[str, Any]:
    """`console` is always there."""
    names = [value] if isinstance(value, str) else list(value or [])
    known = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
    if others := [name for name in names if name not in (*known, "console", "none", "all")]:
        raise NotCarriedError(f"there is no logger {', '.join(others)}; run.loggers takes {', '.join(known)}")
    return {"run.loggers": list(known) if "all" in names else [name for name in names if name in known]}


def lora_targets(value: Any, _: Given) -> dict[str, Any]:
    """Linears by PEFT's names or megatron-core's."""
    names = {value} if isinstance(value, str) else set(value or [])
    if names & {"all-linear", "all_linear"} or names >= set().union(*PEFT_TARGETS.values()):
        return {"engine.lora.targets": list(PEFT_TARGETS)}
    found = [ours for ours, theirs in PEFT_TARGETS.items() if ours in names or theirs <= names]
    if left := names - set(found) - set().union(*(PEFT_TARGETS[one] for one in found)):
        raise NotCarriedError(
            f"adapters are of whole linears, q, k and v together, gate and up together: not {', '.join(sorted(left))} alone"
        )
    return {"engine.lora.targets": found} if found else {}


def tokens(value: Any) -> int:
    """A number where one is needed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotCarriedError("no number; write it into the file that was imported, and import it again")
    return int(value)


def quotient(whole: Any, part: Any, words: str) -> int:
    """How many parts there are; they must be whole."""
    number, size = tokens(whole), tokens(part)
    if size < 1 or number % size:
        raise NotCarriedError(f"{words}: {number} / {size} is no whole number")
    return number // size
