"""The checks of a request that need no key: is its path for admins, does a web page send it?

Without keys, a web page could make a browser on this machine send requests to a loopback address,
and a DNS name that points at loopback makes them look same-origin. Browsers say where a request
comes from: `Origin` must be the address requested, and `Host`, on a server that only this machine
reaches, a name that only this machine has. Programs send no Origin. Always holds:
with keys no request is refused for its origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from quire.api.http.errors import ForeignPage
from quire.base.show import show
from quire.config.server_config import ServerConfig

# Paths that change the server for all tenants, or show the prompts or requests of all tenants.
ADMIN_PATHS = ("/admin", "/v1/cache", "/v1/engine", "/slots", "/reset_prefix_cache", "/flush_cache")
_SCHEMES = ("http://", "https://")
_MAX_HOST_CHARS = 255


def is_guarded(path: str) -> bool:
    """Return whether a path is for admins."""
    return is_below(path, ADMIN_PATHS)


def is_below(path: str, tops: tuple[str, ...]) -> bool:
    """Return whether a path is one of `tops`, or below one."""
    if not path.startswith(tops):
        return False
    return any(path == top or path.startswith(f"{top}/") for top in tops)


class OriginCheck:
    """The check of Host and Origin on a server without keys."""

    def __init__(self, config: ServerConfig, *, has_keys: bool, for_admins: bool = False) -> None:
        self._is_open = not has_keys
        # A browser cannot reach a Unix socket; a proxy in front of one is responsible for the Host.
        is_local = is_loopback(config.host) and config.uds is None
        self._is_local = is_local or for_admins
        self._host = config.host.lower()

    def check(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        is_cors_allowed: bool = False,
        is_guarded: bool = False,
    ) -> None:
        """Accept a request with these headers, or raise ForeignPage.

        is_cors_allowed: its Origin is one of --cors-origin. is_guarded: the path is for admins and
        needs no key, so the Host must be a name of this machine.
        """
        if not self._is_open:
            return
        host = origin = None
        for name, value in headers:  # of several, the last counts
            if name == b"host":
                host = value.decode("latin-1").strip().lower()
            elif name == b"origin":
                origin = value.decode("latin-1").strip().lower()
        is_local = self._is_local or is_guarded
        if host is not None and is_local and not self._is_local_name(host):
            raise ForeignPage(
                f"the request's Host is {show(host)}; this server has no keys and "
                "accepts this request only at localhost or its loopback address; use one of "
                "these, or start the server with --api-key"
            )
        if origin is None or is_cors_allowed:
            return
        if origin not in [scheme + (host or "") for scheme in _SCHEMES]:
            raise ForeignPage(
                f"the request comes from a page of {show(origin)}; this server has no "
                "keys and accepts no pages of other origins; start it with --api-key to accept "
                "pages with a key, or with --cors-origin to accept that page (except at admin "
                "paths)"
            )

    def _is_local_name(self, host: str) -> bool:
        name = _name_of(host)
        if name is None:
            return False
        return is_loopback(name) or name == self._host or name.endswith(".localhost")


@lru_cache(maxsize=64)
def _name_of(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is malformed."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or localhost; other names are not resolved."""
    return len(host) <= _MAX_HOST_CHARS and _is_loopback(host)


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    # Cached: each request is checked twice, mostly for the same few addresses.
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
