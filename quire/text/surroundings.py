"""Which special tokens surround a text, and which tokens of a tokenizer its model has no row for.

tokenizer_config.json (add_bos_token, add_eos_token) overrides the post-processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from quire.base.errors import TokenizerError
from quire.text.added_tokens import named_tokens

_MAX_SURROUNDING = 64


def surroundings(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    *,
    bos_id: int | None,
    eos_id: int | None,
) -> tuple[list[int], list[int]]:
    """Return the ids put before and after a text, each of BOS and EOS at most once.

    Raises TokenizerError for a named token that the tokenizer does not have.
    """
    probe = "a"
    plain = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    num_added = len(full) - len(plain)
    starts = (at for at in range(num_added + 1) if full[at : at + len(plain)] == plain)
    start = next(starts, 0)
    before, after = full[:start], full[start + len(plain) :]
    if num_added > _MAX_SURROUNDING:
        raise TokenizerError(
            f"its post-processor puts {num_added} tokens around a text; at most "
            f"{_MAX_SURROUNDING} are allowed; re-export the tokenizer"
        )
    if (wanted := _flag(config, "add_bos_token")) is not None:
        _check_has(config, "bos_token", bos_id, wanted)
        before = [id_ for id_ in before if id_ != bos_id]
        before = [bos_id, *before] if wanted and bos_id is not None else before
    if (wanted := _flag(config, "add_eos_token")) is not None:
        _check_has(config, "eos_token", eos_id, wanted)
        after = [id_ for id_ in after if id_ != eos_id]
        after = [*after, eos_id] if wanted and eos_id is not None else after
    return before, after


def _check_has(config: Mapping[str, Any], name: str, id_: int | None, wanted: bool) -> None:
    if wanted and id_ is None:
        raise TokenizerError(
            f"tokenizer_config.json says add_{name} is true, but {name} is "
            f"{named_tokens(config).get(name)!r}, which the tokenizer does not have; name one of "
            f"its tokens, or set add_{name} to false"
        )


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(
        f"tokenizer_config.json: {name} is {value!r}; true, false or null is allowed"
    )


def check_rows(ids: Iterable[int], without_row: Mapping[int, str], vocab_size: int) -> None:
    """Raise TokenizerError for an id that the model has no row for."""
    for id_ in ids:
        if id_ in without_row:
            raise TokenizerError(_past(without_row[id_], id_, vocab_size))


def tokens_past_model(
    vocabulary: Mapping[str, int], added: Mapping[int, object], vocab_size: int
) -> dict[int, str]:
    """Return added tokens for which the model has no row. Raises TokenizerError for other tokens.

    Some checkpoints have an added token or two beyond their table (a padding token, or an image
    token of larger models): they work, and only a text that contains such a token is rejected.
    """
    if not vocab_size or max(vocabulary.values(), default=-1) < vocab_size:
        return {}
    past = {id_: token for token, id_ in vocabulary.items() if id_ >= vocab_size}
    ordinary = sorted(past.keys() - added.keys())
    if ordinary:
        raise TokenizerError(_past(past[ordinary[-1]], ordinary[-1], vocab_size))
    return past


def _past(token: str, id_: int, vocab_size: int) -> str:
    return (
        f"its token {token!r} has the id {id_}, but the model has {vocab_size} ids (vocab_size of "
        "config.json); take tokenizer and model from the same checkpoint"
    )
