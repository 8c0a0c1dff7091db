"""Rows of batches and their lines: each function is the work of one transaction.

Always holds: a batch is found only with its key; a line has one result, which is written once and
counted in the same transaction; a batch that has ended never changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from sqlite3 import Connection
from typing import Any

from quire.api.batches.line_form import LineUsage
from quire.api.batches.stored_files import find_file, new_id
from quire.api.http.errors import UnknownBatch
from quire.base.errors import InvalidParameter, TenantLimit
from quire.base.show import show

WINDOW_S = 24 * 60 * 60
MAX_BATCHES, MAX_UNFINISHED = 10_000, 100
ENDED = ("completed", "failed", "expired", "cancelled")
_ENDED = str(ENDED)
# Attempts of a line during which the server was killed, after which it is not tried again.
MAX_ATTEMPTS = 3
_OUTPUT, _ERROR = 0, 1
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
COLUMNS = (
    "seq, id, key, endpoint, input, status, created, expires, metadata, times, errors, output, "
    "error, total, completed, failed, model, input_tokens, cached_tokens, output_tokens, "
    "reasoning_tokens"
)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch, as its columns are. model, tokens: of the answers so far; None in journals of
    servers that did not count them."""

    seq: int
    id: str
    key: bytes
    endpoint: str
    input: str
    status: str
    created_s: int
    expires_s: int
    metadata: str
    times: str
    errors: str
    output: str | None
    error: str | None
    total: int
    completed: int
    failed: int
    model: str | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        times, errors = json.loads(self.times), json.loads(self.errors)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "model": self.model,
            "input_file_id": self.input,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output,
            "error_file_id": self.error,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{name}_at": times.get(name) for name in TIMES},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self._usage(),
            "metadata": json.loads(self.metadata),
        }

    def _usage(self) -> dict[str, Any] | None:
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """A line without a result: its number from 0, and its place in the input file."""

    number: int
    custom_id: str
    start: int
    size: int
    attempts: int


def create_batch(
    database: Connection,
    key: bytes,
    endpoint: str,
    input_id: str,
    metadata: Any,
    output_kept_s: int | None = None,
) -> StoredBatch:
    """Add a batch. output_kept_s: of its output files, from their creation, None for ever.

    Raises UnknownFile, InvalidParameter and TenantLimit.
    """
    file = find_file(database, key, input_id, param="input_file_id")
    if file.purpose != "batch":
        raise InvalidParameter(
            f'file {input_id} has the purpose {show(file.purpose)}; "batch" is allowed',
            param="input_file_id",
        )
    if check_unfinished(database, key) >= MAX_BATCHES:
        _forget_oldest(database, key)
    now_s = int(time.time())
    row = database.execute(
        "INSERT INTO batches (id, key, endpoint, input, status, created, expires, metadata, times, "
        "errors, total, completed, failed, output_bytes, error_bytes, input_tokens, "
        "cached_tokens, output_tokens, reasoning_tokens, output_expiry) "
        "VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, '{}', '[]', 0, 0, 0, 0, 0, 0, 0, 0, 0, ?) "
        f"RETURNING {COLUMNS}",
        (
            *(new_id("batch_"), key, endpoint, input_id, now_s, now_s + WINDOW_S),
            *(json.dumps(metadata), output_kept_s),
        ),
    ).fetchone()
    return StoredBatch(*row)


def check_unfinished(database: Connection, key: bytes) -> int:
    """Return the number of batches of a key. Raises TenantLimit if too many have not ended."""
    num_all, num_open = database.execute(
        f"SELECT count(*), count(*) FILTER (WHERE status NOT IN {_ENDED}) "
        "FROM batches WHERE key = ?",
        (key,),
    ).fetchone()
    if num_open >= MAX_UNFINISHED:
        raise TenantLimit(
            f"{num_open} batches of this key have not ended; at most {MAX_UNFINISHED} are allowed: "
            "wait until one ends, or cancel one"
        )
    return int(num_all)


def _forget_oldest(database: Connection, key: bytes) -> None:
    """Remove the oldest batch that has ended and has no files. Raises TenantLimit."""
    found = database.execute(
        f"DELETE FROM batches WHERE seq = (SELECT min(seq) FROM batches WHERE key = ? "
        f"AND endpoint != '/v1/messages' AND status IN {_ENDED} "
        "AND NOT EXISTS (SELECT 1 FROM files WHERE batch = batches.id))",
        (key,),
    )
    if not found.rowcount:
        raise TenantLimit(
            f"{MAX_BATCHES} batches of this key are stored with their output; delete output files "
            "of old ones (DELETE /v1/files/ID)"
        )


def find_batch(
    database: Connection, key: bytes, id_: str, *, param: str | None = None
) -> StoredBatch:
    """Return a batch. Raises UnknownBatch."""
    row = database.execute(
        f"SELECT {COLUMNS} FROM batches WHERE key = ? AND id = ?", (key, id_)
    ).fetchone()
    if row is None:
        raise UnknownBatch(
            f"batch {show(id_)} is not stored for this key; the list of batches has what is",
            param=param,
        )
    return StoredBatch(*row)


def list_batches(
    database: Connection, key: bytes, *, after: str | None, limit: int
) -> list[StoredBatch]:
    """Return up to `limit` batches of a key, the newest first, without message batches.

    Raises UnknownBatch.
    """
    seq = None if after is None else find_batch(database, key, after, param="after").seq
    rows = database.execute(
        f"SELECT {COLUMNS} FROM batches WHERE key = ?1 AND (?2 IS NULL OR seq < ?2) "
        "AND endpoint != '/v1/messages' ORDER BY seq DESC LIMIT ?3",
        (key, seq, limit),
    )
    return [StoredBatch(*row) for row in rows]


def unfinished(database: Connection) -> list[StoredBatch]:
    """Return the batches that have not ended, the oldest first."""
    rows = database.execute(
        f"SELECT {COLUMNS} FROM batches WHERE status NOT IN {_ENDED} ORDER BY seq"
    )
    return [StoredBatch(*row) for row in rows]


def move_to(
    database: Connection, id_: str, status: str, errors: Sequence[Mapping[str, Any]] = ()
) -> StoredBatch | None:
    """Set the status of a batch, and the time of it; return it.

    None: it has ended before, or is being cancelled, which leads to `cancelled` only.
    """
    row = database.execute(
        "UPDATE batches SET status = ?1, times = json_set(times, '$.' || ?1, ?2), errors = ?3 "
        f"WHERE id = ?4 AND status NOT IN {_ENDED} "
        f"AND (status != 'cancelling' OR ?1 = 'cancelled') RETURNING {COLUMNS}",
        (status, int(time.time()), json.dumps(list(errors)), id_),
    ).fetchone()
    return None if row is None else StoredBatch(*row)


def forget_lines(database: Connection, id_: str) -> None:
    """Remove the lines of a batch: its input is refused, or was not read to its end."""
    database.execute("DELETE FROM lines WHERE batch = ?", (id_,))


def add_line(
    database: Connection, id_: str, number: int, custom_id: str, start: int, size: int
) -> bool:
    """Add a line; return whether its custom_id is new in the batch."""
    added = database.execute(
        "INSERT INTO lines (batch, number, custom_id, start, size) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (batch, custom_id) DO NOTHING",
        (id_, number, custom_id, start, size),
    )
    return added.rowcount > 0


def begin_lines(database: Connection, id_: str, total: int) -> StoredBatch | None:
    """Begin a batch that has been validated."""
    database.execute("UPDATE batches SET total = ? WHERE id = ?", (total, id_))
    return move_to(database, id_, "in_progress")


def next_lines(database: Connection, id_: str, first: int, limit: int) -> list[Line]:
    """Return lines without a result from number `first` on."""
    rows = database.execute(
        "SELECT number, custom_id, start, size, attempts FROM lines "
        "WHERE batch = ? AND number >= ? AND result IS NULL ORDER BY number LIMIT ?",
        (id_, first, limit),
    )
    return [Line(*row) for row in rows]


def begin_attempt(database: Connection, id_: str, number: int) -> None:
    """Count an attempt of a line."""
    database.execute(
        "UPDATE lines SET attempts = attempts + 1 WHERE batch = ? AND number = ?", (id_, number)
    )


def save_result(
    database: Connection,
    id_: str,
    number: int,
    result: bytes,
    failed: int,
    usage: LineUsage | None = None,
) -> None:
    """Write the result of a line, unless it has one. failed: 0 if the line succeeded.

    usage: of the line, which its batch counts.
    """
    saved = database.execute(
        "UPDATE lines SET result = ?, failed = ? WHERE batch = ? AND number = ? AND result IS NULL",
        (result, failed, id_, number),
    )
    if not saved.rowcount:
        return
    count, size = ("failed", "error_bytes") if failed else ("completed", "output_bytes")
    database.execute(
        f"UPDATE batches SET {count} = {count} + 1, {size} = {size} + ? WHERE id = ?",
        (len(result), id_),
    )
    if usage is not None:
        counts = {name: value for name, value in asdict(usage).items() if name != "model"}
        sums = ", ".join(f"{name} = {name} + :{name}" for name in counts)
        database.execute(
            f"UPDATE batches SET model = coalesce(model, :model), {sums} WHERE id = :id",
            {**asdict(usage), "id": id_},
        )


def end_batch(database: Connection, id_: str, status: str, *, has_files: bool = True) -> None:
    """End a batch: make its files, and remove the lines without a result.

    A batch that is being cancelled is cancelled, whatever its last lines did. has_files: see
    LineForm.
    """
    batch = move_to(database, id_, status) or move_to(database, id_, "cancelled")
    if batch is None:
        return
    database.execute("DELETE FROM lines WHERE batch = ? AND result IS NULL", (id_,))
    *sizes, kept_s = database.execute(
        "SELECT output_bytes, error_bytes, output_expiry FROM batches WHERE id = ?", (id_,)
    ).fetchone()
    for failed, column, size in zip((_OUTPUT, _ERROR), ("output", "error"), sizes, strict=True):
        if not size or not has_files:
            continue
        file_id = new_id("file-")
        database.execute(
            "INSERT INTO files (id, key, name, purpose, bytes, created, ready, batch, failed, "
            "expires) VALUES (?1, ?2, ?3, 'batch_output', ?4, ?5, 1, ?6, ?7, ?5 + ?8)",
            (
                *(file_id, batch.key, f"{id_}_{column}.jsonl", size, int(time.time())),
                *(id_, failed, kept_s),
            ),
        )
        database.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file_id, id_))
