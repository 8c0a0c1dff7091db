"""GET /v1/cache and POST /v1/cache/flush: report the contents of the prefix cache, and empty it.

For admins (auth.py guards both paths, and the names that other servers give the second): the report
covers the prefixes of all tenants, as keyed digests without text. The engine provides the numbers
(quire.base.cache_usage).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.parameterless import refuse_parameters
from quire.api.server_state import ServerState
from quire.base.cache_usage import CacheReport
from quire.base.errors import InvalidParameter
from quire.base.show import show

NUM_PREFIXES = 20
MAX_PREFIXES = 1000


class CacheRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def get(self, request: Request) -> Response:
        """Return the report; `?prefixes=N` adds the N prefixes that saved the most tokens."""
        num_prefixes = _num_prefixes(request)
        report = await self._server_state.engine().cache_report(num_prefixes=num_prefixes)
        return _json(report_json(report))

    async def flush(self, request: Request) -> Response:
        """Empty the cache; running requests continue."""
        await refuse_parameters(request)
        return _json({"flushed_blocks": await self._server_state.engine().flush_cache()})


def report_json(report: CacheReport) -> dict[str, Any]:
    """Return the report as JSON; shares are of the tokens looked up, null before any lookup."""
    queried = report.queried_tokens_total
    host, disk = report.host_hit_tokens_total, report.disk_hit_tokens_total
    pool = report.hit_tokens_total - host - disk

    def share(found: int) -> float | None:
        return round(found / queried, 4) if queried else None

    return {
        "object": "cache",
        "prefix_caching": report.prefix_caching,
        "block_size": report.block_size,
        "blocks": {
            "total": report.blocks_total,
            "used": report.blocks_used,
            "free_used_once": report.blocks_once,
            "free_used_again": report.blocks_again,
            "free_used_again_most": report.blocks_again_most,
            "free_pinned": report.blocks_pinned,
            "free_plain": report.blocks_plain,
            "findable": report.blocks_findable,
        },
        "evicted_blocks_total": report.evicted_blocks_total,
        "evicted_digests": {"known": report.ghosts, "most": report.ghosts_most},
        "tokens": {
            "queried_total": queried,
            "found_total": {"pool": pool, "host": host, "disk": disk},
            "hit_rate": {
                "all": share(report.hit_tokens_total),
                "pool": share(pool),
                "host": share(host),
                "disk": share(disk),
            },
        },
        "prefixes": [dataclasses.asdict(prefix) for prefix in report.prefixes],
        "owners": [dataclasses.asdict(owner) for owner in report.owners],
    }


def _num_prefixes(request: Request) -> int:
    for name in request.query_params:
        if name != "prefixes":
            raise InvalidParameter(
                f"{show(name)} is no parameter of this route; prefixes is: leave the other out",
                param=name[:64],
            )
    given = request.query_params.get("prefixes", str(NUM_PREFIXES))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) <= MAX_PREFIXES):
        raise InvalidParameter(
            f"prefixes is {show(given)}; a number from 0 to {MAX_PREFIXES} is allowed",
            param="prefixes",
        )
    return int(given)


def _json(content: dict[str, Any]) -> Response:
    return Response(
        msgspec.json.encode(content),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
