"""StreamJournal: what was delivered of a stream, so that another replica can continue it.

Of each choice it has the token ids and the last cursor; a replica says in its first comment how
many choices there are. Knows no replica and no API. Always holds: the client has exactly the events
up to the newest cursor.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from quire.router.event_blocks import CursorComment


class StreamJournal:
    """fields: of the request; its output_ids are of an answer that the client itself continues.
    num_delivered: tokens since."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        ids, cursors = fields.get("output_ids") or [], fields.get("output_cursor")
        # Of several choices that the client itself continues.
        several = ids if all(isinstance(one, list) for one in ids) else []
        self._ids = [array("q", one) for one in several or [ids]]
        self._cursors: list[str | None] = [None] * len(self._ids)
        if isinstance(cursors, list) and len(cursors) == len(self._ids):
            self._cursors = list(cursors)
        self.num_known = sum(map(len, self._ids))
        self.num_delivered = 0
        self.has_begun = False

    @property
    def num_choices(self) -> int:
        """How many choices the answer has; 1 while that is not known."""
        return len(self._ids)

    def has_choice(self, comment: CursorComment) -> bool:
        """Return whether a comment is of one of the choices that there are."""
        return comment.choice < max(len(self._ids), comment.num_choices)

    def delivered(self, comment: CursorComment) -> None:
        """Note that the client has all events up to `comment`."""
        if comment.num_choices > len(self._ids):
            self._ids += [array("q") for _ in range(comment.num_choices - len(self._ids))]
            self._cursors += [None] * (comment.num_choices - len(self._cursors))
        self._ids[comment.choice].extend(comment.output_ids)
        self._cursors[comment.choice] = comment.output_cursor
        self.num_delivered += len(comment.output_ids)
        self.num_known += len(comment.output_ids)
        self.has_begun = True

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request that continues the stream."""
        ids = [one.tolist() for one in self._ids]
        if len(ids) == 1:
            return {"output_ids": ids[0], "output_cursor": self._cursors[0]}
        return {"output_ids": ids, "output_cursor": self._cursors}


def is_known_ids(given: Any) -> bool:
    """Return whether a field has token ids, of one choice or a list of them for each of several."""
    if given is None:
        return True
    if not isinstance(given, list):
        return False
    if given and all(isinstance(one, list) for one in given):
        return all(map(_are_ids, given))
    return _are_ids(given)


def _are_ids(given: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**31 for one in given)
