"""Tokenizers from GGUF files: the ids of the original tokenizers, or a rejection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import TokenizerError
from quire.text.byte_alphabet import stand_ins
from quire.text.chat_template import ChatTemplate
from quire.text.gguf_splits import SPLITS
from quire.text.sentencepiece_proto import read_pieces
from quire.text.template_files import sources_in
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.data import outside
from tests.drawn import examples
from tests.unit.text.made_files import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    bpe_pieces,
    model_bytes,
)
from tests.unit.text.made_gguf import of_json, of_pieces, write
from tests.unit.text.made_tokenizers import LINES, byte_level_json
from tests.unit.text.published import published_tokenizer

TEXTS = st.text(st.sampled_from("the a▁ \n🦙é犬<s>/0129'\t")) | st.text(max_size=20)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def loaded(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(write(folder / "model.gguf", metadata))


def refused(folder: Path, metadata: dict[str, Any]) -> str:
    with pytest.raises(TokenizerError) as caught:
        loaded(folder, metadata)
    assert "model.gguf" in str(caught.value)
    return str(caught.value)


# ---- SentencePiece


def from_model(folder: Path, content: bytes, **config: Any) -> Tokenizer:
    """Return the same model from its own file, with spaces after special tokens as in llama.cpp."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": True, **config}))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_give_the_ids_of_the_original_model(
    prefixed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    found = loaded(folder, of_pieces(bpe_pieces(), add_space_prefix=prefixed))
    right = from_model(folder / "model", model_bytes(bpe_pieces(), add_dummy_prefix=prefixed))
    assert (found.bos_id, found.eos_id, found.special_ids) == (1, 2, {0, 1, 2})
    assert found.special_tokens == right.special_tokens

    @given(text=TEXTS | st.sampled_from(LINES))
    @settings(max_examples=examples(150), deadline=None)
    def check(text: str) -> None:
        ids = found.encode(text)
        assert ids == right.encode(text)
        assert found.decode(ids) == right.decode(ids)

    check()


def test_tokens_beside_the_pieces_are_found_in_texts(tmp_path: Path) -> None:
    pieces = [
        *bpe_pieces(),
        ("<|im_end|>", -1000.0, CONTROL),
        ("<tool>", -1000.0, USER_DEFINED),
        ("  ", -1000.0, USER_DEFINED),
        ("[PAD9]", -1000.0, UNUSED),
    ]
    path = write(tmp_path / "model.gguf", of_pieces(pieces))
    found, end = Tokenizer.load(path, vocab_size=len(pieces)), len(pieces) - 4
    the = found.encode("the", add_special_tokens=False)
    ids = found.encode("the<tool>the<|im_end|>", add_special_tokens=False)
    assert ids == [*the, end + 1, *the, end]
    assert found.encode("a  b", add_special_tokens=False).count(end + 2) == 1
    assert found.decode([*the, end + 1, end]) == "the<tool>"
    assert end in found.special_ids
    assert found.token_id("[PAD9]") is None
    assert found.decode([end + 3], skip_special_tokens=False) == ""


def test_user_pieces_with_marks_are_found_as_by_the_library(tmp_path: Path) -> None:
    pieces = [*bpe_pieces(), ("▁▁", 0.0, USER_DEFINED), ("\n\n", 0.0, USER_DEFINED)]
    found = loaded(tmp_path, of_pieces(pieces, add_space_prefix=False))
    right = from_model(tmp_path / "model", model_bytes(pieces, add_dummy_prefix=False))
    for text in ("a  b", "   a", "a\n\n\nb", "the \n\n the    the"):
        assert found.encode(text) == right.encode(text), text


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ({}, (1, None)),
        ({"add_bos_token": False}, (None, None)),
        ({"add_eos_token": True}, (1, 2)),
        ({"bos_token_id": None}, (None, None)),
    ],
)
def test_bos_and_eos_are_added_according_to_the_file(
    flags: dict[str, Any], ends: tuple[Any, Any], tmp_path: Path
) -> None:
    ids = loaded(tmp_path, of_pieces(bpe_pieces(), **flags)).encode("a")
    assert (ids[0] if ids[0] == 1 else None, ids[-1] if ids[-1] == 2 else None) == ends


def test_phi_3s_tokens_strip_the_space_after_them_by_name(tmp_path: Path) -> None:
    pieces = [*bpe_pieces(), ("<|user|>", -1000.0, USER_DEFINED)]
    plain = loaded(tmp_path, of_pieces(pieces))
    named = loaded(tmp_path, {**of_pieces(pieces), "general.name": "Phi-3 mini"})
    text = "<|user|>\n the"
    assert named.encode(text) == plain.encode("<|user|>the") != plain.encode(text)
    assert named.encode("<s> the") == plain.encode("<s> the")


def test_padding_rows_may_be_of_the_unknown_kind(tmp_path: Path) -> None:
    """Phi-3's file has 53 of them, and the unknown token, which is of the control kind."""
    pieces = [
        (text, score, CONTROL if kind == UNKNOWN else kind) for text, score, kind in bpe_pieces()
    ]
    padded = [*pieces, *((f"[PAD{place}]", -10_000.0, UNKNOWN) for place in range(53))]
    found = loaded(tmp_path, of_pieces(padded))
    right = loaded(tmp_path, of_pieces(bpe_pieces()))
    for text in LINES:
        assert found.encode(text) == right.encode(text)
    assert found.encode("[PAD7]", add_special_tokens=False) == [len(pieces) + 7]


def _tied() -> list[Any]:
    return [
        (text, -1000.0 if kind == NORMAL else score, kind) for text, score, kind in bpe_pieces()
    ]


@each_case(
    ("changes", "said"),
    [
        ({"model": "t5"}, '"t5"'),
        ({"model": "bert"}, "'gpt2' .byte-level BPE. are supported"),
        ({"model": None}, "is null"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "array of strings"),
        ({"token_type": None}, "no tokenizer.ggml.token_type"),
        ({"token_type": [1, 1]}, "has 2 entries for"),
        ({"token_type": [9] * len(bpe_pieces())}, "of kinds .9."),
        ({"scores": None}, "scores is missing"),
        ({"scores": [1.0]}, "scores is 1 numbers"),
        ({"scores": [-1000.0] * len(bpe_pieces())}, "the same score"),
        ({"scores": [float("nan")] * len(bpe_pieces())}, "the same score"),
        ({"remove_extra_whitespaces": True}, "normalizes its text"),
        ({"precompiled_charsmap": [1, 2]}, "normalizes its text"),
        ({"bos_token_id": 10_000}, "bos_token_id is 10000; an id below"),
        ({"bos_token_id": "x"}, "bos_token_id is"),
        ({"add_bos_token": 1}, "add_bos_token is 1; true or false"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true"),
        ({"tokens": ["<unk>"] * len(bpe_pieces())}, "tokens 0 and 1 are both '<unk>'"),
    ],
)  # fmt: skip
def test_pieces_that_cannot_be_read_exactly_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=said):
        loaded(tmp_path, of_pieces(bpe_pieces(), **changes))


def test_inconsistent_pieces_are_rejected(tmp_path: Path) -> None:
    pieces = bpe_pieces()
    two = of_pieces([*pieces, ("<two>", 0.0, UNKNOWN)], unknown_token_id=None)
    assert "unknown tokens" in refused(tmp_path, two)
    assert "not tokens" in refused(tmp_path, of_pieces([*pieces, ("aŋ", -2.5, NORMAL)]))
    assert "bytes" in refused(tmp_path, of_pieces([p for p in pieces if p[0] != "<0x41>"]))
    assert "user-defined" in refused(tmp_path, of_pieces([*pieces, ("▁▁", 0.0, USER_DEFINED)]))
    not_text = {**of_pieces(pieces), "tokenizer.ggml.tokens": [b"\xff"] * len(pieces)}
    assert "not UTF-8" in refused(tmp_path, not_text)


# ---- byte-level BPE


def test_merges_give_the_ids_of_the_original_tokenizer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("merges")
    found = loaded(folder, of_json(byte_level_json(), "gpt-2", bos_token_id=0, eos_token_id=1))
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    (folder / "model.gguf").rename(folder.with_suffix(".gguf"))
    right = Tokenizer.load(folder)
    assert found.special_ids == right.special_ids == {0, 1}
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}

    @given(text=TEXTS | st.sampled_from(LINES))
    @settings(max_examples=examples(150), deadline=None)
    def check(text: str) -> None:
        ids = found.encode(text)
        assert ids == right.encode(text, add_special_tokens=False)
        assert found.decode(ids) == right.decode(ids)

    check()


@each_case("pre", SPLITS)
def test_every_pre_tokenizer_round_trips_texts(pre: str, tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, of_json(byte_level_json(), pre, bos_token_id=0, eos_token_id=1))
    for text in (*LINES, "  HelloWorld 12345  it's\r\n\n x", "e\u0301"):
        ids = tokenizer.encode(text)
        kept = "é" if text == "e\u0301" and SPLITS[pre].composes else text
        assert tokenizer.decode(ids) == kept
        assert (ids[0] == 0) == SPLITS[pre].adds_bos


@each_case(
    ("pre", "text", "words"),
    [
        ("gpt-2", "Hi 12345", ["Hi", "Ġ12345"]),
        ("smollm", "Hi 123", ["Hi", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "Hi 12345", ["Hi", "Ġ", "123", "45"]),
        ("dbrx", "it's 12345", ["it", "'s", "Ġ", "123", "45"]),
        ("qwen2", "Hi 12", ["Hi", "Ġ", "1", "2"]),
        ("tekken", "HelloWorld it's 12", ["Hello", "World", "Ġit", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWORLDs it's 1234", ["Hello", "WORLDs", "Ġit's", "Ġ", "123", "4"]),
        ("stablelm2", "it's 12", ["it", "'s", "Ġ", "1", "2"]),
        ("mpt", "it's 12345", ["it", "'s", "Ġ12345"]),
        ("gpt-neox", "a  b", ["a", "Ġ", "Ġb"]),
        ("falcon", "a  12345!?$ x.", ["a", "Ġ", "Ġ", "123", "45", "!?$", "Ġx", "."]),
        (
            "deepseek-coder",
            "it's  x1\n\n12, $y",
            ["it", "'", "s", "Ġ", "Ġx", "1", "Ċ", "Ċ", "1", "2", ",", "Ġ$", "y"],
        ),
        (
            "deepseek-llm",
            "it's  x1\n12, $y犬a",
            ["it", "'", "s", "Ġ", "Ġx", "1", "Ċ", "1", "2", ",", "Ġ$", "y", "çĬ¬", "a"],
        ),
        # Small Armenian letters are in no class of DeepSeek's; capital ones are.
        ("deepseek-llm", "\u0531\u0561a", ["Ô±", "Õ¡", "a"]),
        ("deepseek-coder", "\u0531\u0561a", ["Ô±Õ¡a"]),
    ],
)
def test_texts_are_split_by_the_familys_pre_tokenizer(
    pre: str, text: str, words: list[str]
) -> None:
    found = SPLITS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [word for word, _ in found] == words


def test_a_gpt_neox_file_needs_no_name(tmp_path: Path) -> None:
    metadata = of_json(byte_level_json(), "gpt-neox", pre=None)
    found = loaded(tmp_path, {**metadata, "general.architecture": "gptneox"})
    assert found.decode(found.encode("e\u0301")) == "é"


@pytest.mark.parametrize("byte", [0xC0, 0xF1, 0xFF, 0x03])
def test_unusual_bytes_may_lack_a_token(byte: int, tmp_path: Path) -> None:
    """StarCoder's vocabulary lacks 14; its own tokenizer drops such bytes."""
    metadata = of_json(byte_level_json(), "starcoder")
    tokens = metadata["tokenizer.ggml.tokens"]
    at = tokens.index(stand_ins()[byte])
    tokens[at] = "<gone>"
    found = loaded(tmp_path, metadata)
    assert found.decode(found.encode("a\U00041000\x03b")).startswith("a")
    tokens[at] = stand_ins()[byte]
    whole = loaded(tmp_path, metadata)
    for text in LINES:
        assert found.encode(text) == whole.encode(text)
    assert not found.min_num_tokens("\x03" * 1000)  # no bound if bytes are dropped


@pytest.mark.parametrize("byte", [0x41, 0x0A, 0x80, 0xC3, 0xF0, 0xF3])
def test_usual_bytes_need_a_token(byte: int, tmp_path: Path) -> None:
    metadata = of_json(byte_level_json(), "starcoder", merges=[])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(stand_ins()[byte])] = "<gone>"
    assert f"no token for 1 of the 256 bytes, the first 0x{byte:02X}" in refused(tmp_path, metadata)


@each_case(
    ("changes", "said"),
    [
        ({"pre": None}, "pre, which names how text is split before merging, is missing"),
        ({"pre": "default"}, '"default"; known: llama-bpe'),
        ({"pre": 3}, "is 3"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "merge 0 is 'ab'"),
        ({"merges": ["zz qq"]}, "merge 0 is 'zz qq'"),
        ({"merges": [b"\xff\xfe a"]}, "merge 0 is"),
        ({"merges": [1]}, "array of strings"),
        ({"add_space_prefix": True}, "add_space_prefix is true beside gpt-2"),
        ({"tokens": ["a"], "token_type": [1], "merges": []}, "no token for 255 of the 256 bytes"),
    ],
)
def test_unreadable_merges_are_rejected(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=said):
        loaded(tmp_path, of_json(byte_level_json(), "gpt-2", **changes))


# ---- templates


def test_templates_are_those_of_the_file_by_name(tmp_path: Path) -> None:
    metadata = of_json(byte_level_json(), "gpt-2", bos_token_id=0)
    assert sources_in(write(tmp_path / "model.gguf", metadata)) == {}
    metadata["tokenizer.chat_template"] = TEMPLATE
    path = write(tmp_path / "model.gguf", metadata)
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.load(path, tokenizer)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    several = sources_in(write(tmp_path / "model.gguf", metadata))
    assert several == {"default": TEMPLATE, "tool_use": "tools"}
    metadata["tokenizer.chat_template"] = 3
    broken = ChatTemplate.load(write(tmp_path / "model.gguf", metadata), tokenizer)
    assert broken is not None
    assert "a string is expected" in broken.problems["default"]


# ---- published tokenizers


def published(name: str) -> dict[str, Any]:
    """Return the entries a converter writes for a published tokenizer."""
    folder = outside(f"tokenizers/{name}")
    if name == "llama2":
        pieces = read_pieces(folder, (folder / "tokenizer.model").read_bytes())
        listed = zip(pieces.texts, pieces.scores, map(int, pieces.kinds), strict=True)
        return of_pieces(list(listed))
    if name == "phi3":  # Llama 2's pieces, and further tokens
        said = json.loads((folder / "tokenizer.json").read_text())
        beside = {token["id"]: token for token in said["added_tokens"] if token["id"] > 2}
        llama2 = outside("tokenizers/llama2")
        pieces = read_pieces(llama2, (llama2 / "tokenizer.model").read_bytes())
        listed = list(zip(pieces.texts, pieces.scores, map(int, pieces.kinds), strict=True))
        for id_ in sorted(beside):
            kind = CONTROL if beside[id_]["special"] else USER_DEFINED
            assert id_ == len(listed)
            listed.append((beside[id_]["content"], -1000.0, kind))
        return of_pieces(listed)
    backend = published_tokenizer(name)._backend
    return of_json(backend.to_str(), {"llama3": "llama-bpe", "qwen": "qwen2"}.get(name, "gpt-2"))


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("llama3", "llama-bpe"),
        ("qwen", "qwen2"),
        ("llama2", "llama-spm"),
        ("gpt2", "gpt-2"),
        ("phi3", "phi-3"),
    ],
)
def test_all_published_cases_have_their_published_ids(
    name: str, cases: str, tmp_path: Path
) -> None:
    tokenizer = loaded(tmp_path, published(name))
    check_cases(tokenizer, outside("tokenizers/cases") / cases)


@pytest.mark.parametrize(
    "name",
    ["deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact",
     "starcoder"],
)  # fmt: skip
def test_all_cases_of_published_gguf_vocabularies_have_their_ids(name: str) -> None:
    file = outside(f"tokenizers/gguf/ggml-vocab-{name}.gguf")
    check_cases(Tokenizer.load(file), file)


def check_cases(tokenizer: Tokenizer, file: Path) -> None:
    """Compare with llama.cpp's cases beside `file`: FILE.inp and FILE.out."""
    texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(id_) for id_ in line.split()], text
        assert tokenizer.decode(ids) == text
