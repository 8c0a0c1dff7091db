"""Train a classifier from outcomes, and report what it would save.

Logistic regression by AdaGrad in plain Python, with a Gaussian prior for the weights. How wide that
is, down to weights of 0, is chosen by outcomes that are left out of the fit. A fifth of the
outcomes, chosen by their features so that equal requests are on one side, is held out: the
report is of these, by a model that has not seen them; the file is of a model trained on all. Always
holds: the same outcomes in the same order give the same file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple
from zlib import crc32

import msgspec

from quire.base.errors import SettingError
from quire.router.classifier import (
    FORMAT,
    MAX_WEIGHT,
    Classifier,
    ClassifierFile,
    sigmoid,
    word_scale,
)
from quire.router.outcome_files import Example
from quire.router.prompt_features import VERSION

MIN_EXAMPLES, MIN_OF_A_KIND = 100, 10
# The last is a cascade without a classifier: the small model tries each request.
THRESHOLDS = tuple(at / 10 for at in range(1, 11))
_HELD_OUT = 5  # one in so many
# Variances of the prior: the values of words are small, since they are scaled.
_WORD_VARIANCE, _FACT_VARIANCE = 25.0, 1.0
# Shares of these, from which the one is taken that predicts best; 0: nothing can be learned.
_PRIORS = (0.0, 0.01, 0.1, 1.0)
_RATE = 0.5
_MAX_PASSES, _MIN_PASSES = 12, 3
# Updates of weights of one fit, so that training ends in some minutes.
_MAX_UPDATES = 30_000_000
_MIN_WEIGHT = 1e-3


class Report(NamedTuple):
    """What the classifier does with held-out outcomes. auc: the share of pairs of a hard and an
    easy request that are in the right order. log_loss, base_log_loss: of its probabilities, and of
    the share of hard ones as the only probability. by_threshold: what a cascade would do."""

    num_examples: int
    num_hard: int
    num_held_out: int
    auc: float
    log_loss: float
    base_log_loss: float
    small_price: float
    by_threshold: list[dict[str, float]]


def train(examples: Sequence[Example], cascade: str = "") -> ClassifierFile:
    """Return the file of a classifier trained on all examples. Raises SettingError for few."""
    check_enough(examples)
    bias, weights = _fitted(examples)
    kept = sorted(one for one in weights.items() if abs(one[1]) >= _MIN_WEIGHT)
    return ClassifierFile(
        format=FORMAT,
        features=VERSION,
        cascade=cascade,
        num_examples=len(examples),
        num_hard=sum(one.is_hard for one in examples),
        bias=_rounded(bias),
        buckets=[bucket for bucket, _ in kept],
        weights=[_rounded(weight) for _, weight in kept],
    )


def report(examples: Sequence[Example], small_price: float) -> Report:
    """Train on four fifths and return what the model says of the rest.

    small_price: of an answer of the small model, as a share of one of the large. Raises
    SettingError for few.
    """
    check_enough(examples)
    held_out = [one for one in examples if _is_held_out(one)]
    learned = [one for one in examples if not _is_held_out(one)]
    if not held_out or len({one.is_hard for one in learned}) < 2:
        raise SettingError(
            f"the {len(examples)} outcomes, or all of one kind, are of one request; log those of "
            "different ones"
        )
    model = Classifier(*_fitted(learned))
    judged = sorted((model.probability(one.features), one.is_hard) for one in held_out)
    share = sum(one.is_hard for one in learned) / len(learned)
    share = min(max(share, 1e-6), 1 - 1e-6)
    return Report(
        num_examples=len(examples),
        num_hard=sum(one.is_hard for one in examples),
        num_held_out=len(held_out),
        auc=_auc(judged),
        log_loss=_log_loss(judged),
        base_log_loss=_log_loss([(share, is_hard) for _, is_hard in judged]),
        small_price=small_price,
        by_threshold=[_row(judged, at, small_price) for at in THRESHOLDS],
    )


def check_enough(examples: Sequence[Example]) -> None:
    """Raise SettingError where too little is known to learn from."""
    num_hard = sum(one.is_hard for one in examples)
    if len(examples) < MIN_EXAMPLES or min(num_hard, len(examples) - num_hard) < MIN_OF_A_KIND:
        raise SettingError(
            f"there are {len(examples)} outcomes, {num_hard} of them of answers that were "
            f"replaced; at least {MIN_EXAMPLES}, with {MIN_OF_A_KIND} of each kind, are needed: "
            "log more"
        )


def file_bytes(file: ClassifierFile) -> bytes:
    """Return the bytes of a file."""
    return msgspec.json.format(msgspec.json.encode(file), indent=0) + b"\n"


def _is_held_out(example: Example, *, within: int = 1) -> bool:
    # Words as text, so that the division does not depend on the byte order.
    return crc32(repr(example.features.words).encode()) // within % _HELD_OUT == 0


def _fitted(examples: Sequence[Example]) -> tuple[float, dict[int, float]]:
    """Return bias and weights, with the prior that predicts best what is left out."""
    learned = [one for one in examples if not _is_held_out(one, within=_HELD_OUT)]
    left_out = [one for one in examples if _is_held_out(one, within=_HELD_OUT)]

    def loss(prior: float) -> float:
        model = Classifier(*_fitted_with(learned, prior))
        return _log_loss([(model.probability(one.features), one.is_hard) for one in left_out])

    both = {one.is_hard for one in learned}
    best = min(_PRIORS, key=loss) if left_out and len(both) == 2 else _PRIORS[0]
    return _fitted_with(examples, best)


def _fitted_with(examples: Sequence[Example], prior: float) -> tuple[float, dict[int, float]]:
    """Return bias and weights. prior: as a share of the variances."""
    rows = [
        ([*one.features.words, *one.features.facts], len(one.features.words),
         word_scale(one.features), one.is_hard)
        for one in examples
    ]  # fmt: skip
    counts = dict[int, int]()
    for buckets, *_ in rows:
        for bucket in buckets:
            counts[bucket] = counts.get(bucket, 0) + 1
    total = sum(map(len, (row[0] for row in rows)))
    passes = min(max(_MAX_UPDATES // max(total, 1), _MIN_PASSES), _MAX_PASSES)
    num_hard = sum(row[3] for row in rows)
    bias = math.log(num_hard / (len(rows) - num_hard))
    if not prior:
        return bias, {}
    weights, squares = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 1e-8)
    bias_squares, order, drawn = 1e-8, list(range(len(rows))), Random(0)
    for _ in range(passes):
        drawn.shuffle(order)
        for at in order:
            buckets, num_words, scale, is_hard = rows[at]
            words = sum(weights[one] for one in buckets[:num_words])
            facts = sum(weights[one] for one in buckets[num_words:])
            error = sigmoid(bias + words * scale + facts) - is_hard
            bias_squares += error * error
            bias -= _RATE * error / math.sqrt(bias_squares)
            for place, bucket in enumerate(buckets):
                is_word = place < num_words
                value, variance = (scale, _WORD_VARIANCE) if is_word else (1.0, _FACT_VARIANCE)
                weight = weights[bucket]
                slope = error * value + weight / (prior * variance * counts[bucket])
                squares[bucket] += slope * slope
                weights[bucket] = weight - _RATE * slope / math.sqrt(squares[bucket])
    return bias, weights


def _auc(judged: Sequence[tuple[float, bool]]) -> float:
    """Return the share of pairs in the right order; 0.5 where there are none. judged: sorted."""
    num_hard = sum(is_hard for _, is_hard in judged)
    num_easy = len(judged) - num_hard
    if not num_hard or not num_easy:
        return 0.5
    right, at, easy_below = 0.0, 0, 0
    while at < len(judged):
        end = at
        while end < len(judged) and judged[end][0] == judged[at][0]:
            end += 1
        hard = sum(is_hard for _, is_hard in judged[at:end])
        easy = end - at - hard
        right += hard * (easy_below + easy / 2)
        easy_below, at = easy_below + easy, end
    return right / (num_hard * num_easy)


def _log_loss(judged: Sequence[tuple[float, bool]]) -> float:
    return -sum(math.log(p if is_hard else 1 - p) for p, is_hard in judged) / max(len(judged), 1)


def _row(
    judged: Sequence[tuple[float, bool]], threshold: float, small_price: float
) -> dict[str, float]:
    """Return what a cascade with this threshold would do. price: of the answers of one request, as
    a share of one by the large model; the small one's is judged, and replaced where it is hard."""
    small = [is_hard for p, is_hard in judged if p <= threshold]
    num, num_large = max(len(judged), 1), len(judged) - len(small)
    replaced = sum(small)
    return {
        "hard_above": threshold,
        "large_at_once": num_large / num,
        "large_needlessly": (num_large - (sum(h for _, h in judged) - replaced)) / num,
        "replaced": replaced / num,
        "price": (num_large + small_price * len(small) + replaced) / num,
    }


def _rounded(value: float) -> float:
    return round(min(max(value, -MAX_WEIGHT), MAX_WEIGHT), 4)
