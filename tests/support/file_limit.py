"""What the system lets one process write: a disk that is full, its modes, the umask."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file that this process writes gets longer, as on a full disk, whoever the user is.

    Modules that it imports are not cached: a cache that was cut off breaks every later import.
    """
    former, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    without_caches = sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = without_caches
        resource.setrlimit(resource.RLIMIT_FSIZE, (former, hard))


def without_override() -> None:
    """For `preexec_fn`: root may read and write what its modes say, as any other user."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability)  # PR_CAPBSET_DROP


def umask() -> int:
    """This process's."""
    own = os.umask(0o022)
    os.umask(own)
    return own
