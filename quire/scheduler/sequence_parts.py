"""Parts of a SequenceState: its place in the queue, and what only some requests use.

Records without methods: layered chunks, scores of prompts, objectives, preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.base.records import PromptScores


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
