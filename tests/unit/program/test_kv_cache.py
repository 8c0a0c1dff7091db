"""The rewrite that sets the precision of keys and values: what it changes and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.models.registry import build_program, open_model
from quire.program.declarations import CacheSpec
from quire.program.kv_cache import KV_CACHE_DTYPES, kv_cache_text, with_kv_cache_dtype
from quire.program.ops import Attention, StoreKV
from quire.program.program import Program
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama


@pytest.fixture
def program(tmp_path: Path) -> Program:
    spec = open_model(write_tiny_llama(tmp_path))
    return build_program(spec, dtype=DType.F32, max_positions=64)


def test_auto_and_the_own_dtype_leave_a_program_unchanged(program: Program) -> None:
    assert with_kv_cache_dtype(program, "auto") is program
    assert with_kv_cache_dtype(program, "f32") == program


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_one_byte_elements_change_the_cache_alone(program: Program, scheme: str) -> None:
    made = with_kv_cache_dtype(program, scheme)
    assert (made.buffers, made.segments) == (program.buffers, program.segments)
    cache = made.caches[0]
    assert cache.token_bytes == 2 * cache.layers * cache.kv_heads * (cache.head_dim + 4)
    assert kv_cache_text(made) == scheme


def test_another_dtype_applies_to_all_attention_products(program: Program) -> None:
    made = with_kv_cache_dtype(program, "bf16")
    assert made.caches[0].token_bytes == program.caches[0].token_bytes // 2
    for ops in made.segments.values():
        for op in ops:
            if isinstance(op, (StoreKV, Attention)):
                assert {view.dtype for view in op.inputs} == {DType.BF16}
            if isinstance(op, Attention):
                assert op.outputs[0].dtype is DType.F32
    assert made.outputs["logits"].dtype is DType.F32


def test_each_precision_has_its_own_digest_and_round_trips(
    program: Program,
) -> None:
    made = [with_kv_cache_dtype(program, dtype) for dtype in ("f32", "bf16", "int8", "fp8")]
    assert len({digest(one) for one in made}) == 4
    assert [from_plain(to_plain(one)) for one in made] == made


def test_an_unknown_precision_is_rejected_with_the_known_ones(program: Program) -> None:
    with pytest.raises(ValueError, match=", ".join(KV_CACHE_DTYPES)):
        with_kv_cache_dtype(program, "fp4")
    with pytest.raises(ValueError, match="scheme is 'int4'; 'int8' and 'fp8' are known"):
        CacheSpec("paged", 1, 1, 4, DType.F32, scheme="int4")
