"""Names and types of the fields of megatron-core's DistributedDataParallelConfig, read from its source: no torch in here.

For checking `engine.overrides` before anything starts. Leaves out the config itself (wrap.py).
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

SOURCE = "core/distributed/distributed_data_parallel_config.py"
CLASS = "DistributedDataParallelConfig"


def ddp_fields() -> dict[str, str]:
    """Annotation by field name; empty where megatron-core is not installed, as on a machine that only submits runs."""
    found = importlib.util.find_spec("megatron")  # a namespace package: nothing of it is imported
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(folder) / SOURCE
        if path.is_file():
            classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
            (body,) = (node.body for node in classes if node.name == CLASS)
            return {
                node.target.id: ast.unparse(node.annotation)
                for node in body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    return {}
