"""Who asks, and whether they may: bearer keys, compared in constant time.

With keys configured every path needs one but those below, which load balancers ask and which tell
nothing of the traffic: "/", "/health", "/version". /metrics needs a key, because it shows what is
asked here; Prometheus sends one with `authorization: {credentials: KEY}`. Without keys all is open
(the server then listens on loopback only, unless told --insecure).

A key of --api-key is the default tenant's and opens everything. A key of the tenants file is its
tenant's; what tells of everybody (ADMIN_PATHS) then needs an admin's. Always holds: who asks is
known before anything else of a request is read.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.api.errors import NotAdmin
from quire.base.errors import NotAuthorized
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest

OPEN_PATHS = frozenset({"/", "/health", "/version"})
# What tells of everybody's requests, and what changes things for everybody.
ADMIN_PATHS = ("/admin", "/metrics", "/v1/cache", "/reset_prefix_cache", "/flush_cache")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. is_admin: may ask for what tells of everybody. key: the digest of the key shown,
    empty where none is needed."""

    tenant: Tenant = ONLY_TENANT
    is_admin: bool = True
    key: bytes = b""


ANYBODY = Caller()


class Keys:
    """The configured keys. Only digests of equal length are compared, all of them every time.

    tenants: of the tenants file, the default one first; None where there is no file.
    """

    def __init__(self, keys: Iterable[str], tenants: Sequence[Tenant] | None = None) -> None:
        default = tenants[0] if tenants else ONLY_TENANT
        self._callers: list[tuple[bytes, Caller]] = []
        for key in keys:
            digest = bytes.fromhex(key_digest(key))
            self._callers.append((digest, Caller(default, True, digest)))
        for tenant in tenants or ():
            for known in tenant.key_digests:
                digest = bytes.fromhex(known)
                self._callers.append((digest, Caller(tenant, tenant.is_admin, digest)))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._callers)

    def check(self, path: str, authorization: bytes | None) -> Caller:
        """Who asks for `path`; raises NotAuthorized or NotAdmin where they may not."""
        if not self._callers or path in OPEN_PATHS:
            return ANYBODY
        if authorization is None:
            raise NotAuthorized("no API key was sent; send `Authorization: Bearer KEY`")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise NotAuthorized(
                "the Authorization header is not of the form `Bearer KEY`; send it like that"
            )
        sent = bytes.fromhex(key_digest(key.strip()))
        matches = [hmac.compare_digest(sent, digest) for digest, _ in self._callers]
        if not any(matches):
            raise NotAuthorized("the API key is not one of this server's keys; check it")
        caller = self._callers[matches.index(True)][1]
        if not caller.is_admin and _tells_of_everybody(path):
            raise NotAdmin(
                f"this path tells of everybody's requests, and tenant {caller.tenant.name} is not "
                "an admin; use a key of --api-key, or set `admin = true` for the tenant"
            )
        return caller


def _tells_of_everybody(path: str) -> bool:
    return any(path == admin or path.startswith(f"{admin}/") for admin in ADMIN_PATHS)
