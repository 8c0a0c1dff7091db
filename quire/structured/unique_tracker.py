"""UniqueTracker: the tokens that would repeat an item of an array, taken out of a mask.

Follows an answer token by token (unique_state.py). Few tokens of a mask can end an item, so only
those are tried: an index of the vocabulary finds them. Invariant: the result depends only on the
tokens taken, so replayed, rolled back and copied matchers agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.structured.item_values import Items, settled
from quire.structured.matcher import Words, without
from quire.structured.token_index import Ids, TokenIndex
from quire.structured.unique_state import Mode, Place, Position, beginning


class UniqueTracker:
    """The position of one answer. place: the schema's first, items: of all its arrays
    (unique_state.places_of)."""

    def __init__(self, place: Place, items: Sequence[Items], index: TokenIndex) -> None:
        self._index = index
        self._items = items
        self._positions = [beginning(place)]

    def copy(self) -> UniqueTracker:
        """Return an independent copy."""
        twin = UniqueTracker.__new__(UniqueTracker)
        twin._index, twin._items = self._index, self._items
        twin._positions = self._positions.copy()
        return twin

    @property
    def num_bytes(self) -> int:
        """Return the approximate memory of what the items remember, shared by all copies."""
        return sum(items.num_bytes for items in self._items)

    @property
    def dead_end(self) -> str:
        """See Tracker (matcher.py)."""
        return (
            "each would repeat an item of an array with uniqueItems; allow more values of an item, "
            "or fewer items"
        )

    def take(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens; return whether no item is repeated."""
        for token_id in token_ids:
            position = self._positions[-1].after(self._index.bytes[token_id])
            if position is None:
                return False
            self._positions.append(position)
        return True

    def go_back(self, num_tokens: int) -> None:
        """Roll back the last tokens."""
        del self._positions[len(self._positions) - num_tokens :]

    def narrowed(self, mask: Words) -> Words:
        """Return a mask without the tokens that repeat an item or leave none that differs."""
        position = self._positions[-1]
        repeats: list[int] = []
        for id_ in self._candidates(position, mask):
            after = position.after(self._index.bytes[id_])
            if after is None or not after.is_open:
                repeats.append(id_)
        return without(mask, repeats) if repeats else mask

    def _candidates(self, position: Position, mask: Words) -> Iterable[int]:
        """Return the tokens of a mask among which are all that repeat an item or leave none."""
        index, items, used = self._index, position.items, position.used
        if items is None:
            return _allowed(mask, index.enters)
        if not used.keys:
            return _allowed(mask, index.commas)
        if position.mode is not Mode.STRING:
            return _all(without(mask, index.digits) if items.takes_digits(position.text) else mask)
        begun, partial = settled(position.text[1:])
        is_ample = items.has_more_than(len(used.keys) + 1)
        nexts = _allowed(mask, index.begins_next if is_ample else index.ends_and_commas)
        if not used.has_beginning(begun):
            return nexts
        if partial:
            return _all(mask)
        found = {*nexts, *_allowed(mask, index.escapes)}
        for string in used.beginning_with(begun):
            rest = string[len(begun) :]
            found.update(index.by_rest.get(rest, ()))
            if not items.is_free_string:
                for end in range(1, min(len(rest), index.longest) + 1):
                    found.update(index.by_bytes.get(rest[:end], ()))
        return _allowed(mask, np.array(sorted(found), np.int64))


def _allowed(mask: Words, ids: Ids) -> list[int]:
    """Return those of some ids that a mask allows."""
    bits = mask[ids // 32] >> (ids % 32).astype(np.uint32) & np.uint32(1)
    allowed: list[int] = ids[bits != 0].tolist()
    return allowed


def _all(mask: Words) -> list[int]:
    """Return all ids of a mask."""
    ids: list[int] = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids
