"""BatchJournal: files, batches and the results of their lines in one SQLite file.

Statements run in a thread of the journal, one transaction each, so that a killed server leaves each
result whole or absent. One process has the file at a time. Files are rows, not files of a folder:
no id and no name is ever a path. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.base.errors import QuireError, SettingError, ShuttingDown

T = TypeVar("T")

_SCHEMA_VERSION = 1
_BUSY_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key BLOB, name TEXT, purpose TEXT,
    bytes INTEGER, created INTEGER, ready INTEGER, batch TEXT, failed INTEGER, expires INTEGER
);
CREATE INDEX IF NOT EXISTS files_by_key ON files (key, seq);
CREATE TABLE IF NOT EXISTS chunks (
    file TEXT, number INTEGER, data BLOB, PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key BLOB, endpoint TEXT, input TEXT,
    status TEXT, created INTEGER, expires INTEGER, metadata TEXT, times TEXT, errors TEXT,
    output TEXT, error TEXT, total INTEGER, completed INTEGER, failed INTEGER,
    output_bytes INTEGER, error_bytes INTEGER, model TEXT, input_tokens INTEGER,
    cached_tokens INTEGER, output_tokens INTEGER, reasoning_tokens INTEGER,
    output_expiry INTEGER
);
CREATE INDEX IF NOT EXISTS batches_by_key ON batches (key, seq);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT, number INTEGER, custom_id TEXT, start INTEGER, size INTEGER,
    attempts INTEGER DEFAULT 0, failed INTEGER, result BLOB, PRIMARY KEY (batch, number)
);
CREATE UNIQUE INDEX IF NOT EXISTS custom_ids ON lines (batch, custom_id);
CREATE INDEX IF NOT EXISTS begun ON lines (batch) WHERE attempts > 0 AND result IS NULL;
"""
# Columns that journals of older servers lack; these servers read newer journals too.
_ADDED = {
    "batches": {
        "model": "TEXT",
        **dict.fromkeys(
            ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), "INTEGER"
        ),
        "output_expiry": "INTEGER",
    },
    "files": {"expires": "INTEGER"},
}
# A line that ran when the server was killed has one attempt more than before.
_RECOVER = """
DELETE FROM chunks WHERE file IN (SELECT id FROM files WHERE NOT ready);
DELETE FROM files WHERE NOT ready;
"""
_FORGET_ATTEMPTS = "UPDATE lines SET attempts = 0 WHERE attempts > 0 AND result IS NULL"


class JournalError(QuireError):
    """The journal cannot be read or written, as on a full disk."""


class BatchJournal:
    """The journal. Raises SettingError if the file cannot be used.

    open_uploads: the ids of files that are being uploaded; `work` may read it.
    """

    def __init__(self, path: str) -> None:
        self._database = _opened(path)
        self.open_uploads: set[str] = set()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "quire-batches")

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` does in one transaction of the journal's thread.

        Raises JournalError, ShuttingDown once it is closed, and what `work` raises.
        """
        if self._is_closed:
            raise ShuttingDown("the server is shutting down; send the request again later")

        def in_transaction() -> T:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                return work(database)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, in_transaction)
        except sqlite3.Error as error:
            raise JournalError(f"the journal of batches cannot be used: {error}") from error

    def close(self) -> None:
        """Close the file. Lines that run are not counted as attempts: the server was not killed.

        Raises sqlite3.Error where it cannot be written; it is closed then too.
        """
        self._is_closed = True
        self._thread.shutdown()
        try:
            with self._database as database:
                database.execute(_FORGET_ATTEMPTS)
        finally:
            self._database.close()


def _opened(path: str) -> sqlite3.Connection:
    """Return the connection of the one process that has the file; only this user can read it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        try:
            _prepare(database, path)
        except BaseException:
            database.close()  # else its lock is held until the object is collected
            raise
    except (OSError, sqlite3.Error) as error:
        raise SettingError(
            f"batch_store is {path!r}, which cannot be used: {error}; give the path of a SQLite "
            "file that this server made and no other server uses, or of a new file"
        ) from error
    return database


def _prepare(database: sqlite3.Connection, path: str) -> None:
    """Lock the file, and create what it lacks. Raises SettingError for a file of another kind."""
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, _SCHEMA_VERSION):
        raise SettingError(
            f"batch_store is {path!r}, a file of version {version}, and this server reads "
            f"version {_SCHEMA_VERSION}; give another path"
        )
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if tables and "batches" not in tables:
        raise SettingError(
            f"batch_store is {path!r}, a SQLite file of something else; give another path"
        )
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_SCHEMA + _RECOVER)
    for table, added in _ADDED.items():
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        for name in added.keys() - columns:
            database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {added[name]}")
    database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    database.commit()
