"""Parts of a SequenceState: its place in the queue, and what only some requests use.

Records with little logic: layered chunks, scores of prompts, objectives, preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.records import PromptScores, Request


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
class PromptScoreParts:
    """Scores of a prompt, in as many parts as it was computed in, or the sum of its pooled rows
    (prompt_scores.py).

    end: positions before it are scored or pooled, from num_scored on. is_cached_enough: what the
    prefix cache holds needs no computing: only the last position is pooled, which always is
    computed. sums: of a prompt that is pooled, so far. were_taken: whether all were reported.
    """

    end: int
    parts: list[PromptScores] = field(default_factory=list)
    num_scored: int = 0
    is_cached_enough: bool = False
    sums: NDArray[np.int64] | None = None
    were_taken: bool = False

    @classmethod
    def of(cls, request: Request) -> PromptScoreParts:
        """Return the state of a request that is scored or pooled, and not computed yet."""
        length, pooling = len(request.prompt_ids), request.sampling.pooling
        if pooling is None:
            return cls(end=length - 1)
        is_last = pooling == "last"
        return cls(end=length, num_scored=length - 1 if is_last else 0, is_cached_enough=is_last)

    @property
    def next_position(self) -> int | None:
        """The first position to score or to pool; None where all are."""
        return self.num_scored if self.num_scored < self.end else None

    @property
    def needs_rows(self) -> bool:
        """Whether positions must be computed though the prefix cache may hold them."""
        return self.num_scored < self.end and not self.is_cached_enough


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
