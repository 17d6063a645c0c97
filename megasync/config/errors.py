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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SPEAKER_SECONDS = 10.0  # by which ranks come to the same error at different times
LEAST_LIKENESS = 0.65  # of names of which one may be meant by the other
LEAST_LENGTH = 0.7  # of the shorter one, as a share of the longer


def explain(headline: str, **lines: str) -> str:
    """The headline and, indented below it, each named line that is not empty."""
    shown = {name.replace("_", " ") + ":": text for name, text in lines.items() if text}
    width = max(map(len, shown), default=0)
    return "\n".join([headline, *(f"  {name:<{width}} {text}" for name, text in shown.items())])


class ConfigError(ValueError):
    """A config, or a file that it names, cannot be run as it is. The text is `explain`'s."""

    def __init__(self, headline: str, **lines: str) -> None:
        super().__init__(explain(headline, **lines))
        self.headline, self.lines, self.parts = headline, lines, [self]


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """One error that says all of them, and last how many; each in few lines, so that many can be read: choices only where the
    remedy is one of them, and the source once where all have the same.
    """
    if len(errors) == 1:
        return errors[0]
    sources = {error.lines.get("given_in", "") for error in errors}
    shown = dict[str, None]()
    for error in errors:
        remedy = error.lines.get("remedy", "")
        drops = {
            "nearest",
            *(["given_in"] if len(sources) == 1 else []),
            *([] if "choices" in remedy or not remedy else ["choices"]),
        }
        shown[explain(error.headline, **{name: text for name, text in error.lines.items() if name not in drops})] = None
    source = f" in {sources.pop()}" if len(sources) == 1 and any(sources) else ""
    all_of_them = ConfigError("\n".join([*shown, f"{len(shown)} errors{source}; nothing was started"]))
    all_of_them.parts = list(errors)
    return all_of_them


class Found:
    """Errors of several checks, which are all made before the first one is raised.

    found = Found()
    with found.more():
        check_one(config)
    with found.more():
        check_other(config)
    found.stop()
    """

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    @contextmanager
    def more(self) -> Iterator[None]:
        """What is raised in the block is kept for later."""
        try:
            yield
        except ConfigError as error:
            self.errors += error.parts

    def stop(self) -> None:
        """Raise what was found, if anything was."""
        if self.errors:
            raise together(self.errors)


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
    """From 0 to 1. Slips seldom hit the first letter, so that `question` is less like `solution` than their letters are; and they
    leave the length as it is, so that max_num_batched_tokens is not max_new_tokens, where no words are left out.
    """
    words, others = set(word.split("_")), set(other.split("_"))
    shorter, longer = sorted((len(word), len(other)))
    if shorter < LEAST_LENGTH * longer and not (words <= others or others <= words):
        return 0.0
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
    path = Path(os.fsdecode(error.filename2 or error.filename))
    if error.errno == errno.ENOENT and path.is_symlink():
        remedy = "put its target there, or a file in place of the link"
        return explain(f"{path}: is a link to {path.readlink()}, which is not there", remedy=remedy)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room there, or name one on another disk" if is_full else "name one that this user can read, or write"
    return explain(f"{error.filename2 or error.filename}: {error.strerror}", remedy=remedy)
