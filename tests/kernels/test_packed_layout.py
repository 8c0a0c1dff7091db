"""The packed layout has a version: files hold packed weights, so bytes must not change under it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from quire import _native
from quire.quant.scheme import INT_SCHEMES
from tests.kernels.isas import ISAS
from tests.kernels.one_op import packed

# Digests of one packed matrix by layout version. Any change of them is a new layout: raise
# kPackedLayout in native/include/quire/weight.h, and add its line here.
KNOWN = {
    1: "c80447543c3850ff575c01c35be119e3",
    2: "f874a9fe569c4572a99de97f542e47c8",
}


def _matrix() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    steps = np.arange(70 * 201, dtype=np.int64) * 2_654_435_761 % 4_093
    return ((steps - 2_046) / 512).astype(np.float32).reshape(70, 201)


@pytest.mark.parametrize("isa", ISAS)
def test_packed_bytes_match_their_version_on_every_instruction_set(isa: str) -> None:
    pool, digest = _native.Pool(2, isa=isa), hashlib.blake2b(digest_size=16)
    for scheme in ("f32", "bf16", *INT_SCHEMES):
        digest.update(packed(pool, "matrix", scheme, _matrix()).packed.tobytes())
    assert digest.hexdigest() == KNOWN[_native.PACKED_LAYOUT]


def test_packed_bytes_are_used_in_place_and_never_written() -> None:
    pool = _native.Pool(1)
    made = packed(pool, "matrix", "int4-g32", _matrix())
    room = np.zeros(made.num_bytes + 192, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + made.num_bytes]
    copy[:] = made.packed
    shape = ("matrix", "f32", 70, 201, "int4-g32")
    mapped = _native.Weight(*shape, packed=copy)
    assert [mapped.row(row) for row in range(70)] == [made.row(row) for row in range(70)]
    with pytest.raises(RuntimeError, match="packed before"):
        mapped.fill(pool, 0, 70, _matrix().view(np.uint8).reshape(-1), "f32")
    with pytest.raises(ValueError, match="are needed, aligned to 64"):
        _native.Weight(*shape, packed=copy[:-64])
    with pytest.raises(ValueError, match="are needed, aligned to 64"):
        _native.Weight(*shape, packed=room[start + 1 : start + 1 + made.num_bytes])
    with pytest.raises(ValueError, match="read-only"):
        made.packed[:1] = 0
