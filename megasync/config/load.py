"""Reads a config: YAML files (each may refine a `base`), then `key=value` overrides, into frozen pydantic models.

Every key, type, choice and range is checked here; invalid.py says what is wrong. Leaves out what needs the model, the data or
the world size (check.py). No torch in here.

    config = load_config("configs/grpo_fsdp.yaml", ["engine.wrap=ddp", "sync.bucket_bytes=64MiB"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from typing_extensions import TypeVar

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.files import write_atomically
from megasync.config.invalid import explain_invalid
from megasync.config.keys import all_keys, kind_of, with_any_name
from megasync.config.schema import Config

COMMAND_LINE = "the command line"
Root = TypeVar("Root", bound=Config, default=Config)
Sources = dict[tuple[str, ...], str]  # where each value was given, by its path


def load_config(path: str | Path, overrides: Sequence[str] = (), root: type[Root] = Config) -> Root:  # type: ignore[assignment]
    """Raises ConfigError for anything that is not a config of the model `root`."""
    nested, sources = root().model_dump(), Sources()
    for source, mapping in _read_layers(Path(path), ()):
        _merge(nested, mapping, (), source, sources)
    for override in overrides:
        _merge(nested, _read_override(override, root), (), COMMAND_LINE, sources)
    try:
        return root.model_validate(_interpolate(nested, sources))
    except ValidationError as error:
        raise explain_invalid(error, root, sources) from error


def save_config(config: Config, path: str | Path) -> None:
    """Writes the resolved config as YAML that `load_config` reads back to an equal one."""
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_atomically(Path(path), text)


def with_changes(config: Root, changes: Mapping[str, Any]) -> Root:
    """The same config but for these values, by full key. Raises pydantic's ValidationError where one is none of the key's."""
    nested = config.model_dump()
    for key, value in changes.items():
        *path, name = key.split(".")
        inner = nested
        for each in path:
            inner = inner[each]
        inner[name] = value
    return type(config).model_validate(nested)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that OmegaConf reads as numbers, and PyYAML does not, such as 0E0."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        try:
            float(text.replace("_", ""))
        except ValueError:
            return self.represent_str(text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _Dumper.represent_text)


def _read_layers(path: Path, refined_by: tuple[Path, ...]) -> list[tuple[str, Mapping[Any, Any]]]:
    """(source, mapping) of the file and of the files it refines, the most basic first."""
    if path.resolve() in refined_by:
        chain = " -> ".join(str(file) for file in (*refined_by, path.resolve()))
        raise ConfigError(f"{path}: `base` goes in a circle", files=chain, remedy="take one `base` out")
    mapping = _read_yaml(path)
    base = mapping.pop("base", None)
    if base is None:
        return [(str(path), mapping)]
    if not isinstance(base, str):
        raise ConfigError(f"base = {base!r}: the path of another YAML file is expected", given_in=str(path))
    return [*_read_layers(path.parent / Path(base).expanduser(), (*refined_by, path.resolve())), (str(path), mapping)]


def _read_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        others = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        near = nearest_name(path.name, others)
        problem = "is a folder, a YAML file is expected" if path.is_dir() else "there is no such config file"
        raise ConfigError(
            f"{path}: {problem}",
            nearest=str(path.parent / near) if near else "",
            there=", ".join(others[:12]),
            remedy="give the path of a YAML file, such as configs/quickstart.yaml",
        )
    remedy = "a config is a YAML mapping, such as `run: {name: first, steps: 10}`"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or "cannot be read as YAML"
        raise ConfigError(f"{path}:{line}: {problem}", context=error.context or "", remedy=remedy) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read as a config: {problem}", remedy=remedy) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}, not a mapping", remedy=remedy)
    return content


def _read_override(override: str, root: type[Config]) -> dict[str, Any]:
    """The one value as a nested mapping; what is for a text key is the text as typed: run.name=1e3, data.eval=."""
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        is_flag = key.startswith("-") and equals
        remedy = f"write {override.lstrip('-')}" if is_flag else "write for example engine.wrap=ddp"
        raise ConfigError(f"{override!r}: an override is written key=value", remedy=remedy)
    if any("\ud800" <= letter <= "\udfff" for letter in override):  # bytes of the command line that are no UTF-8
        raise ConfigError(f"{override!a}: not in UTF-8", remedy="write it in UTF-8, and without halves of surrogate pairs")
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
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert isinstance(nested, dict)
    return nested


def _merge(into: dict[str, Any], layer: Mapping[Any, Any], above: tuple[str, ...], source: str, sources: Sources) -> None:
    """Lays `layer` over `into`: mappings key by key, anything else whole; a section without anything in it changes nothing."""
    for raw_name, value in layer.items():
        name, old = str(raw_name), into.get(str(raw_name))
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value, (*above, name), source, sources)
        elif value is not None or not isinstance(old, dict):
            into[name], sources[*above, name] = value, source


def _interpolate(nested: dict[str, Any], sources: Sources) -> Any:
    """The same with every `${...}` replaced."""
    try:
        return OmegaConf.to_container(OmegaConf.create(nested), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "the config")
        headline = f"{key}: {str(error).splitlines()[0]}"
        remedy = "give it a value; ${...} may name another full key, or an environment variable as ${oc.env:NAME}"
        source = sources.get(tuple(key.split(".")), "")
        raise ConfigError(headline, given_in=source, remedy=remedy) from error
