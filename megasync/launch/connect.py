"""Whether something listens at an address. Imported by every verb before packages are checked, so that it needs sockets alone."""

from __future__ import annotations

import socket

CONNECT_SECONDS = 3.0


def connection_problem(host: str, port: int) -> str:
    """Why a connection fails; empty where it does not."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # also a name that no host can have
        return str(getattr(error, "strerror", "") or error)
    return ""
