"""Names of models as Ollama's clients write them: `NAME:latest` is NAME.

Always holds: a served name that ends with the tag itself is found as it is.
"""

from __future__ import annotations

from starlette.requests import Request

from quire.api.generation.request_context import MODEL_TAG
from quire.engine.model_card import ModelCard

TAG = ":latest"


def take_tag(request: Request) -> None:
    """Let the name of a request's model end with the tag."""
    request.scope[MODEL_TAG] = TAG


def is_served(name: str, card: ModelCard) -> bool:
    """Return whether a name, with or without the tag, is one of the model's."""
    return name in card.names or name.removesuffix(TAG) in card.names
