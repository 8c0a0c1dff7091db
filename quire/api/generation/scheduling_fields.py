"""From request fields and the tenant to Terms, and to the salt of cached prefixes.

Values are checked by Terms itself; here the bounds of a tenant are added. Always holds: requests of
a cache scope share prefixes with no other scope, whatever salts are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.fields import TERMS, flag
from quire.base.errors import InvalidParameter
from quire.base.scheduling_params import SchedulingParams
from quire.base.show import show
from quire.config.tenants import Tenant

MAX_SALT_CHARS = 256
# Around a cache scope; no salt of a request may begin with it.
_SEAL = "\0"


def scheduling_params_of(given: Mapping[str, Any], tenant: Tenant) -> SchedulingParams:
    """The terms a request of `tenant` asks for. Raises InvalidParameter naming the field."""
    fields = {name: given[name] for name in TERMS & given.keys()}
    terms = SchedulingParams(
        tenant=tenant.name_in_requests,
        report_progress=flag(given, "return_progress") and flag(given, "stream"),
        **{"priority": tenant.priority, **fields},
    )
    if not tenant.priority_min <= terms.priority <= tenant.priority_max:
        raise InvalidParameter(
            f"priority is {terms.priority}; tenant {tenant.name} may ask for "
            f"{tenant.priority_min} to {tenant.priority_max} (lower is served earlier)",
            param="priority",
        )
    return terms


def cache_salt_of(given: Mapping[str, Any], tenant: Tenant) -> str:
    """The salt of a request's cached prefixes. Raises InvalidParameter."""
    salt = given.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS or salt.startswith(_SEAL):
        raise InvalidParameter(
            f"cache_salt is {show(salt)}; a text of at most {MAX_SALT_CHARS} characters is "
            "allowed, the first of them not U+0000",
            param="cache_salt",
        )
    return f"{_SEAL}{tenant.cache_scope}{_SEAL}{salt}" if tenant.cache_scope else salt
