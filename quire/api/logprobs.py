"""Log-probabilities as OpenAI's two APIs write them, and those of prompts as vLLM writes them.

JSON has no infinity: what is impossible is written as -9999.0, and what nothing precedes as null.
A token that is only part of a character has no text; completions, which have no bytes field, write
it as "bytes:\\xe2\\x80".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.engine.token_text import TokenText

_IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk; top_logprobs ends with the ids that were listed."""
    content = [
        {
            **_chat_token(token),
            "top_logprobs": [_chat_token(other) for other in (*token.top, *token.listed)],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenText], *, echo_chars: int, num_top: int, lists_ids: bool = False
) -> dict[str, Any]:
    """The `logprobs` of a completion; `echo_chars` is how many characters of echo come before.

    top_logprobs holds the `num_top` best, the ids the caller listed and the chosen token. Its
    keys are texts, which several ids may share: with lists_ids there is also listed_logprobs, for
    each token the numbers of these ids in their order.
    """
    written: dict[str, Any] = {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, num_top) for token in tokens],
        "text_offset": [echo_chars + token.start_chars for token in tokens],
    }
    if lists_ids:
        written["listed_logprobs"] = [
            [_finite(other.logprob) for other in token.listed] for token in tokens
        ]
    return written


def echoed_logprobs(
    first: TokenText, tokens: Sequence[TokenText | None], *, num_chars: int, num_top: int
) -> dict[str, Any]:
    """The same of an echoed prompt of `num_chars` characters; its first token has null."""
    named = [first, *(token for token in tokens if token is not None)]
    written = completion_logprobs(named, echo_chars=0, num_top=num_top)
    written["text_offset"] = [min(offset, num_chars) for offset in written["text_offset"]]
    return written


def joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The `logprobs` of a completion put together from two parts, the prompt's first.

    A prompt's tokens have no listed ids: their entries are null.
    """
    nothing = [None] * len(before["tokens"])
    return {name: [*before.get(name, nothing), *part] for name, part in after.items()}


def prompt_logprobs(
    tokens: Sequence[TokenText | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs`: null first, then the token itself and the `num_top` best, by id."""
    return [
        None
        if token is None
        else {str(other.token_id): _ranked(other) for other in (token, *token.top[:num_top])}
        for token in tokens
    ]


def _top(token: TokenText, num_top: int) -> dict[str, float | None] | None:
    if math.isnan(token.logprob):
        return None
    named = (*token.top[:num_top], *token.listed, token)
    return {_name(other): _finite(other.logprob) for other in named}


def _ranked(token: TokenText) -> dict[str, Any]:
    return {
        "logprob": _finite(token.logprob),
        "rank": token.rank,
        "decoded_token": token.text,
    }


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _name(token: TokenText) -> str:
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, _IMPOSSIBLE)
