"""Who may ask a server without keys: programs, and pages this server could have sent itself.

A page from anywhere can make a browser on this machine send requests to a loopback address, and a
name that its owner points at loopback makes them look like that page's own. Browsers say where a
request comes from: `Origin` must be the address asked, and `Host`, on a server that only this
machine reaches, a name that only this machine has. Programs send no Origin. Always holds: with
keys nothing is refused here, because a page does not have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from quire.api.http.errors import ForeignPage
from quire.api.http.sockets import is_loopback
from quire.base.show import show
from quire.config.groups import ServerConfig

_SCHEMES = ("http://", "https://")


class OriginCheck:
    """The check of one server."""

    def __init__(self, config: ServerConfig, *, has_keys: bool, for_admins: bool = False) -> None:
        self._is_open = not has_keys
        # A browser cannot be pointed at a Unix socket; whatever leads there answers for the Host.
        is_local = is_loopback(config.host) and config.uds is None
        self._is_local = is_local or for_admins
        self._host = config.host.lower()

    def check(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        may_ask: bool = False,
        is_guarded: bool = False,
    ) -> None:
        """Return if a request with these headers may be answered; raise ForeignPage if not.

        may_ask: its Origin is one that --cors-origin lets in. is_guarded: it asks for what admins
        may, which without keys only this machine does, by a name that only it has.
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
        if host is not None and is_local and not self._is_ours(host):
            raise ForeignPage(
                f"the request's Host is {show(host)}; this server has no key and is asked for this "
                "as localhost or by its loopback address only; ask it so, or start it with "
                "--api-key"
            )
        if origin is None or may_ask:
            return
        if origin not in [scheme + (host or "") for scheme in _SCHEMES]:
            raise ForeignPage(
                f"the request comes from a page of {show(origin)}; this server has no key and "
                "answers no pages but its own; start it with --api-key to let pages with the key "
                "in, or with --cors-origin to let that page ask (but for what admins may)"
            )

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if name is None:
            return False
        return is_loopback(name) or name == self._host or name.endswith(".localhost")


@lru_cache(maxsize=64)
def _name_of(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return None
