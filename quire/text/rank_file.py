"""Byte-level BPE from files that list its parts: tiktoken's ranks, or vocab.json and merges.txt.

Neither format describes how a text is split before merging: that is known for the families below,
each with its own pattern, and any other is rejected (a wrong pattern silently yields almost correct
ids). The result is a `tokenizers` object, as from a tokenizer.json of the same model. As in
tiktoken, a whole word in the vocabulary is one token. Knows no rules for BOS and EOS.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.base.errors import TokenizerError
from quire.text.added_tokens import MAX_ID, put_listed, read_json
from quire.text.byte_alphabet import stand_ins, written
from quire.text.merges import merges_of
from quire.text.tokenizer_files import read_file
from quire.text.tokenizer_json import HOW_TO_CONVERT
from quire.text.word_patterns import CL100K_WORDS, O200K_WORDS, QWEN_WORDS

_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of a family that its files lack.

    pattern: how text is split before merging; None: as GPT-2 does. num_ranks: in the published
    file. special_tokens: with their ids, used if no config lists any. named: special tokens by
    role. composes: normalize to Unicode NFC first.
    """

    name: str
    pattern: str | None
    num_ranks: int
    special_tokens: Mapping[str, int]
    named: Mapping[str, str]
    adds_bos: bool = False
    composes: bool = False


def _numbered(stem: str, low: int, high: int) -> tuple[str, ...]:
    return tuple(f"<|{stem}_{place}|>" for place in range(low, high))


def _from(first_id: int, *tokens: str) -> dict[str, int]:
    """Give the tokens consecutive ids."""
    return {token: first_id + place for place, token in enumerate(tokens)}


# https://github.com/meta-llama/llama-models, llama3/tokenizer.py; names as of Llama 3.1.
LLAMA_3 = Family(
    name="Llama 3",
    pattern=CL100K_WORDS,
    num_ranks=128_000,
    special_tokens=_from(
        128_000,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *_numbered("reserved_special_token", 0, 2),
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        *_numbered("reserved_special_token", 3, 248),
    ),
    named={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    adds_bos=True,
)
# https://huggingface.co/Qwen/Qwen-7B, tokenization_qwen.py.
QWEN = Family(
    name="Qwen",
    pattern=QWEN_WORDS,
    num_ranks=151_643,
    special_tokens=_from(
        151_643, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *_numbered("extra", 0, 205)
    ),
    named={"eos_token": "<|endoftext|>"},
    composes=True,
)
# https://github.com/openai/gpt-2, encoder.py.
GPT_2 = Family(
    name="GPT-2",
    pattern=None,
    num_ranks=0,
    special_tokens={},
    named=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
)
# https://github.com/openai/tiktoken, tiktoken_ext/openai_public.py.
P50K = Family(
    name="p50k_base",
    pattern=None,
    num_ranks=50_280,
    special_tokens={"<|endoftext|>": 50_256},  # an unused rank
    named={"eos_token": "<|endoftext|>"},
)
CL100K = Family(
    name="cl100k_base",
    pattern=CL100K_WORDS,
    num_ranks=100_256,
    special_tokens={
        **_from(100_257, "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        "<|endofprompt|>": 100_276,
    },
    named={"eos_token": "<|endoftext|>"},
)
O200K = Family(
    name="o200k_base",
    pattern=O200K_WORDS,
    num_ranks=199_998,
    special_tokens={"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
    named={"eos_token": "<|endoftext|>"},
)
_OF_SIZE = {family.num_ranks: family for family in (LLAMA_3, QWEN, P50K, CL100K, O200K)}
_OF_CLASS = {
    "QWenTokenizer": QWEN,
    "Qwen2Tokenizer": QWEN,
    "GPT2Tokenizer": GPT_2,
    "CodeGenTokenizer": GPT_2,
}


def _class_name(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def read_ranks(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Family]:
    """Read tiktoken ranks: lines with a token in base64 and its id.

    Raises TokenizerError for a broken line, with its number, and for an unknown family.
    """
    ranks = _parsed_ranks(file)
    family = _family_of_ranks(file, len(ranks), config)
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    by_rank = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = merges_of(by_rank, vocabulary)
    if "added_tokens_decoder" in config:
        put_listed(vocabulary, config, file)
        special: Mapping[str, int] = {}
    else:
        special = family.special_tokens
        _check_free(file, vocabulary, special)
        vocabulary.update(special)
    backend = _byte_level(vocabulary, merges, family, whole_words=True)
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return backend, family


def read_vocabulary_and_merges(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Family]:
    """Read vocab.json and merges.txt. Raises TokenizerError, with the line of a merge."""
    family = _OF_CLASS.get(_class_name(config)) if _class_name(config) else GPT_2
    file = folder / "vocab.json"
    if family is None:
        raise TokenizerError(
            f"{file}: its tokenizer_class is {_class_name(config)!r}, and vocab.json does not say "
            f"how text is split before merging; known: {', '.join(_OF_CLASS)}. For another, "
            f"{HOW_TO_CONVERT}"
        )
    vocabulary = _checked_ids(file, read_json(file))
    merges = _parsed_merges(folder / "merges.txt", vocabulary)
    _check_bytes(file, vocabulary)
    put_listed(vocabulary, config, file)
    backend = _byte_level(
        vocabulary,
        merges,
        family,
        whole_words=False,
        opens_with_space=config.get("add_prefix_space") is True,
    )
    return backend, family


def looks_like_ranks(content: bytes) -> bool:
    """Return whether a file begins like tiktoken's: base64, a space, a number."""
    first = content[:1024].split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit() and _from_base64(first[0]) is not None


def _byte_level(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    family: Family,
    *,
    whole_words: bool,
    opens_with_space: bool = False,
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    if family.composes:
        backend.normalizer = normalizers.NFC()
    if family.pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=opens_with_space)
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(family.pattern), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=opens_with_space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _family_of_ranks(file: Path, num_ranks: int, config: Mapping[str, Any]) -> Family:
    family = _OF_CLASS.get(_class_name(config))
    if family is None and file.name == "qwen.tiktoken":
        family = QWEN
    if family is None or not family.num_ranks:
        family = _OF_SIZE.get(num_ranks)
    if family is None:
        known = ", ".join(f"{family.name} ({size})" for size, family in _OF_SIZE.items())
        raise TokenizerError(
            f"{file}: {num_ranks} tiktoken ranks match no known family, and such a file does not "
            f"say how text is split before merging; known families and their ranks: {known}; "
            f"Qwen's also by tokenizer_class QWenTokenizer. For another, {HOW_TO_CONVERT}"
        )
    if family.num_ranks != num_ranks and "added_tokens_decoder" not in config:
        raise TokenizerError(
            f"{file}: {num_ranks} ranks; {family.name}'s file has {family.num_ranks}, and its "
            "special tokens follow the last. Copy it again if it was cut short; else list the "
            "special tokens under added_tokens_decoder in tokenizer_config.json"
        )
    return family


def _check_free(file: Path, vocabulary: Mapping[str, int], special: Mapping[str, int]) -> None:
    taken = set(special.values()) & set(vocabulary.values())
    if taken:
        raise TokenizerError(
            f"{file}: gives a token the rank {min(taken)}, which belongs to a special token of its "
            "family; copy the file again"
        )


def _parsed_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_file(file).splitlines(), 1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        raw = _from_base64(token)
        if not raw or not rank.isdigit() or len(rank) > 10 or int(rank) > MAX_ID:
            raise _bad_line(file, number, line, "a token in base64, a space and its rank")
        if raw in ranks:
            raise TokenizerError(
                f"{file}: line {number} gives the token {raw!r} the rank {int(rank)}, an earlier "
                f"line {ranks[raw]}; copy the file again"
            )
        ranks[raw] = int(rank)
    if len(set(ranks.values())) != len(ranks):
        _raise_twice(file, {written(token): rank for token, rank in ranks.items()})
    _check_bytes(file, {written(token) for token in ranks if len(token) == 1})
    return ranks


def _parsed_merges(file: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    try:
        lines = read_file(file).decode().split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8 ({error}); copy it again") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not space or not left or not right or " " in right:
            raise _bad_line(file, number, line, "two tokens with a space between them")
        for part in (left, right, left + right):
            if part not in vocabulary:
                raise TokenizerError(
                    f"{file}: line {number} merges {line[:_SHOWN]!r}, but vocab.json has no "
                    f"{part[:_SHOWN]!r}; take both files from the same model"
                )
        merges.append((left, right))
    return merges


def _checked_ids(file: Path, vocabulary: Mapping[str, Any]) -> dict[str, int]:
    for token, id_ in vocabulary.items():
        if type(id_) is not int or not 0 <= id_ <= MAX_ID:
            raise TokenizerError(
                f"{file}: the id of {token[:_SHOWN]!r} is {id_!r}; a whole number from 0 is allowed"
            )
    if len(set(vocabulary.values())) != len(vocabulary):
        _raise_twice(file, vocabulary)
    return dict(vocabulary)


def _check_bytes(file: Path, tokens: Mapping[str, int] | set[str]) -> None:
    missing = [byte for byte, character in enumerate(stand_ins()) if character not in tokens]
    if missing:
        raise TokenizerError(
            f"{file}: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02X}, "
            "so that some texts have no encoding; copy it again"
        )


def _raise_twice(file: Path, vocabulary: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for token, id_ in vocabulary.items():
        if id_ in seen:
            raise TokenizerError(
                f"{file}: the id {id_} is given to {seen[id_]!r} and to {token!r}; copy it again"
            )
        seen[id_] = token


def _bad_line(file: Path, number: int, line: str | bytes, allowed: str) -> TokenizerError:
    return TokenizerError(
        f"{file}: line {number} is {line[:_SHOWN]!r}; expected: {allowed}; copy it again"
    )


def _from_base64(text: bytes) -> bytes | None:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return None
