"""Discovery: the addresses of the replicas; StaticList and WatchedFile.

A file has one address a line; empty lines and lines that begin with # are ignored. It is read again
when it changes. A file that cannot be read as a whole (half-written, empty, with a malformed line)
changes nothing: the last good list stays, and the log says why. One that lacks replicas of that
list may be half-written, up to the end of a line, so it counts once polls have read the same for a
while. Writers should write a new file and rename it, which is never seen half-written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from quire.base.errors import InvalidParameter, SettingError
from quire.base.log import Log
from quire.base.server_url import ServerUrl, server_url

_MAX_FILE_BYTES = 1 << 20
_MAX_REPLICAS = 1024


class Discovery(Protocol):
    """Where the addresses of the replicas come from."""

    def poll(self) -> tuple[ServerUrl, ...]:
        """Return the addresses as of now. Cheap; called every probe."""

    async def read(self) -> bool:
        """Read the addresses once, where `poll` does not; return whether they have changed."""

    async def watch(self, changed: Callable[[], None]) -> None:
        """Keep the addresses current until cancelled; call `changed` when they have changed."""


class Unwatched:
    """A discovery that needs no task: `poll` does all."""

    async def read(self) -> bool:
        """Read nothing."""
        return False

    async def watch(self, changed: Callable[[], None]) -> None:
        """Return at once."""


class StaticList(Unwatched):
    """Addresses that never change."""

    def __init__(self, urls: tuple[ServerUrl, ...]) -> None:
        self._urls = urls

    def poll(self) -> tuple[ServerUrl, ...]:
        """Return all."""
        return self._urls


class WatchedFile(Unwatched):
    """Addresses in a file. Raises SettingError where it cannot be read at the start.

    settle_s: so long a version that lacks replicas has to stay. now: returns the time in seconds.
    """

    def __init__(self, path: Path, log: Log, settle_s: float, now: Callable[[], float]) -> None:
        self._path = path
        self._log = log
        self._settle_s = settle_s
        self._now = now
        self._seen = self._stamp()
        self._smaller: tuple[ServerUrl, ...] | None = None  # of the last poll, until it counts
        self._smaller_s = 0.0  # when a poll read it first
        try:
            self._urls = self._read()
        except (OSError, ValueError) as error:
            raise SettingError(f"--replicas-file {path}: {_why(error)}") from error

    def poll(self) -> tuple[ServerUrl, ...]:
        """Return the addresses of the last good file."""
        stamp = self._stamp()
        if stamp == self._seen and self._smaller is None:
            return self._urls
        self._seen = stamp
        try:
            urls = self._read()
        except (OSError, ValueError) as error:
            self._smaller = None
            self._log.warning(
                "replicas file ignored",
                file=str(self._path),
                reason=_why(error),
                kept=len(self._urls),
            )
            return self._urls
        if not set(self._urls).issubset(urls):
            now_s = self._now()
            if urls != self._smaller:
                self._smaller, self._smaller_s = urls, now_s
            if now_s - self._smaller_s < self._settle_s:
                return self._urls
        self._smaller = None
        if urls != self._urls:
            self._log.event("replicas file read", file=str(self._path), replicas=len(urls))
        self._urls = urls
        return urls

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> tuple[ServerUrl, ...]:
        with self._path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        if raw and not raw.endswith(b"\n"):
            raise ValueError("its last line has no line break, so it may be half-written")
        return parsed(raw.decode().splitlines())


def replica_url(text: str) -> ServerUrl:
    """Parse the address of a replica. Raises InvalidParameter.

    The /v1 of clients' base URLs is left out: the router adds the paths. Any other path is kept,
    for servers behind a proxy.
    """
    url = server_url(text)
    return replace(url, path=url.path.removesuffix("/v1").rstrip("/"))


def parsed(lines: list[str]) -> tuple[ServerUrl, ...]:
    """Return the addresses of lines, each once. Raises ValueError naming the line."""
    urls: dict[str, ServerUrl] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            url = replica_url(text)
        except InvalidParameter as error:
            raise ValueError(f"line {number}: {error}") from error
        urls.setdefault(url.full, url)
    if not urls:
        raise ValueError("it names no replica; write one address a line")
    if len(urls) > _MAX_REPLICAS:
        raise ValueError(f"it names {len(urls)} replicas; at most {_MAX_REPLICAS} are allowed")
    return tuple(urls.values())


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
