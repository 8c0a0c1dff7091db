"""GrammarRows: the matchers of grammar-constrained requests, by slot.

Masks are computed in a background thread while the model runs; they are needed when tokens are
sampled. Invariants: a row's matcher has taken the tokens of its request, also after preemption and
branching; a failed matcher fails its own row only; steps without such rows cost nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import QuireError
from quire.base.grammar import Grammar
from quire.base.records import NO_INTS, Admission
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.runner.draft_masks import BEHIND_DRAFT, DraftMasks
from quire.sampling.parts import NO_MASKS, Words
from quire.structured.matcher import DeadEnd, Matcher, MatcherError, TrackerError, without

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]


class MatcherSource(Protocol):
    """Where matchers come from; quire.structured.compiler.GrammarCompiler is one."""

    def matcher(self, grammar: Grammar) -> Matcher: ...

    def replacement(self, grammar: Grammar, failed: Matcher) -> Matcher: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """rows [R]: which of `words` each row that samples has, -1 none; empty where none has any.
    failed: rows of these that cannot go on, and why."""

    rows: Int32s
    words: Words
    failed: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """What is certain after chosen tokens, for rows (indexes of rows that sample) with news.

    forced: the ids that must follow. complete: rows with answers that can only end after them.
    """

    forced: dict[int, list[int]] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


NO_MASK = Masks(rows=NO_INTS, words=NO_MASKS, failed={})
NO_FOLLOW = Follow()


def wait_for_masks(masks: Future[Masks]) -> None:
    """Wait until the masks are made, or have failed."""
    masks.exception()


@dataclass(slots=True)
class _Row:
    """One slot's matcher. taken: the answer's tokens it has; error: why it has none.

    is_replaced: the matcher was compiled for this row alone, after another had failed.
    drafts_failed: a copy failed with drafts; no further masks are made behind drafts.
    """

    grammar: Grammar
    matcher: Matcher | None
    num_prompt_tokens: int
    error: str = ""
    taken: list[int] = field(default_factory=list)
    ends_late: bool = False
    jumps: bool = False
    is_beam: bool = False
    is_replaced: bool = False
    drafts_failed: bool = False


class GrammarRows:
    """source: None where nothing compiles grammars; rows that have one fail then. jump_ahead:
    whether forced tokens are returned with the token before them."""

    def __init__(
        self,
        num_slots: int,
        tokens: TokenTable,
        source: MatcherSource | None,
        *,
        jump_ahead: bool = True,
    ) -> None:
        self.has: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._num = 0
        self._rows: list[_Row | None] = [None] * num_slots
        self._tokens = tokens
        self._source = source
        self._jump_ahead = jump_ahead
        self._thread: ThreadPoolExecutor | None = None
        # Waits for masks that were begun; a caller that measures the waits replaces it.
        self.wait: Callable[[Future[Masks]], None] = wait_for_masks

    def admit(self, admission: Admission) -> None:
        """Give a request its slot; its matcher catches up when the slot is first asked for."""
        grammar, slot = admission.sampling.structured_outputs, admission.slot
        if grammar is None:
            return
        self._num += not self.has[slot]
        self.has[slot] = True
        row = self._rows[slot] = _Row(grammar, None, admission.num_prompt_tokens)
        if self._source is None:
            row.error = "nothing here compiles grammars"
            return
        try:
            row.matcher = self._source.matcher(grammar)
        except QuireError as error:
            row.error = str(error)
        row.is_beam = admission.num_candidates > 0
        row.ends_late = admission.sampling.ignore_eos
        row.jumps = self._jump_ahead and not row.is_beam and _may_jump(admission)

    def retire(self, slot: int) -> None:
        """Keep nothing of a request that is over."""
        if self.has[slot]:
            self._num -= 1
            self.has[slot] = False
            self._rows[slot] = None

    def branch(self, sources: Int32s, slots: Int32s) -> None:
        """Each of `slots` goes on as its source stands, before any of them goes on."""
        if not self._num:
            return
        copies = []
        for source in sources.tolist():
            row = self._rows[source]
            if row is not None and row.matcher is not None:
                copies.append((row.matcher.copy(), row.taken.copy(), row.error, row.is_replaced))
            else:
                copies.append((None, [], "" if row is None else row.error, False))
        for slot, (matcher, taken, error, is_replaced) in zip(slots.tolist(), copies, strict=True):
            row = self._rows[slot]
            if row is not None:
                row.matcher, row.taken, row.error = matcher, taken, error
                row.is_replaced = is_replaced

    def begin(self, slots: Index, positions: Int32s) -> Future[Masks] | None:
        """Start to compute the masks of rows in `slots` [R], for tokens at `positions` [R]."""
        if not self._num or not self.has[slots].any():
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        return self._thread.submit(self._masks, slots, positions)

    def follow(self, slots: Index, positions: Int32s, token_ids: Int32s) -> Follow:
        """Advance the matchers by the chosen `token_ids` [R] (-1: none could be chosen).

        A row with several positions has them in order. Its matcher stops at the first position that
        ends the run (TokenRuns).
        """
        if not self._num or not self.has[slots].any():
            return NO_FOLLOW
        follow, ended, begun = Follow(), set[int](), set[int]()
        for place in self.has[slots].nonzero()[0].tolist():
            slot, token_id = int(slots[place]), int(token_ids[place])
            row = self._rows[slot]
            if row is None or row.matcher is None or row.is_beam or slot in ended:
                continue
            if token_id < 0:
                ended.add(slot)
                continue
            if slot in begun and not _has_mask(row.matcher):
                follow.failed[place] = BEHIND_DRAFT
                ended.add(slot)
                continue
            begun.add(slot)
            try:
                if self._follow_one(follow, place, row, int(positions[place]), token_id):
                    ended.add(slot)
            except MatcherError as error:
                row.error = follow.failed[place] = str(error)
                ended.add(slot)
        return follow

    def ends(self, slot: int, token_ids: Sequence[int]) -> list[bool]:
        """Return which tokens end the answer of the beam in `slot`, right after its mask was made.

        Raises MatcherError.
        """
        row = self._rows[slot]
        if row is None or row.matcher is None:
            return [False] * len(token_ids)
        return [row.matcher.is_over_with(token_id) for token_id in token_ids]

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _follow_one(
        self, follow: Follow, place: int, row: _Row, position: int, token_id: int
    ) -> bool:
        """Advance one matcher by the token at `position`; return whether that ends the run."""
        assert row.matcher is not None, "the caller has checked"
        self._go_back(row, position)
        if row.matcher.ends_with(token_id):
            return True  # the token that ends the answer is known to the scheduler
        try:
            row.matcher.take([token_id])
        except TrackerError:
            raise  # the lexer is not the cause
        except MatcherError as error:
            self._replace(row, [*row.taken, token_id], error)
        matcher = row.matcher
        row.taken.append(token_id)
        if row.jumps:
            room = self._tokens.tokens.shape[1] - position - 1
            forced = matcher.forced(most=room)
            if forced:
                row.taken += forced
                follow.forced[place] = forced
        if matcher.is_complete:
            follow.complete.append(place)
        return place in follow.forced or matcher.is_complete

    def _go_back(self, row: _Row, position: int) -> None:
        """Take back tokens at `position` and after it: masks of later positions were made with
        tokens that the run may not have."""
        num_tokens = position - row.num_prompt_tokens
        if len(row.taken) > num_tokens:
            assert row.matcher is not None, "the caller has checked"
            row.matcher.go_back(len(row.taken) - num_tokens)
            del row.taken[num_tokens:]

    def _masks(self, slots: Index, positions: Int32s) -> Masks:
        rows = np.full(len(slots), -1, np.int32)
        failed: dict[int, str] = {}
        words: list[Words] = []
        drafts: DraftMasks | None = None
        last_slot = -1
        for place in self.has[slots].nonzero()[0].tolist():
            slot, position = int(slots[place]), int(positions[place])
            row = self._rows[slot]
            assert row is not None, "a slot that has a grammar has a row"
            if slot == last_slot:
                behind = self._mask_behind(drafts, row, slot, position)
                if behind is None:
                    failed[place] = BEHIND_DRAFT
                    continue
                mask = behind
            else:
                last_slot, drafts = slot, None
                try:
                    mask = self._mask(row, slot, position)
                except MatcherError as error:
                    row.error = failed[place] = str(error)
                    continue
                if row.matcher is not None and not row.is_beam and not row.drafts_failed:
                    drafts = DraftMasks(row.matcher, mask, excludes_eos=row.ends_late)
            rows[place] = len(words)
            words.append(mask)
        if not words:
            return Masks(rows=NO_INTS, words=NO_MASKS, failed=failed)
        return Masks(rows=rows, words=np.stack(words), failed=failed)

    def _mask_behind(
        self, drafts: DraftMasks | None, row: _Row, slot: int, position: int
    ) -> Words | None:
        """Return the mask of `position`, which a draft precedes; None if the drafts end before."""
        if drafts is None:
            return None
        mask = drafts.after(int(self._tokens.tokens[slot, position - 1]))
        row.drafts_failed |= drafts.has_failed
        return mask

    def _mask(self, row: _Row, slot: int, position: int) -> Words:
        """Catch up with the tokens before `position`, then see what may stand there."""
        if row.error or row.matcher is None:
            raise MatcherError(row.error or "the grammar has no matcher")
        known = self._tokens.tokens[slot, row.num_prompt_tokens : position].tolist()
        try:
            mask = self._mask_after(row, known)
        except DeadEnd:
            if not row.is_beam:
                raise
            return row.matcher.no_mask()  # it goes on no more; others may
        if row.ends_late:
            longer = without(mask, row.matcher.eos_ids)
            return longer if longer.any() else mask
        return mask

    def _mask_after(self, row: _Row, known: list[int]) -> Words:
        """Return the mask after the answer's tokens `known`, with a new matcher if this one fails.
        Raises MatcherError."""
        assert row.matcher is not None, "the caller has checked"
        try:
            if known != row.taken:
                self._catch_up(row.matcher, row.taken, known)
                row.taken = known
            return row.matcher.mask()
        except (DeadEnd, TrackerError):
            raise  # the lexer is not the cause
        except MatcherError as error:
            self._replace(row, known, error)
            row.taken = known
            return row.matcher.mask()

    def _replace(self, row: _Row, known: list[int], error: MatcherError) -> None:
        """Give the row a matcher that shares nothing with others, advanced by `known`.

        The lexer that failed is shared by all rows of the grammar, so the cause may be another
        request. If the row's own matcher fails as well, the row is the cause: raises that error.
        """
        if row.is_replaced or self._source is None or row.matcher is None:
            raise error
        row.is_replaced = True
        try:
            row.matcher = self._source.replacement(row.grammar, row.matcher)
        except QuireError as failed:
            raise MatcherError(str(failed)) from error
        row.matcher.replay(known)

    def _catch_up(self, matcher: Matcher, taken: Sequence[int], known: Sequence[int]) -> None:
        same = 0
        while same < min(len(taken), len(known)) and taken[same] == known[same]:
            same += 1
        matcher.go_back(len(taken) - same)
        if len(known) > same:
            matcher.replay(known[same:])


def _has_mask(matcher: Matcher) -> bool:
    """Renew the work budget of the matcher's lexer between two tokens; return whether it can go on.

    The next step reports why, if it cannot.
    """
    try:
        matcher.mask()
    except MatcherError:
        return False
    return True


def _may_jump(admission: Admission) -> bool:
    """Return whether each step of the request, left with one token, would choose just that, with
    nothing else to return and no state to move."""
    sampling: SamplingParams = admission.sampling
    bans = (
        admission.rules.banned_sequences
        or sampling.allowed_token_ids is not None
        or sampling.no_repeat_ngram_size
        or (sampling.min_tokens and sampling.stop_token_ids)
    )
    return not (bans or sampling.mirostat or sampling.logprobs is not None)
