"""The fields `speculation` and `prediction` as SpeculationParams. No token depends on them.

Knows forms and bounds of the fields; what the server offers is checked with the model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.foreign_fields import BREAKPOINT, check_options
from quire.api.generation.request_context import RequestContext, encode
from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.show import show
from quire.base.speculation_params import MAX_DRAFT_TOKENS, SpeculationParams


async def speculation_params(request: RequestContext) -> SpeculationParams:
    """Return what a request says of draft tokens. Raises InvalidParameter naming the field."""
    given = request.given
    is_on, max_drafts = _speculation(given, request.engine.card.max_draft_tokens)
    if "prediction" not in given:
        return SpeculationParams(is_on=is_on, max_drafts=max_drafts)
    if is_on is False:
        raise InvalidParameter(
            'prediction is given and speculation is "off"; leave one of them out',
            param="prediction",
        )
    text = _predicted_text(given["prediction"])
    try:
        ids = await encode(
            request, text, add_special_tokens=False, min_output=0, param="prediction"
        )
    except ContextTooLong as error:
        most = request.engine.card.max_model_len
        raise InvalidParameter(
            f"prediction has more tokens than the {most} of the model's context, so that no answer "
            "is that text; shorten it to what the answer will repeat, or leave it out",
            param="prediction",
        ) from error
    return SpeculationParams(is_on=is_on, max_drafts=max_drafts, prediction_ids=tuple(ids))


def _speculation(given: Mapping[str, Any], most: int) -> tuple[bool | None, int | None]:
    """Return whether drafts are wanted, None where not said, and how many at most.

    most: what the server allows, which is checked later; 0: it verifies none.
    """
    value = given.get("speculation")
    if value is None:
        return None, None
    if value in ("off", "auto"):
        return value == "auto", None
    if isinstance(value, dict) and value.keys() == {"max_draft_tokens"}:
        num = value["max_draft_tokens"]
        if type(num) is int and num >= 1:
            return True, num
    raise InvalidParameter(
        f'speculation is {show(value)}; "off", "auto" or {{"max_draft_tokens": 1 to '
        f"{most or MAX_DRAFT_TOKENS}}} is allowed",
        param="speculation",
    )


def _predicted_text(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"type", "content"}:
        content = value["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") for part in parts if _is_text(part)]
        if value["type"] == "content" and len(texts) == len(parts):
            return "".join(map(str, texts))
    raise InvalidParameter(
        f'prediction is {show(value)}; {{"type": "content", "content": text}} is allowed, the '
        "content also as a list of text parts",
        param="prediction",
    )


def _is_text(part: Any) -> bool:
    """Return whether a part has a text; a breakpoint of the prompt's cache has no effect here."""
    if not isinstance(part, dict) or part.keys() - {"type", "text", "prompt_cache_breakpoint"}:
        return False
    point = part.get("prompt_cache_breakpoint")
    if point is not None:
        check_options("prompt_cache_breakpoint", point, BREAKPOINT, param="prediction")
    return part.get("type") == "text" and isinstance(part.get("text"), str)
