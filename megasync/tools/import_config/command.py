"""Writes a config of ours from one of verl or TRL, and says what could not be carried over. No torch in here.

FILE is YAML, as verl's trainer and TRL's command line read it; of verl also a text with its overrides, key=value, such as the
script that starts it. What is written has the other project's defaults where they are not ours.

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

from megasync.config.errors import ConfigError, main_errors
from megasync.config.files import write_atomically
from megasync.config.load import load_config
from megasync.tools.import_config import trl, verl
from megasync.tools.import_config.carried import Carried, carry

PROJECTS = {"verl": verl, "trl": trl}
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
PLACEHOLDER = "my_rewards:score"  # which a start refuses until there is such a module
SAMPLE_KEYS = {"verl": {}, "trl": {"data.prompt_key": "prompt"}}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 2: the file cannot be read."""
    parser = argparse.ArgumentParser(prog="megasync import", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="YAML; of verl also a text of overrides, such as the script that starts it")
    parser.add_argument("--from", dest="project", choices=PROJECTS, required=True, help="whose config it is")
    parser.add_argument("--to", type=Path, help="where ours is written (default: printed)")
    options = parser.parse_args(list(arguments))
    with main_errors():
        given = read(options.file)
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
        ConfigError: it is neither YAML nor a text of overrides.
    """
    text = path.read_text(encoding="utf-8")
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 # a SafeLoader
    except yaml.YAMLError:
        content = None
    if isinstance(content, dict):
        nested = OmegaConf.create({str(name): value for name, value in content.items()})
    else:
        pairs = [match.groups() for word in shlex.split(text, comments=True) if (match := OVERRIDE.fullmatch(word))]
        if not pairs:
            raise ConfigError(f"{path}: neither a YAML mapping nor overrides", remedy="give a YAML file, or a text of key=value")
        nested = OmegaConf.create({})
        for name, value in pairs:
            OmegaConf.update(nested, name, _value(value))
    return _flat(nested)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-6 as a number, and a dumped dataclass as its mapping."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789"))
_Loader.add_multi_constructor(
    "tag:yaml.org,2002:python/object", lambda loader, _, node: loader.construct_mapping(node, deep=True)
)


def _value(text: str) -> Any:
    """Of an override; a variable that is not set here stays a text."""
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
        except OmegaConfBaseException:  # names what is not in this file; or ???
            unresolved: Any = OmegaConf.to_container(nested, resolve=False)
            value = unresolved[name]
        if OmegaConf.is_dict(value) and len(value) and name not in ("override_ddp_config", "chat_template_kwargs", "vllm"):
            found |= _flat(value, f"{key}.")
        elif name != "_target_" and value != "???":
            found[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def convert(given: dict[str, Any], project: str) -> Carried:
    """What is carried over, with what is left to do by hand."""
    rules = PROJECTS[project]
    carried = carry(given, rules.DEFAULTS, rules.RULES)
    carried.keys = {**SAMPLE_KEYS[project], "rollout.reward": PLACEHOLDER, **carried.keys}
    carried.to_do += rules.to_do({**rules.DEFAULTS, **given}, carried.keys)
    path = str(carried.keys.get("model.path", ""))
    if HUB_NAME.fullmatch(path) and not Path(path).is_dir():
        carried.to_do.append(f"model.path is a local folder: hf download {path} --local-dir FOLDER, then model.path=FOLDER")
    return carried


def written(carried: Carried, source: str) -> str:
    """The YAML, with all that is left as comments above it."""
    nested: dict[str, Any] = {}
    for key, value in carried.keys.items():
        *above, name = key.split(".")
        into = nested
        for part in above:
            into = into.setdefault(part, {})
        into[name] = value
    body = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)
    lines = [f"# From {source}.", *(f"# {line}" for line in left_lines(carried))]
    return "\n".join([*lines, body])


def left_lines(carried: Carried) -> list[str]:
    """What was not carried over, by reason, and what is to be done."""
    reasons: dict[str, list[str]] = {}
    for name, reason in carried.left.items():
        reasons.setdefault(reason, []).append(name)
    lines = [f"not carried over: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    off = "needs no key here (switched off, without effect there, or read with another)"
    lines += [f"{off}: {', '.join(carried.off)}"] if carried.off else []
    return lines + [f"to do: {line}" for line in carried.to_do]


def report(carried: Carried, path: Path | None) -> str:
    """The same for the terminal, and what a start would refuse."""
    lines = [
        f"{len(carried.keys)} keys{f' in {path}' if path else ''}; {len(carried.left)} were not carried over",
        *left_lines(carried),
    ]
    if path is not None:
        try:
            load_config(path)
            lines.append(f"next: megasync train {path} --check")
        except ConfigError as error:
            lines.append(f"a start refuses it:\n{error}")
    return "\n".join(lines)
