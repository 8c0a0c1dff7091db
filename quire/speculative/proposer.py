"""Proposer: where draft tokens come from. The base classes of everything that guesses an answer.

A proposer reads the known tokens of running requests and guesses what follows. Whether a guess is
right changes the speed of an answer and never its tokens: each draft is verified by the model. A
proposer is asked for several requests at once, because a model that drafts computes them as one
batch. What it can do besides is said by the classes below that it derives from; a method of the
same name means nothing. Letters: B requests that are asked for, K most drafts of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.token_table import TokenTable

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]


# Drafts that follow a match of so many tokens with an earlier text are right far more often than
# those that follow a shorter one.
LONG_MATCH = 4


class Drafts(NamedTuple):
    """Buffers for drafts: the first counts[i] of ids[i] follow the known tokens of request i.

    matches: how many of the last known tokens occur before the place that the drafts are copied
    from; 0: unknown, or not copied.
    """

    ids: Int32s  # [B, K]
    counts: Int32s  # [B]
    matches: Int32s  # [B]


def no_drafts(num_requests: int, max_drafts: int) -> Drafts:
    """Return empty buffers."""
    counts, matches = np.zeros((2, num_requests), np.int32)
    return Drafts(np.zeros((num_requests, max_drafts), np.int32), counts, matches)


class Proposer(ABC):
    """Guesses tokens, by slot. May raise: the request then goes on without drafts.

    name: in metrics; that of its kind in quire/config/proposer_kinds.py, if it has one.
    may_begin_late: `begin` and `end` may come some steps after the request took its slot or left
    it: all that the proposer keeps of a request follows from its known tokens.
    """

    name: ClassVar[str]
    may_begin_late: ClassVar[bool] = False

    @abstractmethod
    def begin(self, slot: int, request: Request) -> None:
        """Note that `request` runs in `slot`, from its start or again after a preemption."""

    @abstractmethod
    def end(self, slot: int) -> None:
        """Forget the request in `slot`."""

    @abstractmethod
    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """Fill `drafts` with at most limits[i] tokens that may follow the known ones of slots[i].

        The known tokens of a slot only grow until `end`. Drafts of an earlier call were maybe not
        used.
        """

    def verified(  # noqa: B027  most need not know it
        self, slots: Index, drafted: Int32s, accepted: Int32s
    ) -> None:
        """Note that of drafted[i] drafts of slots[i] the first accepted[i] were right."""

    def close(self) -> None:  # noqa: B027  lookups have nothing to free
        """Free threads and memory; no further calls follow."""


class LookupProposer(Proposer):
    """A Proposer that can say cheaply whether it finds anything. knows_matches: it sets the matches
    of its drafts."""

    may_begin_late = True
    knows_matches: ClassVar[bool] = False

    @abstractmethod
    def may_find(self, tokens: TokenTable) -> bool:
        """Return whether `propose` may find something now, for any slot that has begun."""

    def finds_long(self, tokens: TokenTable, slots: Index | None) -> bool:
        """Return whether `propose` finds drafts of a long match now, for any of `slots`; None: for
        any slot that has begun."""
        return False


class LearningProposer(Proposer):
    """A Proposer that learns from answers that have ended."""

    @abstractmethod
    def learn(self, slot: int, output: Int32s) -> None:
        """Note the output tokens of the request in `slot`, which has ended."""


class PausingProposer(Proposer):
    """A Proposer that takes part in steps without being asked, which a long rest makes needless. It
    is asked for no request in the step that admits it."""

    @abstractmethod
    def note_rest(self, step: int, num_steps: int) -> None:
        """Note that about `num_steps` steps pass after `step` before drafts are asked for; 0: they
        may be in the next one."""


class CostlyProposer(Proposer):
    """A Proposer that computes its drafts, so that it is asked only for as many as pay.

    drafting_ms: milliseconds that it has computed so far. catching_up_ms: of these, for known
    tokens that the proposer lacked beyond what drafts need anyway, stalls excluded. catch_up_ms:
    about how long a call may compute such tokens, which all requests of the step wait for.
    """

    drafting_ms = catching_up_ms = 0.0
    catch_up_ms = math.inf

    @abstractmethod
    def possible(self, tokens: TokenTable, slots: Index, limits: Int32s) -> Int32s:
        """Return how many drafts each of `slots` may get, at most limits[i]. Computes none."""

    @abstractmethod
    def pass_ms(self, num_requests: int) -> Float64s:
        """Return the milliseconds of a pass that drafts a token for each of 0 to `num_requests`
        requests; 0 where no time is known."""

    def call_ms(self) -> float:
        """Return the milliseconds of a call beside its passes."""
        return 0.0

    @abstractmethod
    def behind_ms(self, tokens: TokenTable, slots: Index) -> Float64s:
        """Return the milliseconds until each of `slots` is known well enough to draft for it."""


class CacheProposer(CostlyProposer):
    """A CostlyProposer that computes with the target's KV cache."""

    @abstractmethod
    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """Note the blocks of `slots` (see DraftSource in quire/scheduler/interfaces.py)."""
