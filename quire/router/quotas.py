"""Quotas: how many tokens each key may use, reserved before a request and settled after it.

A quota is a bucket that fills at a constant rate up to its burst. A request reserves its prompt and
as many tokens as it may generate; what it did not use is given back, and what it used beyond that
is taken, so that a bucket may be below zero for some time. Is given the time. Knows no replica and
no Redis. Always holds: what is taken from a bucket is what requests used, plus what open ones have
reserved.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.router.faults import Refusal
from quire.router.route_file import QuotaTable, TenantTable

# Beyond this number the bucket that was used longest ago is forgotten, and is full again.
MAX_BUCKETS = 100_000


@dataclass(frozen=True, slots=True)
class Quota:
    """A rate and the most tokens that can be saved. name: of the tenant, or of a single key."""

    name: str
    tokens_per_s: float
    burst_tokens: int

    def share(self, parts: int) -> Quota:
        """Return the part of one of several routers."""
        return Quota(self.name, self.tokens_per_s / parts, max(self.burst_tokens // parts, 1))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens that were taken from a bucket. settle: called once, with the tokens that were used."""

    tokens: int
    settle: Callable[[int], Awaitable[None]]


class Buckets(Protocol):
    """Where the buckets are."""

    async def reserve(self, quota: Quota, tokens: int) -> Reservation | float:
        """Take tokens, or return in how many seconds there are enough."""


class LocalBuckets:
    """Buckets of this process. now: returns the time in seconds. parts: how many routers share."""

    def __init__(self, now: Callable[[], float], parts: int = 1) -> None:
        self._now = now
        self._parts = parts
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def reserve(self, quota: Quota, tokens: int) -> Reservation | float:
        """Take tokens, or return in how many seconds there are enough."""
        quota = quota.share(self._parts)
        level = self._level(quota)
        wanted = min(tokens, quota.burst_tokens)  # a local part may be smaller than a request
        if level < wanted:
            return (wanted - level) / quota.tokens_per_s
        self._put(quota, level - tokens)

        async def settle(used: int) -> None:
            self._put(quota, self._level(quota) + tokens - used)

        return Reservation(tokens, settle)

    def _level(self, quota: Quota) -> float:
        now_s = self._now()
        level, since_s = self._levels.get(quota.name, (float(quota.burst_tokens), now_s))
        return min(level + (now_s - since_s) * quota.tokens_per_s, float(quota.burst_tokens))

    def _put(self, quota: Quota, level: float) -> None:
        self._levels[quota.name] = (min(level, float(quota.burst_tokens)), self._now())
        self._levels.move_to_end(quota.name)
        while len(self._levels) > MAX_BUCKETS:
            self._levels.popitem(last=False)


class Quotas:
    """default: of each key that no tenant has; None for no limit."""

    def __init__(
        self, default: QuotaTable | None, tenants: Mapping[str, TenantTable], buckets: Buckets
    ) -> None:
        self._default = default
        self._buckets = buckets
        self._of_digest = {
            digest: _quota(f"tenant:{name}", table)
            for name, table in tenants.items()
            for digest in table.key_digests
        }

    def quota_of(self, key: bytes) -> Quota | None:
        """Return the quota of a client's key, b"" for clients without one; None for no limit."""
        digest = hashlib.sha256(key).hexdigest() if key else ""
        found = self._of_digest.get(digest)
        if found is None and self._default is not None:
            found = _quota(f"key:{digest[:32]}", self._default)
        return found

    async def reserve(self, key: bytes, tokens: int) -> Reservation | None:
        """Take the tokens of a request; None where its key has no limit. Raises Refusal."""
        quota = self.quota_of(key)
        if quota is None or not tokens:
            return None
        per_minute = round(quota.tokens_per_s * 60)
        if tokens > quota.burst_tokens:
            raise Refusal(
                429,
                "quota_exceeded",
                f"the request may use {tokens} tokens (prompts and output of all answers) and this "
                f"key's quota holds {quota.burst_tokens} at most ({per_minute} a minute), so it "
                "would be refused again; lower max_tokens, send fewer prompts or answers in one "
                "request, or shorten the prompt",
                is_final=True,
            )
        found = await self._buckets.reserve(quota, tokens)
        if isinstance(found, Reservation):
            return found
        raise Refusal(
            429,
            "quota_exceeded",
            f"the request may use {tokens} tokens (prompt and output), more than this key has left "
            f"of its {per_minute} a minute; send it again in {math.ceil(found)} s, or lower "
            "max_tokens",
            retry_after_s=found,
        )


def _quota(name: str, table: QuotaTable) -> Quota:
    return Quota(name, table.tokens_per_minute / 60, table.burst_tokens or table.tokens_per_minute)
