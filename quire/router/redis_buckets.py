"""RedisBuckets: buckets of tokens that several routers share.

A script takes tokens in one step, by the clock of Redis, so routers with wrong clocks agree. While
Redis is down each router allows its part of each quota by buckets of its own. Knows no keys of
clients, only names of quotas. Always holds: while Redis is down, a request waits for it once in a
second at most.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.base.log import Log
from quire.router.quotas import LocalBuckets, Quota, Reservation
from quire.router.redis_link import RedisDown, RedisLink

_RETRY_S = 1.0

# A bucket that is full again expires: one that is not there is full. Where the clock was put back,
# a bucket fills from then on.
SCRIPT = """-- quire: take tokens from a bucket
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local tokens, is_settling = tonumber(ARGV[3]), ARGV[4] == '1'
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local found = redis.call('HMGET', KEYS[1], 'level', 'since')
local level, since = tonumber(found[1]) or burst, tonumber(found[2]) or now
level = math.min(burst, level + math.max(0, now - since) * rate)
if not is_settling and level < tokens then
  if now < since then
    redis.call('HSET', KEYS[1], 'since', string.format('%.6f', now))
  end
  return {0, string.format('%.6f', (tokens - level) / rate)}
end
level = math.min(burst, level - tokens)
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level), 'since',
           string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil((burst - level) / rate * 1000) + 1000)
return {1, string.format('%.6f', level)}
"""


class RedisBuckets:
    """local: the buckets while Redis is down. now: returns the time in seconds."""

    def __init__(
        self, link: RedisLink, prefix: str, local: LocalBuckets, log: Log, now: Callable[[], float]
    ) -> None:
        self._run = link.script(SCRIPT)
        self._prefix = f"{prefix}quota:"
        self._local = local
        self._log = log
        self._now = now
        self._retry_s = 0.0
        self.is_down = False

    async def reserve(self, quota: Quota, tokens: int) -> Reservation | float:
        """Take tokens, or return in how many seconds there are enough."""
        found = await self._take(quota, tokens, is_settling=False)
        if found is None:
            return await self._local.reserve(quota, tokens)
        has_taken, number = found
        if not has_taken:
            return number

        async def settle(used: int) -> None:
            if used != tokens:
                await self._take(quota, used - tokens, is_settling=True)

        return Reservation(tokens, settle)

    async def _take(
        self, quota: Quota, tokens: int, *, is_settling: bool
    ) -> tuple[bool, float] | None:
        """Run the script; None while Redis is down."""
        if self.is_down:
            if self._now() < self._retry_s:
                return None
            self._retry_s = self._now() + _RETRY_S  # one request finds out, the others do not wait
        arguments = [f"{quota.tokens_per_s:.9f}", str(quota.burst_tokens), str(tokens)]
        try:
            has_taken, number = await self._run(
                self._prefix + quota.name, [*arguments, "1" if is_settling else "0"]
            )
        except RedisDown as error:
            if not self.is_down:
                self._log.warning("quotas are local while Redis is down", reason=str(error))
            self.is_down, self._retry_s = True, self._now() + _RETRY_S
            return None
        if self.is_down:
            self._log.event("quotas are shared again")
        self.is_down = False
        return bool(int(has_taken)), float(number)
