"""Tokenizers of every kind, saved by transformers, against its AutoTokenizer (`parity`).

Trained here on a few lines; with added tokens that strip spaces, match single words or match
normalized text; with and without tokens around a text. Compared are ids of troublesome texts, and
the texts of those ids and of random ones, with special tokens and without.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.text.tokenizer import Tokenizer
from tests.data import outside

pytestmark = pytest.mark.parity

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
NAMED = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
TEXTS = (
    "", " ", "  a", "a  ", "\n", "\n\n a\n", " Hello world ", "吾輩は猫である。名前はまだ無い。",
    "🦙 🏳️‍🌈👨‍👩‍👧x", "<s>hi</s>", "hi<s> there </s>  <tool>  x", " <tool> a<tool>b <mask> c",
    "word wordpad padword pad. pad", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>", "a<pad>b",
    "\u3000全角\u3000スペース", "e\u0301 é ﬁ Ⅷ", "don't I'm we've 12345 6,789.00", "\x00a\x01",
    "\r\n\t x", "▁under ▁ x", "<0x41> <0x0A>", "a" * 3000 + " b c", "the quick brown fox",
)  # fmt: skip
LINES = [text for text in TEXTS if "<" not in text] * 3

Made = Callable[[], tokenizers.Tokenizer]


def trained(backend: tokenizers.Tokenizer, trainer: Any) -> tokenizers.Tokenizer:
    backend.train_from_iterator(LINES, trainer)
    return backend


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(
        backend,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )


def byte_fallback(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(
        backend,
        trainers.BpeTrainer(vocab_size=450, special_tokens=tokens, show_progress=False),
    )
    content = json.loads(backend.to_str())  # bytes are ordinary tokens of such a file
    added = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": added}))


def prepended() -> tokenizers.Tokenizer:
    """Like Llama 2's file: a normalizer adds the first space, and one after each special token."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    return byte_fallback(backend)


def metaspace() -> tokenizers.Tokenizer:
    """Like newer files: a first space once."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return byte_fallback(backend)


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    return trained(backend, trainer)


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return trained(backend, trainer)


def whole_words() -> tokenizers.Tokenizer:
    """Return a tokenizer without decoder."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return trained(backend, trainer)


KINDS: tuple[Made, ...] = (
    byte_level,
    prepended,
    metaspace,
    unigram,
    word_piece,
    whole_words,
)


def with_added(backend: tokenizers.Tokenizer, *, greedy: bool) -> None:
    """Add chat tokens, and three with other matching; greedy: they strip spaces."""
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens(
        [
            AddedToken("<tool>", lstrip=greedy, rstrip=greedy, normalized=False),
            AddedToken("pad", single_word=True, normalized=greedy),
            AddedToken("<mask>", lstrip=True, normalized=greedy),
        ]
    )


def with_surroundings(backend: tokenizers.Tokenizer) -> None:
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=ids
    )


def agree(folder: Path, texts: Iterable[str], *, num_random: int = 0) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    sequences = []
    for text in texts:
        for special in (True, False):
            right = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == right, text
        sequences.append(right)
    rng = random.Random(7)
    sequences += [
        [rng.randrange(len(theirs)) for _ in range(rng.randrange(1, 9))] for _ in range(num_random)
    ]
    for ids in sequences:
        for skip in (True, False):
            right = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == right, ids


@pytest.mark.parametrize("added", ["plain", "added", "greedy", "around"])
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_ids_and_texts_match_transformers(made: Made, added: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = made()
    if added != "plain":
        with_added(backend, greedy=added == "greedy")
    if added == "around":
        with_surroundings(backend)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)
    saved.save_pretrained(tmp_path)
    agree(tmp_path, TEXTS, num_random=200)


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_troublesome_texts_have_the_ids_of_transformers(made: Made, tmp_path: Path) -> None:
    texts = json.loads(outside("hostile/naughty-strings.json").read_text())
    transformers = pytest.importorskip("transformers")
    backend = made()
    with_added(backend, greedy=True)
    with_surroundings(backend)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)
    saved.save_pretrained(tmp_path)
    agree(tmp_path, texts)


@pytest.mark.parametrize("folder", ["tokenizers/phi3", "tokenizers/gpt2", "stories260K"])
def test_published_files_give_the_ids_of_transformers(folder: str, tmp_path: Path) -> None:
    texts = json.loads(outside("hostile/naughty-strings.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        if (outside(folder) / file).is_file():
            shutil.copy(outside(folder) / file, tmp_path)
    if (tmp_path / "vocab.json").is_file():  # AutoTokenizer requires the class
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    agree(tmp_path, [*TEXTS, *texts], num_random=300)
