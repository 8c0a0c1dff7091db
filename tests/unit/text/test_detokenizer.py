"""Detokenizer: joined pieces equal the library's whole decode, for any ids and any division."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from quire.base.errors import InvalidParameter, TokenizerError
from quire.models.model_folder import box_path
from quire.text.byte_fallback import RUN_LIMIT
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.data import outside
from tests.drawn import examples
from tests.unit.text.made_files import (
    BPE,
    UNIGRAM,
    bpe_pieces,
    model_bytes,
    write_ranks,
    write_vocabulary,
)
from tests.unit.text.made_tokenizers import (
    LINES,
    byte_level_json,
    made,
    metaspace_json,
    with_decoder,
    with_holes,
    word_piece_json,
)
from tests.unit.text.published import published_tokenizer


@functools.cache
def _json(kind: str) -> str:
    metaspace = metaspace_json()
    match kind:
        case "byte-level":
            return byte_level_json()
        case "metaspace":
            return metaspace
        case "no strip":
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            return with_decoder(metaspace, decoders.Sequence(steps))
        case "strip two":
            steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
            return with_decoder(metaspace, decoders.Sequence(steps))
        case "strip each":
            steps = [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.ByteFallback()]
            return with_decoder(metaspace, decoders.Sequence(steps))
        case "metaspace step":
            return with_decoder(metaspace, decoders.Metaspace())
        case "metaspace never":
            return with_decoder(metaspace, decoders.Metaspace(prepend_scheme="never"))
        case "none":
            return with_decoder(metaspace, None)
        case "word piece":
            return word_piece_json()
        case "word piece as it is":
            return with_decoder(word_piece_json(), decoders.WordPiece(prefix="##", cleanup=False))
        case "byte-level with holes":
            return with_holes(byte_level_json())
        case "metaspace with holes":
            return with_holes(metaspace)
        case "none with holes":
            return with_holes(with_decoder(metaspace, None))
    return outside("stories260K/tokenizer.json").read_text(encoding="utf-8")


KINDS = (
    "word piece",
    "word piece as it is",
    "byte-level with holes",
    "metaspace with holes",
    "none with holes",
    "byte-level",
    "metaspace",
    "no strip",
    "strip two",
    "strip each",
    "metaspace step",
    "metaspace never",
    "none",
    "stories260K",
)


@functools.cache
def _pair(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return made(_json(kind)), tokenizers.Tokenizer.from_str(_json(kind))


FILES = (
    "model in the box",
    "ranks",
    "vocabulary and merges",
    "sentencepiece",
    "sentencepiece by the library",
    "llama3",
    "qwen",
    "llama2",
    "gpt2",
    "phi3",
)


@functools.cache
def _loaded(kind: str) -> Tokenizer:
    """Load a tokenizer of each kind of file, like a server; its model's table is larger."""
    if kind == "model in the box":
        return Tokenizer.load(box_path())
    if kind in ("llama3", "qwen", "llama2", "gpt2", "phi3"):
        return published_tokenizer(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "ranks":
            write_ranks(folder / "qwen.tiktoken")
            listed = {"330": {"content": "<|猫é|>", "special": True}, "331": {"content": "<b>"}}
            config = {"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": listed}
            (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        elif kind == "vocabulary and merges":
            write_vocabulary(folder)
        else:
            model = BPE if kind == "sentencepiece" else UNIGRAM
            (folder / "tokenizer.model").write_bytes(model_bytes(bpe_pieces(), model=model))
        return Tokenizer.load(folder, vocab_size=400)


HARD = (
    *LINES,
    "吾輩は猫である。🇯🇵🇨🇭 👩🏽‍🚀👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 e\u0301o\u0308 नमस्ते\u200d x\ufe0f",
)


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_gives_the_whole_decode_for_any_ids_and_division(kind: str) -> None:
    tokenizer = _loaded(kind)
    library = tokenizer._backend
    texts = [tokenizer.encode(line) for line in HARD]
    low = st.integers(0, min(tokenizer.vocab_size, 400) - 1)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1) | low, max_size=RUN_LIMIT)
    of_texts = st.sampled_from(texts).flatmap(
        lambda ids: st.integers(0, len(ids)).map(lambda start: ids[start : start + 30])
    )

    @given(
        ids=any_ids | of_texts | st.builds(list.__add__, of_texts, any_ids),
        at=st.lists(st.integers(0, 60), max_size=6),
        skip=st.booleans(),
    )
    @settings(max_examples=examples(200), deadline=None)
    def check(ids: list[int], at: list[int], skip: bool) -> None:
        stream = Detokenizer(tokenizer, skip)
        pieces = [stream.push(part) for part in _cuts(ids, at)]
        pieces.append(stream.flush())
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == whole
        if len(ids) < RUN_LIMIT:
            assert whole == library.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", FILES)
@each_case("line", HARD)
def test_valid_text_one_token_at_a_time_never_shows_part_of_a_character(
    kind: str, line: str
) -> None:
    tokenizer = _loaded(kind)
    stream = Detokenizer(tokenizer)
    ids = tokenizer.encode(line)
    pieces = [stream.push([id_]) for id_ in ids]
    pieces.append(stream.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    kept = unicodedata.normalize("NFC", line) if kind in ("ranks", "qwen") else line
    assert "".join(pieces) == kept or kind == "model in the box"


def _cuts(ids: list[int], at: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(place, len(ids)) for place in at), len(ids)]
    return [ids[low:high] for low, high in itertools.pairwise(edges)]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_equal_the_whole_decode_for_any_ids_and_division(kind: str) -> None:
    tokenizer, library = _pair(kind)
    num_ids = tokenizer.vocab_size  # unused ids included
    texts = [library.encode(line).ids for line in LINES]
    any_ids = st.lists(st.integers(0, num_ids - 1), max_size=RUN_LIMIT)
    bytes_only = st.lists(st.integers(3, min(258, num_ids - 1)), max_size=RUN_LIMIT - 1)
    start_of_text = st.sampled_from(texts).map(lambda ids: ids[:24])

    @given(
        ids=any_ids | bytes_only | st.builds(list.__add__, start_of_text, any_ids),
        at=st.lists(st.integers(0, 60), max_size=6),
        skip=st.booleans(),
    )
    @settings(max_examples=examples(300), deadline=None)
    def check(ids: list[int], at: list[int], skip: bool) -> None:
        stream = Detokenizer(tokenizer, skip)
        pieces = [stream.push(part) for part in _cuts(ids, at)]
        pieces.append(stream.flush())
        assert "".join(pieces) == library.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("line", [*LINES, "🐫 犬 ŧ"])
def test_no_piece_of_valid_text_holds_half_a_character(kind: str, line: str) -> None:
    tokenizer, _ = _pair(kind)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([id_]) for id_ in tokenizer.encode(line)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == line
    if line.startswith("🐫"):  # not in the training text, so split over tokens
        assert pieces[:3] == ["", "", "🐫"] or kind == "metaspace"


def test_every_character_has_the_index_of_the_token_that_completed_it() -> None:
    tokenizer, _ = _pair("metaspace")
    ids = tokenizer.encode("a🦙\n\nb")
    stream = Detokenizer(tokenizer)
    spans = stream.spans(ids) + stream.flush_spans()
    for text, index in spans:
        if text != " ":
            assert text in tokenizer.decode(ids[: index + 1])
            assert not tokenizer.decode(ids[:index]).endswith(text) or text == "\n"
    by_text = [text for text, _ in spans]
    assert by_text == ["a", "🦙", "\n", "\n", "b"]
    indexes = [index for _, index in spans]
    assert indexes == sorted(indexes)
    assert indexes[1] == ids.index(3 + 0x99)  # the last byte of the emoji


def test_settled_tokens_are_those_with_emitted_text() -> None:
    tokenizer, _ = _pair("byte-level")
    stream = Detokenizer(tokenizer)
    settled = []
    for id_ in tokenizer.encode("a🐫", add_special_tokens=False):
        stream.push([id_])
        settled.append(stream.num_settled_tokens)
    assert settled[0] == 1
    assert settled[1:-1] == [1] * (len(settled) - 2)
    assert settled[-1] == len(settled)


def test_a_long_run_of_byte_tokens_is_not_held_to_its_end() -> None:
    tokenizer, _ = _pair("metaspace")
    stream = Detokenizer(tokenizer)
    longest_wait, waited, text = 0, 0, "ไทย" * 40
    shown = ""
    for byte in text.encode():
        piece = stream.push([3 + byte])
        waited = 0 if piece else waited + 1
        longest_wait = max(longest_wait, waited)
        shown += piece
    assert shown + stream.flush() == text
    assert longest_wait <= RUN_LIMIT + 3


def test_a_broken_run_is_shown_without_waiting_for_its_end() -> None:
    tokenizer, _ = _pair("metaspace")
    stream = Detokenizer(tokenizer)
    assert stream.push([3 + 0xE3]) == ""
    assert stream.push([3 + 0xFF]) == "\ufffd\ufffd"
    assert stream.push([3 + 0x41]) == "\ufffd"
    assert stream.push([tokenizer.token_id("a") or 0]) == "a"
    assert stream.push([3 + 0x41]) == ""
    assert stream.flush() == "A"


def test_continued_text_keeps_its_leading_space() -> None:
    for kind in ("metaspace", "metaspace step"):
        tokenizer, _ = _pair(kind)
        word = [tokenizer.token_id("▁the") or 0]
        assert Detokenizer(tokenizer).push(word) == "the"
        assert Detokenizer(tokenizer, continues=True).push(word) == " the"


def test_unknown_ids_are_rejected_and_the_stream_continues() -> None:
    tokenizer, _ = _pair("byte-level")
    stream = Detokenizer(tokenizer)
    with pytest.raises(InvalidParameter, match="out of range"):
        stream.push([-1])
    assert stream.push(tokenizer.encode("fine")) == "fine"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
)
def test_an_unstreamable_decoder_is_rejected_by_name(decoder: decoders.Decoder) -> None:
    with pytest.raises(TokenizerError, match=r"has a step \w+ that cannot be streamed.*supported"):
        made(with_decoder(metaspace_json(), decoder))


def test_decoding_looks_each_id_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(byte_level_json())
    looked_up = []
    original = tokenizer.pieces._token_of_id
    monkeypatch.setattr(
        tokenizer.pieces, "_token_of_id", lambda id_: looked_up.append(id_) or original(id_)
    )
    stream = Detokenizer(tokenizer, continues=True)
    for _ in range(100):
        stream.push(tokenizer.encode("the same words again"))
    assert len(looked_up) == len(set(looked_up))


def test_the_story_streams_as_published() -> None:
    folder = outside("stories260K")
    tokenizer = Tokenizer.load(folder)
    greedy = json.loads((folder / "greedy_200.json").read_text(encoding="utf-8"))
    stream = Detokenizer(tokenizer)
    text = "".join(stream.push([id_]) for id_ in greedy["ids"]) + stream.flush()
    assert text == greedy["text"]
