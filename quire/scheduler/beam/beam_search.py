"""BeamSearch: which sequences go on and which are finished, from log-probabilities alone.

The search of `transformers` (its fields: num_beams, length_penalty, early_stopping): each step the
best `width` continuations of all beams go on, and continuations that end are kept if they are among
the best `width` of the step. A finished sequence scores the sum of its tokens' scores
(log-probabilities after penalties and bias) over its number of new tokens to the power of
length_penalty.

An answer ends by one of its stop ids, or where the worker says so, which knows grammars and text.
There can be any number of the latter among the best, so no more than twice `width` are looked at in
a step, again as in `transformers`; where fewer than `width` of them go on, the search is that much
narrower for a step.

Knows no slots, blocks or plans. Always holds: decisions depend on the reported numbers and on
nothing else; beams are sorted, best first, and no two are equal; at most `width` are finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.records import (
    NO_BOOLS,
    FinishReason,
    Request,
    StepResult,
    TokenLogprobs,
    token_logprobs,
)

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

# The log-probabilities of a beam, last first: (those before, the last), None for none.
_Trail = tuple[Any, TokenLogprobs] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamCandidates:
    """What the worker reports of one beam: candidate tokens, best first (-1: no further one).

    scores decide; logprobs are the model's own, as `top` and `listed` are, for callers that ask.
    ends: whether the answer is over with the token, by its grammar or its text; may be empty.
    """

    ids: Int32s
    scores: Float32s
    logprobs: Float32s
    ends: Bools
    top: tuple[tuple[int, float], ...] = ()
    listed: tuple[float, ...] = ()


def beam_candidates_of(result: StepResult, entry: int, num_logprobs: int | None) -> BeamCandidates:
    """Return what `result` reports of the beam that has its entry `entry`; see StepResult.

    num_logprobs: the alternatives the caller asked for. Raises WorkerError where there are no
    candidates.
    """
    candidates = result.candidates
    if candidates is None or entry >= len(candidates.ids):
        raise WorkerError(
            f"step {result.step} has no candidates of a beam; the worker must report "
            "Admission.num_candidates of them"
        )
    found = BeamCandidates(
        ids=candidates.ids[entry],
        scores=candidates.scores[entry],
        logprobs=candidates.logprobs[entry],
        ends=candidates.ends[entry] if len(candidates.ends) else NO_BOOLS,
    )
    if num_logprobs is None:
        return found
    of_token = token_logprobs(
        entry,
        result.token_ids,
        result.logprobs,
        result.top_ids,
        result.top_logprobs,
        result.listed_logprobs,
    )
    return replace(found, top=of_token[0].top[:num_logprobs], listed=of_token[0].listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A sequence that has ended; token_ids are the new ones, a stop token included.

    stop_id: that token, where one ended it.
    """

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_id: int | None = None


class BeamSearch:
    """The beams of `request`, which may have `limit` tokens in all, its prompt included."""

    def __init__(self, request: Request, limit: int) -> None:
        sampling = request.sampling
        self.width = sampling.num_sequences
        self.finished: list[Finished] = []  # best first
        self.is_done = False
        self.length = len(request.prompt_ids)  # tokens of each beam
        self._num_prompt_tokens = self.length
        self._limit = limit
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self.num_logprobs = sampling.logprobs
        self._stop_ids = frozenset(request.stop_ids)
        self._may_end = sampling.structured_outputs is not None or bool(sampling.stop)
        self._tokens: Int32s = np.zeros((self.width, limit), np.int32)
        self._tokens[0, : self.length] = request.prompt_ids
        self._scores = np.zeros(1)
        self._trails: list[_Trail] = [None]

    @property
    def num_beams(self) -> int:
        """Beams that go on: one before the first step."""
        return len(self._scores)

    @property
    def num_candidates(self) -> int:
        """How many candidates a beam must report: so many decide.

        `width` that go on lie behind at most so many that end by a stop id; where answers end in
        other ways, no more than twice `width` beside those are looked at.
        """
        return self.width * (2 if self._may_end else 1) + len(self._stop_ids)

    @property
    def tokens(self) -> Int32s:
        """The tokens of each beam, int32 [num_beams, length] (a view)."""
        return self._tokens[: self.num_beams, : self.length]

    @property
    def num_shared_tokens(self) -> int:
        """How many first tokens all beams share; fewer than `length` if there are two."""
        tokens = self.tokens
        differs = (tokens != tokens[0]).any(axis=0)
        return int(differs.argmax()) if differs.any() else self.length

    def advance(self, candidates: Sequence[BeamCandidates]) -> list[int]:
        """Take what each beam may go on with.

        Returns the parents of the new beams, best first. Empty when the search is done.
        """
        parents: list[int] = []
        ids: list[int] = []
        sums: list[float] = []
        trails: list[_Trail] = []
        ended: list[Finished] = []
        ends_all = self.length + 1 == self._limit
        num_looked_at = 0
        for rank, (beam, place, total) in enumerate(self._candidates(candidates)):
            of_beam = candidates[beam]
            token_id = int(of_beam.ids[place])
            stops = token_id in self._stop_ids
            is_end = stops or (len(of_beam.ends) > 0 and bool(of_beam.ends[place]))
            if is_end or ends_all:
                if rank < self.width:
                    reason = FinishReason.STOP if is_end else FinishReason.LENGTH
                    stop_id = token_id if stops else None
                    trail = self._trail(beam, of_beam, place)
                    ended.append(self._end(beam, token_id, total, trail, reason, stop_id))
            else:
                parents.append(beam)
                ids.append(token_id)
                sums.append(total)
                trails.append(self._trail(beam, of_beam, place))
            num_looked_at += not stops
            is_over = ends_all and rank + 1 >= self.width
            if len(parents) == self.width or num_looked_at == 2 * self.width or is_over:
                break
        self.finished = sorted((*self.finished, *ended), key=lambda one: -one.score)[: self.width]
        if parents:
            self._tokens[: len(parents), : self.length] = self._tokens[parents, : self.length]
            self._tokens[: len(parents), self.length] = ids
        self._scores, self._trails = np.array(sums), trails
        self.length += 1
        self.is_done = not parents or self._has_enough()
        return [] if self.is_done else parents

    def _candidates(self, candidates: Sequence[BeamCandidates]) -> Iterator[tuple[int, int, float]]:
        """Yield (beam, place among its own, sum with it), the best sum first."""
        columns = max(len(of_beam.ids) for of_beam in candidates)
        ids = np.full((len(candidates), columns), -1, np.int32)
        scores = np.full(ids.shape, np.nan, np.float32)
        for beam, of_beam in enumerate(candidates):
            ids[beam, : len(of_beam.ids)] = of_beam.ids
            scores[beam, : len(of_beam.ids)] = of_beam.scores
        sums = self._scores[:, None] + scores.astype(np.float64)
        flat = np.flatnonzero((ids >= 0).reshape(-1))
        order = flat[np.argsort(-sums.reshape(-1)[flat], kind="stable")]
        for at in order.tolist():
            beam, place = divmod(at, columns)
            yield beam, place, float(sums[beam, place])

    def _trail(self, beam: int, of_beam: BeamCandidates, place: int) -> _Trail:
        if self.num_logprobs is None:
            return None
        last = TokenLogprobs(
            token_id=int(of_beam.ids[place]),
            logprob=float(of_beam.logprobs[place]),
            top=of_beam.top,
            listed=of_beam.listed,
        )
        return self._trails[beam], last

    def _end(
        self,
        beam: int,
        token_id: int,
        total: float,
        trail: _Trail,
        reason: FinishReason,
        stop_id: int | None,
    ) -> Finished:
        new_ids = self._tokens[beam, self._num_prompt_tokens : self.length].tolist()
        return Finished(
            score=total / float((len(new_ids) + 1) ** self._length_penalty),
            token_ids=(*new_ids, token_id),
            logprobs=_in_order(trail),
            finish_reason=reason,
            stop_id=stop_id,
        )

    def _has_enough(self) -> bool:
        """Return whether going on cannot change the finished sequences any more.

        As early_stopping defines it.
        """
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        new_tokens = self.length - self._num_prompt_tokens
        if self._early_stopping == "never" and self._length_penalty > 0:
            new_tokens = self._limit - self._num_prompt_tokens
        best = float(self._scores[0]) / float(new_tokens**self._length_penalty)
        return best <= self.finished[-1].score


def _in_order(trail: _Trail) -> tuple[TokenLogprobs, ...]:
    found = []
    while trail is not None:
        trail, last = trail
        found.append(last)
    return tuple(reversed(found))
