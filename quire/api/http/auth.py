"""Authentication: API keys, compared in constant time, and what their owners may do.

With keys configured every path needs one except OPEN_PATHS, which load balancers poll and which
show no traffic, and the files of the web page. /metrics needs a key, because it shows what is
requested; Prometheus sends one with `authorization: {credentials: KEY}`. Without keys everything is
open, and the server listens on loopback only, unless started with --insecure. How a request carries
its key is its dialect's.

A key of --api-key belongs to the default tenant; a key of the tenants file to its tenant.
ADMIN_PATHS need a key of the admin key file or of a tenant that is an admin; without an admin key
file also a key of --api-key, or no key if there are none, but only from this machine. With several
keys, each tenant and each key of --api-key has its own scope of cached prefixes, because the time
to first token and the count of cached tokens reveal the prompts of others.

Always holds: the key is checked before the body is read; no admin path is open to another machine
without an admin's key. Paths and web pages: origins.py.
"""

from __future__ import annotations

import enum
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from quire.api.http.errors import NotAdmin
from quire.api.http.origins import is_below, is_guarded
from quire.base.errors import NotAuthorized
from quire.config.tenants import ONLY_TENANT, Tenant, key_digest

OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/version", "/docs", "/openapi.json"})
_KEY_IN_QUERY = re.compile(rb"(?:^|&)(api[_-]?key|key|access_token)=", re.IGNORECASE)
# The files of the web page, which are the same for every client.
_OPEN_TOP = "/web/"
# Paths that count the requests of all tenants: only the keys of admins and of --api-key open them.
COUNTING_PATHS = ("/metrics",)


class Admin(enum.Enum):
    """From where a caller may use admin paths."""

    NOWHERE = enum.auto()
    HERE = enum.auto()  # from this machine, and at --admin-port
    ANYWHERE = enum.auto()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. sees_all: may use COUNTING_PATHS. key: the digest of its key, b""
    where none is needed."""

    tenant: Tenant = ONLY_TENANT
    sees_all: bool = True
    admin: Admin = Admin.HERE
    key: bytes = b""


class Keys:
    """The configured keys. Only digests of equal length are compared, all of them every time.

    tenants: of the tenants file, the default one first; None without a file. admin_digests: SHA-256
    in hex of the keys of the admin key file. shares_prefixes: tenants and keys share cached
    prefixes unless their tenant is isolated explicitly.
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
        # Admin keys come first: a key that is also another's counts as an admin's.
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
        self._keyless = Caller(default, True, plain)
        # The caller of every request except at ADMIN_PATHS; None where requests need keys.
        self.open_caller = None if self._has_callers else self._keyless

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return self._has_callers

    def needed(self, path: str) -> bool:
        """Return whether requests to `path` need a key."""
        if is_open(path):
            return False
        return self._has_callers or (is_guarded(path) and self._has_admins)

    def check(
        self,
        path: str,
        read_key: Callable[[], bytes],
        *,
        is_here: Callable[[], bool] = lambda: True,
        query: bytes = b"",
    ) -> Caller:
        """Return the sender of a request to `path`. Raises NotAuthorized or NotAdmin.

        read_key: returns the key of the request, or raises NotAuthorized. is_here: returns whether
        the request comes from this machine, or to a listener that only this machine reaches. query:
        of the address, where a key is not read.
        """
        if is_open(path):
            return self._keyless
        caller = self._keyless
        if self.needed(path):
            caller = self._caller_of(_read(read_key, query))
        if is_guarded(path):
            _check_admin(caller, is_here)
        elif is_below(path, COUNTING_PATHS) and not caller.sees_all:
            raise NotAdmin(
                "this path counts the requests of all tenants, and tenant "
                f"{caller.tenant.name} is not an admin; use a key of --api-key, or set "
                "`admin = true` for the tenant"
            )
        return caller

    def owner(self, digest: bytes) -> Caller | None:
        """Return the caller with the key of that digest (b"": without keys), if there is one."""
        if not digest:
            return self.open_caller
        return next((caller for key, caller in self._callers if key == digest), None)

    def _caller_of(self, key: bytes) -> Caller:
        sent = bytes.fromhex(key_digest(key))
        matches = [hmac.compare_digest(sent, digest) for digest, _ in self._callers]
        if not any(matches):
            raise NotAuthorized("the API key is not one of this server's keys; check it")
        return self._callers[matches.index(True)][1]


def _read(read_key: Callable[[], bytes], query: bytes) -> bytes:
    """Return the key of a request. Raises NotAuthorized, which says if the address has one."""
    try:
        return read_key()
    except NotAuthorized as error:
        named = _KEY_IN_QUERY.search(query)
        if named is None:
            raise
        raise NotAuthorized(
            f"{error}. The address has {named[1].decode()}=..., which is not read, because "
            "addresses are logged by proxies; leave it out, and replace the key if others read "
            "such logs"
        ) from error


def _scoped(caller: Caller, isolates: bool) -> Caller:
    """Return the caller with its own scope of cached prefixes, if it is isolated."""
    tenant = caller.tenant
    if not (isolates if tenant.isolate_cache is None else tenant.isolate_cache):
        return caller
    is_own = not tenant.is_default or caller.key.hex() in tenant.key_digests
    scope = tenant.name if is_own else f"key:{caller.key.hex()}"  # no tenant's name has a colon
    return replace(caller, tenant=replace(tenant, cache_scope=scope))


def is_open(path: str) -> bool:
    """Return whether a path never needs a key."""
    return path in OPEN_PATHS or path.startswith(_OPEN_TOP)


def _check_admin(caller: Caller, is_here: Callable[[], bool]) -> None:
    if caller.admin is Admin.ANYWHERE or (caller.admin is Admin.HERE and is_here()):
        return
    why = (
        "the key that was sent is not an admin's"
        if caller.admin is Admin.NOWHERE
        else "the request came from another machine, or through a proxy or a Unix socket"
    )
    raise NotAdmin(
        f"this path is for admins, and {why}; use a key of --admin-key-file or of a tenant with "
        "`admin = true`, or send the request from the machine itself to --admin-port"
    )
