"""system_fingerprint: equal for equal engines, different for whatever changes an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.ops import DType
from quire.runner.fingerprint import system_fingerprint, weights_digest
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("fingerprint") / "model")


def test_it_is_the_same_each_time_and_names_nothing_of_the_place(folder: Path) -> None:
    program = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    files = list(folder.glob("*.safetensors"))
    one = system_fingerprint(program, files, recipe="avx512")
    assert one == system_fingerprint(program, files, recipe="avx512")
    assert one.startswith("fp_")
    assert len(one) == 3 + 16
    moved = folder.parent / "elsewhere"
    moved.mkdir()
    for file in files:
        (moved / file.name).write_bytes(file.read_bytes())
    assert one == system_fingerprint(program, list(moved.iterdir()), recipe="avx512")


def test_it_changes_with_recipe_degree_dtype_and_program(folder: Path) -> None:
    spec = open_model(folder)
    program = build_program(spec, dtype=DType.F32, max_positions=64)
    files = list(folder.glob("*.safetensors"))
    prints = [
        system_fingerprint(program, files, recipe="avx512"),
        system_fingerprint(program, files, recipe="avx2"),
        system_fingerprint(program, files, recipe="avx512", parallel_degree=2),
        system_fingerprint(
            build_program(spec, dtype=DType.BF16, max_positions=64), files, recipe="avx512"
        ),
        system_fingerprint(
            build_program(replace(spec, norm_eps=1e-3), dtype=DType.F32, max_positions=64),
            files,
            recipe="avx512",
        ),
    ]
    assert len(set(prints)) == len(prints)


def test_the_context_length_does_not_change_it(folder: Path) -> None:
    spec = open_model(folder)
    short, long = (build_program(spec, dtype=DType.F32, max_positions=n) for n in (64, 128))
    assert system_fingerprint(short, [], recipe="x") == system_fingerprint(long, [], recipe="x")


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_changed_byte_a_name_or_a_length_changes_the_weights(tmp_path: Path, place: int) -> None:
    content = bytearray(range(256)) * 40
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = weights_digest([file])
    content[place] ^= 1
    file.write_bytes(content)
    assert weights_digest([file]) != before
    file.write_bytes(content + b"\0")
    assert weights_digest([file]) != before
    content[place] ^= 1
    file.write_bytes(content)
    assert weights_digest([file]) == before
    assert weights_digest([file.rename(tmp_path / "other.safetensors")]) != before
