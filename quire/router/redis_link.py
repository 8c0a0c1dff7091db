"""The connection to Redis: the only file that imports the `redis` package.

For quotas that several routers share, and for leases of replicas. Knows the commands that these
need and nothing of their meaning. Always holds: whatever goes wrong with Redis is a RedisDown; no
command is sent twice by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from quire.base.errors import QuireError, SettingError

_T = TypeVar("_T")
# Whether the last command of a task had a connection, and may have been sent.
_is_sent: ContextVar[bool] = ContextVar("_is_sent", default=False)


class RedisDown(QuireError):
    """Redis did not answer as it should, in time. may_have_run: it may have got the command, and
    has not refused it."""

    def __init__(self, message: str, *, may_have_run: bool) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run


class RedisLink:
    """Connections to one server, each command within `timeout_s`. is_down: whether the last one had
    no answer. Bytes that are no UTF-8 are read as surrogates."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import redis
            import redis.asyncio
        except ImportError as error:
            raise SettingError(
                "[redis] needs the package redis; install it with pip install 'quire-llm[redis]'"
            ) from error
        try:
            pool = _noting_pool().from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # A command may have run although its connection has ended. A kept connection that
                # has ended is found before anything is sent.
                retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
                decode_responses=True,
                encoding_errors="surrogateescape",
                protocol=2,
            )
        except ValueError as error:
            raise SettingError(
                f"[redis] url: {error}; write it like redis://127.0.0.1:6379/0"
            ) from error
        self._client: Any = redis.asyncio.Redis.from_pool(pool)
        self._errors = (redis.RedisError, OSError, TimeoutError)
        self._refusals = (redis.ResponseError, redis.BusyLoadingError)
        self._timeout_s = timeout_s
        self.is_down = False

    def script(self, text: str) -> Callable[[str, list[str]], Awaitable[Any]]:
        """Return a script as a function of one key and its arguments. Raises RedisDown."""
        registered = self._client.register_script(text)

        def run(key: str, arguments: list[str]) -> Awaitable[Any]:
            return self._within(registered(keys=[key], args=arguments))

        return run

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys with a prefix. Raises RedisDown."""

        async def scan() -> list[str]:
            return [key async for key in self._client.scan_iter(match=f"{prefix}*", count=1000)]

        return await self._within(scan())

    async def put(self, key: str, value: str, ttl_s: float) -> None:
        """Set a key that expires. Raises RedisDown."""
        await self._within(self._client.set(key, value, px=max(round(ttl_s * 1000), 1)))

    async def remove(self, key: str) -> None:
        """Remove a key. Raises RedisDown."""
        await self._within(self._client.delete(key))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _within(self, doing: Awaitable[_T]) -> _T:
        _is_sent.set(False)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await doing
        except self._errors as error:
            self.is_down = True
            reason = str(error) or type(error).__name__
            may_have_run = _is_sent.get() and not isinstance(error, self._refusals)
            raise RedisDown(f"Redis did not answer: {reason}", may_have_run=may_have_run) from error
        self.is_down = False
        return result


def _noting_pool() -> Any:
    """Return the class of a pool that notes whether a command has got a connection."""
    from redis.asyncio import ConnectionPool

    class NotingPool(ConnectionPool):
        async def get_connection(self, *arguments: Any, **options: Any) -> Any:
            _is_sent.set(False)
            get_connection: Any = super().get_connection
            connection = await get_connection(*arguments, **options)
            _is_sent.set(True)
            return connection

    return NotingPool
