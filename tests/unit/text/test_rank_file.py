"""Byte-level BPE from tiktoken ranks and from vocab.json with merges.txt."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import TokenizerError
from quire.text.byte_alphabet import stand_ins, written
from quire.text.rank_file import CL100K, LLAMA_3, O200K, P50K, QWEN, Family
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.drawn import examples
from tests.unit.text.made_files import byte_tokens, write_ranks, write_vocabulary
from tests.unit.text.made_tokenizers import LINES

LISTED = {"400": {"content": "<|im_start|>", "special": True}, "402": {"content": "<tool>"}}
QWEN_CONFIG = {"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": LISTED}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("qwen")
    write_ranks(folder / "qwen.tiktoken")
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN_CONFIG))
    return Tokenizer.load(folder)


def _as_tiktoken_does(text: str, pattern: str) -> list[int]:
    """Apply the rule directly: words by the pattern; in each the best pair, the leftmost,
    merges.
    """
    rank = {token: place for place, token in enumerate(byte_tokens())}
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    ids = []
    for word, _ in split.pre_tokenize_str(text):
        parts = list(written(word.encode()))
        while "".join(parts) not in rank or len(parts) > 1:
            if "".join(parts) in rank:
                parts = ["".join(parts)]
                break
            joined = [left + right for left, right in itertools.pairwise(parts)]
            known = [(rank[pair], at) for at, pair in enumerate(joined) if pair in rank]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [joined[at]]
        ids += [rank[part] for part in parts]
    return ids


@given(text=st.text(max_size=40) | st.text(" \n\ta猫🦙é1x'", max_size=40))
@settings(max_examples=examples(200), deadline=None)
def test_ids_follow_tiktokens_rule_and_text_round_trips(qwen: Tokenizer, text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    assert QWEN.pattern is not None
    assert qwen.encode(text) == _as_tiktoken_does(composed, QWEN.pattern)
    assert qwen.decode(qwen.encode(text)) == composed


def test_listed_tokens_have_their_ids_across_unused_ones(qwen: Tokenizer) -> None:
    assert qwen.encode("a<|im_start|><tool>") == [*qwen.encode("a"), 400, 402]
    assert qwen.decode([400, 402, 350]) == "<tool>"
    assert qwen.vocab_size == 403


def test_digits_are_split_by_the_familys_rule() -> None:
    assert LLAMA_3.pattern is not None
    assert QWEN.pattern is not None
    for family, parts in ((LLAMA_3, ["123", "45"]), (QWEN, ["1", "2", "3", "4", "5"])):
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(family.pattern), "isolated")
        assert [part for part, _ in split.pre_tokenize_str("12345")] == parts


def test_a_full_llama_3_file_is_recognized_by_its_size(
    tmp_path: Path,
) -> None:
    pairs = [first + second for first in stand_ins() for second in stand_ins()]
    triples = [pair + stand_ins()[0] for pair in pairs]
    tokens = [*stand_ins(), *pairs, *triples][: LLAMA_3.num_ranks]
    write_ranks(tmp_path / "tokenizer.model", tokens)
    tokenizer = Tokenizer.load(tmp_path, vocab_size=128_256)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (128_000, 128_001)
    assert tokenizer.encode("")[0] == 128_000
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False) == [128_009]
    assert tokenizer.encode("<|reserved_special_token_247|>")[1] == 128_255


@functools.cache
def _ranks_of(num_ranks: int, special: frozenset[tuple[str, int]], *words: str) -> str:
    """Return a file of `num_ranks` tokens, in which the long ones of `words` are tokens."""
    pairs = [first + second for first in stand_ins() for second in stand_ins()]
    triples = [stand_ins()[byte] + pair for byte in (0xFD, 0xFE, 0xFF) for pair in pairs]
    whole = [written(word.encode()) for word in words if len(word) > 2]
    made = dict.fromkeys([*stand_ins(), *whole, *pairs, *triples])
    reserved = dict(special)
    tokens = [token for token in made if token not in reserved][:num_ranks]
    byte_of = {character: byte for byte, character in enumerate(stand_ins())}
    lines, rank = [], 0
    for token in tokens:
        rank += rank in reserved.values()  # p50k_base's file leaves one out
        raw = bytes(byte_of[character] for character in token)
        lines.append(f"{base64.b64encode(raw).decode()} {rank}\n")
        rank += 1
    return "".join(lines)


@pytest.mark.parametrize(
    ("family", "special", "words"),
    [
        (P50K, {"<|endoftext|>": 50_256}, ["it", "'s", " 12345", " ", " HelloWORLD", "."]),
        (
            CL100K,
            {"<|endoftext|>": 100_257, "<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276},
            ["it", "'s", " ", "123", "45", " ", " HelloWORLD", "."],
        ),
        (
            O200K,
            {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
            ["it's", " ", "123", "45", " ", " Hello", "WORLD", "."],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else None,
)
@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "GPT2Tokenizer"}])
def test_openais_files_are_recognized_by_their_sizes(
    family: Family,
    special: dict[str, int],
    words: list[str],
    config: dict[str, str],
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks.tiktoken").write_text(
        _ranks_of(family.num_ranks, frozenset(special.items()), *words)
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    for token, id_ in special.items():
        assert tokenizer.encode(token) == [id_]
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"
    ids = tokenizer.encode("".join(words))
    found = [tokenizer.decode([id_]) for id_ in ids]
    assert "".join(found) == "".join(words)
    # Whole words of more than two characters are tokens, and nothing crosses a word's end.
    assert [word for word in found if len(word) > 2] == [word for word in words if len(word) > 2]


def test_a_rank_in_place_of_a_special_token_is_rejected(tmp_path: Path) -> None:
    pairs = [first + second for first in stand_ins() for second in stand_ins()]
    write_ranks(tmp_path / "p50k.tiktoken", [*stand_ins(), *pairs][: P50K.num_ranks])
    with pytest.raises(TokenizerError, match="the rank 50256, which belongs to a special token"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("other.tiktoken", {}, r"316 tiktoken ranks match no known family.*Llama 3 \(128000\)"),
        ("tokenizer.model", {}, r"match no known family.*AutoTokenizer"),
        (
            "qwen.tiktoken",
            {},
            r"316 ranks; Qwen's file has 151643.*cut short.*added_tokens_decoder",
        ),
        (
            "qwen.tiktoken",
            {"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": {"3": {"content": "<x>"}}},
            r"gives the id 3 to '<x>', qwen.tiktoken to",
        ),
        (
            "qwen.tiktoken",
            {"added_tokens_decoder": {"900": {"content": "a"}}},
            r"gives 'a' the id 900, qwen.tiktoken \d+; take both",
        ),
    ],
)
def test_incomplete_ranks_are_rejected(
    tmp_path: Path, name: str, config: dict[str, object], why: str
) -> None:
    write_ranks(tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=why):
        Tokenizer.load(tmp_path)


def _line(number: int, becomes: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        lines = content.split(b"\n")
        lines[number - 1] = becomes
        return b"\n".join(lines)

    return change


@each_case(
    ("change", "why"),
    [
        (_line(300, b"!!!! 299"), r"line 300 is b'!!!! 299'; expected: a token in base64"),
        (_line(300, b"YWI="), r"line 300"),
        (_line(300, b"YWI= -4"), r"line 300"),
        (_line(300, b"YWI= 99999999999"), r"line 300"),
        (_line(300, b" 299"), r"line 300"),
        (_line(300, base64.b64encode(b"a") + b" 9999"), r"line 300 gives the token b'a' the rank"),
        (_line(300, base64.b64encode(b"\xff\xfe\xff") + b" 7"), r"the id 7 is given to"),
        (_line(300, b"\xff\xfe\xfd"), r"line 300"),
        (lambda content: content[:-5], r"line 316"),
        (lambda content: content[:1000], r"line \d+|no token for \d+ of the 256 bytes"),
        (lambda content: b"", r"no token for 256 of the 256 bytes, the first 0x00"),
    ],
)
def test_a_broken_rank_file_is_reported_with_its_line(
    tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    file = write_ranks(tmp_path / "qwen.tiktoken")
    file.write_bytes(change(file.read_bytes()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(QWEN_CONFIG))
    with pytest.raises(TokenizerError, match=rf"qwen\.tiktoken.*({why})"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("line", [*LINES, "", " ", "a  b\n\n c", "it's 123<|endoftext|>x", "\0"])
def test_vocabulary_and_merges_give_the_ids_of_the_library(tmp_path: Path, line: str) -> None:
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path))
    library = tokenizers.ByteLevelBPETokenizer.from_file(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    )
    library.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.encode(line) == library.encode(line).ids
    if "<|" not in line:
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.eos_id == tokenizer.bos_id == 318
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


def test_a_class_that_adds_bos_is_recognized_from_its_config(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).encode("") == [318]


def test_older_added_tokens_are_read(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": 400}))
    assert Tokenizer.load(tmp_path).encode("<sep>") == [400]


@each_case(
    ("file", "content", "why"),
    [
        (
            "merges.txt",
            "#version: 0.2\na b c\n",
            r"merges\.txt: line 2 is 'a b c'; expected: two tokens",
        ),
        ("merges.txt", "ab\n", r"merges\.txt: line 1"),
        ("merges.txt", "a q猫\n", r"line 1 merges 'a q猫', but vocab\.json has no"),
        ("merges.txt", b"\xff\xfe", r"merges\.txt: not UTF-8"),
        ("vocab.json", '{"a": 1', r"vocab\.json: not valid JSON"),
        ("vocab.json", '{"a": "1"}', r"vocab\.json: the id of 'a' is '1'; a whole number"),
        ("vocab.json", '{"a": -1}', r"the id of 'a' is -1"),
        ("vocab.json", '{"a": 1, "b": 1}', r"the id 1 is given to 'a' and to 'b'"),
        ("vocab.json", '{"a": 1}', r"vocab\.json has no"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "CLIPTokenizer"}',
            r"tokenizer_class is 'CLIPTokenizer', and vocab\.json does not say.*known: QWen",
        ),
    ],
)
def test_broken_vocabularies_and_merges_are_reported(
    tmp_path: Path, file: str, content: str | bytes, why: str
) -> None:
    write_vocabulary(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=why):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_of_qwens_class_is_split_and_composed_like_qwens(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    as_gpt_2 = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2TokenizerFast"}')
    as_qwen = Tokenizer.load(tmp_path)
    assert as_qwen.encode("e\u0301") == as_qwen.encode("é") == as_gpt_2.encode("é")
    assert as_gpt_2.encode("e\u0301") != as_gpt_2.encode("é")
    assert as_qwen.decode(as_qwen.encode("12 x\n\n")) == "12 x\n\n"
