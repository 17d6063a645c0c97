"""Imports a function or class that a user names as `package.module:name`; failures become ConfigErrors. No torch in here.

Leaves out checks of the imported object (rewards/resolve.py, episodes/resolve.py, checks/own_functions.py).

    module, function = import_named("my_package.rewards:close", "rollout.reward = 'my_package.rewards:close'")
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.own_packages import PACKAGES, hidden, rename

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def import_named(path: str, headline: str) -> tuple[ModuleType, Any]:
    """The module, and its attribute of that name, or None.

    Raises:
        ConfigError: the module cannot be imported; the message begins with `headline`.
    """
    module_name, _, name = path.partition(":")
    files = hidden(Path.cwd())
    if (top := module_name.partition(".")[0]) in PACKAGES and top != "megasync":
        own = [file for file in files if file.partition(".")[0].partition("/")[0] == top]
        remedy = rename(own) or f"name a module of yours; {top} is one of megasync's packages"
        raise ConfigError(f"{headline}: {top} is one of megasync's packages", remedy=remedy)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        is_not_found = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        remedy = f"correct the module, or install the packages it imports, until `python -c 'import {module_name}'` works"
        if is_not_found:
            remedy = "start in the folder of the module, or set PYTHONPATH"
        if module_name.startswith("megasync.examples."):
            remedy = f"write {module_name.removeprefix('megasync.')}:{name}, and start in the folder of a clone of the repository"
        remedy += f"; and {rename(files)}" if files else ""
        if module_name.endswith(".py"):
            remedy = f"write {module_name.removesuffix('.py')}:{name}, without the file's .py"
        raise ConfigError(f"{headline}: cannot be imported: {type(error).__name__}: {error}", remedy=remedy) from error
    return module, getattr(module, name, None)


def digest_of_module(name: str) -> str:
    """BLAKE2b of the file of an imported module, to notice that its functions may have changed."""
    file = getattr(sys.modules[name], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes() if file else b"").hexdigest()


def own_object(key: str, path: str, wanted: str, arguments: Sequence[str]) -> Any:
    """The function or class that the value `path` of `key` names. `wanted`: the expected thing, as text; `arguments`: the names
    of those that it will be called with.

    Raises:
        ConfigError: it is no package.module:name, cannot be imported, is no function or class, or takes other arguments.
    """
    headline, remedy = f"{key} = {path}", f"name {wanted}, as package.module:name"
    if not IMPORT_PATH.fullmatch(path):
        raise ConfigError(f"{headline}: is not written as package.module:name", remedy=remedy)
    module, found = import_named(path, headline)
    if not callable(found):
        name = path.partition(":")[2]
        problem = f"{name} is not in {module.__file__}" if found is None else f"{name} is no function"
        near = nearest_name(name, [other for other, value in vars(module).items() if callable(value)])
        raise ConfigError(f"{headline}: {problem}", nearest=near, remedy=remedy)
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{headline}: cannot be called with {', '.join(arguments)}: {error}", remedy=remedy) from error
    except ValueError:  # a function of C that does not tell
        pass
    return found
