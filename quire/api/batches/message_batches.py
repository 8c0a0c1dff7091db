"""Rows of Anthropic's message batches: their lines come with the request that creates them.

Each function is the work of one transaction. The lines lie in a file that only the worker reads.
Always holds: the id of a message batch is never that of another batch; a batch that has ended has
a result for each line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from sqlite3 import Connection

from quire.api.batches.stored_batches import (
    COLUMNS,
    ENDED,
    MAX_BATCHES,
    WINDOW_S,
    StoredBatch,
    add_line,
    begin_lines,
    check_unfinished,
    find_batch,
)
from quire.api.batches.stored_files import CHUNK_BYTES, new_id, part_of_lines
from quire.api.http.errors import UnknownBatch
from quire.base.errors import BodyTooLarge, InvalidParameter, TenantLimit
from quire.base.show import show

ENDPOINT = "/v1/messages"
_PREFIX = "msgbatch_"
# Before the key of the file with the lines, so that /v1/files does not find it.
_HIDDEN = b"message batch "
# The results of a line, as the column `failed` has them.
SUCCEEDED, ERRORED, CANCELED, EXPIRED = range(4)


def create(
    database: Connection, key: bytes, lines: Sequence[tuple[str, bytes]], max_bytes: int
) -> StoredBatch:
    """Add a batch of (custom_id, line of input). Raises TenantLimit and BodyTooLarge."""
    _check_room(database, key, sum(len(line) for _, line in lines), max_bytes)
    now_s, file_id, id_ = int(time.time()), new_id("file-"), new_id(_PREFIX)
    content = b"".join(line for _, line in lines)
    database.execute(
        "INSERT INTO files (id, key, name, purpose, bytes, created, ready) "
        "VALUES (?, ?, '', 'message_batch', ?, ?, 1)",
        (file_id, _HIDDEN + key, len(content), now_s),
    )
    database.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?)",
        (
            (file_id, number, content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            for number in range(-(-len(content) // CHUNK_BYTES))
        ),
    )
    database.execute(
        "INSERT INTO batches (id, key, endpoint, input, status, created, expires, metadata, times, "
        "errors, total, completed, failed, output_bytes, error_bytes) "
        "VALUES (?, ?, ?, ?, 'validating', ?, ?, 'null', '{}', '[]', 0, 0, 0, 0, 0)",
        (id_, key, ENDPOINT, file_id, now_s, now_s + WINDOW_S),
    )
    start = 0
    for number, (custom_id, line) in enumerate(lines):
        add_line(database, id_, number, custom_id, start, len(line))
        start += len(line)
    batch = begin_lines(database, id_, len(lines))
    assert batch is not None, "it was added above"
    return batch


def find(database: Connection, key: bytes, id_: str, *, param: str | None = None) -> StoredBatch:
    """Return a message batch. Raises UnknownBatch."""
    batch = find_batch(database, key, id_, param=param) if id_.startswith(_PREFIX) else None
    if batch is None:
        raise UnknownBatch(
            f"message batch {show(id_)} is not stored for this key; GET /v1/messages/batches lists "
            "what is",
            param=param,
        )
    return batch


def page(
    database: Connection, key: bytes, *, before: str | None, after: str | None, limit: int
) -> list[StoredBatch]:
    """Return up to `limit` batches, the newest first: those older than `after`, or the nearest
    that are newer than `before`. Raises UnknownBatch."""
    newest_first = before is None
    edge = after if newest_first else before
    param = "after_id" if newest_first else "before_id"
    seq = None if edge is None else find(database, key, edge, param=param).seq
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    rows = database.execute(
        f"SELECT {COLUMNS} FROM batches WHERE key = ?1 AND endpoint = ?2 "
        f"AND (?3 IS NULL OR seq {sign} ?3) ORDER BY seq {order} LIMIT ?4",
        (key, ENDPOINT, seq, limit),
    )
    return [StoredBatch(*row) for row in rows]


def delete(database: Connection, key: bytes, id_: str) -> None:
    """Remove a batch that has ended. Raises UnknownBatch and InvalidParameter."""
    batch = find(database, key, id_)
    if batch.status not in ENDED:
        raise InvalidParameter(
            f"message batch {id_} has not ended; cancel it first, and delete it once it has ended",
            param="id",
        )
    _forget(database, batch)


def result_counts(database: Connection, id_: str) -> dict[int, int]:
    """Return how many lines have each kind of result."""
    rows = database.execute(
        "SELECT failed, count(*) FROM lines WHERE batch = ? AND failed IS NOT NULL GROUP BY failed",
        (id_,),
    )
    return dict(rows.fetchall())


def keep_counts(database: Connection, id_: str) -> None:
    """Write the counts of a batch that ends into its row, so that they need no look at lines."""
    counts = json.dumps(result_counts(database, id_))
    database.execute("UPDATE batches SET metadata = ? WHERE id = ?", (counts, id_))


def results_part(database: Connection, id_: str, at: int) -> tuple[bytes, int] | None:
    """Return a part of the results from line `at` on, and the line after it; None at the end."""
    rows = database.execute(
        "SELECT number, result FROM lines WHERE batch = ? AND number >= ? AND result IS NOT NULL "
        "ORDER BY number",
        (id_, at),
    )
    return part_of_lines(rows)


def _check_room(database: Connection, key: bytes, num_bytes: int, max_bytes: int) -> None:
    """Raise TenantLimit or BodyTooLarge if another batch has no room; forget the oldest first."""
    num_all = check_unfinished(database, key)
    (used_bytes,) = database.execute(
        "SELECT coalesce(sum(bytes), 0) FROM files WHERE key IN (?, ?)", (key, _HIDDEN + key)
    ).fetchone()
    if used_bytes + num_bytes > max_bytes:
        raise BodyTooLarge(
            f"the files and batches of this key would have more than {max_bytes} bytes "
            "(--batch-store-size); delete some (DELETE /v1/messages/batches/ID)"
        )
    if num_all >= MAX_BATCHES:
        row = database.execute(
            f"SELECT {COLUMNS} FROM batches WHERE key = ? AND endpoint = ? AND status IN {ENDED} "
            "ORDER BY seq LIMIT 1",
            (key, ENDPOINT),
        ).fetchone()
        if row is None:
            raise TenantLimit(
                f"{MAX_BATCHES} batches of this key are stored; delete output files of old ones "
                "(DELETE /v1/files/ID)"
            )
        _forget(database, StoredBatch(*row))


def _forget(database: Connection, batch: StoredBatch) -> None:
    database.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
    database.execute("DELETE FROM chunks WHERE file = ?", (batch.input,))
    database.execute("DELETE FROM files WHERE id = ?", (batch.input,))
    database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
