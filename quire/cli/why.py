"""`quire why REQUEST_ID`: where the time of a request went, asked of a running server.

Arguments and the HTTP request only; timeline_view.py draws. Exit code 0, or 1 if the server does
not know the request or cannot be reached.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

from quire.base.errors import InvalidParameter, WorkerError
from quire.cli.timeline_view import drawn

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30.0
_MAX_BYTES = 64 * 1024 * 1024


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
    parser.add_argument(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY", ""),
        metavar="KEY",
        help="the key that sent the request, or an admin key (default: $QUIRE_API_KEY, else "
        "$OPENAI_API_KEY)",
    )
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
    connection, path = _connection(url)
    path += f"/v1/requests/{quote(request_id, safe='')}/timeline"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with closing(connection):
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            content = response.read(_MAX_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise WorkerError(
                f"no server answers at {url} ({error}); give its address with --url"
            ) from error
    try:
        found = json.loads(content)
    except ValueError as error:
        raise WorkerError(f"{url} answers with something else than JSON") from error
    if response.status != 200:
        raise WorkerError(_message(found, response.status))
    if not isinstance(found, dict) or found.get("object") != "request.timeline":
        raise WorkerError(f"{url} sends no timelines; is it a server of Quire?")
    return found


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to the host of `url`, and the path before /v1."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidParameter(f"{url!r} is not an address: {error}", param="url") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidParameter(f"{url!r} is not an http:// or https:// address", param="url")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=_TIMEOUT_S), parts.path.rstrip("/").removesuffix("/v1")


def _message(found: Any, status: int) -> str:
    try:
        return str(found["error"]["message"])
    except (LookupError, TypeError):
        return f"the server answers {status}"
