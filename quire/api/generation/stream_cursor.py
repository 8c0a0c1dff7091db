"""Cursor: where the stream of one choice stood, as `output_cursor` says it.

Knows no request but its fields. Always holds: a cursor that is written is read as it was.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.generation.request_context import RequestContext
from quire.base.errors import InvalidParameter
from quire.base.show import show

CURSOR_PARAM = "output_cursor"
_DIGITS = 24  # of an id
CURSOR = (
    "([a-z]{1,16}[-_][0-9a-f]{24}):([0-9]{1,12}):([0-9]{1,9}):([0-9]{1,6})"
    "(?::([0-9a-f]{8}))?(:end)?"
)
_CURSOR = re.compile(CURSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a choice stood after the tokens of output_ids: the id and time of the answer, the
    number of the last event, tokens computed after output_ids, of which part of the text may have
    been delivered, and the digest of the prompt's ids and the text so far; None: not known.
    has_ended: the client has its finish reason."""

    answer_id: str
    created_s: int
    num_events: int
    held_tokens: int
    digest: int | None
    has_ended: bool = False

    def __str__(self) -> str:
        shown = "" if self.digest is None else f":{self.digest:08x}"
        end = ":end" if self.has_ended else ""
        return f"{self.answer_id}:{self.created_s}:{self.num_events}:{self.held_tokens}{shown}{end}"


def prompt_digest(token_ids: Sequence[int]) -> int:
    """Return the digest of an answer without text."""
    return zlib.crc32(array("I", token_ids).tobytes())


def digest_after(digest: int, text: str) -> int:
    """Return the digest of an answer with more text."""
    return zlib.crc32(text.encode(errors="surrogatepass"), digest)


def read_cursors(
    given: Mapping[str, Any], context: RequestContext
) -> tuple[Sequence[Cursor | None], Cursor]:
    """Return the cursor of each choice in `output_cursor`, None of those that have not begun, and
    the one of the last event; let the answer have its id. Raises InvalidParameter."""
    value, prefix = given[CURSOR_PARAM], context.request_id[:-_DIGITS]
    values = value if isinstance(value, list) else [value]
    cursors = [None if one is None and len(values) > 1 else _cursor(one, prefix) for one in values]
    begun = [cursor for cursor in cursors if cursor is not None]
    if len({(cursor.answer_id, cursor.created_s) for cursor in begun}) != 1:
        raise InvalidParameter(
            "output_cursor holds cursors of different answers, or of none; send those of one "
            "stream, and null for each choice that has not begun",
            param=CURSOR_PARAM,
        )
    context.answer_id = begun[0].answer_id
    return cursors, max(begun, key=lambda cursor: cursor.num_events)


def _cursor(value: Any, prefix: str) -> Cursor:
    found = _CURSOR.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[1][:-_DIGITS] != prefix:
        raise InvalidParameter(
            f"output_cursor is {show(value)}; the output_cursor of a stream of this route is "
            "allowed, as its last comment had it (include_output_ids)",
            param=CURSOR_PARAM,
        )
    return Cursor(
        answer_id=found[1],
        created_s=int(found[2]),
        num_events=int(found[3]),
        held_tokens=int(found[4]),
        digest=None if found[5] is None else int(found[5], 16),
        has_ended=found[6] is not None,
    )
