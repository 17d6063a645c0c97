"""What a launcher says last of a run that did not come to its end: the newest checkpoint, and the command that goes on."""

from __future__ import annotations

import os

from megasync.config.files import newest_checkpoint
from megasync.config.schema import Config

COMMAND = "MEGASYNC_COMMAND"  # environment variable of the scripts in launch/: what the user typed


def last_words(config: Config, command: str) -> str:
    """`command`: the launcher's own, where the user typed no script's."""
    newest, again = newest_checkpoint(config.run.folder), os.environ.get(COMMAND, command).strip()
    if newest is None:
        return f"newest checkpoint: none in {config.run.folder}\nbegin again: {again}"
    if config.checkpoint.resume == "never":
        again += " checkpoint.resume=auto"
    return f"newest checkpoint: {newest}\ngo on from it: {again}"
