"""Convert a tenants file to scheduler limits: shares of the KV cache become blocks.

The API layer checks keys and priorities; this module does not identify callers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.base.errors import SettingError
from quire.config.tenants import Tenant, read_tenants
from quire.scheduler.tenants.tenant_usage import TenantLimits


def read_limits(
    path: str | None, *, num_blocks: int
) -> tuple[tuple[TenantLimits, ...], Mapping[str, float]]:
    """Limits of all tenants, and their weights by the names requests carry; none without a file.

    Raises SettingError where the file is wrong, or a tenant's ceiling is below its floor.
    """
    if path is None:
        return (), {}
    tenants = read_tenants(path)
    limits = tuple(_limits(tenant, num_blocks, path) for tenant in tenants)
    return limits, {tenant.name_in_requests: tenant.weight for tenant in tenants}


def _limits(tenant: Tenant, num_blocks: int, path: str) -> TenantLimits:
    floor, ceiling = tenant.kv_floor_blocks or 0, tenant.kv_ceiling_blocks
    if tenant.kv_floor_share is not None:
        floor = _share(tenant.kv_floor_share, num_blocks)
    if tenant.kv_ceiling_share is not None:
        ceiling = max(_share(tenant.kv_ceiling_share, num_blocks), 1)
    if ceiling is not None and floor > ceiling:
        raise SettingError(
            f"the tenants file {path}: tenant {tenant.name} has a floor of {floor} KV blocks and a "
            f"ceiling of {ceiling} (the cache has {num_blocks}); lower the floor"
        )
    return TenantLimits(
        name=tenant.name_in_requests,
        shown=tenant.name,
        floor_blocks=floor,
        ceiling_blocks=ceiling,
        max_running=tenant.max_running,
        max_queued=tenant.max_queued,
    )


def _share(share: float, num_blocks: int) -> int:
    return math.floor(share * num_blocks + 1e-6)  # 0.29 of 100 are 29, not 28.999...
