"""`quire why REQUEST_ID`: where the time of a request went, asked of a running server.

Arguments and the HTTP request only; timeline_view.py draws. Exit code 0, or 1 if the server does
not know the request or cannot be reached.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
from contextlib import closing
from typing import Any
from urllib.parse import quote

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.server_url import (
    key_headers,
    key_refused_text,
    server_url,
    unreachable_text,
)
from quire.cli.server_arguments import add_key_argument
from quire.cli.timeline_view import drawn

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30.0
_MAX_BYTES = 64 * 1024 * 1024
_UNAUTHORIZED = 401


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the id and where to ask."""
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        help="id of the answer (as in chatcmpl-...), or the x-request-id of the request",
    )
    parser.add_argument(
        "--url", default=_DEFAULT_URL, help=f"address of the server (default {_DEFAULT_URL})"
    )
    add_key_argument(parser, "the key that sent the request, or an admin key")
    parser.add_argument("--json", action="store_true", help="print the server's JSON, no drawing")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    timeline = timeline_of(arguments.url, arguments.request_id, arguments.api_key)
    if arguments.json:
        print(json.dumps(timeline))
    else:
        print("\n".join(drawn(timeline)))
    return 0


def timeline_of(url: str, request_id: str, api_key: str) -> dict[str, Any]:
    """Return a server's timeline of a request. Raises WorkerError and InvalidParameter."""
    if not request_id:
        raise InvalidParameter("the request id is empty; give an answer's id", param="request_id")
    if request_id.startswith(("http://", "https://")):
        raise InvalidParameter(
            f"REQUEST_ID is {request_id}, the address of a server; give the id of an answer, and "
            "the address with --url",
            param="request_id",
        )
    address = server_url(url)
    shown = address.full
    kind = http.client.HTTPSConnection if address.is_secure else http.client.HTTPConnection
    path = address.path.removesuffix("/v1")
    path += f"/v1/requests/{quote(request_id, safe='')}/timeline"
    with closing(kind(address.host, address.port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", path, headers=key_headers(api_key))
            with connection.getresponse() as response:
                content = response.read(_MAX_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            hint = "" if isinstance(error, ssl.SSLError) else "; give its address with --url"
            raise WorkerError(unreachable_text(shown, error) + hint) from error
    if response.status == _UNAUTHORIZED:
        raise WorkerError(key_refused_text(shown, has_key=bool(api_key)))
    try:
        found = json.loads(content)
    except ValueError as error:
        raise WorkerError(
            f"{shown} answers with something else than JSON, so it is no server of Quire; check "
            "the address (--url)"
        ) from error
    if response.status != 200:
        raise WorkerError(_message(found, response.status))
    if not isinstance(found, dict) or found.get("object") != "request.timeline":
        raise WorkerError(f"{shown} sends no timelines; give the address of a server of Quire")
    return found


def _message(found: Any, status: int) -> str:
    try:
        return str(found["error"]["message"])
    except (LookupError, TypeError):
        return f"the server answers {status}"
