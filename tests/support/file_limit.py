"""What the system lets one process write: a disk that is full, the umask."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file that this process writes gets longer, as on a full disk, whoever the user is."""
    former, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (former, hard))


def umask() -> int:
    """This process's."""
    own = os.umask(0o022)
    os.umask(own)
    return own
