"""Log-probabilities as OpenAI's two APIs write them.

JSON has no infinity: what is impossible is written as -9999.0. A token that is only part of a
character has no text; completions, which have no bytes field, write it as "bytes:\\xe2\\x80".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.token_text import TokenText

_IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk."""
    content = [
        {**_chat_token(token), "top_logprobs": [_chat_token(other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenText], *, echo_chars: int, num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a completion; `echo_chars` is how many characters of echo come before.

    top_logprobs holds the `num_top` best and the chosen token, so up to num_top + 1 entries.
    """
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_name(other): _finite(other.logprob) for other in (*token.top[:num_top], token)}
            for token in tokens
        ],
        "text_offset": [echo_chars + token.start_chars for token in tokens],
    }


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _name(token: TokenText) -> str:
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
