"""Read texts and token ids of a request as token ids that fit the context.

Too long inputs are refused with both numbers; with truncate_prompt_tokens they are cut, and special
tokens around a text (such as the end-of-text token, which gives the vector) stay. Knows the fields
that all routes of this package share. Always holds: no text beyond max_text_bytes is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.engine_protocol import Engine
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext, checked_ids, encode
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.generation.truncation import kept_tokens
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.text.tokenizer import Tokenizer

MAX_INPUTS = 2048  # as OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How inputs become ids. keep_tokens: the most ids of one, None to refuse what is too long;
    from_left: keep its end instead of its beginning."""

    adds_special: bool = True
    keep_tokens: int | None = None
    from_left: bool = False


def cutting_of(given: Mapping[str, Any], engine: Engine) -> Cutting:
    """Return the fields about length. Raises InvalidParameter."""
    kept = kept_tokens(given, engine, 0, default_side="right")
    keep = None if kept is None else abs(kept.start or kept.stop)
    return Cutting(
        adds_special=flag(given, "add_special_tokens", default=True),
        keep_tokens=None if keep is None else min(keep, engine.card.max_model_len),
        from_left=kept is not None and kept.stop is None,
    )


def listed_inputs(value: object, *, param: str) -> list[Any]:
    """Return one input or several, each a text or a list of unchecked ids. Raises
    InvalidParameter."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidParameter(
            f"{param} is {'missing' if value is None else show(value)}; a text, a list of texts, a "
            "list of token ids, or a list of such lists is needed, and none of them empty",
            param=param,
        )
    entries = value if isinstance(value[0], str | list) else [value]
    _check_count(len(entries), param)
    for entry in entries:
        if isinstance(entry, str) != isinstance(entries[0], str) or not isinstance(
            entry, str | list
        ):
            raise InvalidParameter(
                f"{param} mixes kinds: it begins with {show(entries[0])} and holds {show(entry)}; "
                "give only texts, only token ids, or only lists of ids",
                param=param,
            )
    return entries


def listed_texts(value: object, *, param: str) -> list[str]:
    """Return one text or several; each may be an object with a `text`. Raises InvalidParameter."""
    entries = value if isinstance(value, list) else [value]
    _check_count(len(entries), param)
    if value is None or not entries:
        found = "missing" if value is None else "an empty list"
        raise InvalidParameter(
            f"{param} is {found}; a text or a list of texts is needed", param=param
        )
    texts = []
    for entry in entries:
        text = _text_of(entry)
        if text is None:
            raise InvalidParameter(
                f'{param} holds {show(entry)}; texts, or objects such as {{"text": "..."}}, are '
                "allowed",
                param=param,
            )
        texts.append(text)
    return texts


async def input_ids(
    request: RequestContext, entry: Any, cutting: Cutting, *, before: str = "", param: str
) -> list[int]:
    """Return the ids of an input. before: precedes a text. Raises ContextTooLong and
    InvalidParameter."""
    engine, keep = request.engine, cutting.keep_tokens
    if not isinstance(entry, str):
        if keep is not None:
            entry = entry[-keep:] if cutting.from_left else entry[:keep]
        return checked_ids(engine, entry, min_output=0, param=param)
    text = before + entry
    if keep is None:
        ids = await encode(
            request, text, add_special_tokens=cutting.adds_special, min_output=0, param=param
        )
    else:
        check_text_bytes(engine, text, param=param)
        plain = await request.run_in_thread(engine.tokenizer.encode, text, add_special_tokens=False)
        first, last = special_ids(engine.tokenizer) if cutting.adds_special else ([], [])
        ids = [*first, *cut(plain, keep - len(first) - len(last), cutting), *last][:keep]
    if not ids:
        raise InvalidParameter(
            f"{param} holds an empty text, and the tokenizer adds no token to it; give some text",
            param=param,
        )
    return ids


def cut(ids: Sequence[int], most: int, cutting: Cutting) -> Sequence[int]:
    """Return at most `most` of the ids, from the side that is kept."""
    most = max(most, 0)
    return ids[max(len(ids) - most, 0) :] if cutting.from_left else ids[:most]


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text."""
    probe = "a"
    plain = tokenizer.encode(probe, add_special_tokens=False)
    full = tokenizer.encode(probe, add_special_tokens=True)
    at = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), len(full))
    return full[:at], full[at + len(plain) :]


async def yield_regularly(at: int) -> None:
    """Let other requests continue between many short inputs."""
    if at % 8 == 7:
        await asyncio.sleep(0)


def _text_of(entry: object) -> str | None:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and entry.keys() == {"text"} and isinstance(entry["text"], str):
        return entry["text"]
    return None


def _check_count(count: int, param: str) -> None:
    if count > MAX_INPUTS:
        raise InvalidParameter(
            f"{param} has {count} entries; at most {MAX_INPUTS} a request are allowed: send them "
            "in several requests",
            param=param,
        )
