"""Imports a function or class that a user names as `package.module:name`; failures become ConfigErrors. No torch in here.

Leaves out checks of the imported object (rewards/resolve.py, episodes/resolve.py).

    module, function = import_named("my_package.rewards:close", "rollout.reward = 'my_package.rewards:close'")
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megasync.config.errors import ConfigError
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
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        remedy = f"correct the module, or install the packages it imports, until `python -c 'import {module_name}'` works"
        if is_missing:
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
