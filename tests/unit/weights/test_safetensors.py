"""The safetensors reader: values bit for bit, and every kind of inconsistent file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import WeightsError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.safetensors import SafetensorsFile
from tests.data import outside
from tests.drawn import examples
from tests.safetensors_writer import rounded, write_raw, write_safetensors

VALUES = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
FINE = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def refused(path: Path, header: Any, body: bytes = bytes(24), **lies: int) -> str:
    """Return the error message for a file of this header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_raw(path / "model.safetensors", raw, body, **lies)
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path / "model.safetensors")
    assert "model.safetensors" in str(caught.value)
    return str(caught.value)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": FINE["a"] | changes}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_values_round_trip(dtype: str, tmp_path: Path) -> None:
    names = {"b.odd": VALUES[:3, :1], "a": VALUES, "scalar": VALUES[0, 0], "none": VALUES[:0]}
    tensors = {name: np.asarray(values) for name, values in names.items()}
    path = write_safetensors(tmp_path / "model.safetensors", tensors, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names) == set(tensors)
    for name, values in tensors.items():
        stored = checkpoint.tensor(name)
        assert (stored.dtype, stored.shape) == (dtype, values.shape)
        found = checkpoint.read_f32(name)
        assert found.dtype == np.float32
        assert np.array_equal(found, rounded(values, dtype))
        assert found.flags.c_contiguous
    assert checkpoint.total_bytes == sum(t.size for t in tensors.values()) * (
        4 if dtype == "f32" else 2
    )
    assert np.array_equal(
        open_checkpoint(path).read_f32("a", slice(2, 5)), rounded(VALUES, dtype)[2:5]
    )


def test_the_data_of_a_file_may_begin_at_any_byte(tmp_path: Path) -> None:
    header = json.dumps(FINE).encode()
    for padding in range(8):
        path = tmp_path / f"{padding}.safetensors"
        write_raw(path, header + b" " * padding, VALUES.tobytes()[:24])
        found = open_checkpoint(path).read_f32("a")
        assert np.array_equal(found.ravel(), VALUES.ravel()[:6])


def test_a_released_tensor_reads_the_same_again(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": VALUES, "b": VALUES + 1})
    checkpoint = open_checkpoint(tmp_path)
    view = checkpoint.tensor("a").array
    checkpoint.release("a")
    checkpoint.release("b")
    assert np.array_equal(view, VALUES)
    assert np.array_equal(checkpoint.read_f32("b"), VALUES + 1)


def test_tensors_cannot_be_written_through(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": VALUES})
    with pytest.raises(ValueError, match="read-only"):
        open_checkpoint(tmp_path).tensor("a").array[0, 0] = 1


def test_a_git_lfs_pointer_is_reported(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(WeightsError, match="a pointer of Git LFS, not the file itself; run git"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_length_is_rejected(size: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(WeightsError, match=f"has {size} bytes, too short"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [10_000, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_rejected(length: int, tmp_path: Path) -> None:
    message = refused(tmp_path, FINE, said_length=length)
    assert f"says it has {length} bytes" in message
    assert "fetch it again" in message


def test_a_truncated_header_is_rejected(tmp_path: Path) -> None:
    assert "not JSON" in refused(tmp_path, FINE, said_length=20)


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"  {}", b"\x80\x02}q", b"null", b"{", b'{"a": \xff}', b"{" * 50_000]
)
def test_a_header_that_is_no_json_object_is_rejected(header: bytes, tmp_path: Path) -> None:
    assert "header" in refused(tmp_path, header)


def test_deeply_nested_headers_are_rejected(tmp_path: Path) -> None:
    assert "nested too deeply" in refused(tmp_path, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


def test_duplicate_names_are_rejected(tmp_path: Path) -> None:
    text = json.dumps(FINE["a"])
    assert '"a" is given twice' in refused(tmp_path, f'{{"a": {text}, "a": {text}}}'.encode())


@pytest.mark.parametrize(("dtype", "numbers"), [("I32", "<i4"), ("I64", "<i8")])
def test_tables_of_whole_numbers_are_read(dtype: str, numbers: str, tmp_path: Path) -> None:
    values = np.array([[0, -1, 2**31 - 1], [-(2**31), 5, 307]], numbers)
    described = {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, values.nbytes]}
    write_raw(
        tmp_path / "model.safetensors", json.dumps({"a": described}).encode(), values.tobytes()
    )
    found = open_checkpoint(tmp_path).tensor("a").whole_numbers()
    assert found.dtype == np.int64
    assert np.array_equal(found, values)


@pytest.mark.parametrize("dtype", ["I16", "F8_E5M2", "f32", "", 5, None, ["F32"]])
def test_an_unsupported_dtype_is_named(dtype: Any, tmp_path: Path) -> None:
    message = refused(tmp_path, entry(dtype=dtype))
    assert f"a: dtype is {dtype!r}; F32, F16, BF16 and F8_E4M3 can be read" in message


@pytest.mark.parametrize("shape", [[2, -3], [2.0, 3], "23", None, [True, 6], [[6]], [1] * 9])
def test_an_invalid_shape_is_rejected(shape: Any, tmp_path: Path) -> None:
    assert "a: shape is" in refused(tmp_path, entry(shape=shape))


@pytest.mark.parametrize("offsets", [[0], [24, 0], [-24, 0], [0, 24, 48], [0, 24.0], "0,24", None])
def test_invalid_offsets_are_rejected(offsets: Any, tmp_path: Path) -> None:
    assert "a: data_offsets is" in refused(tmp_path, entry(data_offsets=offsets))


@pytest.mark.parametrize("shape", [[2, 4], [1], [2**40, 2**40], [0], []])
def test_a_shape_that_contradicts_its_bytes_is_rejected(shape: list[int], tmp_path: Path) -> None:
    message = refused(tmp_path, entry(shape=shape))
    assert f"F32 {shape} needs {4 * int(np.prod(shape, dtype=object))} bytes" in message
    assert "span 24" in message


def test_truncated_data_is_rejected_with_the_missing_bytes(tmp_path: Path) -> None:
    assert "ends 10 bytes after the end of the file" in refused(tmp_path, FINE, bytes(14))


def test_data_beyond_the_last_tensor_is_rejected(tmp_path: Path) -> None:
    assert "9 bytes after the last tensor" in refused(tmp_path, FINE, bytes(33))


def test_overlaps_and_gaps_are_named_with_their_sizes(tmp_path: Path) -> None:
    def at(start: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [2, 3], "data_offsets": [start, start + 24]}

    overlap = refused(tmp_path, {"a": at(0), "b": at(16)}, bytes(40))
    assert "b: overlaps a by 8 bytes" in overlap
    gap = refused(tmp_path, {"a": at(4), "b": at(32)}, bytes(56))
    assert "a: 4 bytes between the header and it" in gap
    assert "b: 4 bytes between a and it" in gap


def test_all_problems_are_listed_together(tmp_path: Path) -> None:
    header = {
        "a": FINE["a"] | {"dtype": "U8"},
        "b": FINE["a"] | {"shape": "x"},
        "c": FINE["a"] | {"extra": 1},
        "d": 3,
    }
    message = refused(tmp_path, header)
    assert "4 problems" in message
    assert all(f"- {name}: " in message for name in header)


def test_a_long_list_of_problems_is_shortened_and_counted(tmp_path: Path) -> None:
    message = refused(tmp_path, {f"t{i}": 0 for i in range(500)})
    assert "500 problems" in message
    assert "and 480 more" in message


@pytest.mark.parametrize("metadata", [[], "x", {"format": 1}, {"a": {"b": "c"}}])
def test_metadata_of_a_wrong_type_is_rejected(metadata: Any, tmp_path: Path) -> None:
    assert "__metadata__" in refused(tmp_path, FINE | {"__metadata__": metadata})


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": VALUES}, metadata={"format": "pt"})
    assert SafetensorsFile(path).names == ("a",)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_correctly_or_rejected(data: st.DataObject) -> None:
    """Flips, truncations and insertions anywhere: an error of the tree or the shapes as written."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_safetensors(path, {"a": VALUES, "b": VALUES[:2]}, dtype="bf16")
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, max(len(content) - 1, 0)))
            match data.draw(st.sampled_from(["flip", "cut", "insert"])):
                case "flip" if content:
                    content[place] ^= 1 << data.draw(st.integers(0, 7))
                case "cut":
                    del content[place : place + data.draw(st.integers(1, 40))]
                case _:
                    content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(Path(folder))
        except WeightsError:
            return
        for name in checkpoint.names:
            stored = checkpoint.tensor(name)
            assert checkpoint.read_f32(name).shape == stored.shape


def test_real_weights_match_the_safetensors_library() -> None:
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    folder = outside("stories260K")
    checkpoint = open_checkpoint(folder)
    right = load_file(folder / "model.safetensors")
    assert set(checkpoint.names) == set(right)
    for name, values in right.items():
        assert np.array_equal(checkpoint.read_f32(name), values)
