"""Products of parameters in two parts, like the squares of a chessboard: CI takes the white ones, `--all` the black ones, too.

White is every third square of each row and of each column, every second one where there are only two of them: so that what is
wrong in a whole row or column shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

COLOURS = pytest.mark.parametrize("is_black", [False, pytest.param(True, marks=pytest.mark.long)], ids=["white", "black"])


def squares(rows: Iterable[Any], columns: Iterable[Any], *, is_black: bool) -> list[tuple[Any, Any]]:
    """The pairs of one colour, row by row; the first is white."""
    rows, columns = list(rows), list(columns)
    step = min(3, len(rows), len(columns))
    numbered = ((i + j, row, column) for i, row in enumerate(rows) for j, column in enumerate(columns))
    return [(row, column) for number, row, column in numbered if (number % step > 0) == is_black]
