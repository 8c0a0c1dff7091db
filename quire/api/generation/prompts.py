"""Texts to token ids at the edge: long texts are tokenized in a thread, others go on meanwhile.

Knows the tokenizer, the vocabulary and the context length; whether prompt and all of the output fit
together is the engine's to say. Always holds: ids that leave here are plain ints the model has; no
text is tokenized that is beyond `most_text_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.generation.request_context import RequestContext
from quire.api.server_state import Engine
from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.show import show
from quire.engine.client.request_builder import prompt_too_long

# Tokenizing so many characters takes about a millisecond.
_SHORT_CHARS = 4096
# Tokenizing takes 130 times a text's bytes of memory, so that a body of the largest size would
# take a gigabyte. Text has some four bytes a token: what has more than so many fills no context.
_BYTES_A_TOKEN = 16
_LEAST_MOST_BYTES = 1 << 20


def most_text_bytes(engine: Engine) -> int:
    """How long a text may be that is tokenized."""
    return max(_BYTES_A_TOKEN * engine.card.max_model_len, _LEAST_MOST_BYTES)


def check_text_bytes(engine: Engine, text: str, *, param: str) -> None:
    """Refuses a text that would take too long to tokenize. param: the field it came in."""
    most_bytes = most_text_bytes(engine)
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > most_bytes:
        raise InvalidParameter(
            f"{param} makes a text of {num_bytes} bytes; at most {most_bytes} are tokenized at "
            f"once ({_LEAST_MOST_BYTES}, or {_BYTES_A_TOKEN} for each token of the context, where "
            "that is more); send less, or in pieces",
            param=param,
        )


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
    request: RequestContext,
    text: str,
    *,
    add_special_tokens: bool,
    least_output: int = 1,
    keep_tokens: int | None = None,
    param: str = "prompt",
) -> list[int]:
    """The ids of a request's `text`. One too long for the context in any tokens, or beyond
    most_text_bytes, is not even looked at.

    param: the field it came in. least_output: tokens there must be room for behind it; 0 where it
    is only scored. keep_tokens: of a longer text only the last so many. Raises ContextTooLong
    and InvalidParameter.
    """
    engine, encoded = request.engine, request.engine.tokenizer.encode
    if keep_tokens is None:
        min_num_tokens = engine.tokenizer.min_num_tokens(text)
        if min_num_tokens + least_output > engine.card.max_model_len:
            found = f"{len(text)} characters, so at least {min_num_tokens} tokens"
            raise _too_long(engine, found, least_output, param)
    if len(text) <= _SHORT_CHARS:
        ids = encoded(text, add_special_tokens=add_special_tokens)
    else:
        check_text_bytes(engine, text, param=param)
        ids = await request.beside(encoded, text, add_special_tokens=add_special_tokens)
    if keep_tokens is not None:
        return ids[-keep_tokens:]
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
