"""Tokenizer: files, special tokens around a text, ids of any kind, and rejections."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.data import outside
from tests.unit.text.made_tokenizers import (
    LINES,
    NAMED,
    byte_level_json,
    made,
    metaspace_json,
    reference,
    write_folder,
)


def _that_adds_bos(tokenizer_json: str) -> str:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    return backend.to_str()


@each_case("tokenizer_json", [byte_level_json(), metaspace_json()])
@each_case("line", [*LINES, "", " ", "\n", "a</s>b", "\0"])
def test_ids_match_the_library_and_text_round_trips(tokenizer_json: str, line: str) -> None:
    tokenizer, library = made(tokenizer_json), reference(tokenizer_json)
    ids = tokenizer.encode(line)
    assert ids == library.encode(line).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(
        ids, skip_special_tokens=False
    )
    if "</s>" not in line:
        assert tokenizer.decode(ids) == line


@pytest.mark.parametrize("json_adds", [False, True])
@pytest.mark.parametrize("config_says", [None, False, True])
def test_bos_is_added_once_or_never_according_to_the_config(
    json_adds: bool, config_says: bool | None
) -> None:
    text = _that_adds_bos(byte_level_json()) if json_adds else byte_level_json()
    tokenizer = made(text, {**NAMED, "add_bos_token": config_says})
    expected = json_adds if config_says is None else config_says
    assert tokenizer.encode("hi").count(0) == (1 if expected else 0)
    assert tokenizer.encode("hi", add_special_tokens=False).count(0) == 0
    assert tokenizer.encode("") == ([0] if expected else [])


def test_eos_is_added_if_configured() -> None:
    tokenizer = made(byte_level_json(), {**NAMED, "add_eos_token": True, "add_bos_token": True})
    ids = tokenizer.encode("hi")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert ids[1:-1] == tokenizer.encode("hi", add_special_tokens=False)


def test_a_nonexistent_bos_cannot_be_added() -> None:
    with pytest.raises(TokenizerError, match=r"add_bos_token is true.*'<nope>'"):
        made(byte_level_json(), {"bos_token": "<nope>", "add_bos_token": True})


def test_an_invalid_flag_is_rejected() -> None:
    with pytest.raises(TokenizerError, match="add_bos_token is 'yes'; true, false or null"):
        made(byte_level_json(), {**NAMED, "add_bos_token": "yes"})


def test_named_tokens_may_be_objects_and_become_special() -> None:
    tokenizer = made(byte_level_json(), {"eos_token": {"content": "<tool>", "lstrip": False}})
    assert tokenizer.special_tokens == {"eos_token": "<tool>"}
    assert tokenizer.eos_id == 299
    assert 299 in tokenizer.special_ids
    assert tokenizer.decode([299]) == ""


@pytest.mark.parametrize("extra", [["<tool>"], {"call_token": "<tool>"}, [{"content": "<tool>"}]])
@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_without_a_role_are_special(name: str, extra: Any) -> None:
    tokenizer = made(byte_level_json(), {**NAMED, name: extra})
    assert 299 in tokenizer.special_ids
    assert tokenizer.decode([299]) == ""
    assert tokenizer.decode([299], skip_special_tokens=False) == "<tool>"


def test_tokens_only_the_config_lists_are_added_at_their_ids() -> None:
    listed = {"300": {"content": "<new>", "special": True}, "301": {"content": "<newer>"}}
    tokenizer = made(byte_level_json(), {**NAMED, "added_tokens_decoder": listed})
    assert tokenizer.encode("<new><newer>") == [300, 301]
    assert tokenizer.decode([300, 301]) == "<newer>"
    assert tokenizer.vocab_size == 302


def test_contradicting_ids_of_config_and_tokenizer_are_named() -> None:
    listed = {"7": {"content": "</s>", "special": True}}
    with pytest.raises(TokenizerError, match=r"'</s>' the id 7, tokenizer\.json 1"):
        made(byte_level_json(), {"added_tokens_decoder": listed})


@pytest.mark.parametrize("token_id", [-1, 300, 10**9])
def test_ids_out_of_range_are_errors_that_name_the_range(token_id: int) -> None:
    tokenizer = made(byte_level_json())
    for use in (lambda: tokenizer.decode([token_id]), lambda: tokenizer.token_text(token_id)):
        with pytest.raises(
            InvalidParameter, match=rf"{token_id} is out of range; ids from 0 to 29"
        ):
            use()


def test_ids_past_the_tokenizer_but_within_the_model_have_no_text() -> None:
    tokenizer = Tokenizer(reference(byte_level_json()), config=NAMED, vocab_size=320)
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([319]) == ""
    with pytest.raises(InvalidParameter):
        tokenizer.decode([320])


@pytest.mark.parametrize("text", ["\ud83e", "ok \udc80", "\udd99\ud83e"])
def test_lone_surrogates_are_rejected_with_their_position(text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"lone surrogate U\+D[89A-F]"):
        made(byte_level_json()).encode(text)


def test_bytes_are_not_text() -> None:
    with pytest.raises(InvalidParameter, match="of type bytes"):
        made(byte_level_json()).encode(b"\xff")  # type: ignore[arg-type]


def test_a_tokenizer_neither_truncates_nor_pads() -> None:
    backend = reference(byte_level_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend, config={}).encode("xyz" * 20)) == 60


def test_token_texts_and_bytes_joined_are_the_text() -> None:
    for tokenizer in (made(byte_level_json()), made(metaspace_json())):
        ids = tokenizer.encode("the 猫 🦙")
        raw = b"".join(tokenizer.token_bytes(id_) for id_ in ids)
        assert raw.decode().strip() == "the 猫 🦙"
    assert made(byte_level_json()).token_text(made(byte_level_json()).encode("🐫")[0]) == "\ufffd"


def test_a_missing_tokenizer_is_an_error_with_files_found_and_advice(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="found nothing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"found config.json. Copy"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"begins with b.x.; a SentencePiece model"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match="no such directory"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\0\0\0"])
def test_a_broken_tokenizer_json_is_an_error_of_the_model(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path, content, None)
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_git_lfs_pointer_in_place_of_a_tokenizer_is_reported(tmp_path: Path) -> None:
    write_folder(tmp_path, "version https://git-lfs.github.com/spec/v1\nsize 5\n", None)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: a pointer of Git LFS"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 20_000])
def test_a_broken_tokenizer_config_is_an_error_of_the_model(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path, byte_level_json(), None)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json"):
        Tokenizer.load(tmp_path)


def test_special_tokens_map_is_read_and_overridden_by_the_config(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_json(), {"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<tool>", "bos_token": "<s>"})
    )
    assert Tokenizer.load(tmp_path).special_tokens == NAMED


@pytest.mark.parametrize("folder", ["stories260K", "tokenizers/phi3"])
def test_published_tokenizers_round_trip_texts(folder: str) -> None:
    tokenizer = Tokenizer.load(outside(folder))
    library = tokenizers.Tokenizer.from_file(str(outside(folder) / "tokenizer.json"))
    strings = json.loads(outside("hostile/naughty-strings.json").read_text(encoding="utf-8"))
    lines = outside("text/japanese-neko.txt").read_text(encoding="utf-8").splitlines()[:200]
    for text in [*LINES, *strings, *lines]:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(
            ids, skip_special_tokens=False
        )


def test_the_story_of_stories260k_decodes_as_published() -> None:
    folder = outside("stories260K")
    tokenizer = Tokenizer.load(folder)
    greedy = json.loads((folder / "greedy_200.json").read_text(encoding="utf-8"))
    assert tokenizer.decode(greedy["prompt_ids"] + greedy["ids"]) == greedy["text"]
    assert tokenizer.encode("") == greedy["prompt_ids"]


def test_a_long_text_matches_the_library_and_does_not_hold_the_interpreter() -> None:
    text = "".join(LINES) * 4000
    tokenizer, library = made(byte_level_json()), reference(byte_level_json())
    others, ended = 0, threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.wait(0.002):
        others += 1
    thread.join()
    assert others > 10  # held all the time it is one or two
    assert tokenizer.encode(text[:9000]) == library.encode(text[:9000]).ids


@each_case("tokenizer_json", [byte_level_json(), metaspace_json()])
@each_case("text", [*LINES, "</s>" * 50, " " * 700, "<tool>\n", "a" * 99, "\0"])
def test_the_minimal_token_count_of_a_text_is_a_lower_bound(tokenizer_json: str, text: str) -> None:
    tokenizer = made(tokenizer_json)
    assert (
        0 < tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    )


def _with(**parts: object) -> str:
    return json.dumps({**json.loads(byte_level_json()), **parts})


@pytest.mark.parametrize(
    ("tokenizer_json", "bounded"),
    [
        (_with(normalizer={"type": "NFC"}), True),
        (_with(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), False),
        (_with(normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}), False),
        (_with(pre_tokenizer={"type": "Whitespace"}), False),
        (_with(pre_tokenizer=None), False),
    ],
)
def test_without_a_bound_on_dropped_text_there_is_no_minimum(
    tokenizer_json: str, bounded: bool
) -> None:
    assert bool(made(tokenizer_json).min_num_tokens("a" * 1000)) == bounded


def test_a_library_panic_is_an_ordinary_error(tmp_path: Path) -> None:
    broken = _with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(write_folder(tmp_path, broken, None))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    slow = _with(pre_tokenizer={**split, "invert": False})
    with pytest.raises(InvalidParameter, match="tokenizer fails"):
        made(slow).encode("a" * 40 + "!")


def test_half_a_character_in_a_config_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_json(), {"bos_token": "\ud800"})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)


def _normalizing(*parts: object) -> str:
    return _with(normalizer={"type": "Sequence", "normalizers": parts})


def _unigram(pieces: list[tuple[str, float]], **more: object) -> str:
    return _with(model={"type": "Unigram", "vocab": pieces, "byte_fallback": False, **more})


_GROWS = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
_DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}


@each_case(
    ("content", "why"),
    [
        (_normalizing(_GROWS, _GROWS, _GROWS, _GROWS), r"text 1e\+12 times as long, 64 are"),
        (_normalizing({"type": "Prepend", "prepend": "x" * 5000}), r"text inf times as long"),
        (
            _with(decoder={"type": "Sequence", "decoders": [_DOUBLES] * 30}),
            r"its decoder may make a text 1\.07374e\+09 times as long, 64 are allowed",
        ),
        (_normalizing(*[{"type": "NFC"}] * 3000), r"its normalizer has 3001 parts, at most 256"),
        (
            _with(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}] * 3000,
                }
            ),
            r"its pre_tokenizer has 3001 parts, at most 256",
        ),
        (_normalizing(_CHARSMAP), r"claims 4294967295 bytes of 8 for its trie"),
        (_normalizing(_CHARSMAP).replace("precompiled", "\\u0070recompiled"), r"claims 4294967295"),
        (_normalizing({**_CHARSMAP, "precompiled_charsmap": "?"}), r"is not base64"),
        (_unigram([("a" * 200_000, 0.0), ("b", 0.0)], unk_id=0), r"a piece has 200000 characters"),
        (_unigram([], unk_id=None), r"unk_id"),
        (_with(model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {}}), r"Missing \[UNK\]"),
        (_with(pre_tokenizer=json.loads("[" * 60 + "]" * 60)), r"cannot be read"),
        (
            _with(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [
                        *([{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 999),
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
                }
            ),
            r"puts 999 tokens around a text; at most 64",
        ),
    ],
)
def test_a_file_that_would_crash_or_flood_the_process_is_rejected(
    tmp_path: Path, content: str, why: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*({why})"):
        Tokenizer.load(write_folder(tmp_path, content, None))


def test_text_the_library_cannot_encode_is_a_client_error() -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    words = _with(model={**model, "max_input_chars_per_word": 9, "vocab": {"a": 0}})
    with pytest.raises(InvalidParameter, match=r"fails on this text \(WordPiece error"):
        made(words, {}).encode("b")


def test_the_same_text_has_the_same_ids_despite_random_training_options() -> None:
    content = json.loads(byte_level_json())
    content["model"]["dropout"] = 0.9
    assert made(json.dumps(content)).encode(LINES[0]) == made(byte_level_json()).encode(LINES[0])
