"""ServerUrl: the address of an HTTP server, and the header that carries its key.

For commands that talk to a server; imports the standard library and the error tree only.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.base.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """An address. path: without a trailing slash. shown: without the user's name and password."""

    is_secure: bool
    host: str
    port: int | None
    path: str
    shown: str


def server_url(url: str) -> ServerUrl:
    """Parse an address; without a scheme it is http. Raises InvalidParameter."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidParameter(f"{url!r} is not an address: {error}", param="url") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidParameter(f"{url!r} is not an http:// or https:// address", param="url")
    return ServerUrl(
        is_secure=parts.scheme == "https",
        host=host,
        port=port,
        path=parts.path.rstrip("/"),
        shown=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
    )


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the header with the key, none without a key. Raises InvalidParameter."""
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():  # not shown in the message
        raise InvalidParameter(
            "the API key has characters that no HTTP header can hold; give it without line breaks "
            "and in ASCII",
            param="api_key",
        )
    return {"Authorization": f"Bearer {api_key}"}
