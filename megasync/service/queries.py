"""Routes of lists and downloads of saved weights.

Leaves out requests and futures (http.py), and where weights lie (catalog.py).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from datetime import UTC, datetime

from aiohttp import web

from megasync.service.bodies import BadRequestError
from megasync.service.calls import Reader, saved_in
from megasync.service.catalog import Catalog, Found

PREFIX = "/api/v1"
RUN = f"{PREFIX}/training_runs/{{model}}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"
FILE = f"{PREFIX}/files/{{model}}/{{name}}/{{file}}"
SIGNED = "signed"  # the name of the route that needs no key
URL_SECONDS = 3600


class Queries:
    """`reader` knows the models of former requests."""

    def __init__(self, catalog: Catalog, reader: Reader) -> None:
        self._catalog, self._reader = catalog, reader
        self._secret = secrets.token_bytes(32)  # signs URLs of files

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(f"{PREFIX}/training_runs", self._training_runs),
            web.get(RUN, self._training_run),
            web.get(f"{RUN}/checkpoints", self._checkpoints),
            web.get(f"{PREFIX}/checkpoints", self._checkpoints),
            web.get(f"{CHECKPOINT}/external_weights_urls", self._urls),
            web.get(FILE, self._file, name=SIGNED),
        ]

    async def _training_runs(self, request: web.Request) -> web.StreamResponse:
        return _page(request, "training_runs", self._catalog.training_runs())

    async def _training_run(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        known = self._catalog.training_run(model) if model in self._reader.models else None
        return found_or(known, f"training run {model!r}: there is none such")

    async def _checkpoints(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info.get("model", "")
        if model and model not in self._reader.models:
            return problem(404, f"training run {model!r}: there is none such")
        return _page(request, "checkpoints", self._catalog.checkpoints(model))

    async def _urls(self, request: web.Request) -> web.StreamResponse:
        """URLs of PEFT's files, each with a signature instead of the key, valid for an hour."""
        path, expires = path_of_route(request), int(time.time()) + URL_SECONDS
        files = self._catalog.files(path)
        if not files:
            return problem(404, f"{path}: there are no such weights")
        model, _, name = saved_in(path, "external_weights")
        urls = {}
        for file in files:
            url = request.url.origin().with_path(FILE.format(model=model, name=name, file=file))
            urls[file] = str(url.with_query(expires=expires, signature=self._signature(url.path, str(expires))))
        return web.json_response({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        expires, signature = request.query.get("expires", ""), request.query.get("signature", "")
        is_signed = hmac.compare_digest(signature.encode(), self._signature(request.path, expires).encode())
        if not is_signed or int(expires) < time.time():
            return problem(403, "the signature is wrong or has expired: ask for external_weights_urls again")
        path = "tinker://{model}/external_weights/{name}".format(**request.match_info)
        file = request.match_info["file"]
        if file not in self._catalog.files(path):
            return problem(404, f"{path}: there is no file {file!r}")
        return web.FileResponse(self._catalog.folder_of(path) / file)

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()


def problem(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


def found_or(found: Found | None, otherwise: str) -> web.Response:
    return problem(404, otherwise) if found is None else web.json_response(found)


def path_of_route(request: web.Request) -> str:
    return "tinker://{model}/{kind}/{name}".format(**request.match_info)


def _page(request: web.Request, name: str, items: list[Found]) -> web.Response:
    """A part of a list, by `limit` and `offset`."""
    try:
        limit, offset = (int(request.query.get(key, start)) for key, start in (("limit", "1000"), ("offset", "0")))
    except ValueError:
        limit = offset = -1
    if min(limit, offset) < 0:
        raise BadRequestError("limit and offset are whole numbers from 0 on")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return web.json_response({name: items[offset : offset + limit], "cursor": cursor})
