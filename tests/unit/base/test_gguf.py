"""The GGUF container: valid files, every kind of inconsistent header, and random bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.errors import ConfigError, ModelError, WeightsError
from quire.base.gguf_file import GgufArray, GgufFile
from quire.base.gguf_model import GgufModel, find_gguf, model_name_of
from quire.models.registry import open_model
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from tests.cases import each_case
from tests.drawn import examples
from tests.gguf_convert import write_gguf_of
from tests.gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Typed,
    describe,
    entry,
    string,
    write_gguf,
)
from tests.tiny_models import write_tiny_llama

VALUES = np.arange(64, dtype=np.float32).reshape(2, 32)
METADATA: dict[str, Any] = {
    "general.architecture": "llama", "text": "é", "whole": 7, "negative": -3, "real": 0.25,
    "flag": True, "byte": Typed(U8, 255), "wide": Typed(U64, 2**40), "double": Typed(12, 0.1),
    "words": ["a", "", "bc"], "numbers": [1, 2, 3], "flags": [True, False], "none": [],
}  # fmt: skip


def header(
    entries: list[bytes], tensors: list[bytes], *, version: int = 3, claimed: int | None = None
) -> bytes:
    """Encode a header of these entries and descriptions; `claimed` overrides the number of
    entries.
    """
    count = len(entries) if claimed is None else claimed
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), count)
    return start + b"".join(entries) + b"".join(tensors)


def padded(content: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment)


def refused(folder: Path, content: bytes, name: str = "m.gguf") -> str:
    (folder / name).write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        GgufFile(folder / name)
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_metadata_and_tensors_round_trip(version: int, alignment: int, tmp_path: Path) -> None:
    tensors = {"a.weight": (VALUES, "F32"), "b": (VALUES[:, :7].copy(), "F16"),
               "c": (VALUES, "Q8_0")}  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", METADATA, tensors, version=version, alignment=alignment)
    file = GgufFile(path)
    for key, value in METADATA.items():
        found = file.metadata[key]
        if isinstance(value, list):
            assert isinstance(found, GgufArray)
            listed = [text.decode() for text in found.texts()] or found.numbers().tolist()
            assert listed == value
        else:
            assert found == (value.value if isinstance(value, Typed) else value), key
            assert type(found) is type(value.value if isinstance(value, Typed) else value)
    assert {name: t.shape for name, t in file.tensors.items()} == {
        name: values.shape for name, (values, _) in tensors.items()
    }
    assert file.raw(file.tensors["a.weight"]).tobytes() == VALUES.tobytes()
    assert all(tensor.start % alignment == 0 for tensor in file.tensors.values())
    with pytest.raises(ValueError, match="read-only"):
        file.raw(file.tensors["c"])[0] = 1
    file.release(file.tensors["a.weight"])
    assert file.raw(file.tensors["a.weight"]).tobytes() == VALUES.tobytes()
    assert path.read_bytes().startswith(file.header())


@each_case(
    ("content", "said"),
    [
        (b"", "begins with b''"),
        (b"GGUF", "has 4 bytes, too short"),
        (b"GGML" + bytes(40), "begins with b'GGML'"),
        (b"lmgg" + bytes(40), "older than GGUF"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "is version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian .version 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "claims 9223372036854775808 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "metadata entries; at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "0 bytes are left"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 0), "a tensor's name"),
    ],
)  # fmt: skip
def test_unsupported_files_are_rejected(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=said):
        GgufFile(path)


@each_case(
    ("entries", "said"),
    [
        ([entry("a", 1), entry("a", 2)], 'key "a" is there twice'),
        ([struct.pack("<Q", 2**62) + b"a"], "claims 4611686018427387904 bytes"),
        ([struct.pack("<Q", 2**64 - 1)], "claims 18446744073709551615 bytes"),
        ([string(b"\xff\xfe") + struct.pack("<II", U32, 1)], "not UTF-8"),
        ([string("k") + struct.pack("<I", 77)], 'value of "k" is of type 77'),
        ([string("k") + struct.pack("<IB", BOOL, 2)], "is a flag of 2"),
        ([string("k") + struct.pack("<IQ", STRING, 2**40) + b"x"], "claims 1099511627776 bytes"),
        ([string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], "array of arrays"),
        ([string("k") + struct.pack("<IIQ", ARRAY, 13, 1)], "entries of type 13"),
        ([string("k") + struct.pack("<IIQ", ARRAY, U32, 2**61)], "claims 2305843009213693952"),
        ([string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**60)], "entries of at least 8 bytes"),
        ([string("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**50)], "entry 0 of the value"),
        ([string("k") + struct.pack("<IIQBBB", ARRAY, BOOL, 3, 1, 0, 9)], "a flag of 9"),
        ([string("k" * 70_000) + struct.pack("<IB", U8, 1)], "at most 65535 are allowed"),
        ([string("k") + struct.pack("<I", F32) + b"\0"], "should be here, but 1 bytes"),
    ],
)  # fmt: skip
def test_inconsistent_metadata_is_rejected_with_its_position(
    entries: list[bytes], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, header(entries, []))
    assert "byte " in refused(tmp_path, header(entries, []))


@each_case(
    ("tensors", "said"),
    [
        ([describe("a", (32,), 0, 0)] * 2, "a is there twice"),
        ([describe("a" * 65, (32,), 0, 0)], "claims 65 bytes"),
        ([describe("a", (1, 1, 1, 1, 1), 0, 0)], "has 5 dimensions"),
        ([describe("a", (), 0, 0)], "has 0 dimensions"),
        ([describe("a", (0, 32), 0, 0)], "no dimension may be 0"),
        ([describe("a", (2**32, 2**32), 0, 0)], "needs 73786976294838206464 bytes"),
        ([describe("a", (2**63, 2**63), 8, 0)], "needs"),
        ([describe("a", (2, 33), 8, 0)], "must be a multiple of 32"),
        ([describe("a", (2, 32), 99, 0)], "is of type 99, which is not known"),
        ([describe("a", (2, 32), 4, 0)], "is of type 4"),
        ([describe("a", (32,), 0, 2**63)], "at offset 9223372036854775808"),
        ([describe("a", (32,), 0, 32)], "after the header"),
        ([describe("a", (32,), 0, 1)], "it would be"),
        ([describe("a", (32,), 0, 0), describe("b", (32,), 0, 64)], "after a"),
        ([describe("a", (32,), 0, 0), describe("b", (32,), 0, 256)], "after a"),
        ([describe("a", (70,), 0, 0)], "ends at byte"),
        ([describe("a", (2,), 0, 0)], "bytes after the last tensor belong to none"),
    ],
)
def test_inconsistent_tensors_are_rejected(tensors: list[bytes], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, padded(header([], tensors)) + bytes(256))


@pytest.mark.parametrize("alignment", [0, 3, 48, -8, "x", True, 2**40, 1.5])
def test_an_alignment_that_is_no_power_of_two_is_rejected(alignment: Any, tmp_path: Path) -> None:
    value = Typed(U64, alignment) if alignment == 2**40 else alignment
    content = padded(header([entry("general.alignment", value)], []))
    assert "general.alignment is" in refused(tmp_path, content)


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, {"a": (VALUES, "Q8_0")})
    content = path.read_bytes()
    last = GgufFile(path).tensors["a"].end
    for length in range(0, last, 3):
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            GgufFile(path)
    path.write_bytes(content[:last])  # padding after the last tensor may be missing
    assert GgufFile(path).tensors["a"].end == last


# ---- files of a model


def split(folder: Path, *, count: int = 3, **changes: Any) -> Path:
    """Write a model of `count` parts with a tensor each; `changes` overrides keys of part 2."""
    for number in range(count):
        metadata: dict[str, Any] = {
            "split.no": Typed(U16, number),
            "split.count": Typed(U16, count),
            "split.tensors.count": count,
        }
        if number == 0:
            metadata["general.architecture"] = "llama"
        if number == 1:
            metadata |= {key.replace("__", "."): value for key, value in changes.items()}
        name = changes.get("name", f"t{number}") if number == 1 else f"t{number}"
        metadata.pop("name", None)
        path = folder / f"big-{number + 1:05d}-of-{count:05d}.gguf"
        write_gguf(path, metadata, {name: (VALUES + number, "F32")})
    return folder / f"big-00001-of-{count:05d}.gguf"


def test_parts_of_a_split_model_are_one_model(tmp_path: Path) -> None:
    first = split(tmp_path)
    for place in (first, tmp_path, tmp_path / "big-00003-of-00003.gguf"):
        assert find_gguf(place) == first
    model = GgufModel(first)
    assert list(model.tensors) == ["t0", "t1", "t2"]
    assert model.holder("t2").raw(model.tensors["t2"]).view("<f4")[0] == 2
    assert model_name_of(first) == "big"
    assert model_name_of(Path("Some-Model.Q4_K_M.gguf")) == "Some-Model.Q4_K_M"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split__no": 2}, "split.no is 2 and split.count 3; 1 and 3"),
        ({"split__count": 4}, "split.count 4"),
        ({"split__no": "x"}, "split.no is 'x'"),
        ({"name": "t0"}, "t0 is in big-00001-of-00003.gguf too"),
    ],
)
def test_parts_of_different_models_are_rejected(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=said):
        GgufModel(split(tmp_path, **changes))


def test_a_missing_or_renamed_part_is_rejected(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    with pytest.raises(WeightsError, match=r"part big-00002-of-00003\.gguf of 3 is missing"):
        GgufModel(first)
    with pytest.raises(WeightsError, match=r"keep the names that the parts"):
        GgufModel(first.rename(tmp_path / "renamed.gguf"))


def test_a_directory_stands_for_the_one_model_in_it(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    one = write_gguf(tmp_path / "one.Q4_0.gguf", METADATA, {})
    write_gguf(tmp_path / "mmproj-one.gguf", METADATA, {})
    assert find_gguf(tmp_path) == one
    write_gguf(tmp_path / "one.Q8_0.gguf", METADATA, {})
    with pytest.raises(ConfigError, match=r"several GGUF models are there \(one\.Q4_0\.gguf, one"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "one.Q8_0.gguf") == tmp_path / "one.Q8_0.gguf"
    assert find_gguf(tmp_path / "absent.gguf") == tmp_path / "absent.gguf"
    with pytest.raises(WeightsError, match=r"absent\.gguf: cannot be read: No such file"):
        GgufFile(tmp_path / "absent.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert find_gguf(tmp_path / "folder.gguf") is None


# ---- random bytes


def readers(path: Path) -> list[Callable[[], Any]]:
    """Open a file with every reader, each of which may reject it."""

    def tensors() -> None:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names:
            checkpoint.read_f32(name)
            checkpoint.release(name)

    return [lambda: open_model(path), tensors, lambda: Tokenizer.load(path)]


def test_a_changed_file_is_rejected_or_still_a_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    checkpoint = write_tiny_llama(folder / "checkpoint", hidden_size=32, head_dim=16,
                                  num_attention_heads=2, intermediate_size=32,
                                  num_hidden_layers=1)  # fmt: skip
    path = write_gguf_of(checkpoint, folder / "model.gguf", kind="Q8_0")
    content = path.read_bytes()
    size = GgufFile(path).header_bytes
    changed = folder / "changed.gguf"

    @given(
        at=st.lists(st.integers(0, size - 1), min_size=1, max_size=6),
        values=st.lists(
            st.sampled_from([0, 1, 2, 7, 8, 9, 32, 127, 128, 255]) | st.integers(0, 255),
            min_size=6,
            max_size=6,
        ),
        cut=st.none() | st.integers(0, len(content)),
        moved=st.integers(0, 3),
    )
    @settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
    def check(at: list[int], values: list[int], cut: int | None, moved: int) -> None:
        broken = bytearray(content)
        for place, value in zip(at, values, strict=False):
            broken[place] = value
        if moved == 1:  # bytes too many or too few shift everything after them
            del broken[at[0] : at[0] + values[0] % 9]
        changed.write_bytes(broken if cut is None or moved != 2 else broken[:cut])
        for read in readers(changed):
            with contextlib.suppress(ModelError):
                read()

    check()
