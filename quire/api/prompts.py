"""Texts to token ids at the edge: long texts are tokenized in a thread, others go on meanwhile.

Knows the tokenizer, the vocabulary and the context length; whether prompt and all of the output fit
together is the engine's to say. Always holds: ids that leave here are plain ints the model has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.serving import Engine
from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.show import show
from quire.engine.requests import prompt_too_long

# Tokenizing so many characters takes about a millisecond.
_SHORT_CHARS = 4096


def most_tokens(given: Mapping[str, Any], engine: Engine, max_tokens: int | None) -> int | None:
    """truncate_prompt_tokens: the last so many tokens of a prompt are kept; None keeps all.

    -1 keeps what the context has room for beside max_tokens (or one token).
    """
    asked = given.get("truncate_prompt_tokens")
    if asked is None:
        return None
    context = engine.card.max_model_len
    if isinstance(asked, bool) or not isinstance(asked, int) or (asked < 1 and asked != -1):
        raise InvalidParameter(
            f"truncate_prompt_tokens is {show(asked)}; a whole number from 1 is allowed, or -1 for "
            "what the context has room for",
            param="truncate_prompt_tokens",
        )
    if given.get("echo"):
        raise InvalidParameter(
            "truncate_prompt_tokens and echo are both given; an echo tells the prompt as it was "
            "sent: leave one out",
            param="truncate_prompt_tokens",
        )
    return asked if asked > 0 else max(context - (1 if max_tokens is None else max_tokens), 1)


async def encode(
    engine: Engine,
    text: str,
    *,
    add_special_tokens: bool,
    least_output: int = 1,
    keep_tokens: int | None = None,
    param: str = "prompt",
) -> list[int]:
    """The ids of `text`. A text too long for the context in any tokens is not even looked at.

    param: the field it came in. least_output: tokens there must be room for behind it; 0 where it
    is only scored. keep_tokens: of a longer text only the last so many. Raises ContextTooLong
    and InvalidParameter.
    """
    if keep_tokens is not None:
        encoded = engine.tokenizer.encode
        ids = await asyncio.to_thread(encoded, text, add_special_tokens=add_special_tokens)
        return ids[-keep_tokens:]
    least_tokens = engine.tokenizer.least_tokens(text)
    if least_tokens + least_output > engine.card.max_model_len:
        found = f"{len(text)} characters, so at least {least_tokens} tokens"
        raise _too_long(engine, found, least_output, param)
    if len(text) <= _SHORT_CHARS:
        ids = engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        encoded = engine.tokenizer.encode
        ids = await asyncio.to_thread(encoded, text, add_special_tokens=add_special_tokens)
    if len(ids) + least_output > engine.card.max_model_len:
        raise _too_long(engine, f"{len(ids)} tokens", least_output, param)
    return ids


def checked_ids(
    engine: Engine,
    token_ids: Sequence[Any],
    *,
    least_output: int = 1,
    keep_tokens: int | None = None,
    param: str = "prompt",
) -> list[int]:
    """Token ids a caller gave as field `param`.

    Raises InvalidParameter, and ContextTooLong with both numbers.
    """
    card = engine.card
    if keep_tokens is not None:
        token_ids = token_ids[-keep_tokens:]
    if len(token_ids) + least_output > card.max_model_len:
        raise _too_long(engine, f"{len(token_ids)} tokens", least_output, param)
    if not token_ids:
        raise InvalidParameter(
            "the prompt is an empty list; give at least one token id", param=param
        )
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < card.vocab_size:
            raise InvalidParameter(
                f"the prompt holds {show(token_id)}; token ids from 0 to {card.vocab_size - 1} "
                "are allowed",
                param=param,
            )
    return list(token_ids)


def _too_long(engine: Engine, found: str, least_output: int, param: str) -> ContextTooLong:
    message = prompt_too_long(found, engine.card.max_model_len, least_output=least_output)
    return ContextTooLong(message, param=param)
