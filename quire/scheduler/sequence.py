"""SequenceState: one request inside the scheduler, from its arrival to its end.

Plain Python, touched on events only (admission, preemption, first token, end): what a steady step
needs lies in arrays (running_batch.py). Knows no policy and no blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage
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

NO_SLOT = -1


@dataclass(slots=True, kw_only=True)
class LayeredPart:
    """A chunk of a prompt that is computed some layers per step (prefill/layered.py)."""

    start: int
    count: int
    layers_done: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A first token predicted `ms` after at_ms, or the end of the answer where is_end is set.

    waits: other requests, or a lack of blocks, keep it from a slot.
    """

    at_ms: float
    ms: float
    waits: bool
    is_end: bool = False


@dataclass(slots=True)
class SequenceTimes:
    """When things happened, in milliseconds of the engine's clock; NaN before."""

    first_scheduled_ms: float = math.nan
    first_token_ms: float = math.nan
    last_token_ms: float = math.nan


@dataclass(slots=True)
class KVHistory:
    """What became of a request's keys and values.

    cached_tokens, cache_use: found in the prefix cache at its first admission, and why no more.
    num_fetched_blocks: loaded from a tier since it entered the queue, for which it waited
    waited_ms.
    """

    cached_tokens: int = 0
    cache_use: CacheUsage | None = None
    num_fetched_blocks: int = 0
    waited_ms: float = 0.0


@dataclass(slots=True)
class PromptScoreParts:
    """Scores of a prompt, in as many parts as it was computed in (prompt_scores.py).

    num_scored: positions so far. were_taken: whether all were reported.
    """

    parts: list[PromptScores] = field(default_factory=list)
    num_scored: int = 0
    were_taken: bool = False


@dataclass(slots=True)
class QueueEntry:
    """What orders a request in the queue, set when it enters.

    key: given by the policy. is_long: whether it has many tokens. num_overtakes: how many requests
    overtook it while blocks were short. likely_tokens: predicted output tokens still to come, where
    that is needed.
    """

    key: tuple[float, ...] = ()
    is_long: bool = False
    num_overtakes: int = 0
    likely_tokens: float = 1.0


@dataclass(slots=True)
class ObjectiveState:
    """What was predicted for the latency objectives of a request.

    first_token: the prediction that it was accepted by, until its first token has come; end: that
    of its end. missed_first_token: whether it has waited for longer than its objective.
    """

    first_token: Prediction | None = None
    end: Prediction | None = None
    missed_first_token: bool = False


@dataclass(slots=True)
class PreemptionState:
    """How often a request was preempted, and what it resumes with.

    had_computed: tokens it lost with its slot; 0 once it runs again. mirostat_mu: the state of
    mirostat then.
    """

    count: int = 0
    had_computed: int = 0
    mirostat_mu: float | None = None


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
    prompt; None where the request wants none.
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

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_ids)
        if self.request.sampling.prompt_logprobs is not None:
            self.scores = PromptScoreParts()

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
        """Whether rows of its prompt must still be computed for their logits."""
        return self.scores_prompt and self.num_scored < self.num_prompt_tokens - 1

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
            self.num_scored if self.scores is not None and self.has_positions_to_score else None,
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
        )
