"""When files expire: the fields that say so, and the removal of expired and partial files.

An expired file is not found; its rows are removed soon after, those of a batch's input once the
batch has ended. Knows no HTTP. Always holds: a file without an expiry is kept until it is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from sqlite3 import Connection
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

ANCHOR = "created_at"
MIN_S, MAX_S = 3600, 30 * 24 * 3600
# Interval of searches for expired files.
SWEEP_S = 600.0
# A condition on rows of files, for now_s() as :now.
IS_ALIVE = "(expires IS NULL OR expires > :now)"
_FORM = f'{{"anchor": "{ANCHOR}", "seconds": {24 * 3600}}}'


def now_s() -> int:
    """Return the time as it is stored."""
    return int(time.time())


def expiry_s(given: Any, *, param: str) -> int | None:
    """Return the seconds that a file is kept after its creation; None for ever.

    given: {"anchor", "seconds"}. Raises InvalidParameter.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.keys() != {"anchor", "seconds"}:
        raise InvalidParameter(f"{param} is {show(given)}; {_FORM} is allowed", param=param)
    if given["anchor"] != ANCHOR:
        raise InvalidParameter(
            f'{param}.anchor is {show(given["anchor"])}; "{ANCHOR}" is allowed', param=param
        )
    seconds = given["seconds"]
    if type(seconds) is not int or not MIN_S <= seconds <= MAX_S:
        raise InvalidParameter(
            f"{param}.seconds is {show(seconds)}; a whole number from {MIN_S} to {MAX_S} is "
            "allowed",
            param=param,
        )
    return seconds


def drop_stale(database: Connection, open_uploads: Container[str]) -> None:
    """Remove expired files, and partial ones that no open upload continues.

    open_uploads: ids of files, each added before its upload begins.
    """
    _drop_partial(database, open_uploads)
    _drop_expired(database)


def _drop_expired(database: Connection) -> None:
    """Remove the expired files that no unfinished batch reads, with their contents."""
    rows = database.execute(
        f"SELECT id, batch, failed FROM files WHERE NOT {IS_ALIVE} AND NOT EXISTS (SELECT 1 "
        "FROM batches WHERE batches.input = files.id AND status IN "
        "('validating', 'in_progress', 'finalizing', 'cancelling'))",
        {"now": now_s()},
    ).fetchall()
    for id_, batch, failed in rows:
        drop_file(database, id_, batch, failed)


def _drop_partial(database: Connection, open_uploads: Container[str]) -> None:
    """Remove files of uploads that failed and could not be removed then, as on a full disk."""
    for (id_,) in database.execute("SELECT id FROM files WHERE NOT ready").fetchall():
        if id_ not in open_uploads:
            drop_file(database, id_)


def drop_file(
    database: Connection, id_: str, batch: str | None = None, failed: int | None = None
) -> None:
    """Remove the rows of a file. batch, failed: as of StoredFile."""
    if batch is not None:
        database.execute("DELETE FROM lines WHERE batch = ? AND failed = ?", (batch, failed))
    database.execute("DELETE FROM chunks WHERE file = ?", (id_,))
    database.execute("DELETE FROM files WHERE id = ?", (id_,))
