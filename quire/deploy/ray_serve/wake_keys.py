"""WakeKeys: which clients may make an application start an engine.

Engines check the keys of requests. Without an engine nothing does, so the router checks the key of
a request that would wait for one; otherwise any client could start machines. Knows no request but
its headers. Always holds: key files are read anew, so that they count as they are now.
"""

from __future__ import annotations

import hmac

from quire.base.errors import SettingError
from quire.base.http_apis import any_key_headers, key_in
from quire.base.log import Log
from quire.config.admin_keys import read_api_keys
from quire.config.tenants import key_digest, read_tenants_of_server
from quire.deploy.ray_serve.app_args import AppArgs


class WakeKeys:
    """The keys of the engines, as a router's node has them."""

    def __init__(self, args: AppArgs, log: Log) -> None:
        self._server, engine = args.configs("127.0.0.1")
        self._tenants_file = engine.scheduler.tenants
        self._is_open = args.insecure
        self._log = log

    def accept(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Return whether a request has a key of the engines, or needs none."""
        try:
            digests = self._digests()
        except SettingError as error:
            self._log.error(
                "keys cannot be read, so no request starts an engine", reason=str(error)
            )
            return False
        if not digests and self._is_open:
            return True
        sent = key_digest(key_in(headers, any_key_headers()))
        # All are compared, so that the time says nothing of their order.
        return sum(hmac.compare_digest(sent, known) for known in digests) > 0

    def _digests(self) -> list[str]:
        keys = (*self._server.api_key, *read_api_keys(self._server.api_key_file))
        digests = [key_digest(key) for key in keys]
        if self._tenants_file is not None:
            tenants = read_tenants_of_server(self._tenants_file, has_keys=bool(keys))
            digests += [digest for tenant in tenants for digest in tenant.key_digests]
        return digests
