"""Ticket: one request inside the scheduler, from add to its end.

Plain Python, touched on events only (admission, preemption, first token, end): what a steady
step needs lies in arrays (quire.scheduler.state). Knows no policy and no blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.records import FinishReason, Request, RequestOutput, RequestTimes, TokenLogprobs
from quire.cache.manager import Chain

NO_SLOT = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A live request.

    token_ids: all tokens known when it last entered the queue. limit: most tokens it may have.
    leader: who computes the prompt it shares, where it is a fork: stream 0 of its group, or an
    heir. forks: whose leader it is, unless they have ended. mirostat_mu: where it stood when it
    was preempted, None before its first token or without mirostat. chain: digests of token_ids,
    made once while it waits.
    """

    request: Request
    arrival: int  # 0, 1, 2, ... in order of add
    limit: int
    token_ids: NDArray[np.int32]
    leader: Ticket | None = None
    forks: list[Ticket] = field(default_factory=list)
    chain: Chain | None = None
    slot: int = NO_SLOT  # NO_SLOT: it waits
    alive: bool = True
    was_admitted: bool = False
    cached_tokens: int = 0
    num_preemptions: int = 0
    mirostat_mu: float | None = None
    first_scheduled_ms: float = math.nan
    first_token_ms: float = math.nan
    last_token_ms: float = math.nan

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; never changes."""
        return len(self.request.prompt_ids)

    def output(
        self,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_id: int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """An output that tells all there is to tell now."""
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_id=stop_id,
            error=error,
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
            times=RequestTimes(
                arrival_ms=self.request.arrival_ms,
                first_scheduled_ms=self.first_scheduled_ms,
                first_token_ms=self.first_token_ms,
                last_token_ms=self.last_token_ms,
            ),
        )
