"""Check the input file of a batch line by line, and enter its lines into the journal.

One chunk of the file at a time is in memory, and one line of at most --max-body. A file with a
fault in the form of a line is refused with the numbers of such lines; the fields of a body are
checked when the line runs, and a fault there is an error of that line only.
"""

from __future__ import annotations

from functools import partial
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from quire.api.batches.stored_batches import StoredBatch, add_line, forget_lines
from quire.base.show import show

if TYPE_CHECKING:
    from quire.api.batches.journal import BatchJournal

MAX_LINES = 1_000_000
MAX_FAULTS = 100
MAX_CUSTOM_ID_CHARS = 512


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line, with its body as it was sent."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_DECODER = msgspec.json.Decoder(InputLine)


def decode_line(raw: bytes) -> InputLine:
    """Return a line. Raises ValueError."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(
            f"it is not an object of custom_id, method, url and body: {error}"
        ) from error


class InputCheck:
    """The check of one batch. Always holds: after faults, the lines need not be complete."""

    def __init__(self, batch: StoredBatch, max_line_bytes: int) -> None:
        self._batch, self._max_line_bytes = batch, max_line_bytes
        self._rest = bytearray()
        self._start = self._num_seen = 0
        self.num_lines = 0
        self.faults: list[dict[str, Any]] = []

    async def read(self, journal: BatchJournal) -> None:
        """Read the whole file, one transaction a chunk."""
        await journal.run(lambda db: forget_lines(db, self._batch.id))
        number = 0
        while await journal.run(partial(self._take_chunk, number=number)):
            number += 1
        if not self.num_lines and not self.faults:
            self._fault("empty_file", "the file has no lines; give one JSON object a line")

    def _take_chunk(self, database: Connection, number: int) -> bool:
        """Read one chunk; return whether there may be more."""
        row = database.execute(
            "SELECT data FROM chunks WHERE file = ? AND number = ?", (self._batch.input, number)
        ).fetchone()
        if row is None:
            if self._rest:
                self._take_line(database, bytes(self._rest), len(self._rest))
            return False
        self._rest += row[0]
        *lines, rest = bytes(self._rest).split(b"\n")
        for line in lines:
            if not self._take_line(database, line, len(line) + 1):
                return False
        self._rest = bytearray(rest)
        if len(rest) > self._max_line_bytes:
            return self._take_line(database, rest, len(rest)) and False
        return True

    def _take_line(self, database: Connection, line: bytes, num_bytes: int) -> bool:
        """Check and enter a line; return whether to go on."""
        start, self._start = self._start, self._start + num_bytes
        self._num_seen += 1
        if not line.strip():
            return True
        if self.num_lines == MAX_LINES:
            self._fault("too_many_lines", f"at most {MAX_LINES} lines are allowed; split the file")
            return False
        if len(line) > self._max_line_bytes:
            self._fault(
                "line_too_long",
                f"the line has more than {self._max_line_bytes} bytes (--max-body)",
                self._num_seen,
            )
            return False
        fault = self._enter(database, line, start)
        if fault is not None:
            self._fault(*fault, line=self._num_seen)
        self.num_lines += 1
        return len(self.faults) < MAX_FAULTS

    def _enter(self, database: Connection, line: bytes, start: int) -> tuple[str, str] | None:
        try:
            entry = decode_line(line)
        except ValueError as error:
            return "invalid_json_line", str(error)
        if not 1 <= len(entry.custom_id) <= MAX_CUSTOM_ID_CHARS:
            return (
                "invalid_custom_id",
                f"custom_id has {len(entry.custom_id)} characters; 1 to {MAX_CUSTOM_ID_CHARS} are "
                "allowed",
            )
        if entry.method != "POST":
            return "invalid_method", f'method is {show(entry.method)}; "POST" is allowed'
        if entry.url != self._batch.endpoint:
            return (
                "mismatched_url",
                f"url is {show(entry.url)}; the batch is for {show(self._batch.endpoint)}",
            )
        if not bytes(entry.body).startswith(b"{"):
            return "invalid_body", "body is not a JSON object"
        if not add_line(
            database, self._batch.id, self.num_lines, entry.custom_id, start, len(line)
        ):
            return (
                "duplicate_custom_id",
                f"custom_id {show(entry.custom_id)} is that of an earlier line too",
            )
        return None

    def _fault(self, code: str, message: str, line: int | None = None) -> None:
        self.faults.append({"code": code, "message": message, "param": None, "line": line})
