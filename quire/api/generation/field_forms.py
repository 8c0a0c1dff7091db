"""Forms in which clients write lists and biases of sampling fields.

llama.cpp's clients send logit_bias as a list of [token id or text, bias], where false means never;
the bias of a text is added to each of its tokens, and of several entries the sum counts.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import MAX_LOGIT_BIAS
from quire.base.show import show
from quire.text.tokenizer import Tokenizer

_MAX_ID_DIGITS = 10
MAX_BIAS_TEXT_CHARS = 256


def one_or_listed(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of texts; one text alone is a list of one."""
    if isinstance(value, str):
        return (value,)
    return listed(name, value, allowed="a string or a list of strings")


def listed(name: str, value: Any, *, allowed: str = "a list") -> tuple[Any, ...]:
    """Return a list of JSON. Raises InvalidParameter."""
    if not isinstance(value, list):
        raise InvalidParameter(f"{name} is {show(value)}; {allowed} is allowed", param=name)
    return tuple(value)


def parsed_list(text: str) -> Any:
    """Return the list that `text` holds as JSON, with or without its brackets; else the text."""
    try:
        value = msgspec.json.decode(text if text.lstrip().startswith("[") else f"[{text}]")
    except (msgspec.DecodeError, ValueError):
        return text
    return tuple(value) if isinstance(value, list) else text


def biases(value: Any, tokenizer: Tokenizer | None) -> dict[int, Any]:
    """Return the biases by token id. Raises InvalidParameter.

    tokenizer: of texts in the list form; None: texts are refused.
    """
    if not isinstance(value, dict | list):
        raise InvalidParameter(
            f"logit_bias is {show(value)}; an object of token ids and numbers is allowed, or a "
            "list of [token id or text, number or false]",
            param="logit_bias",
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidParameter(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
        )
    return _from_list(value, tokenizer) if isinstance(value, list) else _from_object(value)


def _from_object(value: dict[str, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
        if not is_id or int(key) in found:
            raise InvalidParameter(
                f"logit_bias has the key {show(key)}; each key must be one token id, as in "
                '"50256", given once',
                param="logit_bias",
            )
        found[int(key)] = bias
    return found


def _from_list(entries: list[Any], tokenizer: Tokenizer | None) -> dict[int, Any]:
    found: dict[int, float] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2 or not _is_bias(entry[1]):
            raise InvalidParameter(
                f"logit_bias holds {show(entry)}; each entry must be [token id or text, number or "
                "false]",
                param="logit_bias",
            )
        bias = -math.inf if entry[1] is False else float(entry[1])
        for token_id in _ids_of(entry[0], tokenizer):
            found[token_id] = found.get(token_id, 0.0) + bias
    return found


def _is_bias(value: Any) -> bool:
    return value is False or (isinstance(value, int | float) and not isinstance(value, bool))


def _ids_of(token: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(token, int) and not isinstance(token, bool):
        return [token]
    if not isinstance(token, str) or not 0 < len(token) <= MAX_BIAS_TEXT_CHARS:
        raise InvalidParameter(
            f"logit_bias names the token {show(token)}; a token id or a text of 1 to "
            f"{MAX_BIAS_TEXT_CHARS} characters is allowed",
            param="logit_bias",
        )
    ids = [] if tokenizer is None else tokenizer.encode(token, add_special_tokens=False)
    if tokenizer is None or not tokenizer.special_ids.isdisjoint(ids):
        raise InvalidParameter(
            f"logit_bias names the text {show(token)}, which "
            + ("cannot be tokenized here" if tokenizer is None else "spells a special token")
            + "; give token ids",
            param="logit_bias",
        )
    return ids
