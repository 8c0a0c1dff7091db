"""Synthetic tokenizers, so that tests of text do not depend on external data.

One is byte-level BPE trained on a few lines with emoji and Japanese, so that most characters
outside of ASCII are split over tokens; one is like SentencePiece: metaspace, byte fallback, and a
leading space that is dropped. Both have the special tokens <s> and </s> and one plain added token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from quire.text.tokenizer import Tokenizer

LINES = (
    "Once upon a time there was a llama 🦙 who drank tea.",
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "🦙🦙 🏳️‍🌈 👨‍👩‍👧 naïve café Übergröße\n\n\tdef f(x): return x**2",
)
SPECIAL = ("<s>", "</s>")
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def byte_level_json() -> str:
    """Return a tokenizer.json of 300 ids: 256 bytes, merges, two special tokens and <tool>
    (id 299).
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=299,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend.to_str()


@functools.cache
def metaspace_json() -> str:
    """Return a tokenizer.json like a converted SentencePiece model: 259 byte tokens,
    letters, words.
    """
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "the", "a", "b", "▁a", "猫", "▁猫", "é", "▁▁", "▁▁▁", "<", ">"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: place for place, token in enumerate(tokens)},
            [("▁", "a"), ("▁", "▁"), ("▁▁", "▁"), ("▁", "猫")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.add_special_tokens(["<unk>", *SPECIAL])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend.to_str()


@functools.cache
def word_piece_json() -> str:
    """Return a tokenizer.json like BERT's: whole words, and parts of words that begin with ##."""
    words = [
        "[UNK]",
        *SPECIAL,
        "a",
        "the",
        "##s",
        "##a",
        "n't",
        "'",
        "'s",
        ".",
        ",",
        "?",
        "猫",
        "##🦙",
    ]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", *SPECIAL])
    return backend.to_str()


def with_holes(tokenizer_json: str) -> str:
    """Return the same tokenizer with unused ids: ids from 262 on are 40 higher."""
    content = json.loads(tokenizer_json)
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {
        token: id_ + 40 if id_ >= 262 else id_ for token, id_ in vocabulary.items()
    }
    for token in content["added_tokens"]:
        if token["id"] >= 262:
            token["id"] += 40
            content["model"]["vocab"][token["content"]] = token["id"]
    return json.dumps(content)


def with_decoder(tokenizer_json: str, decoder: decoders.Decoder | None) -> str:
    """Return the same tokenizer with another decoder."""
    content = json.loads(tokenizer_json)
    content["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    return json.dumps(content)


def made(
    tokenizer_json: str, config: Mapping[str, Any] | None = None, *, vocab_size: int = 0
) -> Tokenizer:
    """Return a Tokenizer of it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    return Tokenizer(backend, config=NAMED if config is None else config, vocab_size=vocab_size)


def reference(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Return the library's own tokenizer."""
    return tokenizers.Tokenizer.from_str(tokenizer_json)


def write_folder(folder: Path, tokenizer_json: str, config: Mapping[str, Any] | None) -> Path:
    """Write a model directory with just its tokenizer files."""
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
