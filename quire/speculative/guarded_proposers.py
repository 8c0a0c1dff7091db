"""GuardedProposers: the two proposers of drafts, asked so that their errors change no answer.

One proposes from the texts that requests predict, the other is the engine's. Which requests ask
which is kept by slot; a request's predicted text is asked first, and the engine's proposer for
requests that have no drafts from that. Knows no control, no rests, no prices and no clock: when
drafts are asked for, and how many are computed, is the caller's choice. Always holds: drafts are
token ids of the model, at most as many as were asked for; a proposer that raises costs the request
its drafts and nothing else, and is reported once for it; where a call for drafts, or for what is
possible, is for several requests at once, those are asked one by one then, while an error in the
times of passes, or in what a proposer is let know of a step, costs all requests of the call theirs;
the loss of the model's device is passed on.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.base.records import Request
from quire.base.report import Report
from quire.base.token_table import TokenTable
from quire.speculative.plain_counts import LONG_MATCHES, OF_TEXT, PREDICTED
from quire.speculative.proposer import (
    LONG_MATCH,
    CacheProposer,
    CostlyProposer,
    Drafts,
    LearningProposer,
    LookupProposer,
    PausingProposer,
    Proposer,
    no_drafts,
)

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


class ProposerFailed(Exception):
    """A proposer raised its cause, and it is not known for which requests."""


def _raise_failed(error: Exception) -> NoReturn:
    """Raise ProposerFailed for an error of a proposer; the loss of the device is passed on."""
    if isinstance(error, DeviceLost):
        raise error
    raise ProposerFailed from error


class Found(NamedTuple):
    """What `find` found for B requests. drafts: those that are known without computing a model.
    limits: how many these are, or could be computed for a request without; the counts of `drafts`
    themselves where none are computed. is_computed: for which requests some could be; None: the
    engine's proposer computes none. predicted: which have drafts of predictions; None: no request
    brings any. kinds: of the drafts (plain_counts.py); None: all are OF_TEXT."""

    drafts: Drafts
    limits: Int32s  # [B]
    is_computed: Bools | None  # [B]
    predicted: Bools | None  # [B]
    kinds: Index | None  # [B]


class GuardedProposers:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step.

    proposer: of the engine. prediction: proposes from the texts that requests bring. report:
    receives each error. computes: the engine's proposer is a CostlyProposer. knows_matches: see
    LookupProposer, of the engine's proposer. asks_proposer, asks_prediction: which slots ask
    either, and num_asking, num_predicting: how many of them. mutes_proposer, mutes_predictions:
    which of the two is not asked in this step, as it rests beside the other; neither, where no
    request brings a prediction.
    """

    def __init__(
        self,
        proposer: Proposer,
        prediction: Proposer,
        *,
        num_slots: int,
        max_drafts: int,
        vocab_size: int,
        report: Report,
    ) -> None:
        self._proposer, self._prediction = proposer, prediction
        self._costly = proposer if isinstance(proposer, CostlyProposer) else None
        self._learner = proposer if isinstance(proposer, LearningProposer) else None
        self._in_cache = proposer if isinstance(proposer, CacheProposer) else None
        self._pausing = proposer if isinstance(proposer, PausingProposer) else None
        self.pauses = self._pausing is not None
        self.computes = self._costly is not None
        self.learns, self.uses_cache = self._learner is not None, self._in_cache is not None
        self.knows_matches = isinstance(proposer, LookupProposer) and proposer.knows_matches
        self.may_begin_late = proposer.may_begin_late and not self.learns
        self._max_drafts, self._vocab_size, self._report = max_drafts, vocab_size, report
        self._request_ids = [""] * num_slots
        self._catching_up_ms = 0.0  # of the costly proposer, when it was asked for last
        self.num_asking = self.num_predicting = 0
        self.mutes_proposer = self.mutes_predictions = False
        self.asks_proposer: Bools = np.zeros(num_slots, np.bool_)
        self.asks_prediction: Bools = np.zeros(num_slots, np.bool_)
        self._both = ((prediction, self.asks_prediction), (proposer, self.asks_proposer))

    def close(self) -> None:
        """Free what the proposers hold."""
        for proposer, _ in self._both:
            proposer.close()

    def begin(self, slot: int, request: Request, *, predicts: bool) -> None:
        """Note that `request` runs in `slot`. predicts: it brings a prediction."""
        speculation = request.speculation
        assert speculation is not None, "only requests that speculate begin"
        self._request_ids[slot] = request.request_id
        self.asks_proposer[slot] = speculation.uses_proposer
        self.num_asking += speculation.uses_proposer
        self.asks_prediction[slot] = predicts
        self.num_predicting += predicts
        for proposer, asks in self._both:
            if asks[slot]:
                try:
                    proposer.begin(slot, request)
                except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
                    self._give_up(slot, error)

    def learn(self, slot: int, output: Int32s) -> None:
        """Note the output of the request in `slot`, which has ended."""
        if self._learner is not None and self.asks_proposer[slot]:
            try:
                self._learner.learn(slot, output)
            except Exception as error:  # noqa: BLE001  of whatever proposes: nothing is learned
                self._give_up(slot, error)

    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """Note the blocks of `slots`, for a proposer that computes in the target's KV cache."""
        assert self._in_cache is not None, "drafts are computed with the target's cache"
        try:
            self._in_cache.note_kv(slots, block_tables, capacities)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
            self.give_up_all(slots, error)

    def note_rest(self, step: int, num_steps: int) -> None:
        """Note that the engine's proposer is asked for nothing in about `num_steps` steps after
        `step`."""
        assert self._pausing is not None, "the proposer takes part in steps"
        try:
            self._pausing.note_rest(step, num_steps)
        except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
            self.give_up_all(self.asks_proposer.nonzero()[0], error)

    def end(self, slot: int) -> None:
        """Forget the request in `slot`."""
        for proposer, asks in self._both:
            if asks[slot]:
                self._end(proposer, slot)
        self._asks_nothing(slot)

    def verified(self, index: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Note that of drafted[i] drafts of slots `index` the first accepted[i] were right."""
        for proposer, asks in self._both:
            some = asks[index]
            if not np.logical_or.reduce(some):
                continue
            of_some = index, drafted, accepted
            if not np.logical_and.reduce(some):
                of_some = index[some], drafted[some], accepted[some]
            try:
                proposer.verified(*of_some)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001  of whatever proposes: the tokens are known
                self.give_up_all(of_some[0], error)

    def find(
        self,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        *,
        of_proposer: bool,
        of_predictions: bool,
    ) -> Found:
        """Return what can be drafted. of_proposer, of_predictions: whether these are asked."""
        drafts = no_drafts(len(index), self._max_drafts)
        may_compute = is_computed = predicted = kinds = None
        if self.num_predicting:
            if of_predictions:
                self._look_up(self._prediction, self.asks_prediction, tokens, index, limits, drafts)
            predicted = drafts.counts > 0
        if self._costly is not None:
            may_compute = np.zeros(len(index), np.int32)
            if of_proposer:
                some = self._without_drafts(self.asks_proposer, index, limits, drafts)
                may_compute[some] = self._possible(tokens, index[some], limits[some])
            is_computed = may_compute > 0
        elif of_proposer:
            asks = self.asks_proposer
            if predicted is None and np.logical_and.reduce(asks[index]):  # all at once
                self._ask(self._proposer, tokens, index, limits, drafts)
            else:
                self._look_up(self._proposer, asks, tokens, index, limits, drafts)
        if self.knows_matches:
            kinds = LONG_MATCHES * (drafts.matches >= LONG_MATCH)
        if predicted is not None:
            kinds = np.where(predicted, PREDICTED, OF_TEXT if kinds is None else kinds)
        most = drafts.counts if may_compute is None else drafts.counts + may_compute
        return Found(drafts, most, is_computed, predicted, kinds)

    def _possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """Return `possible` of the costly proposer, as `_ask` asks: one by one if that raises."""
        assert self._costly is not None, "drafts are computed"
        try:
            return self._costly.possible(tokens, slots, limits) if len(slots) else limits
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
            if len(slots) == 1:
                self._give_up(int(slots[0]), error)
                return np.zeros(1, np.int32)
        ones = [slice(at, at + 1) for at in range(len(slots))]
        return np.concatenate([self._possible(tokens, slots[one], limits[one]) for one in ones])

    def making_ms(
        self, tokens: TokenTable, slots: Index, num_requests: int
    ) -> tuple[Float64s, Float64s, float]:
        """Return `pass_ms`, `behind_ms` and `call_ms` of the costly proposer. Raises
        ProposerFailed."""
        assert self._costly is not None, "drafts are computed"
        try:
            pass_ms = self._costly.pass_ms(num_requests)
            return pass_ms, self._costly.behind_ms(tokens, slots), self._costly.call_ms()
        except Exception as error:  # noqa: BLE001  raised again
            _raise_failed(error)

    def behind_ms(self, tokens: TokenTable, slots: Index) -> Float64s:
        """Return `behind_ms` of the costly proposer. Raises ProposerFailed."""
        assert self._costly is not None, "drafts are computed"
        try:
            return self._costly.behind_ms(tokens, slots)
        except Exception as error:  # noqa: BLE001  raised again
            _raise_failed(error)

    def compute(
        self, tokens: TokenTable, slots: Index, counts: Int32s, catch_up_ms: float
    ) -> tuple[Drafts, float]:
        """Return at most counts[i] computed drafts of slots[i], and how many milliseconds drafts
        have taken so far. catch_up_ms: see CostlyProposer."""
        assert self._costly is not None, "drafts are computed"
        made = no_drafts(len(slots), self._max_drafts)
        self._costly.catch_up_ms = catch_up_ms
        self._ask(self._costly, tokens, slots, counts, made)
        return made, self._costly.drafting_ms

    def caught_up_ms(self) -> float:
        """Return how long known tokens were computed since this was called last."""
        assert self._costly is not None, "drafts are computed"
        before, self._catching_up_ms = self._catching_up_ms, self._costly.catching_up_ms
        return self._catching_up_ms - before

    def give_up_all(self, index: Index, error: Exception) -> None:
        """Propose no more for the requests in `index`, as a proposer raised `error`."""
        for slot in index.tolist():
            if self.asks_proposer[slot] or self.asks_prediction[slot]:
                self._give_up(slot, error)

    def _look_up(
        self,
        proposer: Proposer,
        asks: Bools,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        drafts: Drafts,
    ) -> None:
        """Ask a proposer that computes nothing for the rows that have no drafts yet."""
        some = self._without_drafts(asks, index, limits, drafts)
        if not len(some):
            return
        found = no_drafts(len(some), self._max_drafts)
        self._ask(proposer, tokens, index[some], limits[some], found)
        for into, parts in zip(drafts, found, strict=True):
            into[some] = parts

    def _without_drafts(self, asks: Bools, index: Index, limits: Int32s, drafts: Drafts) -> Index:
        """Return the rows that ask a proposer and have no drafts yet."""
        rows: Index = (asks[index] & (limits > 0) & (drafts.counts == 0)).nonzero()[0]
        return rows

    def _ask(
        self, proposer: Proposer, tokens: TokenTable, slots: Index, limits: Int32s, found: Drafts
    ) -> None:
        """Ask for all `slots` at once; one by one if that raises, so that one failure is one's."""
        try:
            proposer.propose(tokens, slots, limits, found)
        except DeviceLost:  # nor can any step be computed
            raise
        except Exception as error:  # noqa: BLE001  see above
            found.counts[:] = 0
            if len(slots) == 1:
                self._give_up(int(slots[0]), error)
                return
            for at in range(len(slots)):
                one = slice(at, at + 1)
                part = Drafts(*(buffer[one] for buffer in found))
                self._ask(proposer, tokens, slots[one], limits[one], part)
            return
        np.minimum(found.counts, limits, out=found.counts)
        # Negative ids are large ones here.
        if int(np.maximum.reduce(found.ids.view(np.uint32), axis=None)) < self._vocab_size:
            return
        is_bad = (found.ids < 0) | (found.ids >= self._vocab_size)
        num_good = np.where(is_bad.any(axis=1), is_bad.argmax(axis=1), found.ids.shape[1])
        np.minimum(found.counts, num_good, out=found.counts)

    def _give_up(self, slot: int, error: Exception) -> None:
        """Propose no more for the request in `slot`."""
        for proposer, asks in self._both:
            if asks[slot]:
                self._end(proposer, slot)
        self._asks_nothing(slot)
        self._report(
            "proposer failed; the request goes on without drafts",
            request_id=self._request_ids[slot],
            error=f"{type(error).__name__}: {error}",
        )

    def _end(self, proposer: Proposer, slot: int) -> None:
        """Let a proposer forget a request; one that fails in that is begun anew with the next."""
        try:
            proposer.end(slot)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  the request has ended, or has no drafts any more
            self._report(
                "proposer failed to forget a request",
                request_id=self._request_ids[slot],
                error=f"{type(error).__name__}: {error}",
            )

    def _asks_nothing(self, slot: int) -> None:
        self.num_predicting -= int(self.asks_prediction[slot])
        self.num_asking -= int(self.asks_proposer[slot])
        self.asks_proposer[slot] = self.asks_prediction[slot] = False
        if not self.num_predicting:
            self.mutes_proposer = self.mutes_predictions = False
