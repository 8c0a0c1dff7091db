"""EventOrder: the KV events of one replica in the order of their numbers, without gaps.

Batches of events are numbered from 0. What is missing is asked for again; a number that was there
before is a batch that is sent twice, or a publisher that has begun anew, and a replay from the last
batch on says which.
Knows no sockets and no clock. Always holds: changes are taken from a batch once, in order, and what
was stored before a gap that cannot be filled is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_MAX_HASH = 2**64 - 1
_MAX_BLOCK_SIZE = 65536
_MEDIUM = "GPU"
# Requests for a replay without an answer, after which events are taken as they come.
_MAX_UNANSWERED = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that are stored (block_size > 0) or removed (0); without any, all are gone."""

    hashes: tuple[int, ...] = ()
    block_size: int = 0


CLEARED = Change()
_decode = msgspec.msgpack.Decoder().decode


class EventOrder:
    """can_replay: whether missing batches can be asked for. engine: that the batches are of, by
    their data-parallel rank; None: any. num_gaps: that were found; num_invalid: batches that could
    not be read, or were of another engine. other_engine: of the first of these."""

    def __init__(self, *, can_replay: bool, engine: int | None = None) -> None:
        self._can_replay = can_replay
        self._engine = engine
        self.other_engine: int | None = None
        self._next = 0
        self._is_replaying = False
        self._is_other = False
        self._last_hash = 0
        self._num_replayed = 0
        self._last_live = -1
        self._num_unanswered = 0
        self.num_gaps = 0
        self.num_invalid = 0

    def begin(self) -> tuple[list[Change], int | None]:
        """Begin anew: return the changes, and the number from which to ask for a replay."""
        self._next = 0
        return [CLEARED], self._ask()

    def live(self, number: int, raw: bytes) -> tuple[list[Change], int | None]:
        """Take a batch as it is published: return as `begin` does."""
        if self._is_replaying:  # the replay, or the next one, has it
            self._last_live = number
            return [], None
        if number == self._next:
            return self._take(number, raw), None
        if not self._can_replay:
            self.num_gaps += 1
            return [CLEARED, *self._take(number, raw)], None
        if number > self._next:
            self.num_gaps += 1
        # Else it is sent twice by anyone, or the publisher has begun anew.
        return [], self._ask()

    def replayed(self, number: int, raw: bytes) -> list[Change]:
        """Take a batch of a replay."""
        if not self._is_replaying:
            return []
        self._num_replayed += 1
        if number == self._next - 1:
            self._is_other = hash(raw) != self._last_hash
        if number < self._next or self._is_other:
            return []
        changes = list[Change]()
        if number > self._next and self._next:
            changes.append(CLEARED)  # what is between is no longer kept
        return changes + self._take(number, raw)

    def replay_ended(self) -> tuple[list[Change], int | None]:
        """Note that the replay is complete; return as `begin` does."""
        self._is_replaying, self._num_unanswered = False, 0
        if self._is_other or (self._next and not self._num_replayed):
            return self.begin()  # the publisher does not have our last batch
        if self._last_live >= self._next:  # it was published after the replay
            return [], self._ask()
        return [], None

    def check(self) -> int | None:
        """Return the number from which to ask whether the last batches were lost."""
        if self._is_replaying:  # no answer came
            self._is_replaying = False
            self._num_unanswered += 1
            self._can_replay = self._num_unanswered < _MAX_UNANSWERED
        return self._ask()

    def _ask(self) -> int | None:
        """Ask from the last batch on, which shows whether the publisher is the same."""
        if not self._can_replay:
            return None
        self._is_replaying, self._is_other = True, False
        self._num_replayed, self._last_live = 0, -1
        return max(self._next - 1, 0)

    def _take(self, number: int, raw: bytes) -> list[Change]:
        self._next, self._last_hash = number + 1, hash(raw)
        try:
            batch = _decode(raw)
            changes = changes_of(batch)
        except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeError):
            self.num_invalid += 1
            return [CLEARED]  # something has changed, and it is not known what
        rank = batch[2] if len(batch) > 2 else None
        if self._engine is None or type(rank) is not int or rank == self._engine:
            return changes
        if self.other_engine is None:  # each is logged, and a false publisher has many
            self.other_engine = rank
        self.num_invalid += 1
        return [CLEARED]


def changes_of(batch: Any) -> list[Change]:
    """Return the changes of a decoded batch. Raises ValueError for what is none."""
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("a batch is an array of time and events")
    changes = list[Change]()
    for event in batch[1]:
        kind = event[0] if isinstance(event, list) and event else None
        if kind == "AllBlocksCleared":
            changes.append(CLEARED)
        elif kind == "BlockStored" and len(event) >= 5:
            size = event[4]
            if type(size) is not int or not 0 < size <= _MAX_BLOCK_SIZE:
                raise ValueError("the block size is no number of tokens")
            if len(event) < 7 or event[6] in (None, _MEDIUM):
                changes.append(Change(_hashes(event[1]), size))
        elif kind == "BlockRemoved" and len(event) >= 2:
            if len(event) < 3 or event[2] in (None, _MEDIUM):
                changes.append(Change(_hashes(event[1])))
        else:
            raise ValueError("the event is not known")
    return [change for change in changes if change.hashes or change is CLEARED]


def _hashes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ValueError("hashes are an array")
    if not all(type(one) is int and 0 <= one <= _MAX_HASH for one in given):
        raise ValueError("a hash is no number of 64 bits")
    return tuple(given)
