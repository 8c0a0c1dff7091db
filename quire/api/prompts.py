"""Texts to token ids at the edge: long texts are tokenized in a thread, others go on meanwhile.

Knows the tokenizer, the vocabulary and the context length; whether prompt and output fit together
is the engine's to say. Always holds: ids that leave here are plain ints the model has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from quire.api.serving import Engine
from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.show import show

# Tokenizing so many characters takes about a millisecond.
_SHORT_CHARS = 4096


async def encode(
    engine: Engine, text: str, *, add_special_tokens: bool, least_output: int = 1
) -> list[int]:
    """The ids of `text`. A text too long for the context in any tokens is not even looked at.

    least_output: tokens there must be room for behind it; 0 where it is only scored. Raises
    ContextTooLong and InvalidParameter.
    """
    least_tokens = engine.tokenizer.least_tokens(text)
    if least_tokens + least_output > engine.card.max_model_len:
        found = f"{len(text)} characters, so at least {least_tokens}"
        raise _too_long(engine, found, least_output)
    if len(text) <= _SHORT_CHARS:
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(
        engine.tokenizer.encode, text, add_special_tokens=add_special_tokens
    )


def checked_ids(engine: Engine, token_ids: Sequence[Any], *, least_output: int = 1) -> list[int]:
    """Token ids a caller gave. Raises InvalidParameter, and ContextTooLong with both numbers."""
    card = engine.card
    if len(token_ids) + least_output > card.max_model_len:
        raise _too_long(engine, str(len(token_ids)), least_output)
    if not token_ids:
        raise InvalidParameter(
            "the prompt is an empty list; give at least one token id", param="prompt"
        )
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < card.vocab_size:
            raise InvalidParameter(
                f"the prompt holds {show(token_id)}; token ids from 0 to {card.vocab_size - 1} "
                "are allowed",
                param="prompt",
            )
    return list(token_ids)


def _too_long(engine: Engine, num_tokens: str, least_output: int) -> ContextTooLong:
    needed = ", and at least one token of output is needed" * least_output
    return ContextTooLong(
        f"the prompt has {num_tokens} tokens; prompt and output together may have "
        f"{engine.card.max_model_len}{needed}; shorten the prompt",
        param="prompt",
    )
