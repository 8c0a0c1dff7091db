"""Choices that operations have as fields, and constants of their costs.

Knows no operation.
"""

from __future__ import annotations

from enum import StrEnum

# Arithmetic per element of a row that is quantized: magnitude, product, rounding, sum.
QUANTIZING_OPS = 4


class NormForm(StrEnum):
    """RMS norm, or layer norm (which subtracts the mean)."""

    RMS = "rms"
    LAYER = "layer"


class ActivationForm(StrEnum):
    """Functions of the feed-forward half."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


class IdSource(StrEnum):
    """What an embedding is looked up by: token ids, or rope positions (learned positions)."""

    TOKENS = "tokens"
    POSITIONS = "positions"


class RouterScore(StrEnum):
    """How a router's logits become scores: softmax over all experts, or sigmoid of each."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class RoutingForm(StrEnum):
    """The weights of the chosen experts: their scores, or these divided by their sum."""

    SCORES = "scores"
    NORMALIZED = "normalized"
