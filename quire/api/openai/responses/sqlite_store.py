"""SqliteStore: stored responses in a file, which several processes may share.

Statements are executed in a thread of the store. A new file can be read by its user only.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.api.openai.responses.store import MAX_RESPONSES, StoredResponse, StoreError
from quire.base.errors import SettingError

T = TypeVar("T")

_SCHEMA_VERSION = 1
_BUSY_S = 5.0
_RETRY_S = 0.05
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    key BLOB, id TEXT, previous TEXT, response BLOB, items BLOB, bytes INTEGER, used INTEGER,
    PRIMARY KEY (key, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (key, used, bytes);
"""
_DELETE = "DELETE FROM responses WHERE key = ? AND id = ?"
_NEXT_USE = "(SELECT coalesce(max(used), 0) + 1 FROM responses WHERE key = ?1)"


class SqliteStore:
    """A ResponseStore. Raises SettingError if the file cannot be used."""

    def __init__(self, path: str, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self.is_on = max_bytes > 0
        self.max_bytes = max_bytes
        self._max_responses = max_responses
        self._database = _opened(path)
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "quire-responses")

    async def save(self, key: bytes, stored: StoredResponse) -> None:
        """See ResponseStore."""

        def save() -> None:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                self._put(database, key, stored)

        await self._run(save)

    async def change(
        self, key: bytes, id_: str, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse | None:
        """See ResponseStore."""

        def replace() -> StoredResponse | None:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                row = database.execute(
                    "SELECT previous, response, items FROM responses WHERE key = ? AND id = ?",
                    (key, id_),
                ).fetchone()
                if row is None:
                    return None
                previous, response, items = row
                found = StoredResponse(id=id_, previous=previous, response=response, items=items)
                changed = change(found)
                self._put(database, key, changed)
                return changed

        return await self._run(replace)

    async def find(self, key: bytes, id_: str) -> StoredResponse | None:
        """See ResponseStore."""

        def find() -> StoredResponse | None:
            with self._database as database:
                rows = database.execute(
                    f"UPDATE responses SET used = {_NEXT_USE} WHERE key = ?1 AND id = ?2 "
                    "RETURNING previous, response, items",
                    (key, id_),
                ).fetchall()
            if not rows:
                return None
            previous, response, items = rows[0]
            return StoredResponse(id=id_, previous=previous, response=response, items=items)

        return await self._run(find)

    async def delete(self, key: bytes, id_: str) -> bool:
        """See ResponseStore."""

        def delete() -> bool:
            with self._database as database:
                return database.execute(_DELETE, (key, id_)).rowcount > 0

        return await self._run(delete)

    def close(self) -> None:
        """See ResponseStore."""
        self._is_closed = True
        self._thread.shutdown()
        self._database.close()

    def _put(self, database: sqlite3.Connection, key: bytes, stored: StoredResponse) -> None:
        if stored.num_bytes > self.max_bytes:
            database.execute(_DELETE, (key, stored.id))
            return
        row = (key, stored.id, stored.previous, stored.response, stored.items, stored.num_bytes)
        database.execute(
            f"REPLACE INTO responses VALUES (?1, ?2, ?3, ?4, ?5, ?6, {_NEXT_USE})", row
        )
        self._evict(database, key)

    def _evict(self, database: sqlite3.Connection, key: bytes) -> None:
        """Remove the responses of a key that are beyond its bounds, the newest uses first."""
        database.execute(
            "DELETE FROM responses WHERE key = ?1 AND used <= (SELECT max(used) FROM ("
            "SELECT used, sum(bytes) OVER (ORDER BY used DESC) AS total, "
            "row_number() OVER (ORDER BY used DESC) AS place FROM responses WHERE key = ?1"
            ") WHERE total > ?2 OR place > ?3)",
            (key, self.max_bytes, self._max_responses),
        )

    async def _run(self, work: Callable[[], T]) -> T:
        if self._is_closed:  # by the end of the server, which a request has outlived
            raise StoreError("the store of responses is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreError(f"the store of responses cannot be used: {error}") from error


def _opened(path: str) -> sqlite3.Connection:
    """Return a connection to the file, which only this user can read if it is new."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        try:
            _prepare(database, path)
        except BaseException:
            database.close()  # else it is open until the object is collected
            raise
    except (OSError, sqlite3.Error) as error:
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY:
            error = type(error)(
                f"{error}, perhaps as this process may write files of {largest} bytes only "
                "(RLIMIT_FSIZE): raise it, as in `ulimit -f unlimited`"
            )
        raise SettingError(
            f"responses_store is {path!r}, which cannot be used: {error}; give the path of a "
            "SQLite file that this server made, or of a new file"
        ) from error
    return database


def _prepare(database: sqlite3.Connection, path: str) -> None:
    """Create what the file lacks; wait for another process that does the same.

    The switch to WAL fails at once while another connection writes, whatever the timeout.
    """
    for attempts_left in reversed(range(round(_BUSY_S / _RETRY_S))):
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA_VERSION):
                raise SettingError(
                    f"responses_store is {path!r}, a file of version {version}, and this server "
                    f"reads version {_SCHEMA_VERSION}; give another path"
                )
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            database.commit()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not attempts_left:
                raise
            time.sleep(_RETRY_S)
