"""GET / and /web/FILE: the web page for browsers, and the overview of the routes for programs.

The page is static: the files beside this one, the same for every client, without a key and without
anything about the model or its requests. Its scripts send requests to the API like any other client
and with the key that the user enters. Always holds: the page's policy allows its own files and this
server only, neither inline scripts and styles nor frames; a name outside FILES is not served.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.api.http.errors import UnknownRoute
from quire.base.show import show

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
FILES: Mapping[str, str] = {
    "style.css": _STYLE,
    "theme.js": _SCRIPT,
    "main.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "api.js": _SCRIPT,
    "chat.js": _SCRIPT,
    "message.js": _SCRIPT,
    "text.js": _SCRIPT,
    "store.js": _SCRIPT,
    "settings.js": _SCRIPT,
    "engine.js": _SCRIPT,
    "metrics.js": _SCRIPT,
    "try.js": _SCRIPT,
    "icon.svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Headers of every file. no-cache: used again after the ETag was compared.
HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_PAGE, _ROOT = "index.html", b"{root}"
_HTML = "text/html; charset=utf-8"


class WebPageRoutes:
    """The routes. overview: for programs. root_path: the prefix of all paths."""

    def __init__(self, overview: str, *, root_path: str, is_on: bool) -> None:
        self._overview = overview.replace(" /", f" {root_path}/")
        self._root_path = root_path
        self._is_on = is_on

    async def front(self, request: Request) -> Response:
        """Return the page to a client that accepts HTML by name, else the overview."""
        if not (self._is_on and accepts(request.headers.get("accept", ""), "text/html")):
            return PlainTextResponse(self._overview, headers={"vary": "accept"})
        content = _content(_PAGE).replace(_ROOT, self._root_path.encode())
        return _file(request, content, _HTML)

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_params["file"]
        if name not in FILES:
            raise UnknownRoute(f"the web page has no file {show(name)}")
        return _file(request, _content(name), FILES[name])


def accepts(header: str, name: str) -> bool:
    """Return whether an Accept header lists this name itself, with a quality above 0."""
    for each in header.lower().split(","):
        listed, *parameters = (part.strip() for part in each.split(";"))
        if listed == name:
            return not any(_is_zero(parameter) for parameter in parameters)
    return False


def _is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and not value.strip(" 0.")


@cache
def _content(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


@cache
def _packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def _file(request: Request, content: bytes, media: str) -> Response:
    headers = {**HEADERS, "vary": "accept, accept-encoding"}
    if accepts(request.headers.get("accept-encoding", ""), "gzip"):
        content = _packed(content)
        headers["content-encoding"] = "gzip"
    etag = headers["etag"] = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": media})
