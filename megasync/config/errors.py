"""Errors for the person who starts a run: one screen, with what is wrong, what would be right and what to do.

Leaves out errors while training; those are raised where they happen.

    with main_errors():
        config = load_config("configs/quickstart.yaml", ["engine.wrap=ddp"])
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SPEAKER_SECONDS = 10.0  # by which ranks come to the same error at different times
LEAST_LIKENESS = 0.65  # of names of which one may be meant by the other


def explain(headline: str, **lines: str) -> str:
    """The headline and, indented below it, each named line that is not empty."""
    shown = {name.replace("_", " ") + ":": text for name, text in lines.items() if text}
    width = max(map(len, shown), default=0)
    return "\n".join([headline, *(f"  {name:<{width}} {text}" for name, text in shown.items())])


class ConfigError(ValueError):
    """A config, or a file that it names, cannot be run as it is. The text is `explain`'s."""

    def __init__(self, headline: str, **lines: str) -> None:
        super().__init__(explain(headline, **lines))


def refuse_if(is_wrong: object, message: str, **lines: str) -> None:
    if is_wrong:
        raise ConfigError(message, **lines)


def some(names: Iterable[object], most: int = 6) -> str:
    """The first of them, and how many more there are; empty when there are none."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def nearest_name(word: str, names: Iterable[str]) -> str:
    """The name most alike `word`, whole, in one of its `_` parts or by their initials; empty when none is near."""

    def likeness(name: str) -> float:
        words = name.split("_")
        # a word as short as `on` is near to any letter of its, and `log` to a logger
        parts = {name, *(part for part in words if len(part) > 3)}
        parts |= {"".join(part[:1] for part in words)} if len(words) > 1 else set()
        return max(_likeness(word.lower(), part.lower()) for part in parts)

    best = max(names, key=likeness, default="")
    return best if best and likeness(best) >= LEAST_LIKENESS else ""


def _likeness(word: str, other: str) -> float:
    """From 0 to 1; slips seldom hit the first letter, so that `question` is less like `solution` than their letters are."""
    ratio = difflib.SequenceMatcher(None, word, other).ratio()
    return ratio if word[:1] == other[:1] else 0.85 * ratio


@contextmanager
def main_errors(*, speak: bool = True, of_files: bool = True) -> Iterator[None]:
    """Around what a command does before it starts anything: a ValueError becomes its message and exit code 2, and so does, with
    `of_files`, an OSError that names the file: it cannot be read or written.

    Of several ranks that all meet the same error, one should `speak`. Its end ends the others, which so long wait: torchrun would
    end it before it has spoken, if they were first. Where it does not meet the error, they speak after a while.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not (of_files and error.filename):
            raise
        if not speak:
            time.sleep(SPEAKER_SECONDS + int(os.environ.get("LOCAL_RANK", "0")))  # one of them after another
        told = unusable(error) if isinstance(error, OSError) else error
        print(told, file=sys.stderr, flush=True)
        sys.exit(2)


def unusable(error: OSError) -> str:
    """`error` names its file."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room there, or name one on another disk" if is_full else "name one that this user can read, or write"
    return explain(f"{error.filename2 or error.filename}: {error.strerror}", remedy=remedy)
