"""Tokens beside a vocabulary: which ids have them, which are special, which have names.

What is known of them lies scattered: tokenizer_config.json (added_tokens_decoder, bos_token and its
kin, additional_special_tokens or extra_special_tokens), special_tokens_map.json, added_tokens.json,
and the tokenizer file itself. This file makes one list of it. It never guesses an id, and tells
files that contradict.
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
    """tokenizer_config.json over special_tokens_map.json, with what added_tokens.json lists.

    Raises TokenizerError for a file that is broken.
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
    """A JSON object; empty where there is no file. Raises TokenizerError if it is broken."""
    if not is_present(file):
        return {}
    content = read_file(file)
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters are escapes in JSON
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not valid JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds a {type(value).__name__}; an object is allowed")
    return value


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that have a role, as chat templates expect them (bos_token, eos_token, ...)."""
    contents = {name: _content(config.get(name)) for name in _NAMES}
    return {name: content for name, content in contents.items() if content is not None}


def listed_tokens(config: Mapping[str, Any]) -> Iterator[tuple[int, str, dict[str, bool]]]:
    """Ids, contents and flags of added_tokens_decoder, by id. Raises TokenizerError."""
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
    """Give listed tokens their ids in a vocabulary about to be built, holes and all."""
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
    """Have the listed tokens stand in texts as themselves, and mark those that are special."""
    _add_missing(backend, config)
    contents = set(named_tokens(config).values())
    contents |= {content for _, content, flags in listed_tokens(config) if flags.get("special")}
    for extra in (config.get("additional_special_tokens"), config.get("extra_special_tokens")):
        # The newer name of the former; by role where it is an object.
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
    """Tokens that only the config lists are added, at the ids it gives them."""
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
    """A token in a config file: a string, or an object with its string under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
