"""Collect tokens beside a vocabulary: their ids, flags and roles.

This information is spread over tokenizer_config.json (added_tokens_decoder, bos_token and similar,
additional_special_tokens or extra_special_tokens), special_tokens_map.json, added_tokens.json, and
the tokenizer file. This module merges it into one list. It never guesses an id, and reports files
that contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from quire.base.errors import TokenizerError
from quire.base.regular_file import is_present
from quire.text.tokenizer_files import read_file

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_ID = 2**31 - 1


def read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json merged over special_tokens_map.json and added_tokens.json.

    Raises TokenizerError for a broken file.
    """
    config = read_json(folder / "special_tokens_map.json")
    config.update(read_json(folder / "tokenizer_config.json"))
    older = read_json(folder / "added_tokens.json")
    if older and not config.get("added_tokens_decoder"):
        config["added_tokens_decoder"] = {
            str(number): {"content": content, "normalized": False}
            for content, number in older.items()
        }
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no file. Raises TokenizerError if it is broken."""
    if not is_present(file):
        return {}
    content = read_file(file)
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # JSON can escape lone surrogates
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not valid JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds a {type(value).__name__}; an object is allowed")
    return value


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens with a role, as chat templates expect them (bos_token, eos_token, ...)."""
    contents = {name: _content(config.get(name)) for name in _NAMES}
    return {name: content for name, content in contents.items() if content is not None}


def listed_tokens(config: Mapping[str, Any]) -> Iterator[tuple[int, str, dict[str, bool]]]:
    """Yield ids, contents and flags of added_tokens_decoder, by id. Raises TokenizerError."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    for key in sorted(listed, key=lambda key: int(key) if _is_id(key) else -1):
        entry = listed[key]
        content = _content(entry)
        if content is None or not _is_id(key):
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder has {key!r}: {entry!r}; an id and an "
                "object with content are allowed"
            )
        flags = entry if isinstance(entry, Mapping) else {}
        yield int(key), content, {name: bool(flags[name]) for name in _FLAGS if name in flags}


def put_listed(vocabulary: dict[str, int], config: Mapping[str, Any], file: Path) -> None:
    """Add the listed tokens with their ids to a vocabulary, even if ids are left unused."""
    taken = {id_: token for token, id_ in vocabulary.items()}
    for id_, content, _ in listed_tokens(config):
        if vocabulary.get(content, id_) != id_:
            raise _contradiction(file.name, content, id_, vocabulary[content])
        if taken.get(id_, content) != content:
            raise TokenizerError(
                f"tokenizer_config.json gives the id {id_} to {content!r}, {file.name} to "
                f"{taken[id_]!r}; take both files from the same model"
            )
        vocabulary[content] = id_
        taken[id_] = content


def settle_added(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Register the listed tokens as added tokens, and mark those that are special."""
    _add_missing(backend, config)
    contents = set(named_tokens(config).values())
    contents |= {content for _, content, flags in listed_tokens(config) if flags.get("special")}
    for extra in (config.get("additional_special_tokens"), config.get("extra_special_tokens")):
        # The second is a newer name of the first; an object maps roles to tokens.
        listed = list(extra.values()) if isinstance(extra, Mapping) else extra
        if isinstance(listed, list):
            contents |= {content for content in map(_content, listed) if content is not None}
    added = backend.get_added_tokens_decoder()
    already = {token.content for token in added.values() if token.special}
    known = sorted(
        content for content in contents - already if backend.token_to_id(content) is not None
    )
    if known:
        backend.add_special_tokens(
            [tokenizers.AddedToken(content, special=True, normalized=False) for content in known]
        )


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the config lists, and check their ids."""
    listed = list(listed_tokens(config))
    already = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [
        tokenizers.AddedToken(content, **flags)
        for _, content, flags in listed
        if content not in already
    ]
    if missing:
        backend.add_tokens(missing)
    for id_, content, _ in listed:
        found = backend.token_to_id(content)
        if found != id_:
            raise _contradiction("tokenizer.json", content, id_, found)


def _contradiction(file_name: str, content: str, id_: int, found: int | None) -> TokenizerError:
    return TokenizerError(
        f"tokenizer_config.json gives {content!r} the id {id_}, {file_name} {found}; "
        "take both files from the same model"
    )


def _is_id(key: object) -> bool:
    text = str(key)
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= MAX_ID


def _content(value: object) -> str | None:
    """Return the text of a token in a config file: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
