"""What a user names as `package.module:name`: imported, with the config's own words where that fails. No torch in here.

Leaves out what is found there, which rewards and episodes look at themselves.

    module, found = import_named("my_package.rewards:close", "rollout.reward = 'my_package.rewards:close'")
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
    """The module, and what it has under the name: None where it has nothing.

    Raises:
        ConfigError: the module cannot be imported; the message begins with the headline.
    """
    module_name, _, name = path.partition(":")
    files = hidden(Path.cwd())
    if (top := module_name.partition(".")[0]) in PACKAGES and top != "megasync":
        own = [file for file in files if file.partition(".")[0].partition("/")[0] == top]
        remedy = rename(own) or f"name a module of yours; {top} is a package of megasync's own"
        raise ConfigError(f"{headline}: {top} is a package of megasync's own", remedy=remedy)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        remedy = f"the module was found: correct it, or install what it imports, until `python -c 'import {module_name}'` works"
        if is_missing:
            remedy = "start where the module can be imported, or set PYTHONPATH"
        remedy += f"; and {rename(files)}" if files else ""
        if module_name.endswith(".py"):
            remedy = f"write {module_name.removesuffix('.py')}:{name}, without the file's .py"
        raise ConfigError(f"{headline}: cannot be imported: {type(error).__name__}: {error}", remedy=remedy) from error
    return module, getattr(module, name, None)


def digest_of_module(name: str) -> str:
    """Of the file that an imported module is in: where it differs, what its functions return may."""
    file = getattr(sys.modules[name], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes() if file else b"").hexdigest()
