"""SentencePiece models: converted or encoded by the library, with the library's own ids."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import TokenizerError
from quire.text.sentencepiece_model import why_not_converted
from quire.text.sentencepiece_proto import read_pieces
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.data import outside
from tests.drawn import examples
from tests.unit.text.made_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNUSED,
    USER_DEFINED,
    Piece,
    bpe_pieces,
    model_bytes,
    trained_model,
)
from tests.unit.text.made_tokenizers import LINES

TEXTS = st.text(max_size=40) | st.text(" athem吾猫🦙\n▁-🏳️‍🌈", max_size=60)


def _load(folder: Path, content: bytes, config: dict[str, Any] | None = None) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return Tokenizer.load(folder)


def _library(content: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def _why(content: bytes, config: dict[str, Any] | None = None) -> str | None:
    return why_not_converted(read_pieces(Path("x.model"), content), config or {})


def _with_user_pieces() -> list[Piece]:
    pieces = [*bpe_pieces(), ("<tool>", 0.0, USER_DEFINED), ("\n\n", 0.0, USER_DEFINED)]
    known = {text for text, _, _ in pieces}
    return [*pieces, *((text, 0.0, USER_DEFINED) for text in ("th", "▁▁▁▁") if text not in known)]


def _with_tied_runs() -> list[Piece]:
    """As in Llama 2: runs of spaces, all merged last and with equal scores."""
    kept = [piece for piece in bpe_pieces() if set(piece[0]) != {"▁"} or len(piece[0]) == 1]
    return [*kept, *(("▁" * length, -1e9, NORMAL) for length in (2, 4, 8, 5, 6, 3, 7))]


@functools.cache
def _kind(name: str) -> bytes:
    match name:
        case "bpe":
            return model_bytes(bpe_pieces())
        case "no bytes":
            return model_bytes(bpe_pieces(byte_fallback=False), byte_fallback=False)
        case "no prefix":
            return model_bytes(bpe_pieces(), add_dummy_prefix=False)
        case "user pieces":
            return model_bytes(_with_user_pieces())
        case "user pieces, no prefix":
            return model_bytes(_with_user_pieces(), add_dummy_prefix=False)
        case "tied runs":
            return model_bytes(_with_tied_runs())
        case "unused":
            pieces = bpe_pieces()
            return model_bytes([*pieces[:-40], (pieces[-40][0], -9.0, UNUSED), *pieces[-39:]])
        case "unigram":
            return model_bytes(bpe_pieces(), model=UNIGRAM)
        case "extra spaces":
            return model_bytes(bpe_pieces(), remove_extra_spaces=True)
        case "suffix":
            return model_bytes(bpe_pieces(), suffix_spaces=True)
    return trained_model(name.removeprefix("trained "))


CONVERTED = ("bpe", "no bytes", "no prefix", "user pieces", "user pieces, no prefix", "tied runs")
BY_LIBRARY = (
    "unused",
    "unigram",
    "extra spaces",
    "suffix",
    "trained unigram",
    "trained bpe",
    "trained char",
    "trained word",
)


@pytest.mark.parametrize("name", CONVERTED)
def test_these_kinds_need_no_package(name: str) -> None:
    assert _why(_kind(name)) is None


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_the_other_kinds_state_why_the_package_is_needed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = _why(_kind(name))
    assert why is not None
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        TokenizerError, match=rf"model {why[:20]}.*pip install 'quire-llm.sentencepiece.'"
    ):
        _load(tmp_path, _kind(name))


@pytest.mark.parametrize("name", [*CONVERTED, *BY_LIBRARY])
def test_ids_match_the_library_for_any_text(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = _kind(name)
    tokenizer, library = _load(tmp_path_factory.mktemp("model"), content), _library(content)

    @given(text=TEXTS | st.sampled_from(LINES))
    @settings(max_examples=examples(150), deadline=None)
    def check(text: str) -> None:
        if not any(special in text for special in ("<unk>", "<s>", "</s>")):
            assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)

    check()


@pytest.mark.parametrize("name", ["bpe", "tied runs", "user pieces"])
def test_runs_of_one_character_of_any_length_match_the_library(name: str, tmp_path: Path) -> None:
    tokenizer, library = _load(tmp_path, _kind(name)), _library(_kind(name))
    for length in range(40):
        for before, after in (("", ""), ("a", ""), ("", "the"), ("a", "\n"), (" a", "aa")):
            for character in " a▁":
                text = before + character * length + after
                assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)


@pytest.mark.parametrize("name", ["bpe", "unigram", "trained unigram"])
def test_special_tokens_in_a_text_are_found_and_legacy_determines_what_follows(
    name: str, tmp_path: Path
) -> None:
    content = _kind(name)
    with_space = _library(content).encode("the")
    without = _library(content + b"\x1a\x02\x18\x00").encode("the")
    for legacy, after in ((None, without), (False, without), (True, with_space)):
        tokenizer = _load(tmp_path, content, {"legacy": legacy})
        bos = tokenizer.bos_id
        assert tokenizer.encode("the</s>the") == [bos, *with_space, tokenizer.eos_id, *after]
        assert tokenizer.encode("<s>the", add_special_tokens=False) == [bos, *after]


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_the_prefix_follows_the_config(name: str, tmp_path: Path) -> None:
    content = _kind(name)
    without = _library(content + b"\x1a\x02\x18\x00").encode("the a")
    tokenizer = _load(tmp_path, content, {"add_prefix_space": False})
    assert tokenizer.encode("the a", add_special_tokens=False) == without
    assert tokenizer.decode(without) == "the a"


def test_bos_and_eos_are_added_as_by_the_models_class(tmp_path: Path) -> None:
    for config, ends in (
        ({}, (1, None)),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": None}, (1, None)),
        ({"add_bos_token": False}, (None, None)),
        ({"add_eos_token": True}, (1, 2)),
        ({"bos_token": None}, (None, None)),
        ({"tokenizer_class": "T5Tokenizer"}, (None, 2)),
    ):
        ids = _load(tmp_path, _kind("bpe"), config).encode("a")
        found = (ids[0] if ids[0] == 1 else None, ids[-1] if ids[-1] == 2 else None)
        assert found == ends, config


def test_special_and_byte_pieces_become_text_as_for_other_tokenizers(tmp_path: Path) -> None:
    for name in ("bpe", "unigram"):
        tokenizer = _load(tmp_path, _kind(name))
        assert tokenizer.special_ids == {0, 1, 2}
        assert tokenizer.special_tokens["eos_token"] == "</s>"
        assert tokenizer.decode([1, *tokenizer.encode("a 🦙 b"), 2]) == "a 🦙 b"
        assert tokenizer.decode([1, 0], skip_special_tokens=False) == "<s><unk>"
        assert tokenizer.decode(tokenizer.encode("犬", add_special_tokens=False)[:-1]) != "犬"


def test_listed_tokens_follow_the_pieces_across_unused_ids(tmp_path: Path) -> None:
    listed = {"900": {"content": "<|end|>", "special": True}, "950": {"content": "<tool>"}}
    for name in ("bpe", "unigram"):
        tokenizer = _load(tmp_path, _kind(name), {"added_tokens_decoder": listed})
        ids = tokenizer.encode("a<|end|><tool>", add_special_tokens=False)
        assert ids[-2:] == [900, 950]
        assert tokenizer.decode([900, 925, 950]) == "<tool>"
        assert tokenizer.vocab_size == 951


def _break(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    match rng.randrange(3):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    return content[:at] + content[at + rng.randrange(1, 30) :]


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_a_garbled_model_is_an_error_or_still_a_tokenizer(name: str, tmp_path: Path) -> None:
    rng, num_errors = random.Random(7), 0
    for _ in range(150):
        try:
            _load(tmp_path, _break(_kind(name), rng)).encode("the 猫")
        except TokenizerError as error:
            num_errors += 1
            assert "tokenizer.model" in str(error)  # noqa: PT017
    assert num_errors > 50


@each_case(
    ("change", "why"),
    [
        (lambda pieces: model_bytes(pieces)[:400], r"the field at byte \d+ has \d+ bytes, \d+ are"),
        (lambda pieces: model_bytes(pieces[1:]), r"with 0 unknown pieces; exactly one is needed"),
        (lambda pieces: model_bytes([*pieces, pieces[5]]), r"the piece \d+, '<0x02>', occurs tw"),
        (lambda pieces: model_bytes([*pieces, ("", 0.0, NORMAL)]), r"has 0 bytes of text"),
        (
            lambda pieces: model_bytes([*pieces, ("<0x1>", 0.0, BYTE)]),
            r"'<0x1>', is not of the form",
        ),
        (lambda pieces: model_bytes([*pieces, ("x", 0.0, 9)]), r"is of kind 9; 1 to 6"),
        (lambda pieces: model_bytes(pieces, model=7), r"its model type is 7; 1, 2, 3, 4 are known"),
        (
            lambda pieces: model_bytes(pieces).rpartition(b"\x12\x08\x18")[0],
            r"after \d+ pieces it ends without a model type",
        ),
        (lambda pieces: b"\n\x02\x0a\xff", r"byte"),
        (lambda pieces: b"\n\x03\x0a\x01\xff", r"is not UTF-8"),
        (lambda pieces: b"\x07" + model_bytes(pieces), r"begins with b'\\x07"),
        (lambda pieces: b"\n" + b"\xff" * 12, r"a number ends in the middle at byte"),
        (lambda pieces: b"version https://git-lfs.github.com/spec/v1\n", r"pointer of Git LFS"),
        (lambda pieces: b"", r"begins with b''"),
    ],
)
def test_a_broken_model_is_reported_with_the_position(
    tmp_path: Path, change: Callable[[list[Piece]], bytes], why: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model.*({why})"):
        _load(tmp_path, change(bpe_pieces()))


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([*bpe_pieces(), ("qq", -3.0, NORMAL), ("zz", -3.0, NORMAL)], "pieces of equal score"),
        ([*bpe_pieces(), ("𓀀𓀀", -3.5, NORMAL)], "characters that are not pieces"),
        ([*bpe_pieces(), ("th\0", float("nan"), NORMAL)], "pieces of equal score"),
        ([piece for piece in bpe_pieces() if piece[0] != "<0x41>"], "bytes that are not pieces"),
    ],
)
def test_a_model_without_an_exact_conversion_is_not_converted(
    pieces: list[Piece], why: str
) -> None:
    assert why in str(_why(model_bytes(pieces)))


def test_a_control_piece_is_no_part_of_a_merge(tmp_path: Path) -> None:
    content = model_bytes([*bpe_pieces(), ("[x]", 0.0, CONTROL)])
    tokenizer = _load(tmp_path, content)
    assert len(tokenizer.encode("[x]", add_special_tokens=False)) == 1
    assert tokenizer.encode("[x", add_special_tokens=False) == _library(content).encode("[x")


@pytest.mark.parametrize("name", ["japanese-neko.txt", "tinyshakespeare.txt"])
def test_llama_2_matches_the_library_for_whole_books(name: str) -> None:
    folder = outside("tokenizers/llama2")
    tokenizer = Tokenizer.load(folder, vocab_size=32_000)
    library = _library((folder / "tokenizer.model").read_bytes())
    text = outside(f"text/{name}").read_text(encoding="utf-8")[:300_000]
    for part in (text, *text.splitlines()[:2000]):
        ids = tokenizer.encode(part, add_special_tokens=False)
        assert ids == library.encode(part)
        assert tokenizer.decode(ids) == part
