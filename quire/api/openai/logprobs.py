"""Log-probabilities as OpenAI's two APIs write them, and those of prompts as vLLM writes them.

JSON has no infinity: what is impossible is written as -9999.0, and what nothing precedes as null.
A token that is only part of a character has no text; completions, which have no bytes field, write
it as "bytes:\\xe2\\x80". What a position's alternatives are is encoded as soon as it is made, so
that of a long prompt only bytes are held, and how much an answer tells of prompts is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from quire.base.errors import InvalidParameter
from quire.engine.output.token_text import TokenText

_IMPOSSIBLE = -9999.0
# Of prompts, a request: up to some 50 bytes of JSON each. A prompt of 131,072 tokens has 2.75
# million at 20 alternatives a token.
MAX_TOLD = 4_194_304


def check_told(num_told: int, *, param: str) -> None:
    """Refuse an answer that would tell more of prompts than this process should hold."""
    if num_told > MAX_TOLD:
        raise InvalidParameter(
            f"the answer would tell {num_told} numbers of prompts (of each token, for each choice: "
            f"its id, its log-probability, those of alternatives); at most {MAX_TOLD} a request "
            "are allowed: send fewer or shorter prompts, or ask for fewer alternatives or choices",
            param=param,
        )


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
    tokens: Iterable[TokenText], *, echo_chars: int, num_top: int, lists_ids: bool = False
) -> dict[str, Any]:
    """The `logprobs` of a completion; `echo_chars` is how many characters of echo come before.

    top_logprobs holds the `num_top` best, the ids the caller listed and the chosen token. Its
    keys are texts, which several ids may share: with lists_ids there is also listed_logprobs, for
    each token the numbers of these ids in their order.
    """
    placed = ((token, echo_chars + token.start_chars) for token in tokens)
    return _completion(placed, num_top, lists_ids=lists_ids)


def echoed_logprobs(
    first: TokenText,
    tokens: Iterable[TokenText | None],
    *,
    echo: str,
    num_top: int,
    special_ids: Collection[int],
) -> dict[str, Any]:
    """The same of an echoed prompt; its first token has null."""
    return _completion(_places(first, tokens, echo, special_ids), num_top)


def _completion(
    placed: Iterable[tuple[TokenText, int]], num_top: int, *, lists_ids: bool = False
) -> dict[str, Any]:
    names, logprobs, tops, offsets, listed = [], [], [], [], []
    for token, offset in placed:
        names.append(_name(token))
        logprobs.append(_finite(token.logprob))
        tops.append(msgspec.Raw(msgspec.json.encode(_top(token, num_top))))
        offsets.append(offset)
        if lists_ids:
            listed.append([_finite(other.logprob) for other in token.listed])
    written: dict[str, Any] = {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    if lists_ids:
        written["listed_logprobs"] = listed
    return written


def _places(
    first: TokenText,
    tokens: Iterable[TokenText | None],
    echo: str,
    special_ids: Collection[int],
) -> Iterator[tuple[TokenText, int]]:
    """Each token of a prompt with its place in `echo`, never beyond it.

    A special token takes up characters only where the echo spells it: one that was put around the
    text does not, nor one that was given as an id and is left out of texts.
    """
    before, place = first, 0
    yield first, 0
    for token in tokens:
        if token is None:
            continue
        if before.token_id not in special_ids:
            place += token.start_chars - before.start_chars
        elif echo.startswith(before.text, place):
            place += len(before.text)
        before = token
        yield token, min(place, len(echo))


def joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The `logprobs` of a completion put together from two parts, the prompt's first.

    A prompt's tokens have no listed ids: their entries are null.
    """
    nothing = [None] * len(before["tokens"])
    return {name: [*before.get(name, nothing), *part] for name, part in after.items()}


def prompt_logprobs(tokens: Iterable[TokenText | None], num_top: int) -> list[msgspec.Raw | None]:
    """`prompt_logprobs`: null first, then the token itself and the `num_top` best, by id."""
    return [
        None
        if token is None
        else msgspec.Raw(
            msgspec.json.encode(
                {str(other.token_id): _ranked(other) for other in (token, *token.top[:num_top])}
            )
        )
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
