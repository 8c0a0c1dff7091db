"""Who may ask: bearer keys, compared in constant time.

With keys configured every path needs one but those below, which load balancers ask and which tell
nothing of the traffic: "/", "/health", "/version". /metrics needs a key, because it shows what is
asked here; Prometheus sends one with `authorization: {credentials: KEY}`. Without keys all is open
(the server then listens on loopback only, unless told --insecure).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from quire.base.errors import NotAuthorized

OPEN_PATHS = frozenset({"/", "/health", "/version"})


class Keys:
    """The configured keys. Only digests of equal length are compared, all of them every time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Return if the caller may ask for `path`; raise NotAuthorized if not."""
        if not self._digests or path in OPEN_PATHS:
            return
        if authorization is None:
            raise NotAuthorized("no API key was sent; send `Authorization: Bearer KEY`")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise NotAuthorized(
                "the Authorization header is not of the form `Bearer KEY`; send it like that"
            )
        sent = _digest(key.strip())
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if not any(matches):
            raise NotAuthorized("the API key is not one of this server's keys; check it")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
