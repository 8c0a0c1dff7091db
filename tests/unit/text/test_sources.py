"""Which files define the tokenizer, in which order; published tokenizers give published ids."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.tokenizer import Tokenizer
from tests.data import outside
from tests.unit.text.made_files import bpe_pieces, model_bytes, write_ranks, write_vocabulary
from tests.unit.text.made_tokenizers import LINES, NAMED, byte_level_json, made, write_folder
from tests.unit.text.published import published_tokenizer

PUBLISHED = {
    "llama3": "llama-bpe",
    "qwen": "qwen2",
    "llama2": "llama-spm",
    "gpt2": "gpt-2",
    "phi3": "phi-3",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_published_cases_have_their_published_ids(name: str) -> None:
    tokenizer = published_tokenizer(name)
    cases = outside("tokenizers/cases") / PUBLISHED[name]
    texts = cases.with_suffix(".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = cases.with_suffix(".out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(id_) for id_ in line.split()], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", PUBLISHED)
def test_naughty_strings_and_a_japanese_book_round_trip(name: str) -> None:
    tokenizer = published_tokenizer(name)
    strings = json.loads(outside("hostile/naughty-strings.json").read_text(encoding="utf-8"))
    book = outside("text/japanese-neko.txt").read_text(encoding="utf-8")
    for text in [*strings, *book.splitlines()[:100], book[:60_000]]:
        kept = unicodedata.normalize("NFC", text) if name == "qwen" else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).endswith(kept)
        assert 0 <= tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("name", "opens", "bos", "eos", "vocab_size"),
    [
        ("llama3", [128_000], 128_000, 128_001, 128_256),
        ("qwen", [], None, 151_643, 151_851),
        ("llama2", [1], 1, 2, 32_000),
        ("gpt2", [], 50_256, 50_256, 50_257),
    ],
)
def test_bare_files_have_the_special_tokens_of_their_family(
    name: str, opens: list[int], bos: int | None, eos: int, vocab_size: int
) -> None:
    tokenizer = published_tokenizer(name)
    assert tokenizer.encode("") == opens
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    assert tokenizer.vocab_size == vocab_size
    spelled = tokenizer.special_tokens["eos_token"]
    assert tokenizer.encode(f"a{spelled}", add_special_tokens=False)[-1] == eos


@pytest.mark.parametrize(
    "text", ["Hello  world, it's 12345!", "吾輩は猫である。", "🏳️‍🌈👩‍👩‍👧‍👦 🇯🇵 e\u0301", " \n\n\t x"]
)
def test_every_kind_of_file_round_trips_texts(tmp_path: Path, text: str) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "tokenizer.json": lambda folder: write_folder(folder, byte_level_json(), NAMED),
        "tokenizer.model": lambda folder: (folder / "tokenizer.model").write_bytes(
            model_bytes(bpe_pieces())
        ),
        "ranks": _write_qwen,
        "vocab.json": write_vocabulary,
    }
    for name, write in writers.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        tokenizer = Tokenizer.load(folder)
        kept = unicodedata.normalize("NFC", text) if name == "ranks" else text
        assert tokenizer.decode(tokenizer.encode(text)) == kept


def _write_qwen(folder: Path) -> None:
    write_ranks(folder / "qwen.tiktoken")
    config = {"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": {}, "auto_map": {"A": 1}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_first_source_in_the_order_wins(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    sizes = [Tokenizer.load(tmp_path).vocab_size]
    _write_qwen(tmp_path)
    sizes.append(Tokenizer.load(tmp_path).vocab_size)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model_bytes(bpe_pieces()))
    sizes.append(Tokenizer.load(tmp_path).vocab_size)
    write_folder(tmp_path, byte_level_json(), None)
    sizes.append(Tokenizer.load(tmp_path).vocab_size)
    assert sizes == [319, 316, len(bpe_pieces()), 300]


def test_a_broken_source_does_not_fall_through_to_the_next(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_two_rank_files_are_rejected(tmp_path: Path) -> None:
    for name in ("a.tiktoken", "b.tiktoken"):
        write_ranks(tmp_path / name)
    with pytest.raises(TokenizerError, match=r"a\.tiktoken, b\.tiktoken; keep the one"):
        Tokenizer.load(tmp_path)


def test_code_of_a_checkpoint_is_never_run_and_only_missed_without_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}})
    )
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(
        TokenizerError, match=r"refers to Python code .*\(auto_map\), which is never"
    ):
        Tokenizer.load(tmp_path)
    write_vocabulary(tmp_path)
    assert Tokenizer.load(tmp_path).decode([97, 98]) == "ab"


def test_a_tokenizer_larger_than_the_models_table_is_rejected(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    with pytest.raises(
        TokenizerError, match=r"token '.+' has the id 315, but the model has 300 ids \(vocab_size"
    ):
        Tokenizer.load(tmp_path, vocab_size=300)
    assert Tokenizer.load(tmp_path, vocab_size=400).decode([399]) == ""


def test_an_added_token_without_a_model_row_is_rejected_in_texts() -> None:
    listed = {"300": {"content": "<image>", "special": True}}
    tokenizer = made(byte_level_json(), {**NAMED, "added_tokens_decoder": listed}, vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode("an image")) == "an image"
    with pytest.raises(InvalidParameter, match=r"'<image>' of id 300, .* ids up to 299 only"):
        tokenizer.encode("an <image>")
    with pytest.raises(InvalidParameter, match="out of range"):
        tokenizer.decode([300])
    with pytest.raises(TokenizerError, match=r"'<image>' has the id 300, but the model has 300"):
        made(
            byte_level_json(),
            {"bos_token": "<image>", "add_bos_token": True, "added_tokens_decoder": listed},
            vocab_size=300,
        )


@pytest.mark.parametrize("line", LINES)
def test_a_vocabulary_with_unused_ids_works(line: str) -> None:
    content = json.loads(byte_level_json())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {
        token: id_ + 50 if id_ > 270 else id_ for token, id_ in vocabulary.items()
    }
    content["added_tokens"][-1]["id"] = 400
    content["model"]["vocab"]["<tool>"] = 400
    tokenizer = made(json.dumps(content))
    ids = tokenizer.encode(line + "<tool>")
    assert tokenizer.vocab_size == 401
    assert ids[-1] == 400
    assert tokenizer.decode(ids) == line + "<tool>"
    assert tokenizer.decode([290, *ids[:3], 399, *ids[3:], 290]) == line + "<tool>"
