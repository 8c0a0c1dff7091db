"""Who asks, and whether they may: bearer keys, compared in constant time.

With keys configured every path needs one but those below, which load balancers ask and which tell
nothing of the traffic: "/", "/health", "/version", and the pages that say how to ask ("/docs",
"/openapi.json"). /metrics needs a key, because it shows what is asked here; Prometheus sends one
with `authorization: {credentials: KEY}`. Without keys all is open (the server then listens on
loopback only, unless told --insecure).

A key of --api-key is the default tenant's; a key of the tenants file is its tenant's. What changes
things for everybody, and what tells of everybody's prompts (ADMIN_PATHS), is for a key of the admin
key file and for tenants that are admins; where there is no such file, also for a key of --api-key,
or for anybody where there are no keys, but on this machine only. With several keys, each tenant and
each key of --api-key has its own scope of cached prefixes, because the time to a first token and
the count of cached tokens reveal what others have sent. Always holds: the key is checked before
anything else of a request is read; no path of an admin is open to another machine without a key
that says so.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire.api.http.errors import NotAdmin
from quire.base.errors import NotAuthorized
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest

OPEN_PATHS = frozenset({"/", "/health", "/version", "/docs", "/openapi.json"})
# What changes things for everybody, or tells of everybody's prompts.
ADMIN_PATHS = ("/admin", "/v1/cache", "/reset_prefix_cache", "/flush_cache")
# What counts everybody's requests: a tenant's key does not open it, unless it is an admin.
COUNTING_PATHS = ("/metrics",)


class Admin(enum.Enum):
    """Where a caller is an admin."""

    NOWHERE = enum.auto()
    HERE = enum.auto()  # on this machine, and where an admin's listener was asked
    ANYWHERE = enum.auto()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. sees_all: may ask for what counts everybody's requests. key: the digest of the key
    shown, empty where none is needed."""

    tenant: Tenant = ONLY_TENANT
    sees_all: bool = True
    admin: Admin = Admin.HERE
    key: bytes = b""


class Keys:
    """The configured keys. Only digests of equal length are compared, all of them every time.

    tenants: of the tenants file, the default one first; None where there is no file. admin_digests:
    SHA-256 in hex of the keys of the admin key file, empty where there is none. shares_prefixes:
    tenants that do not say otherwise, and keys, share cached prefixes.
    """

    def __init__(
        self,
        keys: Iterable[str],
        tenants: Sequence[Tenant] | None = None,
        admin_digests: Iterable[str] = (),
        *,
        shares_prefixes: bool = False,
    ) -> None:
        default = tenants[0] if tenants else ONLY_TENANT
        admins = [bytes.fromhex(digest) for digest in admin_digests]
        plain = Admin.NOWHERE if admins else Admin.HERE
        # An admin's first: where it is another's too, it counts as that.
        self._callers = [(key, Caller(default, True, Admin.ANYWHERE, key)) for key in admins]
        for key in keys:
            digest = bytes.fromhex(key_digest(key))
            self._callers.append((digest, Caller(default, True, plain, digest)))
        for tenant in tenants or ():
            admin = Admin.ANYWHERE if tenant.is_admin else Admin.NOWHERE
            for known in tenant.key_digests:
                digest = bytes.fromhex(known)
                self._callers.append((digest, Caller(tenant, tenant.is_admin, admin, digest)))
        self._has_callers = len(self._callers) > len(admins)
        isolates = len(self._callers) > 1 and not shares_prefixes
        self._callers = [(key, _scoped(caller, isolates)) for key, caller in self._callers]
        self._has_admins = bool(admins)
        self._anybody = Caller(default, True, plain)

    def __bool__(self) -> bool:
        """Whether a caller needs one."""
        return self._has_callers

    def needed(self, path: str) -> bool:
        """Whether who asks for `path` must show one."""
        if path in OPEN_PATHS:
            return False
        return self._has_callers or (is_guarded(path) and self._has_admins)

    def check(self, path: str, authorization: bytes | None, *, is_here: bool = True) -> Caller:
        """Who asks for `path`; raises NotAuthorized or NotAdmin where they may not.

        is_here: the caller is on this machine, or asks where only that can be.
        """
        if path in OPEN_PATHS:
            return self._anybody
        caller = self._known(authorization) if self.needed(path) else self._anybody
        if is_guarded(path):
            _check_admin(caller, is_here=is_here)
        elif _is_below(path, COUNTING_PATHS) and not caller.sees_all:
            raise NotAdmin(
                f"this path counts everybody's requests, and tenant {caller.tenant.name} is not an "
                "admin; use a key of --api-key, or set `admin = true` for the tenant"
            )
        return caller

    def _known(self, authorization: bytes | None) -> Caller:
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
        return self._callers[matches.index(True)][1]


def _scoped(caller: Caller, isolates: bool) -> Caller:
    """Return the caller with a scope of its own for cached prefixes, if it is isolated."""
    tenant = caller.tenant
    if not (isolates if tenant.isolate_cache is None else tenant.isolate_cache):
        return caller
    is_own = not tenant.is_default or caller.key.hex() in tenant.key_digests
    scope = tenant.name if is_own else f"key:{caller.key.hex()}"  # no tenant's name has a colon
    return replace(caller, tenant=replace(tenant, cache_scope=scope))


def is_guarded(path: str) -> bool:
    """Whether a path is for admins."""
    return _is_below(path, ADMIN_PATHS)


def _check_admin(caller: Caller, *, is_here: bool) -> None:
    if caller.admin is Admin.ANYWHERE or (caller.admin is Admin.HERE and is_here):
        return
    why = (
        "the key that was sent is not an admin's"
        if caller.admin is Admin.NOWHERE
        else "it was asked from another machine, or through a proxy or a Unix socket"
    )
    raise NotAdmin(
        f"this path is for admins, and {why}; use a key of --admin-key-file or of a tenant with "
        "`admin = true`, or ask from the machine itself at --admin-port"
    )


def _is_below(path: str, tops: tuple[str, ...]) -> bool:
    if not path.startswith(tops):
        return False
    return any(path == top or path.startswith(f"{top}/") for top in tops)
