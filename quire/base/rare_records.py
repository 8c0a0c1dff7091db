"""Records that most requests do not have: token rules, layers, scores, pooled rows, candidates.

Like those of records.py, frozen numbers and arrays of numbers. Letters: E tokens of a result, C
candidates of a beam, S scored prompt tokens, K alternatives a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Pooled sums are in units of 1 / POOL_SCALE.
POOL_SCALE = 2.0**28


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What a request's words (and its model) mean in token ids; made where the tokenizer is.

    banned_sequences: the last id of one may not follow the others (one id alone: never).
    breaker_ids: tokens across which DRY sees no repeat. shown_ids: special tokens that are text in
    the answer whatever skip_special_tokens says; given only where the engine reads the text, to end
    beams by stop strings.
    """

    banned_sequences: tuple[tuple[int, ...], ...] = ()
    breaker_ids: tuple[int, ...] = ()
    shown_ids: tuple[int, ...] = ()


NO_RULES = TokenRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayers:
    """Some layers of a part of a prompt: positions start .. start+count-1 of the request in `slot`
    go through layers first_layer .. end_layer-1 of num_layers, and what they are then is kept for
    the plan that has the next. store_from: as in StepPlan. Nothing is sampled or scored.
    """

    slot: int
    start: int
    count: int
    store_from: int
    first_layer: int
    end_layer: int
    num_layers: int

    @property
    def is_last(self) -> bool:
        """Whether the part is computed with these."""
        return self.end_layer == self.num_layers

    @property
    def share(self) -> float:
        """These layers, of all."""
        return (self.end_layer - self.first_layer) / self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSums:
    """Sums of final hidden rows of P prompts, in multiples of 1 / POOL_SCALE.

    They are integers, so they do not depend on the order of addition, and parts of one prompt can
    be added. rows: the rows of the plan; counts: how many positions each has summed.
    """

    rows: Int32s  # [P]
    counts: Int32s  # [P]
    sums: Int64s  # [P, hidden width]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """How likely S tokens of prompts were, each given the tokens before it; raw logits.

    `ranks`: 1 for the likeliest token, ties to the lower id. `top_ids` and `top_logprobs` are the
    best alternatives, best first; unused entries are -1 and NaN. Of a request for all alternatives
    `top_logprobs` has the whole vocabulary in order of ids, and `top_ids` nothing. pooled: of
    prompts that are pooled in place of being scored; None where none is.
    """

    logprobs: Float32s  # [S]
    ranks: Int32s  # [S]
    top_ids: Int32s  # [S, K]
    top_logprobs: Float32s  # [S, K]
    pooled: PooledSums | None = None


def only_pooled(pooled: PooledSums) -> PromptScores:
    """Return the scores of prompts that are all pooled."""
    nothing = np.empty(0, np.float32)
    return PromptScores(
        logprobs=nothing,
        ranks=nothing.astype(np.int32),
        top_ids=np.empty((0, 0), np.int32),
        top_logprobs=np.empty((0, 0), np.float32),
        pooled=pooled,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What beams may go on with: the best C tokens of each of E rows, best first.

    `scores`: log-probabilities after bias, penalties and bans, by which beams are compared;
    `logprobs`: the model's own. Unused entries are -1 and NaN, as those of all other rows are.
    `ends`: whether the answer is over with that token, because its grammar is complete or a stop
    string is; empty where no row is watched.
    """

    ids: Int32s  # [E, C]
    scores: Float32s  # [E, C]
    logprobs: Float32s  # [E, C]
    ends: Bools = field(default_factory=lambda: np.empty((0, 0), np.bool_))  # [E, C] or empty


def no_candidates(num_rows: int) -> Candidates:
    """Return the candidates of rows without beams: none."""
    nothing = np.empty((num_rows, 0), np.float32)
    return Candidates(ids=nothing.astype(np.int32), scores=nothing, logprobs=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePin:
    """The first num_tokens of a prompt stay in the prefix cache for lifetime_ms after their use."""

    num_tokens: int
    lifetime_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How tokens of a request are proposed.

    max_drafts: most tokens proposed per step, at least 1. uses_proposer: the engine's proposer is
    asked. prediction_ids: a text that the answer may repeat.
    """

    max_drafts: int
    uses_proposer: bool = True
    prediction_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
