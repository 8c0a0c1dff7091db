"""TTFTModel: how long a first token takes, by the tokens to compute and those queued before them.

    seconds = fixed + new_tokens * per_new_token + queued_tokens * per_queued_token

Fitted to the first tokens that were seen, the newest counting most. Errors are relative to the
length, so that long waits do not outweigh all others. While samples do not distinguish a request's
own tokens from queued ones, both cost the same. Knows no replica and reads no clock. Always holds:
no coefficient is negative, and the two rates differ by at most a factor of 16; the same samples
give the same model.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_SAMPLES = 20
_KEEP = 1.0 - 1.0 / 128.0  # what a sample leaves of the weight of those before it
# A first token takes its fixed time as if it had so many tokens more, in the weight of a sample.
_SHORT_TOKENS = 256.0
# A sample counts as at most so many times as long as predicted: a stall says nothing of speed.
_MAX_SURPRISE = 8.0
# Made-up samples that divide the time between the coefficients where the real ones do not.
_PRIOR_WEIGHT, _PRIOR_TOKENS = 0.5, 1024.0
_MAX_RATIO = 4.0
# The upper half of the normal equations' matrix; their right side, and what they are solved for.
_Products = tuple[float, float, float, float, float, float]
_Moments = tuple[float, float, float]


class TTFTCosts(NamedTuple):
    """Seconds."""

    fixed: float
    per_new_token: float
    per_queued_token: float

    def seconds(self, new_tokens: float, queued_tokens: float) -> float:
        """Return how long the first token takes."""
        return self.fixed + new_tokens * self.per_new_token + queued_tokens * self.per_queued_token


class TTFTModel:
    """num_samples: that were noted, at most MIN_SAMPLES."""

    def __init__(self) -> None:
        self.num_samples = 0
        # Upper half of the weighted normal equations of 1, new and queued tokens; products with
        # the seconds; and those of all tokens as one.
        self._products: _Products = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._moments: _Moments = (0.0, 0.0, 0.0)
        self._all_tokens = self._all_moments = 0.0
        self._costs: TTFTCosts | None = None

    def note(self, new_tokens: int, queued_tokens: int, seconds: float) -> None:
        """Note a first token. queued_tokens: that were to be computed there when it was sent."""
        known = self.costs
        if known is not None:
            usual_s = known.seconds(new_tokens, queued_tokens)
            seconds = min(seconds, _MAX_SURPRISE * usual_s) if usual_s > 0 else seconds
        tokens = new_tokens + queued_tokens
        weight = _weight(tokens)
        a, b, c, d, e, f = self._products
        self._products = (
            _KEEP * a + weight,
            _KEEP * b + weight * new_tokens,
            _KEEP * c + weight * queued_tokens,
            _KEEP * d + weight * (new_tokens * new_tokens),
            _KEEP * e + weight * (new_tokens * queued_tokens),
            _KEEP * f + weight * (queued_tokens * queued_tokens),
        )
        x, y, z = self._moments
        self._moments = (
            _KEEP * x + weight * seconds,
            _KEEP * y + weight * new_tokens * seconds,
            _KEEP * z + weight * queued_tokens * seconds,
        )
        self._all_tokens = _KEEP * self._all_tokens + weight * tokens * tokens
        self._all_moments = _KEEP * self._all_moments + weight * tokens * seconds
        self.num_samples = min(self.num_samples + 1, MIN_SAMPLES)
        self._costs = None

    @property
    def costs(self) -> TTFTCosts | None:
        """What was learned; None from fewer than MIN_SAMPLES samples, or of no tokens."""
        if self.num_samples < MIN_SAMPLES or self._all_moments <= 0:
            return None
        if self._costs is None:
            self._costs = self._fitted()
        return self._costs

    def _fitted(self) -> TTFTCosts:
        each = self._all_moments / self._all_tokens  # where all tokens cost the same
        a, b, c, d, e, f = self._products
        x, y, z = self._moments
        made_up = _PRIOR_ROW * _PRIOR_TOKENS
        fixed, new, queued = _solved(
            (a + _PRIOR_FIXED, b, c, d + made_up * _PRIOR_TOKENS, e, f + made_up * _PRIOR_TOKENS),
            (x, y + made_up * each * _PRIOR_TOKENS, z + made_up * each * _PRIOR_TOKENS),
        )
        low, high = each / _MAX_RATIO, each * _MAX_RATIO
        return TTFTCosts(max(fixed, 0.0), min(max(new, low), high), min(max(queued, low), high))


def _weight(tokens: float) -> float:
    return 1.0 / (_SHORT_TOKENS + tokens) ** 2


# Of the made-up samples: one of the fixed time, and one of each kind of tokens.
_PRIOR_FIXED = _PRIOR_WEIGHT * _weight(0.0)
_PRIOR_ROW = _PRIOR_WEIGHT * _weight(_PRIOR_TOKENS)


def _solved(products: _Products, moments: _Moments) -> _Moments:
    """Solve the equations. Their matrix is symmetric and, with the made-up rows, definite."""
    a, b, c, d, e, f = products
    x, y, z = moments
    # Cholesky's factors.
    p = a**0.5
    q, r = b / p, c / p
    s = (d - q * q) ** 0.5
    t = (e - q * r) / s
    u = (f - r * r - t * t) ** 0.5
    x /= p
    y = (y - q * x) / s
    z = (z - r * x - t * y) / u
    third = z / u
    second = (y - t * third) / s
    return (x - q * second - r * third) / p, second, third
