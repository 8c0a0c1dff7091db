"""BeamStops: which of the tokens that beams may go on with end their answers, by slot.

Grammars are asked through GrammarRows, which has their matchers; stop strings through watches, one
a slot, which have read the answer so far. Knows tokens by id; no text and no scheduler. Always
holds: what it says of a beam depends on that beam's own tokens, whatever was preempted or branched
meanwhile; a watch that fails fails its row with its reason and touches no other; steps without
such rows do nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import QuireError
from quire.base.records import Admission, Candidates
from quire.base.token_table import TokenTable
from quire.runner.grammar_rows import GrammarRows
from quire.structured.matcher import MatcherError

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class Watch(Protocol):
    """Reads one answer; quire.text.stop_watch.StopWatch does."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the answer."""

    def ends_with(self, token_id: int) -> bool:
        """Return whether a stop string is complete after this token."""

    def copy(self) -> Watch:
        """Return an independent copy."""


class WatchSource(Protocol):
    """Where watches come from; quire.engine.stop_texts.StopTexts is one."""

    def watch(self, admission: Admission) -> Watch:
        """Of an answer at its beginning. Raises QuireError where there can be none."""


@dataclass(slots=True)
class _Row:
    """One slot's watch. taken: the answer's tokens it has; error: why there is none."""

    admission: Admission
    watch: Watch | None = None
    error: str = ""
    taken: list[int] = field(default_factory=list)


class BeamStops:
    """watches: None where nothing watches texts; beams with stop strings fail then."""

    def __init__(
        self,
        num_slots: int,
        tokens: TokenTable,
        grammars: GrammarRows,
        watches: WatchSource | None,
    ) -> None:
        self.has: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._num = 0
        self._rows: list[_Row | None] = [None] * num_slots
        self._tokens = tokens
        self._grammars = grammars
        self._watches = watches

    def admit(self, admission: Admission) -> None:
        """Give a request its slot; its watch catches up when the slot is first asked for."""
        sampling, slot = admission.sampling, admission.slot
        if not admission.num_candidates or not (sampling.stop or sampling.structured_outputs):
            return
        self._num += not self.has[slot]
        self.has[slot] = True
        if sampling.stop:
            row = self._rows[slot] = _Row(admission)
            self._begin(row)

    def retire(self, slot: int) -> None:
        """Keep nothing of a request that is over."""
        self._num -= int(self.has[slot])
        self.has[slot] = False
        self._rows[slot] = None

    def branch(self, sources: Int32s, slots: Int32s) -> None:
        """Each of `slots` goes on as its source stands, before any of them goes on."""
        if not self._num:
            return
        found = [self._rows[source] for source in sources.tolist()]
        copies = [
            None
            if row is None
            else replace(row, watch=row.watch and row.watch.copy(), taken=row.taken.copy())
            for row in found
        ]
        for slot, row in zip(slots.tolist(), copies, strict=True):
            self._rows[slot] = row

    def mark_ends(
        self, slots: Index, positions: Int32s, candidates: Candidates | None
    ) -> tuple[Candidates | None, dict[int, str]]:
        """Return `candidates` of rows in `slots` [R], at `positions` [R], with what ends their
        answers; and rows that cannot be judged, with the reason."""
        failed: dict[int, str] = {}
        if candidates is None or not self._num or not self.has[slots].any():
            return candidates, failed
        ends = np.zeros(candidates.ids.shape, np.bool_)
        for place in self.has[slots].nonzero()[0].tolist():
            ids = [id_ for id_ in candidates.ids[place].tolist() if id_ >= 0]
            try:
                ends[place, : len(ids)] = self._ends(int(slots[place]), int(positions[place]), ids)
            except (MatcherError, QuireError) as error:
                failed[place] = str(error)
        return replace(candidates, ends=ends), failed

    def _ends(self, slot: int, position: int, token_ids: list[int]) -> list[bool]:
        by_grammar = self._grammars.ends(slot, token_ids)
        row = self._rows[slot]
        if row is None:
            return by_grammar
        watch = self._caught_up(row, slot, position)
        return [
            complete or watch.ends_with(token_id)
            for complete, token_id in zip(by_grammar, token_ids, strict=True)
        ]

    def _caught_up(self, row: _Row, slot: int, position: int) -> Watch:
        """Return the row's watch, having read all tokens before `position`."""
        first = row.admission.num_prompt_tokens
        known = self._tokens.tokens[slot, first:position].tolist()
        if known[: len(row.taken)] != row.taken:
            self._begin(row)
        if row.watch is None:
            raise MatcherError(row.error)
        row.watch.take(known[len(row.taken) :])
        row.taken = known
        return row.watch

    def _begin(self, row: _Row) -> None:
        row.taken, row.watch = [], None
        if self._watches is None:
            row.error = "nothing here watches for stop strings"
            return
        try:
            row.watch = self._watches.watch(row.admission)
        except QuireError as error:
            row.error = str(error)
