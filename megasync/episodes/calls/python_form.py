"""Tool calls written as Python, `[add(a=1, b=[2, null])]`: read without running anything.

python_calls('[add(a=1), now()]')     # [("add", {"a": 1}), ("now", {})]
"""

from __future__ import annotations

import ast
import math
import warnings
from typing import Any

from megasync.episodes.calls.arguments import UnreadableError

WORDS = {"true": True, "false": False, "null": None}  # of JSON, which some templates write


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls, one a line or in lists, with keyword arguments of literal values.

    Raises:
        UnreadableError: the text is something else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know, and leaves as they are
            module = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"not calls such as [name(argument=value)]: {error}") from error
    calls: list[ast.expr | None] = []
    for statement in module.body:
        written = statement.value if isinstance(statement, ast.Expr) else None
        calls += written.elts if isinstance(written, ast.List | ast.Tuple) else [written]
    if not calls:
        raise UnreadableError("there is no call")
    return [_call(call) for call in calls]


def _call(node: ast.AST | None) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise UnreadableError("not calls such as [name(argument=value)]")
    if node.args or not all(keyword.arg for keyword in node.keywords):
        raise UnreadableError("an argument has no name: write name(argument=value)")
    made: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg in made:
            raise UnreadableError(f"the argument {keyword.arg} occurs twice")
        made[str(keyword.arg)] = _value(keyword.value)
    return ast.unparse(node.func), made


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return _constant(node.value)
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = _value(node.operand)
        if type(number) in (int, float):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key else None for key in node.keys]
        if all(isinstance(key, str) for key in keys) and len(set(keys)) == len(keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise UnreadableError(f"{ast.unparse(node)[:80]} is no value that JSON has")


def _constant(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise UnreadableError("a number is not finite")
    if isinstance(value, str):  # two halves of a surrogate pair, as JSON writes a character, are one
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
