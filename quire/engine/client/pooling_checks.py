"""Whether a model does what a request is for: text, or an embedding.

Knows the card of a model and parameters only. What is refused is refused with what to do.
"""

from __future__ import annotations

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.engine.model_card import ModelCard
from quire.models.pooling_files import PoolingSpec


def check_task(card: ModelCard, sampling: SamplingParams) -> None:
    """Raise InvalidParameter for an embedding of a model without, or text of a model without a
    head."""
    if sampling.pooling is not None:
        pooling_of(card)
    elif not card.generates:
        raise InvalidParameter(
            f"model {card.name} is a decoder without a head and writes no text; send texts to "
            "/v1/embeddings, or serve a model that generates",
            param="model",
        )


def pooling_of(card: ModelCard, *, scores: bool = False) -> PoolingSpec:
    """Return how the model makes embeddings, or with `scores` compares texts.

    Raises InvalidParameter where it does neither.
    """
    if card.pooling is not None and not (card.pooling.embeds or scores):
        raise InvalidParameter(
            f"model {card.name} judges whether a document answers a query and makes no "
            "embeddings; use /v1/rerank or /v1/score, or start with --convert embed",
            param="model",
        )
    if card.pooling is None:
        raise InvalidParameter(
            f"model {card.name} makes no embeddings: it has no files of sentence-transformers "
            "(modules.json), or they are turned off; start with --convert embed to take the last "
            "token's hidden row, or serve an embedding model",
            param="model",
        )
    return card.pooling
