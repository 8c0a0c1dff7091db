"""SequenceState: one request inside the scheduler, from its arrival to its end.

Plain Python, touched on events only (admission, preemption, first token, end): what a steady step
needs lies in arrays (running_batch.py). Knows no policy and no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import (
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
from quire.scheduler.request_history import KVHistory, RequestHistory, SequenceTimes
from quire.scheduler.sequence_parts import (
    LayeredPart,
    ObjectiveState,
    PreemptionState,
    PromptScoreParts,
    QueueEntry,
)

NO_SLOT = -1


class SequenceGroup(Protocol):
    """Sequences that run on several slots for one request: the beams of a search.

    members: one per slot; the first waits in the queue for all. streams: the request's outputs.
    """

    members: list[SequenceState]
    streams: list[SequenceState]

    @property
    def slots(self) -> list[int]:
        """The slots of its members; empty while they wait."""

    @property
    def num_candidates(self) -> int:
        """How many candidates the worker reports of each row."""

    def num_tail_blocks(self, cache: CacheManager) -> int:
        """Return how many blocks members beside the first take when the group is admitted."""

    def pack(self) -> None:
        """Keep what is needed to go on from other slots."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A live request.

    arrival: 0, 1, 2, ... in order of arrival. limit: the most tokens it may have. token_ids: all
    tokens known when it last entered the queue; chain: digests of their blocks, made once while it
    waits. leader: of a fork, the request that computes the prompt they share; forks: of a leader.
    group: the beams it belongs to, or is a stream of. slot: NO_SLOT while it waits. is_held: paused
    by backpressure. part: a chunk under way by layers, which is lost with the slot. scores: of the
    prompt; None where the request wants none. accepted_drafts, rejected_drafts: tokens proposed for
    it so far.
    """

    request: Request
    arrival: int
    limit: int
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int = field(init=False)
    chain: Chain | None = None
    leader: SequenceState | None = None
    forks: list[SequenceState] = field(default_factory=list)
    group: SequenceGroup | None = None
    slot: int = NO_SLOT
    alive: bool = True
    is_held: bool = False
    was_admitted: bool = False
    part: LayeredPart | None = None
    entry: QueueEntry = field(default_factory=QueueEntry)
    objectives: ObjectiveState = field(default_factory=ObjectiveState)
    preemption: PreemptionState = field(default_factory=PreemptionState)
    times: SequenceTimes = field(default_factory=SequenceTimes)
    kv: KVHistory = field(default_factory=KVHistory)
    scores: PromptScoreParts | None = None
    history: RequestHistory = field(init=False)
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_ids)
        numbers = (self.arrival, request.arrival_ms, self.num_prompt_tokens)
        self.history = RequestHistory(request.request_id, *numbers, self.times, self.kv)
        if request.sampling.prompt_logprobs is not None or request.sampling.pooling is not None:
            self.scores = PromptScoreParts.of(request)

    @property
    def layers_done(self) -> int:
        """Layers computed of the chunk under way; 0 without one."""
        return 0 if self.part is None else self.part.layers_done

    @property
    def num_slots(self) -> int:
        """Slots it takes when it is admitted: a group takes one for each member."""
        return 1 if self.group is None else len(self.group.members)

    @property
    def scores_prompt(self) -> bool:
        """Whether it reports the scores of its prompt; a fork leaves that to its leader."""
        return self.scores is not None and self.leader is None

    @property
    def num_scored(self) -> int:
        """Prompt positions that were scored."""
        return 0 if self.scores is None else self.scores.num_scored

    @property
    def has_positions_to_score(self) -> bool:
        """Whether rows of its prompt must still be computed for their logits, or to be pooled."""
        return self.scores is not None and self.scores_prompt and self.scores.needs_rows

    def admission(self) -> Admission:
        """Return what the worker needs to know of a request that has taken its slot."""
        request = self.request
        return Admission(
            self.slot,
            request.request_id,
            request.stream,
            self.token_ids,
            self.num_prompt_tokens,
            request.stop_ids,
            request.sampling,
            None if self.scores is None or self.leader is not None else self.scores.next_position,
            request.rules,
            self.preemption.mirostat_mu,
            0 if self.group is None else self.group.num_candidates,
        )

    def output(
        self,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_id: int | None = None,
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        scores: PromptScores | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """Return an output with the given fields, and with all that is known by now."""
        request, times, kv = self.request, self.times, self.kv
        if finish_reason is not None:
            self.history.finish_reason = finish_reason
        return RequestOutput(
            request.request_id,
            token_ids,
            logprobs,
            scores,
            finish_reason,
            stop_id,
            error,
            kv.cached_tokens,
            kv.cache_use,
            self.preemption.count,
            RequestTimes(
                request.arrival_ms,
                times.first_scheduled_ms,
                times.first_token_ms,
                times.last_token_ms,
            ),
            None,
            None,
            self.accepted_drafts,
            self.rejected_drafts,
        )
