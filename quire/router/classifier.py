"""Classifier: how likely it is that the small model's answer to a request is replaced.

A logistic regression over hashed features (prompt_features.py). Its weights are a file of JSON that
`quire cascade` writes from logged outcomes: data, no code. Knows no replica and no request.
Always holds: the same file and features give the same probability; a file is of a bounded size and
checked as a whole before it is used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from quire.base.errors import SettingError
from quire.router.prompt_features import NUM_BUCKETS, VERSION, Features

FORMAT: Literal["quire-cascade-classifier"] = "quire-cascade-classifier"
MAX_FILE_BYTES = 8 << 20
MAX_WEIGHT = 1000.0
_MAX_EXPONENT = 30.0

_Bucket = Annotated[int, Meta(ge=0, lt=NUM_BUCKETS)]
_Weight = Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]
_Count = Annotated[int, Meta(ge=0)]


class ClassifierFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file. features: the version of prompt_features.py. weights: of the buckets beside them.
    cascade: that logged the outcomes it was trained on; num_examples, num_hard: how many."""

    format: Literal["quire-cascade-classifier"]
    features: int
    cascade: str = ""
    num_examples: _Count = 0
    num_hard: _Count = 0
    bias: _Weight
    buckets: Annotated[list[_Bucket], Meta(max_length=NUM_BUCKETS)]
    weights: Annotated[list[_Weight], Meta(max_length=NUM_BUCKETS)]


class Classifier:
    """bias, weights: by bucket; of a bucket that is left out the weight is 0."""

    def __init__(self, bias: float, weights: dict[int, float]) -> None:
        self._bias = bias
        self._weights = weights

    def probability(self, features: Features) -> float:
        """Return how likely the request is hard: its answer by the small model is replaced."""
        weights = self._weights
        words = sum(weights.get(one, 0.0) for one in features.words)
        facts = sum(weights.get(one, 0.0) for one in features.facts)
        return sigmoid(self._bias + words * word_scale(features) + facts)


def word_scale(features: Features) -> float:
    """Return the value of each word: less in long prompts, so that these do not outweigh all."""
    return 1.0 / math.sqrt(max(len(features.words), 1))


def sigmoid(value: float) -> float:
    """Return the probability of log-odds."""
    return 1.0 / (1.0 + math.exp(-min(max(value, -_MAX_EXPONENT), _MAX_EXPONENT)))


def read_classifier(path: str) -> Classifier:
    """Read and check a file. Raises SettingError."""
    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(path, f"cannot be read ({error.strerror})") from error
    if len(raw) > MAX_FILE_BYTES:
        raise _wrong(path, f"has more than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(raw, type=ClassifierFile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _wrong(path, f"is no file of weights: {why}") from error
    if found.features != VERSION:
        raise _wrong(
            path, f"is of version {found.features} of the features, and these are {VERSION}"
        )
    if len(found.buckets) != len(found.weights):
        raise _wrong(
            path, f"has {len(found.buckets)} buckets and {len(found.weights)} weights for them"
        )
    weights = dict(zip(found.buckets, found.weights, strict=True))
    if len(weights) < len(found.buckets):
        raise _wrong(path, "has a bucket twice")
    return Classifier(found.bias, weights)


def _wrong(path: str, what: str) -> SettingError:
    return SettingError(
        f"the classifier {path} {what}; write one with `quire cascade OUTCOMES --out {path}`"
    )
