"""Converts a config of verl or TRL, and lists keys that could not be carried over. No torch in here.

FILE is YAML, as verl's trainer and TRL's command line read it; for verl also a text with key=value overrides, such as the script
that starts it. The result contains the other project's defaults that differ from megasync's.

    megasync import run_qwen2-7b.sh --from verl --to qwen.yaml
    megasync import grpo.yaml --from trl                            # prints it
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megasync.config.errors import ConfigError, main_errors, refuse_if, some
from megasync.config.files import write_atomically
from megasync.config.load import load_config
from megasync.tools.import_config import trl, verl
from megasync.tools.import_config.carried import Carried, carry

PROJECTS = {"verl": verl, "trl": trl}
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
CONTINUED = re.compile(r"\\\r?\n")  # shlex keeps the end of the line in the next word
WITHIN_A_WORD = re.compile(r"(?<=[^\s;&|()<>])#")  # as in ${MODEL##*/}: shlex takes it for the begin of a comment, no shell does
SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")  # as in run-$(date +%F), a single word
HASH, SPACE = "\0", "\1"  # stand for these within words
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
PLACEHOLDER = "my_rewards:score"  # a start refuses it until the user writes this module
SAMPLE_KEYS = {"verl": {}, "trl": {"data.prompt_key": "prompt"}}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: done; 2: the file cannot be read or written."""
    parser = argparse.ArgumentParser(prog="megasync import", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="YAML; for verl also a text with overrides, such as its start script")
    parser.add_argument("--from", dest="project", choices=PROJECTS, required=True, help="the project of the config")
    parser.add_argument("--to", type=Path, help="the file to write (default: print it)")
    options = parser.parse_args(list(arguments))
    with main_errors():
        given = read(options.file)
        refuse_others(options.file, given, options.project)
        carried = convert(given, options.project)
        text = written(carried, f"{options.file} of {options.project}")
        if options.to is None:
            print(text)
        else:
            write_atomically(options.to, text)
    print(report(carried, options.to), file=sys.stderr)
    return 0


def read(path: Path) -> dict[str, Any]:
    """Values by full key, with interpolations resolved.

    Raises:
        ConfigError: the file is neither YAML nor a text with overrides.
    """
    remedy = "give a YAML file, or a text of key=value, in UTF-8"
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 # a SafeLoader
    except yaml.YAMLError:
        content = None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}", remedy=remedy) from error
    if isinstance(content, dict):
        nested = OmegaConf.create({str(name): value for name, value in content.items()})
    else:
        try:
            lines = WITHIN_A_WORD.sub(HASH, CONTINUED.sub("\n", text))
            lines = SUBSTITUTION.sub(lambda found: re.sub(r"\s", SPACE, found[0]), lines)
            words = [word.replace(HASH, "#").replace(SPACE, " ") for word in shlex.split(lines, comments=True)]
        except ValueError as error:
            raise ConfigError(f"{path}: no text that a shell reads: {error}", remedy=remedy) from error
        pairs = [match.groups() for word in words if (match := OVERRIDE.fullmatch(word))]
        if words and not pairs:
            raise ConfigError(f"{path}: neither a YAML mapping nor overrides", remedy=remedy)
        nested = OmegaConf.create({})
        for name, value in pairs:
            OmegaConf.update(nested, name, _value(value))
    return _flat(nested)


def refuse_others(path: Path, given: dict[str, Any], project: str) -> None:
    """ConfigError where no key is one of the project's: its defaults would be all that is carried over."""
    fitting = [name for name, rules in PROJECTS.items() if any(rules.is_of(key) for key in given)]
    message = f"{path}: none of its {len(given)} keys is one of {project}'s: {some(given, 5)}"
    remedy = f"write --from {fitting[0]}" if fitting else f"give a config of {' or '.join(PROJECTS)}"
    refuse_if(bool(given) and project not in fitting, message, remedy=remedy)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-6 as a number, and a dumped dataclass as its mapping."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789"))
_Loader.add_multi_constructor(
    "tag:yaml.org,2002:python/object", lambda loader, _, node: loader.construct_mapping(node, deep=True)
)


def _value(text: str) -> Any:
    """The value of an override, with environment variables expanded; a text if a variable is not set."""
    text = os.path.expandvars(text)
    try:
        return text if "$" in text else yaml.load(text, Loader=_Loader)  # noqa: S506 # a SafeLoader
    except yaml.YAMLError:
        return text


def _flat(nested: Any, above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in nested:
        key = f"{above}{name}"
        try:
            value = nested[name]
        except OmegaConfBaseException:  # refers to a key of another file, or is ???
            unresolved: Any = OmegaConf.to_container(nested, resolve=False)
            value = unresolved[name]
        if OmegaConf.is_dict(value) and len(value) and name not in ("override_ddp_config", "chat_template_kwargs", "vllm"):
            found |= _flat(value, f"{key}.")
        elif name != "_target_" and value != "???":
            found[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def convert(given: dict[str, Any], project: str) -> Carried:
    """Converts the keys, and adds the steps that are left to the user."""
    rules = PROJECTS[project]
    carried = carry(given, rules.DEFAULTS, rules.RULES)
    carried.keys = {**SAMPLE_KEYS[project], "rollout.reward": PLACEHOLDER, **carried.keys}
    carried.to_do += rules.to_do({**rules.DEFAULTS, **given})
    if "run.steps" not in carried.keys:
        carried.to_do.append("set run.steps = epochs x examples / data.batch_size")
    of_shell = [f"{key} = {value}" for key, value in carried.keys.items() if isinstance(value, str) and re.search(r"[$`]", value)]
    carried.to_do += [f"{each}: write the value that the shell would put there" for each in of_shell]
    path = str(carried.keys.get("model.path", ""))
    if HUB_NAME.fullmatch(path) and not Path(path).is_dir():
        carried.to_do.append(f"model.path is a local folder: hf download {path} --local-dir FOLDER, then model.path=FOLDER")
    return carried


def written(carried: Carried, source: str) -> str:
    """The config as YAML, with the lines of `left_lines` as comments above it."""
    nested = OmegaConf.create({})
    for key, value in carried.keys.items():
        OmegaConf.update(nested, key, value)
    body = yaml.safe_dump(OmegaConf.to_container(nested), sort_keys=False, allow_unicode=True)
    lines = [f"# From {source}.", *(f"# {line}" for line in left_lines(carried))]
    return "\n".join([*lines, body])


def left_lines(carried: Carried) -> list[str]:
    """Lines with the keys that were not carried over, by reason, and the steps that are left to the user."""
    reasons: dict[str, list[str]] = {}
    for name, reason in carried.left.items():
        reasons.setdefault(reason, []).append(name)
    lines = [f"not carried over: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    off = "needs no key here (switched off, without effect, or read with another key)"
    lines += [f"{off}: {', '.join(carried.off)}"] if carried.off else []
    return lines + [f"to do: {line}" for line in carried.to_do]


def report(carried: Carried, path: Path | None) -> str:
    """The text for the terminal: `left_lines`, and the errors of loading the written config."""
    lines = [
        f"{len(carried.keys)} keys{f' in {path}' if path else ''}; {len(carried.left)} not carried over",
        *left_lines(carried),
    ]
    if path is not None:
        try:
            load_config(path)
            lines.append(f"next: megasync train {path} --check")
        except ConfigError as error:
            lines.append(f"a start refuses it:\n{error}")
    return "\n".join(lines)
