"""Ticket: one request inside the scheduler, from add to its end.

Plain Python, touched on events only (admission, preemption, first token, end): what a steady
step needs lies in arrays (quire.scheduler.state). Knows no policy and no blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage
from quire.base.errors import WorkerError
from quire.base.records import (
    NO_FLOATS,
    NO_INTS,
    Admission,
    FinishReason,
    PromptScores,
    Request,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from quire.cache.chain import Chain
from quire.cache.manager import CacheManager
from quire.scheduler.margin import Foretold

if TYPE_CHECKING:
    from quire.scheduler.groups import BeamGroup

NO_SLOT = -1


@dataclass(slots=True, kw_only=True)
class Part:
    """A part of a prompt that is computed some layers at a time (layered.py)."""

    start: int
    count: int
    layers_done: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A live request.

    token_ids: all tokens known when it last entered the queue. limit: most tokens it may have.
    leader: who computes the prompt it shares, where it is a fork: stream 0 of its group, or an
    heir. forks: whose leader it is, unless they have ended. beams: the group it is a beam of, or
    is told by. mirostat_mu: where it stood when it
    was preempted, None before its first token or without mirostat. chain: digests of token_ids,
    made once while it waits. key: the policy's, given when it entered the queue. is_long: whether
    its known tokens were many then. passed: how many went before it while blocks were short.
    likely_tokens: how many it will still make, as it looked when it entered the queue. is_held: its
    reader does not keep up; it stands aside, or will when no plan names it (holding.py). foretold:
    by what it was let in, where it named a time; until its first token is there. foretold_end: the
    same of its whole answer, where it has a deadline. part: of its prompt, under way by layers; it
    is lost with the slot.
    """

    request: Request
    arrival: int  # 0, 1, 2, ... in order of add
    limit: int
    token_ids: NDArray[np.int32]
    key: tuple[float, ...] = ()
    missed_first_token: bool = False
    is_long: bool = False
    passed: int = 0
    likely_tokens: float = 1.0
    leader: Ticket | None = None
    forks: list[Ticket] = field(default_factory=list)
    beams: BeamGroup | None = None
    chain: Chain | None = None
    slot: int = NO_SLOT  # NO_SLOT: it waits
    alive: bool = True
    is_held: bool = False
    was_admitted: bool = False
    cached_tokens: int = 0
    cache_use: CacheUsage | None = None
    num_preemptions: int = 0
    num_fetched_blocks: int = 0  # that a tier had for it, since it entered the queue
    had_computed: int = 0  # tokens, when it was preempted; 0 since it runs again
    waited_ms: float = 0.0  # for blocks from a tier, since it entered the queue
    mirostat_mu: float | None = None
    foretold: Foretold | None = None
    foretold_end: Foretold | None = None
    part: Part | None = None
    first_scheduled_ms: float = math.nan
    first_token_ms: float = math.nan
    last_token_ms: float = math.nan
    num_scored: int = 0  # prompt positions whose rows were scored: the next is num_scored
    _score_parts: list[PromptScores] = field(default_factory=list)
    _scores_told: bool = False
    num_prompt_tokens: int = field(init=False)  # length of the prompt; never changes

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_ids)

    @property
    def layers_done(self) -> int:
        """Of the part under way; 0 without one."""
        return 0 if self.part is None else self.part.layers_done

    @property
    def num_slots(self) -> int:
        """Slots it takes when it is admitted: a group of beams has one each."""
        return 1 if self.beams is None else self.beams.search.width

    def num_tail_blocks(self, cache: CacheManager) -> int:
        """Blocks for what it knows beside token_ids: the tails of other beams."""
        return 0 if self.beams is None else self.beams.num_tail_blocks(cache)

    @property
    def scores_prompt(self) -> bool:
        """Whether this request tells its group the scores of the prompt; a fork does not."""
        return self.request.sampling.prompt_logprobs is not None and self.leader is None

    @property
    def has_positions_to_score(self) -> bool:
        """Whether rows of its prompt must still be computed for their logits."""
        return self.scores_prompt and self.num_scored < self.num_prompt_tokens - 1

    def keep_scores(self, part: PromptScores) -> None:
        """The next positions' scores."""
        self._score_parts.append(part)
        self.num_scored += len(part.logprobs)

    def take_scores(self) -> PromptScores | None:
        """All scores of the prompt, the first time; None later, or where none were asked for.

        Raises WorkerError where positions are missing.
        """
        if not self.scores_prompt or self._scores_told:
            return None
        if self.num_scored != self.num_prompt_tokens - 1:
            raise WorkerError(
                f"request {self.request.request_id}: {self.num_scored} of "
                f"{self.num_prompt_tokens - 1} prompt tokens were scored; the worker must score "
                "each once"
            )
        parts, self._score_parts, self._scores_told = self._score_parts, [], True
        if not parts:
            none = NO_INTS.reshape(0, 0), NO_FLOATS.reshape(0, 0)
            return PromptScores(
                logprobs=NO_FLOATS, ranks=NO_INTS, top_ids=none[0], top_logprobs=none[1]
            )
        return PromptScores(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
        )

    def admission(self) -> Admission:
        """What the worker is told when it has taken its slot."""
        request = self.request
        return Admission(
            slot=self.slot,
            request_id=request.request_id,
            stream=request.stream,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            scores_from=self.num_scored if self.has_positions_to_score else None,
            rules=request.rules,
            mirostat_mu=self.mirostat_mu,
            num_candidates=0 if self.beams is None else self.beams.search.num_candidates,
        )

    def output(
        self,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        scores: PromptScores | None = None,
        finish_reason: FinishReason | None = None,
        stop_id: int | None = None,
        error: str | None = None,
        prompt_progress: int | None = None,
    ) -> RequestOutput:
        """An output that tells all there is to tell now."""
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            scores=scores,
            finish_reason=finish_reason,
            stop_id=stop_id,
            error=error,
            prompt_progress=prompt_progress,
            cached_tokens=self.cached_tokens,
            cache_use=self.cache_use,
            num_preemptions=self.num_preemptions,
            times=RequestTimes(
                arrival_ms=self.request.arrival_ms,
                first_scheduled_ms=self.first_scheduled_ms,
                first_token_ms=self.first_token_ms,
                last_token_ms=self.last_token_ms,
            ),
        )
