"""RedisBuckets: buckets of tokens that several routers share.

A script takes tokens in one step, by the clock of Redis, so routers with wrong clocks agree. While
Redis is down each router allows its part of each quota by buckets of its own. What requests settle
then is kept, as one number for each bucket, and taken from Redis or given back once it answers.
Knows no keys of clients, only names of quotas. Always holds: while Redis is down, a request waits
for it once in a second at most; nothing is settled twice, so a settlement that was sent and has no
answer, which Redis may have made, is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from quire.base.log import Log
from quire.router.quotas import MAX_BUCKETS, LocalBuckets, Quota, Reservation
from quire.router.redis_link import RedisDown, RedisLink

_RETRY_S = 1.0
# So many buckets are settled after each request: its own, and one that was used while Redis was
# down.
_NUM_SETTLED = 2

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
        self._unsettled: dict[str, tuple[Quota, int]] = {}
        self.is_down = False

    async def reserve(self, quota: Quota, tokens: int) -> Reservation | float:
        """Take tokens, or return in how many seconds there are enough."""
        found = await self._take(quota, tokens, is_settling=False)
        if found is not None and quota.name in self._unsettled:
            await self._settle(quota.name)
            if not found[0]:  # what is given back may be enough
                found = await self._take(quota, tokens, is_settling=False)
        if found is None:
            return await self._local.reserve(quota, tokens)
        has_taken, number = found
        if not has_taken:
            return number

        async def settle(used: int) -> None:
            if used != tokens:
                self._settle_later(quota, used - tokens)
            for name in list(islice(self._unsettled, _NUM_SETTLED)):
                if not self.is_down:
                    await self._settle(name)

        return Reservation(tokens, settle)

    def _settle_later(self, quota: Quota, tokens: int) -> None:
        _, before = self._unsettled.get(quota.name, (quota, 0))
        self._unsettled[quota.name] = (quota, before + tokens)
        if len(self._unsettled) > MAX_BUCKETS:
            del self._unsettled[next(iter(self._unsettled))]

    async def _settle(self, name: str) -> None:
        """Settle what is kept of one bucket."""
        quota, tokens = self._unsettled.pop(name, (None, 0))
        if quota is not None and tokens:
            await self._take(quota, tokens, is_settling=True)

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
            if is_settling and not error.may_have_run:
                self._settle_later(quota, tokens)
            return None
        if self.is_down:
            self._log.event("quotas are shared again")
        self.is_down = False
        return bool(int(has_taken)), float(number)
