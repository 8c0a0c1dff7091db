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
    waited_ms. had_computed: tokens it lost when it was preempted; 0 once it runs again.
    """

    cached_tokens: int = 0
    cache_use: CacheUsage | None = None
    num_fetched_blocks: int = 0
    waited_ms: float = 0.0
    had_computed: int = 0


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

    arrival: 0, 1, 2, ... in order of arrival. limit: the most tokens it may have. asks_scores:
    whether its request wants the scores of the prompt. token_ids: all tokens known when it last
    entered the queue; chain: digests of their blocks, made once while it waits.

    key: given by the policy when it entered the queue. is_long: whether it then had many tokens.
    num_overtakes: how many requests overtook it while blocks were short. likely_tokens: predicted
    output tokens still to come, where that is needed.

    leader: of a fork, the request that computes the prompt they share; forks: of a leader. group:
    the beams it belongs to, or is a stream of. slot: NO_SLOT while it waits. is_held: paused by
    backpressure. mirostat_mu: the state of mirostat when it was preempted. part: a chunk under way
    by layers, which is lost with the slot. prediction, end_prediction: by which its objectives were
    accepted, of its first token (until that has come) and of its end.
    """

    request: Request
    arrival: int
    limit: int
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int = field(init=False)
    asks_scores: bool = field(init=False)
    chain: Chain | None = None
    key: tuple[float, ...] = ()
    is_long: bool = False
    num_overtakes: int = 0
    likely_tokens: float = 1.0
    missed_first_token: bool = False
    leader: SequenceState | None = None
    forks: list[SequenceState] = field(default_factory=list)
    group: SequenceGroup | None = None
    slot: int = NO_SLOT
    alive: bool = True
    is_held: bool = False
    was_admitted: bool = False
    num_preemptions: int = 0
    mirostat_mu: float | None = None
    part: LayeredPart | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)
    kv: KVHistory = field(default_factory=KVHistory)
    scores: PromptScoreParts | None = None
    prediction: Prediction | None = None
    end_prediction: Prediction | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_ids)
        self.asks_scores = self.request.sampling.prompt_logprobs is not None

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
        return self.asks_scores and self.leader is None

    @property
    def num_scored(self) -> int:
        """Prompt positions that were scored."""
        return 0 if self.scores is None else self.scores.num_scored

    @property
    def has_positions_to_score(self) -> bool:
        """Whether rows of its prompt must still be computed for their logits."""
        if not self.asks_scores:
            return False
        return self.scores_prompt and self.num_scored < self.num_prompt_tokens - 1

    def keep_scores(self, part: PromptScores) -> None:
        """Keep the scores of the next positions."""
        if self.scores is None:
            self.scores = PromptScoreParts()
        self.scores.add(part)

    def take_scores(self) -> PromptScores | None:
        """Return all scores of the prompt, once; None later, or where none were asked for.

        Raises WorkerError where positions are missing.
        """
        if not self.scores_prompt:
            return None
        if self.scores is None:
            self.scores = PromptScoreParts()
        if self.scores.were_taken:
            return None
        if self.num_scored != self.num_prompt_tokens - 1:
            raise WorkerError(
                f"request {self.request.request_id}: {self.num_scored} of "
                f"{self.num_prompt_tokens - 1} prompt tokens were scored; the worker must score "
                "each once"
            )
        return self.scores.take()

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
            self.num_scored if self.asks_scores and self.has_positions_to_score else None,
            request.rules,
            self.mirostat_mu,
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
            self.num_preemptions,
            RequestTimes(
                request.arrival_ms,
                times.first_scheduled_ms,
                times.first_token_ms,
                times.last_token_ms,
            ),
        )


class PromptScoreParts:
    """Scores of a prompt, in as many parts as it was computed in. num_scored: positions so far."""

    def __init__(self) -> None:
        self.num_scored = 0
        self.were_taken = False
        self._parts: list[PromptScores] = []

    def add(self, part: PromptScores) -> None:
        """Keep the scores of the next positions."""
        self._parts.append(part)
        self.num_scored += len(part.logprobs)

    def take(self) -> PromptScores:
        """Return all parts as one, and drop them."""
        parts, self._parts, self.were_taken = self._parts, [], True
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
