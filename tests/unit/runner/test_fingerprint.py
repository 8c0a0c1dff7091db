"""Fingerprints: equal for equal engines, different for everything that changes an answer or
a block.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quire.text
from quire.models.registry import build_program, open_model
from quire.program import serialize
from quire.program.pooling import with_pooling
from quire.program.program import Program
from quire.program.tensors import DType
from quire.runner.fingerprint import FILES, block_fingerprint, system_fingerprint
from tests.tiny_models import write_tiny_llama

PLAIN: dict[str, Any] = {"weights_digest": "w", "recipe": "avx512", "max_model_len": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model with every file that FILES can name."""
    folder = write_tiny_llama(tmp_path / "model")
    for pattern in FILES:
        file = folder / pattern.replace("*", "some")
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text("{}")
    return folder


def _program(folder: Path, *, dtype: DType = DType.F32, max_positions: int = 64) -> Program:
    return build_program(open_model(folder), dtype=dtype, max_positions=max_positions)


def test_it_is_reproducible_and_independent_of_the_path(folder: Path) -> None:
    program = _program(folder)
    one = system_fingerprint(program, folder, **PLAIN)
    assert one.startswith("fp_")
    assert len(one) == 3 + 16
    moved = shutil.copytree(folder, folder.parent / "elsewhere")
    (moved / "README.md").write_text("no answer depends on this")
    assert one == system_fingerprint(program, moved, **PLAIN)


@pytest.mark.parametrize("pattern", FILES)
def test_each_byte_and_the_presence_of_each_file_count(folder: Path, pattern: str) -> None:
    program, file = _program(folder), folder / pattern.replace("*", "some")
    file.write_bytes(bytes(range(256)) * 6000)
    before = system_fingerprint(program, folder, **PLAIN)
    content = bytearray(file.read_bytes())
    assert len(content) > 2**20
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    after = system_fingerprint(program, folder, **PLAIN)
    file.unlink()
    assert len({before, after, system_fingerprint(program, folder, **PLAIN)}) == 3


def test_it_changes_with_weights_recipe_degree_length_dtype_and_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, program = open_model(folder), _program(folder)
    changed = replace(spec, norm=replace(spec.norm, eps=1e-3))
    other = build_program(changed, dtype=DType.F32, max_positions=64)
    (cache,) = program.caches
    prints = [
        system_fingerprint(program, folder, **PLAIN),
        system_fingerprint(program, folder, **PLAIN | {"weights_digest": "other"}),
        system_fingerprint(program, folder, **PLAIN | {"recipe": "avx2"}),
        system_fingerprint(program, folder, **PLAIN | {"max_model_len": 63}),
        system_fingerprint(program, folder, **PLAIN, parallel_degree=2),
        system_fingerprint(program, folder, **PLAIN, chat_template=""),
        system_fingerprint(program, folder, **PLAIN, chat_template="{{ messages }}"),
        system_fingerprint(_program(folder, dtype=DType.BF16), folder, **PLAIN),
        system_fingerprint(other, folder, **PLAIN),
        system_fingerprint(
            replace(program, caches=(replace(cache, dtype=DType.BF16),)), folder, **PLAIN
        ),
    ]
    monkeypatch.setattr(serialize, "NUMERICS_VERSION", serialize.NUMERICS_VERSION + 1)
    prints.append(system_fingerprint(program, folder, **PLAIN))
    assert len(set(prints)) == len(prints)


def test_the_models_own_limit_of_positions_does_not_change_it(folder: Path) -> None:
    short, long = (_program(folder, max_positions=n) for n in (64, 128))
    assert system_fingerprint(short, folder, **PLAIN) == system_fingerprint(long, folder, **PLAIN)


def test_every_tokenizer_and_template_file_counts() -> None:
    """Every file name in the code that reads tokenizers and templates is in FILES."""
    room = Path(quire.text.__file__).parent
    named = re.compile(r"""folder / "([^"/]+\.[a-z]+)"|\.glob\("([^"]+)"\)""")
    read = {
        one or other for file in room.glob("*.py") for one, other in named.findall(file.read_text())
    }
    assert "merges.txt" in read
    assert "*.tiktoken" in read
    assert {name for name in read if name != "*.jinja"} <= set(FILES)
    assert "additional_chat_templates/*.jinja" in FILES


OF_BLOCKS: dict[str, Any] = {
    "executor": "native",
    "recipe": "avx512",
    "weights_digest": "w",
    "block_size": 16,
    "block_bytes": 4096,
}


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_block_fingerprints_depend_on_what_computes_blocks(folder: Path, name: str) -> None:
    program = _program(folder)
    before = block_fingerprint(program, **OF_BLOCKS)
    assert len(before) == 32
    assert before == block_fingerprint(_program(folder), **OF_BLOCKS)
    other = 7 if isinstance(OF_BLOCKS[name], int) else "other"
    assert before != block_fingerprint(program, **{**OF_BLOCKS, name: other})
    assert before != block_fingerprint(_program(folder, dtype=DType.BF16), **OF_BLOCKS)


def test_block_fingerprints_ignore_the_tokenizer_and_the_context_length(
    folder: Path,
) -> None:
    before = block_fingerprint(_program(folder), **OF_BLOCKS)
    for pattern in FILES[2:]:  # the configuration determines what runs
        (folder / pattern.replace("*", "some")).write_text('{"a": 1}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    assert before == block_fingerprint(_program(folder, max_positions=128), **OF_BLOCKS)


def test_rope_and_numerics_count_for_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(folder)
    before = block_fingerprint(program, **OF_BLOCKS)
    rope = program.ropes[0]
    turned = replace(rope, inv_freq=tuple(angle / 2 for angle in rope.inv_freq))
    assert before != block_fingerprint(replace(program, ropes=(turned,)), **OF_BLOCKS)
    monkeypatch.setattr(serialize, "NUMERICS_VERSION", -1)
    assert before != block_fingerprint(program, **OF_BLOCKS)


def test_serving_embeddings_changes_neither(folder: Path) -> None:
    program = _program(folder)
    pooled = with_pooling(program)
    assert block_fingerprint(pooled, **OF_BLOCKS) == block_fingerprint(program, **OF_BLOCKS)
    before = system_fingerprint(program, folder, **PLAIN)
    assert system_fingerprint(pooled, folder, **PLAIN) == before
