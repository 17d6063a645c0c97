"""Reads a config: YAML files (each may refine a `base`), then `key=value` overrides, into the frozen dataclasses.

Every key, type, choice and range is checked here. Leaves out what needs the model, the data or the world size
(config_check.py). No torch in here.

    config = load_config("configs/grpo_fsdp.yaml", ["engine.wrap=ddp", "sync.bucket_bytes=64MiB"])
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megasync.config.errors import ConfigError, explain, nearest_name
from megasync.config.schema import CHOICES, RANGES, Config
from megasync.files import write_atomically

__all__ = ["ConfigError", "config_to_dict", "load_config", "save_config"]

COMMAND_LINE = "the command line"
BYTE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping of names to values",
    list: "a list of texts",
}


@dataclass(frozen=True)
class _Given:
    """One value as it was written, and where."""

    value: Any
    source: str


_Path = tuple[str, ...]  # the names from the top of the config to a value
_AllGiven = dict[_Path, _Given]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Raises ConfigError for anything that is not a config: see the module's docstring for what is checked."""
    given: _AllGiven = {}
    for source, mapping in _read_layers(Path(path), ()):
        _flatten(Config, (), mapping, source, given)
    for override in overrides:
        _flatten_override(override, given)
    resolved = _resolve(given)
    config = _build(Config, (), resolved, given)
    assert isinstance(config, Config)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested plain dicts, in the dataclasses' order."""
    return asdict(config)


def save_config(config: Config, path: str | Path) -> None:
    """Writes the resolved config as YAML that `load_config` reads back to an equal one."""
    text = yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
    write_atomically(Path(path), text)


def _read_layers(path: Path, refined_by: tuple[Path, ...]) -> list[tuple[str, Mapping[Any, Any]]]:
    """(source, mapping) of the file and of the files it refines, the most basic first."""
    if path.resolve() in refined_by:
        chain = " -> ".join(str(file) for file in (*refined_by, path.resolve()))
        raise ConfigError(explain(f"{path}: `base` goes in a circle", files=chain, remedy="take one `base` out"))
    mapping = _read_yaml(path)
    base = mapping.pop("base", None)
    if base is None:
        return [(str(path), mapping)]
    if not isinstance(base, str):
        message = explain(f"base = {base!r}: the path of another YAML file is expected", given_in=str(path))
        raise ConfigError(message)
    return [*_read_layers(path.parent / base, (*refined_by, path.resolve())), (str(path), mapping)]


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        others = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        near = nearest_name(path.name, others)
        problem = "is a folder, a YAML file is expected" if path.is_dir() else "there is no such config file"
        raise ConfigError(
            explain(
                f"{path}: {problem}",
                nearest=str(path.parent / near) if near else "",
                there=", ".join(others[:12]),
                remedy="give the path of a YAML file, such as configs/quickstart.yaml",
            )
        )
    remedy = "a config is a YAML mapping, such as `run: {name: first, steps: 10}`"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or "cannot be read as YAML"
        raise ConfigError(explain(f"{path}:{line}: {problem}", context=error.context or "", remedy=remedy)) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(explain(f"{path}: cannot be read as a config: {problem}", remedy=remedy)) from error
    if not isinstance(content, dict):
        raise ConfigError(explain(f"{path}: holds a {type(content).__name__}, not a mapping", remedy=remedy))
    return content


def _flatten_override(override: str, given: _AllGiven) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        remedy = (
            f"write {override.lstrip('-')}" if key.startswith("-") and equals else "write for example engine.wrap=ddp"
        )
        raise ConfigError(explain(f"{override!r}: an override is written key=value", remedy=remedy))
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        message = explain(f"{override!r}: the value cannot be read: {problem}", remedy=f"quote it: {key}='\"...\"'")
        raise ConfigError(message) from error
    assert isinstance(value, dict)
    nested: Any = value["value"]
    for name in reversed(key.split(".")):
        nested = {name: nested}
    _flatten(Config, (), nested, COMMAND_LINE, given, text=text)


def _flatten(
    section: type, above: _Path, mapping: Mapping[Any, Any], source: str, given: _AllGiven, text: str | None = None
) -> None:
    """Adds each value in `mapping` under its path; `text` is an override's value as typed."""
    hints = get_type_hints(section)
    for raw_name, value in mapping.items():
        name = str(raw_name)
        path, kind = (*above, name), hints.get(name)
        if kind is None:
            raise _unknown_key(above, name, section, source)
        if is_dataclass(kind) or get_origin(kind) is dict:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise _wrong_type(".".join(path), value, dict, source)
            if get_origin(kind) is dict:
                given.update({(*path, str(field)): _Given(item, source) for field, item in value.items()})
            else:
                assert isinstance(kind, type)
                _flatten(kind, path, value, source, given, text)
        elif kind is str and text is not None and (not text or isinstance(value, bool | int | float)):
            given[path] = _Given(text, source)  # run.name=12 is the text 12, and data.eval= the empty text
        else:
            given[path] = _Given(value, source)


def _unknown_key(above: _Path, name: str, section: type, source: str) -> ConfigError:
    siblings = get_type_hints(section)
    prefix = "".join(f"{part}." for part in above)
    near = nearest_name(name, siblings)
    everywhere = [full for full in _all_keys(Config, "") if full.rpartition(".")[2] == name]
    nearest = everywhere[0] if everywhere else (prefix + near if near else "")
    return ConfigError(
        explain(
            f"{prefix}{name}: there is no such key",
            given_in=source,
            nearest=nearest,
            choices=", ".join(prefix + sibling for sibling in siblings),
            remedy=f"write {nearest} instead" if nearest else "take the key out, or write one of the choices",
        )
    )


def _wrong_type(key: str, value: object, kind: type, source: str) -> ConfigError:
    inside = next((full for full in _all_keys(Config, "") if full.startswith(f"{key}.")), f"{key}.NAME")
    whole = isinstance(value, float) and value.is_integer()
    choices = CHOICES.get(key, ())
    example = {bool: "true", int: f"{value:.0f}" if whole else "8", float: "0.5", str: next(iter(choices), "some-text")}
    example[list] = f"[{', '.join(choices)}]"
    return ConfigError(
        explain(
            f"{key} = {reprlib.repr(value)}: {KINDS[kind]} is expected",
            given_in=source,
            choices=", ".join(choices),
            remedy=f"write for example {key}={example[kind]}" if kind in example else f"set for example {inside}=...",
        )
    )


def _all_keys(section: type, prefix: str) -> list[str]:
    """Full names of all values, in order."""
    keys: list[str] = []
    for name, kind in get_type_hints(section).items():
        keys += _all_keys(kind, f"{prefix}{name}.") if is_dataclass(kind) else [prefix + name]  # type: ignore[arg-type]
    return keys


def _resolve(given: _AllGiven) -> dict[str, Any]:
    """The defaults with what was given laid over them, nested, `${...}` replaced."""
    nested = config_to_dict(Config())
    for path, leaf in given.items():
        target = nested
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = leaf.value
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(nested), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "the config")
        known = given.get(tuple(key.split(".")))
        headline = f"{key}: {str(error).splitlines()[0]}"
        remedy = "give it a value; ${...} may name another full key, or an environment variable as ${oc.env:NAME}"
        raise ConfigError(explain(headline, given_in=known.source if known else "", remedy=remedy)) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _build(section: type, above: _Path, values: Mapping[str, Any], given: _AllGiven) -> object:
    built: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        path, value = (*above, name), values[name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            built[name] = _build(kind, path, value, given)
        elif get_origin(kind) is dict:
            built[name] = dict(value)
        else:
            source = given[path].source if path in given else "the defaults"
            built[name] = _value(".".join(path), kind, value, source)
    return section(**built)


def _value(key: str, annotation: Any, value: Any, source: str) -> Any:
    """`value` as the key's type, within its choices and range."""
    if get_origin(annotation) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise _wrong_type(key, value, list, source)
        return tuple(_value(key, str, item, source) for item in items)
    kinds = get_args(annotation) or (annotation,)
    kind = kinds[0]
    if value is None and type(None) in kinds:
        return None
    if kind is int and key.endswith("_bytes") and isinstance(value, str):
        value = _num_bytes(key, value, source)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise _wrong_type(key, value, kind, source)
    if key in CHOICES and value not in CHOICES[key]:
        near = nearest_name(value, CHOICES[key])
        raise ConfigError(
            explain(
                f"{key} = {reprlib.repr(value)}: not one of the choices",
                given_in=source,
                choices=", ".join(CHOICES[key]),
                nearest=near,
                remedy=f"write {key}={near or CHOICES[key][0]}",
            )
        )
    if key in RANGES and not (math.isfinite(value) and RANGES[key].holds(value)):
        raise ConfigError(
            explain(
                f"{key} = {value}: out of range",
                given_in=source,
                allowed=str(RANGES[key]),
                remedy=f"write a number {RANGES[key]}",
            )
        )
    return value


def _num_bytes(key: str, text: str, source: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    num_bytes = float(match[1]) * BYTE_UNITS.get(match[2], math.nan) if match else math.nan
    if not num_bytes.is_integer():
        raise ConfigError(
            explain(
                f"{key} = {text!r}: a size in bytes is expected",
                given_in=source,
                choices="a whole number of bytes, or one with " + ", ".join(unit for unit in BYTE_UNITS if unit),
                remedy=f"write for example {key}=64MiB",
            )
        )
    return int(num_bytes)
