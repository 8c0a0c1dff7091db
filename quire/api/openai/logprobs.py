"""Write log-probabilities as OpenAI's two APIs have them.

A first token, which has none, has null. A token that is only part of a character has no text;
completions, which have no bytes field, write it as "bytes:\\xe2\\x80". The alternatives of each
position are encoded at once, so a long prompt holds only bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.api.generation.answer_json import PartedList, finite
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.engine.output.token_text import TokenText


def chat_logprobs(
    tokens: Sequence[TokenText], *, names_ids: bool = False, parted: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice or chunk; top_logprobs ends with the listed ids.

    names_ids: tokens are named by their ids, as `token_id:5`; their bytes are those of the text.
    parted: the list of tokens is a PartedList.
    """

    def written(token: TokenText) -> dict[str, Any]:
        return {**_chat_token(token), **({"token": _id_name(token)} if names_ids else {})}

    def entry(token: TokenText) -> dict[str, Any]:
        tops = [written(other) for other in (*token.top, *token.listed)]
        return {**written(token), "top_logprobs": tops}

    content: Iterable[Any] = map(entry, tokens)
    if parted:
        content = PartedList(lambda: (_encoded(entry(token)) for token in tokens))
    return {"content": content if parted else list(content), "refusal": None}


def completion_logprobs(
    tokens: Iterable[TokenText],
    *,
    echo_chars: int,
    num_top: int,
    lists_ids: bool = False,
    names_ids: bool = False,
    parted: bool = False,
) -> dict[str, Any]:
    """Return the `logprobs` of a completion; `echo_chars` characters of echo precede it.

    top_logprobs has the `num_top` best (-1: all), the listed ids and the chosen token. Its keys are
    texts, which several ids may share: with lists_ids there is also listed_logprobs, for each token
    the log-probabilities of these ids in their order. names_ids: tokens are named by their ids, as
    `token_id:5`. parted: top_logprobs is a PartedList.
    """
    placed = [(token, echo_chars + token.start_chars) for token in tokens]
    return _completion(placed, num_top, lists_ids=lists_ids, names_ids=names_ids, parted=parted)


def echoed_logprobs(
    first: TokenText,
    tokens: Iterable[TokenText | None],
    *,
    echo: str,
    num_top: int,
    special_ids: Collection[int],
    names_ids: bool = False,
    parted: bool = False,
) -> dict[str, Any]:
    """Return the `logprobs` of an echoed prompt; its first token has null."""
    placed = _places(first, tokens, echo, special_ids)
    return _completion(placed, num_top, names_ids=names_ids, parted=parted)


def _completion(
    placed: Iterable[tuple[TokenText, int]],
    num_top: int,
    *,
    lists_ids: bool = False,
    names_ids: bool = False,
    parted: bool = False,
) -> dict[str, Any]:
    name_of = _id_name if names_ids else _name
    names, logprobs, offsets, listed = [], [], [], []
    tops: list[msgspec.Raw] = []
    of_parts: list[TokenText] = []
    for token, offset in placed:
        names.append(name_of(token))
        logprobs.append(finite(token.logprob))
        if parted:
            of_parts.append(token)
        else:
            tops.append(_encoded(_top(token, num_top, name_of)))
        offsets.append(offset)
        if lists_ids:
            listed.append([finite(other.logprob) for other in token.listed])
    written: dict[str, Any] = {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": PartedList(
            lambda: (_encoded(_top(token, num_top, name_of)) for token in of_parts)
        )
        if parted
        else tops,
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
    """Yield each token of a prompt with its offset in `echo`, never beyond its end.

    A special token takes up characters only if the echo has its text: one that was added around
    the text does not, nor one that was given as an id and is skipped in texts.
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
    """Return the `logprobs` of a completion from those of its prompt and its answer.

    The tokens of a prompt have no listed ids: their entries are null.
    """
    nothing = [None] * len(before["tokens"])

    def both(name: str, part: Any) -> Any:
        if not isinstance(part, PartedList):
            return [*before.get(name, nothing), *part]
        return PartedList(lambda: chain(before[name], part))

    return {name: both(name, part) for name, part in after.items()}


def _top(
    token: TokenText, num_top: int, name_of: Callable[[TokenText], str]
) -> dict[str, float | None] | None:
    if math.isnan(token.logprob):
        return None
    top = token.top if num_top == ALL_LOGPROBS else token.top[:num_top]
    named = (*top, *token.listed, token)
    return {name_of(other): finite(other.logprob) for other in named}


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}


def _id_name(token: TokenText) -> str:
    """Return vLLM's name of a token by its id."""
    return f"token_id:{token.token_id}"


def _name(token: TokenText) -> str:
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
