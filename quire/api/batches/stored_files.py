"""Rows of files: an uploaded one in chunks of equal size, an output one as the results of a batch.

Each function is the work of one transaction. Always holds: a file is found only with the key that
it was uploaded with; a content is read by its parts, never as a whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from dataclasses import dataclass
from sqlite3 import Connection, Cursor
from typing import Any

from quire.api.batches.expiry import IS_ALIVE, drop_file, drop_stale, now_s
from quire.api.http.errors import UnknownFile
from quire.base.errors import BodyTooLarge, InvalidParameter, TenantLimit
from quire.base.show import show

CHUNK_BYTES = 256 * 1024
MAX_FILES = 10_000
_COLUMNS = "seq, id, name, purpose, bytes, created, batch, failed, expires"
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. batch, failed: an output file is the results of that batch, or its errors."""

    seq: int
    id: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    batch: str | None
    failed: int | None
    expires_s: int | None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def new_id(prefix: str) -> str:
    """Return a new id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"


def begin_file(database: Connection, key: bytes, id_: str, open_uploads: Container[str]) -> None:
    """Add a file that is not ready. open_uploads: as of drop_stale. Raises TenantLimit."""
    drop_stale(database, open_uploads)
    (num_files,) = database.execute("SELECT count(*) FROM files WHERE key = ?", (key,)).fetchone()
    if num_files >= MAX_FILES:
        raise TenantLimit(
            f"{num_files} files are stored with this key; at most {MAX_FILES} are allowed: delete "
            "some (DELETE /v1/files/ID)"
        )
    database.execute(
        "INSERT INTO files (id, key, name, purpose, bytes, created, ready) "
        "VALUES (?, ?, '', '', 0, ?, 0)",
        (id_, key, now_s()),
    )


def add_chunk(
    database: Connection, key: bytes, id_: str, number: int, chunk: bytes, max_bytes: int
) -> None:
    """Add a chunk of an upload. Raises BodyTooLarge if the files of its key are too large then."""
    database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (id_, number, chunk))
    database.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(chunk), id_))
    (used_bytes,) = database.execute(
        "SELECT sum(bytes) FROM files WHERE key = ?", (key,)
    ).fetchone()
    if used_bytes > max_bytes:
        raise BodyTooLarge(
            f"the files of this key would have more than {max_bytes} bytes (--batch-store-size); "
            "delete some (DELETE /v1/files/ID)"
        )


def finish_file(
    database: Connection, id_: str, name: str, purpose: str, kept_s: int | None
) -> StoredFile:
    """Make an upload ready; return it. kept_s: from its creation, None for ever."""
    row = database.execute(
        "UPDATE files SET ready = 1, name = ?, purpose = ?, expires = created + ? WHERE id = ? "
        f"RETURNING {_COLUMNS}",
        (name, purpose, kept_s, id_),
    ).fetchone()
    return StoredFile(*row)


def find_file(
    database: Connection, key: bytes, id_: str, *, param: str | None = None
) -> StoredFile:
    """Return a file. Raises UnknownFile."""
    row = database.execute(
        f"SELECT {_COLUMNS} FROM files WHERE key = :key AND id = :id AND ready AND {IS_ALIVE}",
        {"key": key, "id": id_, "now": now_s()},
    ).fetchone()
    if row is None:
        raise UnknownFile(
            f"file {show(id_)} is not stored for this key, or has expired; GET /v1/files lists "
            "what is",
            param=param,
        )
    return StoredFile(*row)


def list_files(
    database: Connection,
    key: bytes,
    *,
    purpose: str | None,
    after: str | None,
    limit: int,
    oldest: bool,
) -> list[StoredFile]:
    """Return up to `limit` files of a key after that one. Raises UnknownFile."""
    seq = None if after is None else find_file(database, key, after, param="after").seq
    sign, order = (">", "ASC") if oldest else ("<", "DESC")
    rows = database.execute(
        f"SELECT {_COLUMNS} FROM files WHERE key = :key AND ready AND {IS_ALIVE} "
        f"AND (:purpose IS NULL OR purpose = :purpose) AND (:seq IS NULL OR seq {sign} :seq) "
        f"ORDER BY seq {order} LIMIT :limit",
        {"key": key, "now": now_s(), "purpose": purpose, "seq": seq, "limit": limit},
    )
    return [StoredFile(*row) for row in rows]


def delete_file(database: Connection, key: bytes, id_: str) -> None:
    """Remove a file. Raises UnknownFile, and InvalidParameter while a batch reads it."""
    file = find_file(database, key, id_)
    marks = ", ".join("?" * len(_UNFINISHED))
    reader = database.execute(
        f"SELECT id FROM batches WHERE key = ? AND input = ? AND status IN ({marks})",
        (key, id_, *_UNFINISHED),
    ).fetchone()
    if reader is not None:
        raise InvalidParameter(
            f"file {id_} is the input of batch {reader[0]}, which has not ended; cancel that first",
            param="id",
        )
    drop_file(database, id_, file.batch, file.failed)


def content_part(database: Connection, file: StoredFile, at: int) -> tuple[bytes, int] | None:
    """Return a part of a content and the place of the next; None at the end, or once deleted."""
    if file.batch is None:
        row = database.execute(
            "SELECT data FROM chunks WHERE file = ? AND number = ?", (file.id, at)
        ).fetchone()
        return None if row is None else (row[0], at + 1)
    rows = database.execute(
        "SELECT number, result FROM lines WHERE batch = ? AND failed = ? AND number >= ? "
        "ORDER BY number",
        (file.batch, file.failed, at),
    )
    return part_of_lines(rows)


def part_of_lines(rows: Cursor) -> tuple[bytes, int] | None:
    """Join rows of (number, result) up to a chunk, with the next number; None without rows."""
    part, num_bytes, next_number = list[bytes](), 0, 0
    for number, result in rows:
        part.append(result)
        num_bytes += len(result)
        next_number = number + 1
        if num_bytes >= CHUNK_BYTES:
            break
    return (b"".join(part), next_number) if part else None


def read_span(database: Connection, id_: str, start: int, size: int) -> bytes:
    """Return the bytes of an uploaded file from `start` on."""
    first, last = start // CHUNK_BYTES, (start + size - 1) // CHUNK_BYTES
    rows = database.execute(
        "SELECT data FROM chunks WHERE file = ? AND number BETWEEN ? AND ? ORDER BY number",
        (id_, first, last),
    )
    chunks: bytes = b"".join(row[0] for row in rows)
    return chunks[start - first * CHUNK_BYTES :][:size]
