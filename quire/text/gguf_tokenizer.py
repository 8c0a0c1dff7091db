"""Read the tokenizer in a GGUF file's metadata.

Two kinds are supported: "llama", SentencePiece's pieces with scores, from which the merges follow
(merges.py), and "gpt2", byte-level BPE with listed merges. Tokens are normal, unknown, control
(special), user-defined (matched in a text first), unused (padding rows, not tokens) or bytes. As in
llama.cpp, a model's leading space precedes the text and also what follows each added token in it.
Files that cannot be reproduced exactly are rejected. Source: llama-vocab.cpp, convert_hf_to_gguf.py
(ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from quire.base.errors import TokenizerError
from quire.base.gguf_file import GgufArray
from quire.base.gguf_open import open_gguf
from quire.base.show import show
from quire.text.byte_alphabet import stand_ins
from quire.text.gguf_splits import BY_ARCHITECTURE, SPLITS, Split
from quire.text.merges import merges_of
from quire.text.sentencepiece_model import ties_are_harmless
from quire.text.sentencepiece_proto import PieceKind

_KEY = "tokenizer.ggml."
_MARK = "▁"  # SentencePiece's symbol for a space
_MAX_TOKEN_BYTES = 65_536
_SHOWN = 40
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Phi-3's tokens strip the space after them; files do not record it, so the name decides.
_STRIPPING_NAMES = ("phi-3", "phi3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
# Bytes that never occur in UTF-8, control characters, and first bytes of planes without characters.
# Published vocabularies lack tokens for some; their own tokenizers drop such bytes.
_RARE_BYTES = frozenset(
    {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100), *range(0x20), 0x7F} - set(b"\t\n\r")
)
_HINT = "take another conversion of the model, or its checkpoint with tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """Tokens by id, with their kinds."""

    texts: tuple[str, ...]
    kinds: tuple[PieceKind, ...]

    def of_kind(self, *kinds: PieceKind) -> list[str]:
        """Return texts of these kinds, in the order of their ids."""
        return [text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in kinds]

    def ids(self) -> dict[str, int]:
        """Return ids by text, of all but unused tokens."""
        return {
            text: id_
            for id_, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind is not PieceKind.UNUSED
        }


def read_gguf_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a GGUF file, and an equivalent tokenizer_config.json.

    Raises TokenizerError for what cannot be reproduced exactly, WeightsError for a corrupt file.
    """
    metadata = open_gguf(file).metadata
    model = metadata.get(f"{_KEY}model")
    if model not in ("llama", "gpt2"):
        raise TokenizerError(
            f"{file}: {_KEY}model is {show(model)}; 'llama' (SentencePiece) and 'gpt2' (byte-level "
            f"BPE) are supported; {_HINT}"
        )
    vocabulary = _read_vocabulary(file, metadata, has_kinds=model == "llama")
    if model == "llama":
        backend, adds_bos = _of_pieces(file, metadata, vocabulary), True
    else:
        split = _read_split(file, metadata)
        backend, adds_bos = _of_merges(file, metadata, vocabulary, split), split.adds_bos
    _add_found_first(backend, metadata, vocabulary)
    return backend, _config(file, metadata, vocabulary, adds_bos=adds_bos)


def _read_vocabulary(file: Path, metadata: Mapping[str, Any], *, has_kinds: bool) -> _Vocabulary:
    tokens = _array(file, metadata, "tokens", holds_texts=True)
    if tokens is None or not tokens.count:
        raise TokenizerError(f"{file}: there is no {_KEY}tokens; {_HINT}")
    texts = tuple(_decoded(file, id_, raw) for id_, raw in enumerate(tokens.texts()))
    listed = _array(file, metadata, "token_type", holds_texts=False)
    if listed is None and has_kinds:
        raise TokenizerError(f"{file}: there is no {_KEY}token_type; {_HINT}")
    numbers = [int(PieceKind.NORMAL)] * len(texts) if listed is None else listed.numbers().tolist()
    known = {int(kind): kind for kind in PieceKind}
    if len(numbers) != len(texts) or not known.keys() >= set(numbers):
        raise TokenizerError(
            f"{file}: {_KEY}token_type has {len(numbers)} entries for {len(texts)} tokens, of "
            f"kinds {show(sorted(set(numbers)))}; one of 1 to 6 for each is needed; {_HINT}"
        )
    # A token without text can neither be matched nor decoded.
    kinds = tuple(
        known[number] if text else PieceKind.UNUSED
        for number, text in zip(numbers, texts, strict=True)
    )
    vocabulary = _Vocabulary(texts=texts, kinds=kinds)
    if len(vocabulary.ids()) != len(texts) - kinds.count(PieceKind.UNUSED):
        _raise_twice(file, vocabulary)
    return vocabulary


def _decoded(file: Path, id_: int, raw: bytes) -> str:
    if len(raw) > _MAX_TOKEN_BYTES:
        raise TokenizerError(
            f"{file}: the token {id_} has {len(raw)} bytes; at most {_MAX_TOKEN_BYTES} are allowed"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise TokenizerError(
            f"{file}: the token {id_} is {raw[:_SHOWN]!r}, not UTF-8; {_HINT}"
        ) from None


def _raise_twice(file: Path, vocabulary: _Vocabulary) -> None:
    seen: dict[str, int] = {}
    for id_, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind is not PieceKind.UNUSED and text in seen:
            raise TokenizerError(
                f"{file}: the tokens {seen[text]} and {id_} are both {text[:_SHOWN]!r}; {_HINT}"
            )
        seen[text] = id_


def _array(
    file: Path, metadata: Mapping[str, Any], name: str, *, holds_texts: bool
) -> GgufArray | None:
    value = metadata.get(f"{_KEY}{name}")
    if value is None:
        return None
    if not isinstance(value, GgufArray) or (value.count and value.holds_texts != holds_texts):
        what = "strings" if holds_texts else "numbers"
        raise TokenizerError(f"{file}: {_KEY}{name} must be an array of {what}; {_HINT}")
    return value


# ---- SentencePiece


def _of_pieces(
    file: Path, metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> tokenizers.Tokenizer:
    scores = _array(file, metadata, "scores", holds_texts=False)
    if scores is None or scores.count != len(vocabulary.texts):
        found = "missing" if scores is None else f"{scores.count} numbers"
        raise TokenizerError(
            f"{file}: {_KEY}scores is {found}; one for each of {len(vocabulary.texts)} tokens is "
            f"needed; {_HINT}"
        )
    by_text = {
        text: float(score)
        for text, score, kind in zip(
            vocabulary.texts, scores.numbers().tolist(), vocabulary.kinds, strict=True
        )
        if kind is PieceKind.NORMAL
    }
    prefixed = _flag(file, metadata, "add_space_prefix", default=True)
    if problem := _why_not_exact(file, metadata, vocabulary, by_text, prefixed=prefixed):
        raise TokenizerError(f"{file}: its tokenizer {problem}; {_HINT}")
    # With equal scores the leftmost merges first and grows to its end, so the longest precedes.
    ordered = sorted(by_text, key=lambda text: (-by_text[text], -len(text)))
    merges = merges_of(ordered, {text: place for place, text in enumerate(ordered)})
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids(),
            merges,
            unk_token=_unknown(metadata, vocabulary),
            fuse_unk=True,
            byte_fallback=PieceKind.BYTE in vocabulary.kinds,
        )
    )
    escape = normalizers.Replace(" ", _MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_MARK), escape]) if prefixed else escape
    )
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _unknown(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> str | None:
    """Return the unknown token: the one the file names, else the only one of that kind.

    Phi-3's file also gives that kind to padding rows.
    """
    of_kind = vocabulary.of_kind(PieceKind.UNKNOWN)
    id_ = metadata.get(f"{_KEY}unknown_token_id")
    if isinstance(id_, int) and 0 <= id_ < len(vocabulary.texts):
        return vocabulary.texts[id_]
    return of_kind[0] if len(of_kind) == 1 else None


def _why_not_exact(
    file: Path,
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    by_text: Mapping[str, float],
    *,
    prefixed: bool,
) -> str | None:
    if metadata.get(f"{_KEY}precompiled_charsmap") is not None or _flag(
        file, metadata, "remove_extra_whitespaces", default=False
    ):
        return "normalizes its text, which is not supported"
    if _unknown(metadata, vocabulary) is None:
        return f"has {vocabulary.kinds.count(PieceKind.UNKNOWN)} unknown tokens; one is needed"
    if not ties_are_harmless(by_text):
        return "gives several tokens the same score, which leaves the order of merges open"
    known = by_text.keys()
    if not known >= {character for text in known for character in text}:
        return "has tokens with characters that are not tokens"
    spelled = {f"<0x{byte:02X}>" for byte in range(256)}
    if PieceKind.BYTE in vocabulary.kinds and set(vocabulary.of_kind(PieceKind.BYTE)) != spelled:
        return "falls back to bytes that are not tokens"
    marked = any(_MARK in text for text in vocabulary.of_kind(PieceKind.USER_DEFINED))
    if marked and prefixed:
        return "has user-defined tokens with spaces and adds a space before each text"
    return None


# ---- byte-level BPE


def _read_split(file: Path, metadata: Mapping[str, Any]) -> Split:
    architecture = metadata.get("general.architecture")
    by_architecture = BY_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None
    name = metadata.get(f"{_KEY}pre", by_architecture)
    if not isinstance(name, str) or name not in SPLITS:
        found = "missing" if name is None else show(name)
        raise TokenizerError(
            f"{file}: {_KEY}pre, which names how text is split before merging, is {found}; known: "
            f"{', '.join(SPLITS)}; {_HINT}"
        )
    if _flag(file, metadata, "add_space_prefix", default=False):
        raise TokenizerError(f"{file}: {_KEY}add_space_prefix is true beside {name}; {_HINT}")
    return SPLITS[name]


def _of_merges(
    file: Path, metadata: Mapping[str, Any], vocabulary: _Vocabulary, split: Split
) -> tokenizers.Tokenizer:
    listed = _array(file, metadata, "merges", holds_texts=True)
    if listed is None:
        raise TokenizerError(f"{file}: there is no {_KEY}merges; {_HINT}")
    ids = vocabulary.ids()
    missing = [byte for byte, character in enumerate(stand_ins()) if character not in ids]
    if not _RARE_BYTES.issuperset(missing):
        raise TokenizerError(
            f"{file}: no token for {len(missing)} of the 256 bytes, the first 0x{missing[0]:02X}, "
            f"so that some texts have no encoding; {_HINT}"
        )
    merges: list[tuple[str, str]] = []
    for number, raw in enumerate(listed.texts()):
        text = raw.decode(errors="replace")
        # A token may begin with the separator, a space.
        left, space, right = text[:1], *text[1:].partition(" ")[1:]
        left += text[1:].partition(" ")[0]
        if not space or not {left, right, left + right} <= ids.keys():
            raise TokenizerError(
                f"{file}: merge {number} is {text[:_SHOWN]!r}; two tokens that form a third, "
                f"separated by a space, are expected; {_HINT}"
            )
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=split.whole_words))
    if (normalizer := split.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


# ---- both


def _add_found_first(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> None:
    """Register the tokens that are matched in a text first, special or not."""
    name = str(metadata.get("general.name", "")).lower()
    is_stripping = any(part in name for part in _STRIPPING_NAMES)
    special, plain = [], []
    for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True):
        rstrip = is_stripping and text not in _NOT_STRIPPING
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN):
            special.append(
                tokenizers.AddedToken(text, special=True, normalized=False, rstrip=rstrip)
            )
        elif kind is PieceKind.USER_DEFINED:
            # A token with space symbols is matched in the normalized text.
            is_marked = _MARK in text
            plain.append(tokenizers.AddedToken(text, normalized=is_marked, rstrip=rstrip))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _config(
    file: Path, metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, adds_bos: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for role, key in _ROLES.items():
        id_ = metadata.get(f"{_KEY}{key}")
        if id_ is None:
            continue
        is_id = isinstance(id_, int) and not isinstance(id_, bool)
        if not is_id or not 0 <= id_ < len(vocabulary.texts):
            raise TokenizerError(
                f"{file}: {_KEY}{key} is {show(id_)}; an id below {len(vocabulary.texts)} is "
                f"allowed; {_HINT}"
            )
        if vocabulary.kinds[id_] is not PieceKind.UNUSED:
            config[role] = vocabulary.texts[id_]
    config["add_bos_token"] = _flag(
        file, metadata, "add_bos_token", default=adds_bos and "bos_token" in config
    )
    config["add_eos_token"] = _flag(file, metadata, "add_eos_token", default=False)
    return config


def _flag(file: Path, metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(f"{_KEY}{name}", default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{file}: {_KEY}{name} is {show(value)}; true or false is expected")
    return value
