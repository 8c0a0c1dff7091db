"""BeamSearch: which sequences go on and which are finished, from log-probabilities alone.

The search of `transformers` (its fields: num_beams, length_penalty, early_stopping): each step the
best `width` continuations of all beams go on, and continuations that end are kept if they are
among the best `width` of the step. A finished sequence scores the sum of its tokens'
log-probabilities over its number of new tokens to the power of length_penalty.

Knows no slots, blocks or plans. Always holds: what it decides depends on the numbers it is told
and on nothing else; beams stand best first and no two are equal; at most `width` are finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import FinishReason, Request, TokenLogprobs

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

# The log-probabilities of a beam, last first: (those before, the last), None for none.
_Trail = tuple[Any, TokenLogprobs] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A sequence that has ended; token_ids are the new ones, the stop token included."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason


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
        self._num_logprobs = sampling.logprobs
        self._stop_ids = frozenset(request.stop_ids)
        self._min_tokens = sampling.min_tokens
        self._banned = request.rules.banned_sequences
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
        """Log-probabilities a beam must tell of: so many decide, however many end or are banned.

        `width` that go on lie behind at most so many that end, and those that are banned.
        """
        last_ids = {ids[-1] for ids in self._banned}
        return self.width + len(self._stop_ids) + len(last_ids - self._stop_ids)

    @property
    def tokens(self) -> Int32s:
        """The tokens of each beam, int32 [num_beams, length] (a view)."""
        return self._tokens[: self.num_beams, : self.length]

    @property
    def num_shared_tokens(self) -> int:
        """How many first tokens all beams have in common; fewer than `length` if there are two."""
        tokens = self.tokens
        differs = (tokens != tokens[0]).any(axis=0)
        return int(differs.argmax()) if differs.any() else self.length

    def advance(self, top_ids: Sequence[Int32s], top_logprobs: Sequence[Float32s]) -> list[int]:
        """Take each beam's most likely next tokens, best first (-1: no more of them).

        Returns the parents of the new beams, best first. Empty when the search is done.
        """
        parents: list[int] = []
        ids: list[int] = []
        sums: list[float] = []
        trails: list[_Trail] = []
        rank = 0
        ends_all = self.length + 1 == self._limit
        ended: list[Finished] = []
        for beam, token_id, logprob, total in self._candidates(top_ids, top_logprobs):
            if self._is_banned(beam, token_id):
                continue
            stops = token_id in self._stop_ids
            if stops or ends_all:
                if rank < self.width:
                    trail = self._trail(beam, token_id, logprob, top_ids, top_logprobs)
                    ended.append(self._end(beam, token_id, total, trail, stops=stops))
            else:
                parents.append(beam)
                ids.append(token_id)
                sums.append(total)
                trails.append(self._trail(beam, token_id, logprob, top_ids, top_logprobs))
            rank += 1
            if len(parents) == self.width or (ends_all and rank == self.width):
                break
        self.finished = sorted((*self.finished, *ended), key=lambda one: -one.score)[: self.width]
        if parents:
            self._tokens[: len(parents), : self.length] = self._tokens[parents, : self.length]
            self._tokens[: len(parents), self.length] = ids
        self._scores, self._trails = np.array(sums), trails
        self.length += 1
        self.is_done = not parents or self._has_enough()
        return [] if self.is_done else parents

    def _candidates(
        self, top_ids: Sequence[Int32s], top_logprobs: Sequence[Float32s]
    ) -> Iterator[tuple[int, int, float, float]]:
        """(beam, token id, log-probability, sum with it), the best sum first."""
        columns = max(map(len, top_ids))
        ids = np.full((len(top_ids), columns), -1, np.int32)
        logprobs = np.full(ids.shape, np.nan, np.float32)
        for beam, (of_beam, theirs) in enumerate(zip(top_ids, top_logprobs, strict=True)):
            ids[beam, : len(of_beam)] = of_beam
            logprobs[beam, : len(of_beam)] = theirs
        sums = self._scores[:, None] + logprobs.astype(np.float64)
        flat = np.flatnonzero((ids >= 0).reshape(-1))
        order = flat[np.argsort(-sums.reshape(-1)[flat], kind="stable")]
        for at in order.tolist():
            beam, column = divmod(at, columns)
            yield (
                beam,
                int(ids[beam, column]),
                float(logprobs[beam, column]),
                float(sums[beam, column]),
            )

    def _is_banned(self, beam: int, token_id: int) -> bool:
        """Whether the request forbids this token here."""
        if token_id in self._stop_ids:
            too_early = self.length - self._num_prompt_tokens < self._min_tokens
            if too_early:
                return True
        for *before, last in self._banned:
            if last == token_id and len(before) <= self.length:
                tail = self._tokens[beam, self.length - len(before) : self.length]
                if tail.tolist() == before:
                    return True
        return False

    def _trail(
        self,
        beam: int,
        token_id: int,
        logprob: float,
        top_ids: Sequence[Int32s],
        top_logprobs: Sequence[Float32s],
    ) -> _Trail:
        if self._num_logprobs is None:
            return None
        told = slice(self._num_logprobs)
        pairs = zip(top_ids[beam][told].tolist(), top_logprobs[beam][told].tolist(), strict=True)
        top = tuple((id_, value) for id_, value in pairs if id_ >= 0)
        return self._trails[beam], TokenLogprobs(token_id=token_id, logprob=logprob, top=top)

    def _end(
        self, beam: int, token_id: int, total: float, trail: _Trail, *, stops: bool
    ) -> Finished:
        new_ids = self._tokens[beam, self._num_prompt_tokens : self.length].tolist()
        return Finished(
            score=total / float((len(new_ids) + 1) ** self._length_penalty),
            token_ids=(*new_ids, token_id),
            logprobs=_in_order(trail),
            finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
        )

    def _has_enough(self) -> bool:
        """Whether going on cannot change the finished ones any more, as early_stopping sees it."""
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
    told = []
    while trail is not None:
        trail, last = trail
        told.append(last)
    return tuple(reversed(told))
