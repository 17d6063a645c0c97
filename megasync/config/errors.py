"""Errors for the person who starts a run: the problem, the allowed values and the remedy, on one screen.

Leaves out errors during training, which are raised where they happen.

    with main_errors():
        config = load_config("configs/quickstart.yaml", ["engine.wrap=ddp"])
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

SPEAKER_SECONDS = 10.0  # the other ranks wait this long for the speaking rank to print the error
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MIN_SIMILARITY = 0.65  # of two names, for one to be a misspelling of the other
MIN_LENGTH_RATIO = 0.7  # of the shorter name to the longer one
HEADLINE = re.compile(r"(?:.*?/config\.json: )?([a-z_]\w*(?:\.[\w*]+)*)(?: = (\{.*\}|\[.*\]|.*?))?(?:: | is not set)", re.DOTALL)


def explain(headline: str, **lines: str) -> str:
    """Returns the headline with each named line that is not empty indented below it."""
    shown = {name.replace("_", " ") + ":": text for name, text in lines.items() if text}
    width = max(map(len, shown), default=0)
    return "\n".join([headline, *(f"  {name:<{width}} {text}" for name, text in shown.items())])


class ConfigError(ValueError):
    """A config, or a file that it names, cannot be used. `headline` and `lines` are the arguments of `explain`; `parts` are the
    single errors of a combined one.

    A headline `key = value: problem` or `key: problem`, optionally after `FOLDER/config.json: `, gives `key` and `value`;
    `remedy` is the line of that name.
    """

    def __init__(self, headline: str, **lines: str) -> None:
        super().__init__(explain(headline, **lines))
        self.headline, self.lines, self.parts = headline, lines, [self]
        named = HEADLINE.match(headline)
        self.key, self.value = (named[1], named[2] or "") if named else ("", "")
        self.remedy = lines.get("remedy", "")

    def about(self, key: str, other: str) -> ConfigError:
        """The same error of a folder that `other` names, instead of `key`."""
        lines = {name: text.replace(key, other) for name, text in self.lines.items()}
        named = {} if key in self.headline else {"named_by": other}
        return ConfigError(self.headline.replace(key, other), **named, **lines)


def wrong(config: BaseModel, key: str, problem: str, **lines: str) -> ConfigError:
    """An error about the value of the key with the full name `key`."""
    return ConfigError(f"{key} = {shown_value(attrgetter(key)(config))}: {problem}", **lines)


def shown_value(value: object) -> str:
    """The value as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def combined(errors: Sequence[ConfigError]) -> ConfigError:
    """One error with the text of all, and their number in the last line. To keep it short, choices are left out where there is
    a remedy that does not refer to them, and a source that all errors share is printed once.
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


class ErrorCollector:
    """Errors of several checks, which are all made before the first one is raised.

    errors = ErrorCollector()
    with errors.collect():
        check_one(config)
    with errors.collect():
        check_other(config)
    errors.raise_all()
    """

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps a ConfigError of the block for `raise_all`."""
        try:
            yield
        except ConfigError as error:
            self.found += error.parts

    def raise_all(self) -> None:
        """Raises one ConfigError with all kept errors, if there are any."""
        if self.found:
            raise combined(self.found)


def refuse(errors: Iterable[ConfigError]) -> None:
    """Raises one ConfigError with all of `errors`, if there are any."""
    if listed := list(errors):
        raise combined(listed)


def refuse_if(is_wrong: object, message: str, **lines: str) -> None:
    """Raises ConfigError(message, **lines) if `is_wrong` is true."""
    if is_wrong:
        raise ConfigError(message, **lines)


def some(names: Iterable[object], most: int = 6) -> str:
    """The first `most` names, and the number of further ones, as text; empty for no names."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def nearest_name(word: str, names: Iterable[str], least: float = MIN_SIMILARITY) -> str:
    """The name that is most similar to `word`, compared as a whole, by its parts between `_` and by their initials; empty if no
    name's similarity, from 0 to 1, is `least`.
    """

    def similarity(name: str) -> float:
        words = name.split("_")
        # parts of up to three letters match too much: `on` is similar to any word with an o, `log` to `logger`
        parts = {name, *(part for part in words if len(part) > 3)}
        parts |= {"".join(part[:1] for part in words)} if len(words) > 1 else set()
        return max(_similarity(word.lower(), part.lower()) for part in parts)

    best = max(names, key=similarity, default="")
    return best if best and similarity(best) >= least else ""


def _similarity(word: str, other: str) -> float:
    """From 0 to 1. Typing errors seldom change the first letter, so that names with different first letters count less
    (`question`, `solution`). They seldom change the length, so that a much shorter name counts 0 (`max_new_tokens`,
    `max_num_batched_tokens`), except if it only leaves out words.
    """
    words, others = set(word.split("_")), set(other.split("_"))
    shorter, longer = sorted((len(word), len(other)))
    if shorter < MIN_LENGTH_RATIO * longer and not (words <= others or others <= words):
        return 0.0
    ratio = difflib.SequenceMatcher(None, word, other).ratio()
    return ratio if word[:1] == other[:1] else 0.85 * ratio


@contextmanager
def names_place(place: Path) -> Iterator[None]:
    """An OSError that names no file, such as that of a full disk under an open one, leaves the block with the name of `place`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


@contextmanager
def main_errors(*, speak: bool = True, of_files: bool = True) -> Iterator[None]:
    """For the block before a command starts anything: a ValueError prints its message and exits with code 2, and so does, with
    `of_files`, an OSError that names a file.

    If all ranks raise the same error, one of each node should `speak`. The others wait: the exit of a silent rank would make
    torchrun kill the speaking one before it has printed. They speak after SPEAKER_SECONDS, if the speaking rank did not raise
    the error.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not (of_files and error.filename):
            raise
        if not speak:
            time.sleep(SPEAKER_SECONDS + int(os.environ.get("LOCAL_RANK", "0")))  # one rank after another
        message = explain_os_error(error) if isinstance(error, OSError) else error
        print(message, file=sys.stderr, flush=True)
        sys.exit(2)


def explain_os_error(error: OSError) -> str:
    """The message for an `error` with a file name, with a remedy."""
    path = Path(os.fsdecode(error.filename2 or error.filename))
    if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
        remedy = "restore the target, or replace the link by a file"
        return explain(f"{path}: is a link to {path.readlink()}, which does not exist", remedy=remedy)
    is_full = error.errno in DISK_FULL
    remedy = "free space there, or name a file on another disk" if is_full else "name a file that this user can read or write"
    return explain(f"{error.filename2 or error.filename}: {error.strerror}", remedy=remedy)
