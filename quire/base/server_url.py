"""ServerUrl: the address of an HTTP server, the header with its key, and errors of both.

For commands that talk to a server; imports the standard library and the error tree only.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.base.errors import InvalidParameter

# Variables with the key for a server; the first that is set counts.
KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")
KEY_DEFAULT = "default: $QUIRE_API_KEY, else $OPENAI_API_KEY"
_EXAMPLE = "http://127.0.0.1:8000"
# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_OTHER_NAMES = (62, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """An address. path: without a trailing slash. shown: without the user's name and password."""

    is_secure: bool
    host: str
    port: int | None
    path: str
    shown: str

    @property
    def full(self) -> str:
        """The whole address, with its path, as it is shown."""
        return self.shown + self.path

    @property
    def authority(self) -> bytes:
        """Host and port as they were given, for the header Host."""
        return self.shown.partition("//")[2].encode()

    @property
    def port_number(self) -> int:
        """The port; where none was given, that of the scheme."""
        return self.port or (443 if self.is_secure else 80)


def server_url(url: str) -> ServerUrl:
    """Parse an address; without a scheme it is http. Raises InvalidParameter."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidParameter(
            f"{url!r} is not an address: {error}; write it like {_EXAMPLE}", param="url"
        ) from error
    if not url.isprintable() or " " in url:  # such as zeros of a file that was not written out
        raise InvalidParameter(
            f"{url!r} is not an address: it has a space, or a character that cannot be printed; "
            f"write it like {_EXAMPLE}",
            param="url",
        )
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidParameter(
            f"{url!r} is not an http:// or https:// address; write it like {_EXAMPLE}", param="url"
        )
    return ServerUrl(
        is_secure=parts.scheme == "https",
        host=host,
        port=port,
        path=parts.path.rstrip("/"),
        shown=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
    )


def default_key(environment: Mapping[str, str]) -> str:
    """Return the key for a server that no flag gives, "" for none: the same for all commands."""
    return next((environment[name] for name in KEY_VARIABLES if environment.get(name)), "")


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


def unreachable_text(shown: str, error: BaseException) -> str:
    """Return the error for a server that could not be connected to. shown: its address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAMES:
            return (
                f"the certificate of {shown} is for other names ({error.verify_message}); give an "
                "address that it names"
            )
        return (
            f"the certificate of {shown} is not trusted ({error.verify_message}); set "
            "SSL_CERT_FILE to the PEM file of its authority"
        )
    if isinstance(error, ssl.SSLError):
        return f"{shown} does not speak TLS ({error.reason}); write http:// instead"
    return (
        f"no server answers at {shown} ({reason_of(error)}); start one with `quire serve`, or "
        f"check the address, as in {_EXAMPLE}"
    )


def key_refused_text(shown: str, *, has_key: bool) -> str:
    """Return the error for status 401. has_key: a key was sent."""
    if has_key:
        return (
            f"{shown} does not know the key that was sent; give one of the server's keys with "
            f"--api-key, or in {KEY_VARIABLES[0]}"
        )
    return f"{shown} needs a key: give one with --api-key, or in {KEY_VARIABLES[0]}"


def reason_of(error: BaseException) -> str:
    """Return an error of a connection in the system's words, without numbers and Python's names."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    in_words = error.strerror if isinstance(error, OSError) else None
    return in_words or str(error) or type(error).__name__
