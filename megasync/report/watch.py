"""Serves a run's report on the loopback interface while the run is active. Leaves out the page (page.py).

The page requests `/state` every few seconds and reloads once it has changed. The server renders the page on request, if the
run's files have changed, at most every MIN_SECONDS; it writes no files. One request at a time, each with a time limit.

    watch([Path("runs/a")], port=8070)        # until Ctrl-C
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from megasync.config.errors import ConfigError, explain
from megasync.config.files import EVALUATIONS_FILE, METRICS_FILE
from megasync.report.html.record import read_records
from megasync.report.log import SUMMARY_FILE
from megasync.report.page import page

HOST, DEFAULT_PORT = "127.0.0.1", 8070
REQUEST_SECONDS = 10.0
MIN_SECONDS = 2.0
WATCHED = (METRICS_FILE, EVALUATIONS_FILE, SUMMARY_FILE)


class Watcher:
    """The page of these runs, rendered again after the files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._page, self._state, self._made_seconds = b"", "", float("-inf")

    @property
    def state(self) -> str:
        """Changes with the runs' files."""
        stats = [path.stat() if (path := folder / name).is_file() else None for folder in self.folders for name in WATCHED]
        return "-".join(f"{stat.st_size:x}.{stat.st_mtime_ns:x}" if stat else "0" for stat in stats)

    def page(self) -> bytes:
        """The HTML page. ValueError if a folder is not a run's."""
        state = self.state
        if state != self._state and time.monotonic() - self._made_seconds >= MIN_SECONDS:
            self._page = page(read_records(self.folders), state).encode()
            self._state, self._made_seconds = state, time.monotonic()
        return self._page


class _Server(HTTPServer):
    request_queue_size = 16

    def __init__(self, port: int, watcher: Watcher) -> None:
        super().__init__((HOST, port), _Handler)
        self.watcher = watcher


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):  # against DNS rebinding
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            try:
                self._answer(self.server.watcher.page(), "text/html; charset=utf-8")
            except ValueError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        elif self.path == "/state":
            self._answer(self.server.watcher.state.encode(), "text/plain")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *message: object) -> None:
        """Logs nothing, so that the address stays visible on the terminal."""


def watch(folders: Sequence[Path], port: int) -> None:
    """Serves until Ctrl-C.

    Raises:
        ValueError: a folder is not a run's, or the port is in use.
    """
    watcher = Watcher(folders)
    watcher.page()
    try:
        server = _Server(port, watcher)
    except OSError as error:
        raise ConfigError(explain(f"port {port} of {HOST}: {error.strerror}", remedy="write --port 0 for a free one")) from error
    with server:
        print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
