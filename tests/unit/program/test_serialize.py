"""Programs round-trip, and their digest follows everything that answers depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.tensors import DType
from tests.cases import each_case
from tests.models.case import Case
from tests.models.cases import CASES
from tests.tiny_models import write_tiny_llama


def make(
    folder: Path, *, dtype: DType = DType.F32, positions: int = 512, **changes: Any
) -> Program:
    spec = open_model(write_tiny_llama(folder, **changes))
    return build_program(spec, dtype=dtype, max_positions=positions)


@each_case("case", CASES, ids=lambda case: case.name)
def test_a_program_round_trips_through_json(case: Case, tmp_path: Path) -> None:
    spec = open_model(case.write(tmp_path))
    positions = min(300, spec.max_positions)
    program = build_program(spec, dtype=DType.BF16, max_positions=positions)
    back = from_plain(json.loads(json.dumps(to_plain(program), allow_nan=False)))
    assert back == program
    assert digest(back) == digest(program)


def test_the_digest_changes_with_what_answers_depend_on(tmp_path: Path) -> None:
    digests = {
        digest(make(tmp_path)),
        digest(make(tmp_path, dtype=DType.BF16)),
        digest(make(tmp_path, rms_norm_eps=1e-6)),
        digest(make(tmp_path, rope_theta=20000.0)),
        digest(make(tmp_path, num_hidden_layers=3)),
        digest(make(tmp_path, tie_word_embeddings=True)),
        digest(make(tmp_path, hidden_act="gelu")),
        digest(make(tmp_path, num_key_value_heads=5)),
    }
    assert len(digests) == 8


def test_the_digest_does_not_change_with_the_longest_context(tmp_path: Path) -> None:
    assert digest(make(tmp_path, positions=512)) == digest(make(tmp_path, positions=64))


def test_another_format_is_rejected_with_both_numbers(tmp_path: Path) -> None:
    plain = to_plain(make(tmp_path))
    with pytest.raises(ValueError, match="format is 5; 4 can be read"):
        from_plain(plain | {"format": 5})


def test_a_view_of_a_missing_buffer_is_rejected(tmp_path: Path) -> None:
    plain = to_plain(make(tmp_path))
    plain["segments"]["trunk"][1]["inputs"][0][0] = 999
    with pytest.raises(ValueError, match="names buffer 999"):
        from_plain(plain)


def test_a_program_that_reads_before_it_writes_is_rejected(tmp_path: Path) -> None:
    program = make(tmp_path)
    trunk = program.segments["trunk"][1:]
    with pytest.raises(ValueError, match="read before written"):
        replace(program, segments={"trunk": trunk})
