"""EventBlocks: a stream's bytes as whole blocks, and the comments that say where it stands.

A replica that is asked for `include_output_ids` writes a comment after the events of each delta.
What is between two comments is one delta: it is passed on as a whole or not at all, so that the
journal and the client always agree. Knows no request and no replica. Is used for streams that can
be continued, which have the form of OpenAI's API.
"""

from __future__ import annotations

import msgspec

from quire.router.api_forms import ErrorBody, read_error

_CURSOR = b': {"output_ids":'
_DATA_LINE = b"data: "
STREAM_END, STREAM_ERROR = _DATA_LINE + b"[DONE]", _DATA_LINE + b'{"error":'


class CursorComment(msgspec.Struct, frozen=True):
    """A comment of ContinuableEvents. output_ids: of one delta. prompt_tokens: in the first."""

    output_ids: list[int]
    output_cursor: str
    seed: int | None = None
    prompt_tokens: int | None = None


_read_cursor = msgspec.json.Decoder(CursorComment).decode


class Delta(msgspec.Struct):
    """Blocks that belong together. cursor: where the stream stands after them; None at its end and
    for a heartbeat between deltas. is_last: the stream ends with them. error: that ended it."""

    blocks: bytes
    cursor: CursorComment | None = None
    is_last: bool = False
    error: ErrorBody | None = None


class EventBlocks:
    """Splits the bytes of one stream. shows_comments: the client asked for them itself."""

    def __init__(self, *, shows_comments: bool = False) -> None:
        self._shows_comments = shows_comments
        self._rest = b""
        self._pending: list[bytes] = []

    def push(self, received: bytes) -> list[Delta]:
        """Return the deltas that are complete now."""
        found: list[Delta] = []
        *blocks, self._rest = (self._rest + received).split(b"\n\n")
        for block in blocks:
            if block.startswith(b":"):
                cursor = _cursor_of(block)
                if cursor is None:  # a heartbeat
                    if not self._pending:
                        found.append(Delta(block + b"\n\n"))
                    continue
                if self._shows_comments:
                    self._pending.append(block)
                found.append(Delta(self._take(), cursor))
            elif block.endswith(STREAM_END):
                self._pending.append(block)
                found.append(Delta(self._take(), is_last=True))
            elif block.startswith(STREAM_ERROR) or b"\n" + STREAM_ERROR in block:
                error = read_error(block[block.index(_DATA_LINE) + len(_DATA_LINE) :])
                self._pending.append(block)
                if error is not None:
                    found.append(Delta(self._take(), is_last=True, error=error))
            else:
                self._pending.append(block)
        return found

    def _take(self) -> bytes:
        pending, self._pending = self._pending, []
        return b"".join([block + b"\n\n" for block in pending])


def _cursor_of(block: bytes) -> CursorComment | None:
    if not block.startswith(_CURSOR):
        return None
    try:
        return _read_cursor(block[2:])
    except msgspec.MsgspecError:
        return None
