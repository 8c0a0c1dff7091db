"""What is cut: prompts by `truncate_prompt_tokens` and `truncation_side`, limits by the context.

Not entered by a plain request of OpenAI's API. Knows no tokens. Always holds: a prompt is cut only
if the request says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.api.engine_protocol import Engine
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

TRUNCATION = frozenset({"truncate_prompt_tokens", "truncation_side"})
SIDES = ("left", "right")
# A prompt that is cut leaves this share of the context to the answer.
_ROOM_SHARE = 8


def kept_tokens(
    given: Mapping[str, Any], engine: Engine, max_tokens: int | None, default_side: str = "left"
) -> slice | None:
    """Return the tokens of a prompt to keep; None for all. Raises InvalidParameter.

    Those of its end with truncation_side "left", which cuts off the beginning, or of its beginning
    with "right". -1 keeps what the context has room for beside max_tokens (or one token).
    """
    if TRUNCATION.isdisjoint(given):
        return None
    value, side = given.get("truncate_prompt_tokens"), given.get("truncation_side", default_side)
    if side not in SIDES:
        raise InvalidParameter(
            f'truncation_side is {show(side)}; "left" (keep the end) and "right" (keep the '
            "beginning) are allowed",
            param="truncation_side",
        )
    if value is None:
        raise InvalidParameter(
            "truncation_side is given without truncate_prompt_tokens; add that, or leave it out",
            param="truncation_side",
        )
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise InvalidParameter(
            f"truncate_prompt_tokens is {show(value)}; a whole number from 1 is allowed, or -1 for "
            "what the context has room for",
            param="truncate_prompt_tokens",
        )
    if given.get("echo"):
        raise InvalidParameter(
            "truncate_prompt_tokens and echo are both given; an echo repeats the prompt as it was "
            "sent: leave one out",
            param="truncate_prompt_tokens",
        )
    num_kept = value
    if value < 0:
        num_kept = max(engine.card.max_model_len - (1 if max_tokens is None else max_tokens), 1)
    return slice(-num_kept, None) if side == "left" else slice(num_kept)


def answer_room(max_tokens: int | None, max_model_len: int) -> int:
    """Return the tokens that a prompt which is cut leaves to the answer, at most max_tokens."""
    share = max(max_model_len // _ROOM_SHARE, 1)
    return share if max_tokens is None else min(max_tokens, share)


def fitted(sampling: SamplingParams, room_tokens: int) -> SamplingParams:
    """Return the parameters with a max_tokens that the context has room for.

    For APIs in which an answer ends where the context is full, whatever limit was requested.
    """
    asked_tokens = sampling.max_tokens or 0
    if not asked_tokens > room_tokens >= max(sampling.min_tokens, 1):
        return sampling
    return replace(sampling, max_tokens=room_tokens)


def without_middle(token_ids: Sequence[int], *, most: int, first: int) -> tuple[list[int], range]:
    """Return the first and the last ids, `most` together, and the places of those left out.

    first: ids to keep at the beginning; below 0 as many as possible. At least the last id is kept.
    """
    num_first = most - 1 if first < 0 else min(first, most - 1)
    begin_of_last = len(token_ids) - (most - num_first)
    if begin_of_last <= num_first:
        return list(token_ids), range(0)
    kept = [*token_ids[:num_first], *token_ids[begin_of_last:]]
    return kept, range(num_first, begin_of_last)
