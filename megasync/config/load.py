"""Reads a config: YAML files (each may refine a `base`), then `key=value` overrides, into frozen pydantic models.

Every key, type, choice and range is checked here. Leaves out what pydantic's errors become (invalid.py), and checks that need
the model, the data or the world size (checks/check.py). No torch in here.

    config = load_config("configs/grpo_fsdp.yaml", ["engine.wrap=ddp", "sync.bucket_bytes=64MiB"])
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from typing_extensions import TypeVar

from engine.algorithm import PRESETS
from megasync.config.errors import ConfigError, ErrorCollector, nearest_name
from megasync.config.files import write_atomically
from megasync.config.invalid import explain_invalid, too_large
from megasync.config.keys import all_keys, has_free_values, kind_of, takes_names, with_any_name
from megasync.config.schema import Config

# Integers of YAML 1.1 that few people mean: octal, binary, base 60, as 010, 0b11, 12:30.
OTHER_BASE = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]*[1-7][0-7_]*|[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")

INTERPOLATED = re.compile(r"\$\{|'\?\?\?'")  # or OmegaConf's text for a missing value
COMMAND_LINE = "the command line"
# mappings whose keys are names that the user chooses, and whose values are not free
NAMED = {tuple(key.split(".")) for key, field in all_keys(Config).items() if takes_names(field) and not has_free_values(field)}
Root = TypeVar("Root", bound=Config, default=Config)
Sources = dict[tuple[str, ...], str]  # path of a key -> the file, or the command line, that gives its value


def load_config(path: str | Path, overrides: Sequence[str] = (), root: type[Root] = Config) -> Root:  # type: ignore[assignment]
    """The config of YAML file `path` with `overrides` on top, as the pydantic model `root`.

    Raises:
        ConfigError: with all errors of files, keys and values.
    """
    errors, given = ErrorCollector(), list[tuple[Sequence[str], Any, str]]()  # a path, a value, its source
    for source, mapping in _read_layers(Path(path), ()):
        given += [([str(name)], value, source) for name, value in mapping.items()]
    for override in overrides:
        with errors.collect():
            given.append((*_read_override(override, root), COMMAND_LINE))
    empty = _empty_values(root)
    nested, sources = _laid_over(root().model_dump(), given, empty)
    preset = nested["algorithm"].get("preset") if isinstance(nested.get("algorithm"), dict) else None
    if isinstance(preset, str) and preset in PRESETS:
        preset_keys = (["algorithm"], PRESETS[preset], f"algorithm.preset={preset}")
        nested, sources = _laid_over(root().model_dump(), [preset_keys, *given], empty)
    try:
        config = root.model_validate(_interpolate(nested, sources))
        errors.found += too_large(config, sources)
    except ValidationError as error:
        errors.found += explain_invalid(error, root, sources)
    errors.raise_all()
    return config


def save_config(config: Config, path: str | Path) -> None:
    """Writes the resolved config as YAML; `load_config` reads an equal config from it."""
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_atomically(Path(path), text)


def with_changes(config: Root, changes: Mapping[str, Any]) -> Root:
    """A copy of the config with these values, by full key. Raises pydantic's ValidationError for a value that is not allowed."""
    nested = config.model_dump()
    for key, value in changes.items():
        *path, name = key.split(".")
        inner = nested
        for each in path:
            inner = inner[each]
        inner[name] = value
    return type(config).model_validate(nested)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that OmegaConf, unlike PyYAML, reads as numbers, such as 0E0."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        try:
            float(text.replace("_", ""))
        except ValueError:
            return self.represent_str(text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _Dumper.represent_text)


def _read_layers(path: Path, refined_by: tuple[Path, ...]) -> list[tuple[str, Mapping[Any, Any]]]:
    """(source, mapping) of the file and of its bases, the last base first."""
    whole = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a link to itself
    if whole in refined_by:
        chain = " -> ".join(str(file) for file in (*refined_by, whole))
        raise ConfigError(f"{path}: `base` goes in a circle", files=chain, remedy="remove one `base`")
    mapping = _read_yaml(path)
    base = mapping.pop("base", None)
    if base is None:
        return [(str(path), mapping)]
    if not isinstance(base, str):
        raise ConfigError(f"base = {base!r}: the path of another YAML file is expected", given_in=str(path))
    return [*_read_layers(path.parent / Path(base).expanduser(), (*refined_by, whole)), (str(path), mapping)]


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        others = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        near = nearest_name(path.name, others)
        kind = "a folder" if path.is_dir() else "a pipe or a device" if path.exists() else ""
        problem = f"is {kind}, a YAML file is expected" if kind else "there is no such config file"
        raise ConfigError(
            f"{path}: {problem}",
            nearest=str(path.parent / near) if near else "",
            there=", ".join(others[:12]),
            remedy="give the path of a YAML file, such as configs/quickstart.yaml",
        )
    remedy = "a config is a YAML mapping, such as `run: {name: first, steps: 10}`"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for event in yaml.parse(path.read_text(encoding="utf-8-sig"), yaml.SafeLoader):
            if isinstance(event, yaml.ScalarEvent) and event.style is None and OTHER_BASE.fullmatch(event.value):
                raise _other_base(f"{path}:{event.start_mark.line + 1}", event.value)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or "cannot be read as YAML"
        if "".join(path.read_text(encoding="utf-8-sig").split("\n")[line - 1 : line]).lstrip(" ").startswith("\t"):
            problem, remedy = "begins with a tab", "indent with spaces"
        raise ConfigError(f"{path}:{line}: {problem}", context=error.context or "", remedy=remedy) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read as a config: {problem}", remedy=remedy) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}, not a mapping", remedy=remedy)
    return content


def _other_base(where: str, text: str) -> ConfigError:
    problem = f"{where}: YAML reads {text} as {yaml.safe_load(text)}"
    return ConfigError(problem, remedy=f"write a decimal number, or quote it if it is a text: '{text}'")


def _read_override(override: str, root: type[Config]) -> tuple[list[str], Any]:
    """Path and value of `key=value`. The value of a text key is the text as typed, as in run.name=1e3 and data.eval=."""
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        is_flag = key.startswith("-") and equals
        remedy = f"write {override.lstrip('-')}" if is_flag else "write for example engine.wrap=ddp"
        raise ConfigError(f"{override!r}: an override is written key=value", remedy=remedy)
    if any("\ud800" <= letter <= "\udfff" for letter in override):  # bytes of the command line that are not UTF-8
        raise ConfigError(f"{override!a}: not in UTF-8", remedy="write it in UTF-8, without lone surrogates")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        raise ConfigError(f"{override!r}: the value cannot be read: {problem}", remedy=f"quote it: {key}='\"...\"'") from error
    assert isinstance(value, dict)
    nested: Any = value["value"]
    keys = all_keys(root)
    field = keys.get(".".join(with_any_name(keys, key.split("."))))
    if field and kind_of(field) is str and (not text or isinstance(nested, bool | int | float)):
        nested = text
    elif field and kind_of(field) is list and not text:
        raise ConfigError(f"{key} = '': a list is expected", given_in=COMMAND_LINE, remedy=f"write {key}=[] for an empty one")
    elif OTHER_BASE.fullmatch(text):
        raise _other_base(key, text)
    return key.split("."), nested


@cache
def _empty_values(root: type[Config]) -> Mapping[str, Any]:
    """The value that null stands for, by the full names of keys that take an empty list or a mapping of names."""
    empty = dict[str, Any]()
    for key, field in all_keys(root).items():
        default = field.get_default(call_default_factory=True)
        if default is not None and kind_of(field) is list and not any(hasattr(each, "min_length") for each in field.metadata):
            empty[key] = []
        elif takes_names(field) and default in ("", {}):
            empty[key] = default
    return empty


def _laid_over(
    nested: dict[str, Any], given: Sequence[tuple[Sequence[str], Any, str]], empty: Mapping[str, Any]
) -> tuple[dict[str, Any], Sources]:
    """Writes each (path, value, source) into `nested`, later ones over earlier ones; returns it and the source of each value.

    Mappings are merged key by key, any other value is replaced; an empty section changes nothing. A mapping of NAMED keeps only
    the names that its value gives. null becomes the value of `empty`, by full names of keys.
    """
    sources, left = Sources(), [*reversed(given)]
    while left:
        (*above, name), value, source = left.pop()
        into, path = nested, (*above, name)
        for depth, part in enumerate(above, 1):
            part = _own_name(into, part)
            if not isinstance(into.get(part), dict):
                into[part], sources[path[:depth]] = {}, source
            into = into[part]
        name = _own_name(into, name)
        key, old = ".".join(with_any_name(empty, path)), into.get(name)
        is_new = isinstance(value, Mapping) and not isinstance(old, dict) and all(type(each) in (str, int) for each in value)
        if is_new and any(each.startswith(f"{key}.") for each in empty):  # a new name, whose keys may be null
            into[name], sources[path] = {}, source
            old = into[name]
        if isinstance(old, dict) and isinstance(value, Mapping):
            for left_out in old.keys() - map(str, value) if path in NAMED else ():
                del old[left_out]
            left += [((*path, str(inner)), value[inner], source) for inner in [*value][::-1]]
        elif value is None and key in empty:
            into[name], sources[path] = copy.copy(empty[key]), source
        elif value is not None or not isinstance(old, dict) or path in NAMED:
            into[name], sources[path] = _with_text_names(value) if isinstance(old, str) else value, source
    return nested, sources


def _own_name(mapping: Mapping[Any, Any], name: str) -> Any:
    """The name as the mapping has it: in YAML's free mappings it can be a number."""
    return name if name in mapping else next((each for each in mapping if str(each) == name), name)


def _with_text_names(value: Any) -> Any:
    """A mapping with names of digits as texts, as in data.eval: YAML reads them as numbers, an override as texts."""
    if not isinstance(value, Mapping):
        return value
    return {str(name) if type(name) is int else name: each for name, each in value.items()}


def _interpolate(nested: dict[str, Any], sources: Sources) -> Any:
    """The mapping with every `${...}` replaced by its value. OmegaConf needs 50 ms for it; most configs have none."""
    if not INTERPOLATED.search(repr(nested)):
        return nested
    try:
        return OmegaConf.to_container(OmegaConf.create(nested), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "the config")
        headline = f"{key}: {str(error).splitlines()[0]}"
        remedy = "give it a value; ${...} may name another full key, or an environment variable as ${oc.env:NAME}"
        source = sources.get(tuple(key.split(".")), "")
        raise ConfigError(headline, given_in=source, remedy=remedy) from error
