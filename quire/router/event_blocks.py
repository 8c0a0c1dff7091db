"""EventBlocks: a stream's bytes as whole blocks, and the comments that say where it stands.

A replica that is asked for `include_output_ids` writes a comment after the events of each delta,
and one after the last event or the error that ends the stream. What is between two comments is one
delta: it is passed on as a whole or not at all, so that the journal and the client always agree.
Deltas that have come together are made one: where a stream is behind, an event costs less. Knows no
request, no replica and no API: events are never read. Is used for streams that can be continued.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, structs

from quire.router.faults import ReplicaFault

_CURSOR, ENDED = b': {"output_ids":', b': {"ended":'
# In place of a comment in Anthropic's streams.
_PING = b"event: ping\n"
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_MAX_CHOICES = 2**20


class CursorComment(msgspec.Struct, frozen=True):
    """A comment of ContinuableEvents. output_ids: of its delta. prompt_tokens, num_choices: in the
    first. choice: which of several they are of."""

    output_ids: list[_TokenId]
    output_cursor: str
    seed: int | None = None
    prompt_tokens: int | None = None
    choice: Annotated[int, Meta(ge=0, lt=_MAX_CHOICES)] = 0
    num_choices: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] = 1

    @property
    def answer_id(self) -> str:
        """The id of the answer."""
        return self.output_cursor.partition(":")[0]


class EndComment(msgspec.Struct, frozen=True):
    """The last comment. ended: the code of the error that ended the stream; None without one."""

    ended: str | None


_read_cursor = msgspec.json.Decoder(CursorComment).decode
_read_end = msgspec.json.Decoder(EndComment).decode


def is_heartbeat(received: bytes, end: bytes) -> bool:
    """Return whether bytes of a stream are whole heartbeats or other comments, and no event."""
    *blocks, rest = received.split(end)
    return not rest and all(block.startswith((b":", _PING)) for block in blocks)


class Delta(msgspec.Struct):
    """Blocks that belong together. cursor: where the stream stands after them; None at its end and
    for a heartbeat between deltas. is_last: the stream ends with them. error: the code of the error
    that ended it; "" for none."""

    blocks: bytes
    cursor: CursorComment | None = None
    is_last: bool = False
    error: str = ""


class EventBlocks:
    """Splits the bytes of one stream. end: of each block. shows_comments: the client asked for them
    itself."""

    def __init__(self, end: bytes = b"\n\n", *, shows_comments: bool = False) -> None:
        self._end = end
        self._shows_comments = shows_comments
        self._rest = b""
        self._pending: list[bytes] = []

    def push(self, received: bytes) -> list[Delta]:
        """Return the deltas that are complete now. Raises ReplicaFault for a comment that cannot be
        read: without it a stream could not be continued exactly."""
        found: list[Delta] = []
        *blocks, self._rest = (self._rest + received).split(self._end)
        for block in blocks:
            if not block.startswith((b":", _PING)):
                self._pending.append(block)
                continue
            comment = _comment_of(block)
            if comment is None:  # a heartbeat
                if not self._pending:
                    found.append(Delta(block + self._end))
                continue
            if self._shows_comments:
                self._pending.append(block)
            if isinstance(comment, EndComment):
                found.append(Delta(self._take(), is_last=True, error=comment.ended or ""))
            else:
                found.append(Delta(self._take(), comment))
        return found if len(found) < 2 else _merged(found)

    def _take(self) -> bytes:
        pending, self._pending = self._pending, []
        return b"".join([block + self._end for block in pending])


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Return deltas with tokens of one choice that follow one another as one. Those without any
    stay."""
    found, run = list[Delta](), list[Delta]()
    for delta in deltas:
        if run and _choice(delta) != _choice(run[0]):
            found.append(_joined(run))
            run = []
        (found if delta.cursor is None else run).append(delta)
    return [*found, _joined(run)] if run else found


def _choice(delta: Delta) -> int | None:
    return None if delta.cursor is None else delta.cursor.choice


def _joined(run: list[Delta]) -> Delta:
    cursors = [delta.cursor for delta in run if delta.cursor is not None]
    if len(cursors) == 1:
        return run[0]
    ids, first = [id_ for cursor in cursors for id_ in cursor.output_ids], cursors[0]
    cursor = structs.replace(
        cursors[-1],
        output_ids=ids,
        seed=first.seed,
        prompt_tokens=first.prompt_tokens,
        num_choices=first.num_choices,
    )
    return Delta(b"".join([delta.blocks for delta in run]), cursor)


def _comment_of(block: bytes) -> CursorComment | EndComment | None:
    try:
        if block.startswith(_CURSOR):
            return _read_cursor(block[2:])
        return _read_end(block[2:]) if block.startswith(ENDED) else None
    except msgspec.MsgspecError as error:
        why = f"a comment of its stream cannot be read ({error})"
        raise ReplicaFault(why, is_suspect=True) from error
