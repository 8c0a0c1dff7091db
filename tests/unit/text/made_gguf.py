"""GGUF files with a tokenizer and no tensors, made from tokenizers of other formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gguf_writer import write_gguf
from tests.unit.text.made_files import Piece

KEY = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
Metadata = dict[str, Any]


def of_pieces(pieces: Sequence[Piece], **changes: Any) -> Metadata:
    """Return a SentencePiece model's entries; `changes` by key without the prefix, None
    drops one.
    """
    texts, scores, kinds = zip(*pieces, strict=True)
    named = {"<unk>": "unknown", "<s>": "bos", "</s>": "eos"}
    ids = {f"{role}_token_id": texts.index(text) for text, role in named.items() if text in texts}
    return _entries(
        {
            "model": "llama",
            "pre": "default",
            "tokens": list(texts),
            "scores": [float(score) for score in scores],
            "token_type": list(kinds),
            **ids,
        },
        changes,
    )


def of_json(tokenizer_json: str, split: str, **changes: Any) -> Metadata:
    """Return a byte-level tokenizer.json's entries; unused ids are padded."""
    said = json.loads(tokenizer_json)
    vocabulary = dict(said["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary.values(), NORMAL)
    for token in said["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    texts = {id_: text for text, id_ in vocabulary.items()}
    size = max(texts) + 1
    merges = said["model"]["merges"]
    return _entries(
        {
            "model": "gpt2",
            "pre": split,
            "tokens": [texts.get(id_, f"[PAD{id_}]") for id_ in range(size)],
            "token_type": [kinds.get(id_, UNUSED) for id_ in range(size)],
            "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        },
        changes,
    )


def _entries(content: Metadata, changes: Metadata) -> Metadata:
    content["token_type"] = content["token_type"] or []
    return {f"{KEY}{key}": value for key, value in (content | changes).items() if value is not None}


def write(path: Path, metadata: Metadata) -> Path:
    """Write a file with these entries and no tensors."""
    return write_gguf(path, {"general.architecture": "llama", **metadata}, {})
