"""SampleBatch: what token choice needs to know about each row; TokenChoice: what it yields.

Rows need not share parameters. The semantics, in this order, for a row with raw logits l [V]:

1. log-probabilities (where asked for) are of l itself: l - logsumexp(l), the sum exact in any
   order (sampling/noise.py).
2. l[id] += bias for each logit_bias entry.
3. repetition penalty r over the distinct tokens of prompt and output: l > 0 ? l / r : l * r.
   then for tokens of the output: l -= frequency * count + presence.
4. while fewer than min_tokens were generated: l[stop ids] = -inf.
5. temperature 0: the largest l, ties to the lowest id. Else l /= temperature, and
   min_p: drop l < max + log(min_p); top_k: keep the k largest (ties: lower ids first);
   top_p: over what is left, sorted by (probability down, id up), keep the shortest prefix whose
   probability reaches top_p of the remaining mass; then the largest of l + gumbel(seed, stream,
   position, id) over what is kept, ties to the lowest id.

A row with NaN or +inf, in its logits or after step 4 or the temperature, or with nothing left to
choose, is a row error, never a wrong token. Temperatures below 2^-40 count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


def _ints() -> Int32s:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Parameters of R rows; ragged parts are given by starts [R + 1] into flat arrays.

    positions: absolute position the chosen token will have (the noise depends on it).
    history: all known tokens of the row's request, prompt first (read only where the row has a
    penalty; may be empty otherwise); num_prompt_tokens of them are the prompt.
    num_logprobs: -1 none, else the alternatives wanted (0 to 20).
    banned: ids that may not be chosen now (stop ids while min_tokens is not reached).
    """

    temperature: Float32s  # [R]
    top_k: Int32s  # [R] 0 keeps all
    top_p: Float32s  # [R]
    min_p: Float32s  # [R]
    repetition_penalty: Float32s  # [R]
    presence_penalty: Float32s  # [R]
    frequency_penalty: Float32s  # [R]
    seeds: Int64s  # [R]
    streams: Int32s  # [R]
    positions: Int32s  # [R]
    num_prompt_tokens: Int32s  # [R]
    num_logprobs: Int32s  # [R]
    history_starts: Int32s  # [R + 1]
    history: Int32s = field(default_factory=_ints)
    bias_starts: Int32s  # [R + 1]
    bias_ids: Int32s = field(default_factory=_ints)
    bias_values: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    banned_starts: Int32s  # [R + 1]
    banned_ids: Int32s = field(default_factory=_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """token_ids [R], -1 where the row failed; logprobs [R] of the chosen (NaN: not asked for);
    top_ids, top_logprobs [R, K], best first (ties: lower id first), -1 and NaN where unused."""

    token_ids: Int32s
    logprobs: Float32s
    top_ids: Int32s
    top_logprobs: Float32s
