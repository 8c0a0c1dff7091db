"""Tenants: clients of a server, identified by their keys, with weights and limits.

Read strictly from a TOML or JSON file: an unknown setting is rejected with the name of its tenant.
The HTTP layer uses keys and priorities, the engine the rest. Only digests of plain-text keys are
returned. Invariant: the first tenant is the default one, even if the file does not name it; no two
tenants share a key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidParameter, SettingError
from quire.base.parameter_checks import listed, number, texts, whole
from quire.base.scheduling_params import MAX_PRIORITY, MAX_TENANT_CHARS
from quire.base.show import show
from quire.base.strict_json import parse_object
from quire.base.user_path import user_path

# The tenant of requests if there are no tenants, or with a key of --api-key.
DEFAULT_TENANT = "default"
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_TENANTS = 10_000
_MAX_KEYS = 1000
_MAX_KEY_CHARS = 512
_MAX_WEIGHT = 1e6
_MAX_INT = 2**31 - 1
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_TENANT_CHARS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant. key_digests: SHA-256 of its keys, in hex.

    weight: its share under a fair policy. kv_floor_*: KV blocks reserved for it; kv_ceiling_*:
    maximum blocks of its running requests; each as a number or as a share of the cache.
    max_running, max_queued: maximum running and waiting requests, counting each of a request's n
    choices. priority: default priority of its requests; priority_min, priority_max: the range they
    may specify. isolate_cache: whether it shares no cached prefixes with others; None: the server's
    setting. is_admin: its keys grant access to the admin routes. cache_scope: scope of its cached
    prefixes, set by the server, not by the file; all tenants with an empty scope share them.
    """

    name: str
    key_digests: tuple[str, ...] = ()
    weight: float = 1.0
    kv_floor_blocks: int | None = None
    kv_floor_share: float | None = None
    kv_ceiling_blocks: int | None = None
    kv_ceiling_share: float | None = None
    max_running: int | None = None
    max_queued: int | None = None
    priority: int = 0
    priority_min: int = 0
    priority_max: int = MAX_PRIORITY
    isolate_cache: bool | None = None
    is_admin: bool = False
    cache_scope: str = ""

    @property
    def is_default(self) -> bool:
        """Return whether it is the tenant of requests without a tenant's key."""
        return self.name == DEFAULT_TENANT

    @property
    def name_in_requests(self) -> str:
        """Return the name that its requests carry: empty for the default tenant."""
        return "" if self.is_default else self.name


# Settings used by the HTTP layer only; the engine received all others at its start.
_OF_THE_EDGE = frozenset(
    {"key_digests", "priority", "priority_min", "priority_max", "isolate_cache", "is_admin"}
)

# The default tenant unless the file defines it: without limits.
ONLY_TENANT = Tenant(name=DEFAULT_TENANT, priority_min=-MAX_PRIORITY)


def key_digest(key: str | bytes) -> str:
    """Return the SHA-256 of a key in hex, as in `key_digests`."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def read_tenants(path: str) -> tuple[Tenant, ...]:
    """Read the tenants of a file, the default one first. Raises SettingError if it is invalid."""
    file = user_path(path)
    try:
        size = file.stat().st_size
        raw = file.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise SettingError(
            f"the tenants file {path} cannot be read: {error.strerror}; give a TOML "
            "file with a table [tenants.NAME] for each tenant"
        ) from error
    if size > MAX_FILE_BYTES:
        raise SettingError(
            f"the tenants file {path} has {size} bytes; at most {MAX_FILE_BYTES} are allowed"
        )
    try:
        return _tenants(_document(file, raw))
    except (ValueError, InvalidParameter) as error:
        raise SettingError(f"the tenants file {path}: {error}") from error


def read_tenants_of_server(path: str, *, has_keys: bool) -> tuple[Tenant, ...]:
    """Read the tenants of a server's file, each of which must be able to authenticate.

    has_keys: the server has API keys besides those of tenants. Raises SettingError.
    """
    tenants = read_tenants(path)
    for tenant in tenants:
        if not tenant.key_digests and not tenant.is_default:
            raise SettingError(
                f"the tenants file {path}: tenant {tenant.name} has no key, so no request can use "
                "it; give it keys or key_digests"
            )
    if not has_keys and not any(tenant.key_digests for tenant in tenants):
        raise SettingError(
            f"the tenants file {path}: no tenant has a key; give them keys or key_digests"
        )
    return tenants


def needs_restart(running: Sequence[Tenant], now: Sequence[Tenant]) -> str | None:
    """Return which change from `running` to `now` requires a restart; None if there is none.

    Keys, priorities, isolation and admin rights can change; the set of tenants, weights and limits
    cannot.
    """
    before, after = ({one.name: one for one in tenants} for tenants in (running, now))
    if before.keys() != after.keys():
        name = sorted(before.keys() ^ after.keys())[0]
        return f"tenant {name} is {'removed' if name in before else 'new'}"
    for name, tenant in after.items():
        for one in fields(Tenant):
            was, is_now = getattr(before[name], one.name), getattr(tenant, one.name)
            if one.name not in _OF_THE_EDGE and was != is_now:
                return f"{one.name} of tenant {name} was {show(was)} and is {show(is_now)}"
    return None


def _document(file: Path, raw: bytes) -> dict[str, Any]:
    if file.suffix == ".json":
        return parse_object(raw, limit_bytes=MAX_FILE_BYTES)
    if file.suffix == ".toml":
        try:
            return tomllib.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"it is not TOML: {error}") from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    raise ValueError(f"its name ends in {file.suffix!r}; .toml and .json are read")


def _tenants(document: Mapping[str, Any]) -> tuple[Tenant, ...]:
    for name in document:
        if name != "tenants":
            raise ValueError(
                f"it has {show(name)}; only `tenants` is known, as in [tenants.NAME]; settings of "
                "the server belong in a file of --config"
            )
    entries = document.get("tenants")
    if not isinstance(entries, dict) or not entries:
        raise ValueError("it names no tenant; write one as [tenants.NAME] with its keys")
    if len(entries) > MAX_TENANTS:
        raise ValueError(f"it has {len(entries)} tenants; at most {MAX_TENANTS} are allowed")
    tenants = [_tenant(name, entry) for name, entry in entries.items()]
    owners: dict[str, str] = {}
    for tenant in tenants:
        for digest in tenant.key_digests:
            other = owners.setdefault(digest, tenant.name)
            if other != tenant.name:
                raise ValueError(
                    f"tenants {other} and {tenant.name} have a key in common; each key must belong "
                    "to one tenant"
                )
    others = [tenant for tenant in tenants if not tenant.is_default]
    named = [tenant for tenant in tenants if tenant.is_default]
    return (named[0] if named else ONLY_TENANT, *others)


def _tenant(name: str, entry: Any) -> Tenant:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a tenant is called {show(name)}; letters, digits and _ . - are allowed, at most "
            f"{MAX_TENANT_CHARS}, a letter or digit first"
        )
    if not isinstance(entry, dict):
        raise ValueError(f"tenants.{name} is {show(entry)}; a table of its settings is expected")
    try:
        return _checked(Tenant(name=name, **_read(entry)))
    except InvalidParameter as error:
        raise ValueError(f"tenants.{name}: {error}") from error


def _read(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Tenant, each value checked."""
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in _READERS:
            near = get_close_matches(key, _READERS, 1)
            raise InvalidParameter(
                f"{show(key)} is not known; "
                + (f"did you mean {near[0]}?" if near else f"known: {', '.join(_READERS)}")
            )
        field, read = _READERS[key]
        if field in found:  # keys and key_digests
            found[field] += read(key, value)
        else:
            found[field] = read(key, value)
    return found


def _checked(tenant: Tenant) -> Tenant:
    """Return the tenant if its settings are consistent."""
    for kind in ("floor", "ceiling"):
        blocks, share = f"kv_{kind}_blocks", f"kv_{kind}_share"
        if getattr(tenant, blocks) is not None and getattr(tenant, share) is not None:
            raise InvalidParameter(f"{blocks} and {share} set the same limit; give one of them")
    for unit in ("blocks", "share"):
        floor = getattr(tenant, f"kv_floor_{unit}")
        ceiling = getattr(tenant, f"kv_ceiling_{unit}")
        if floor is not None and ceiling is not None and floor > ceiling:
            raise InvalidParameter(
                f"kv_floor_{unit} is {floor}, more than kv_ceiling_{unit} {ceiling}; lower it"
            )
    if not tenant.priority_min <= tenant.priority <= tenant.priority_max:
        raise InvalidParameter(
            f"priority is {tenant.priority}; it must lie between priority_min "
            f"{tenant.priority_min} and priority_max {tenant.priority_max}"
        )
    return tenant


def _keys(name: str, value: Any) -> tuple[str, ...]:
    keys = texts(name, listed(name, value), most=_MAX_KEYS, max_chars=_MAX_KEY_CHARS)
    for key in keys:
        if key != key.strip():
            raise InvalidParameter(
                f"{name} holds a key with leading or trailing white space; remove it"
            )
    return tuple(key_digest(key) for key in keys)


def _digests(name: str, value: Any) -> tuple[str, ...]:
    digests = texts(name, listed(name, value), most=_MAX_KEYS, max_chars=_MAX_KEY_CHARS)
    for digest in digests:
        if not _DIGEST.fullmatch(digest.lower()):
            raise InvalidParameter(
                f"{name} holds {show(digest)}; each must be a key's SHA-256 in 64 hex digits"
            )
    return tuple(digest.lower() for digest in digests)


def _count(low: int) -> Callable[[str, Any], int]:
    return lambda name, value: whole(name, value, low, _MAX_INT)


def _share(name: str, value: Any) -> float:
    return number(name, value, 0, 1, open_low=True)


def _priority(name: str, value: Any) -> int:
    return whole(name, value, -MAX_PRIORITY, MAX_PRIORITY)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {show(value)}; true or false is allowed")
    return value


# Maps a setting's name in the file to the field of Tenant and the reader of its value.
_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "keys": ("key_digests", _keys),
    "key_digests": ("key_digests", _digests),
    "weight": ("weight", lambda name, value: number(name, value, 0, _MAX_WEIGHT, open_low=True)),
    "kv_floor_blocks": ("kv_floor_blocks", _count(0)),
    "kv_floor_share": ("kv_floor_share", _share),
    "kv_ceiling_blocks": ("kv_ceiling_blocks", _count(1)),
    "kv_ceiling_share": ("kv_ceiling_share", _share),
    "max_running": ("max_running", _count(1)),
    "max_queued": ("max_queued", _count(1)),
    "priority": ("priority", _priority),
    "priority_min": ("priority_min", _priority),
    "priority_max": ("priority_max", _priority),
    "isolate_cache": ("isolate_cache", _flag),
    "admin": ("is_admin", _flag),
}
