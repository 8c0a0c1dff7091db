"""Digests: published vectors, equality of Python and native code, and what a chain identifies."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire._native import hash_chains as native_hash_chains
from quire._native import siphash128 as native_siphash128
from quire.cache import plain_digest
from quire.cache.chain import FIXED_KEY, keys_of, seed_of

# The first lines of vectors_sip128 in the authors' reference code: key 00..0f, message 00..n-1.
VECTORS = (
    "a3817f04ba25a8e66df67214c7550293",
    "da87c1d86b99af44347659119b22fc45",
    "8177228da4a45dc7fca38bdef60affe4",
    "9c70b60c5267a94e5f33b6b02985ed51",
    "f88164c12d9c8faf7d0f6e7c7bcd5579",
    "1368875980776f8854527a07690e9627",
    "14eeca338b208613485ea0308fd7a15e",
    "a1f1ebbed8dbc153c0b84aa61ff08239",
    "3b62a9ba6258f5610f83e264f31497b4",
)


@pytest.mark.parametrize("siphash128", [plain_digest.siphash128, native_siphash128])
def test_siphash_matches_the_published_vectors(siphash128) -> None:
    for length, expected in enumerate(VECTORS):
        low, high = siphash128(bytes(range(length)), FIXED_KEY)
        assert struct.pack("<QQ", low, high).hex() == expected


@given(st.binary(max_size=200), st.binary(min_size=16, max_size=16))
def test_native_siphash_matches_the_reference(message: bytes, key: bytes) -> None:
    assert native_siphash128(message, key) == plain_digest.siphash128(message, key)


@given(st.data())
def test_native_chains_match_the_reference(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 9))
    random = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    num = data.draw(st.integers(0, 5))
    token_ids = [
        random.integers(0, 2**31 - 1, random.integers(0, 40), np.int32) for _ in range(num)
    ]
    seeds = list(random.integers(0, 2**63, (num, 2)).astype(np.uint64))
    arguments = (token_ids, seeds, block_size, FIXED_KEY)
    native, plain = native_hash_chains(*arguments), plain_digest.hash_chains(*arguments)
    assert native.shape == plain.shape == (sum(len(ids) // block_size for ids in token_ids), 2)
    assert (native == plain).all()


def test_a_digest_depends_on_all_tokens_before_it_and_on_none_after() -> None:
    tokens = np.arange(12, dtype=np.int32)
    seed = seed_of("", FIXED_KEY)
    before = native_hash_chains([tokens], [seed], 4, FIXED_KEY)
    tokens[5] += 1
    after = native_hash_chains([tokens], [seed], 4, FIXED_KEY)
    assert (before == after).all(axis=1).tolist() == [True, False, False]


def test_salts_and_keys_change_the_digests_of_the_same_tokens() -> None:
    tokens = np.arange(4, dtype=np.int32)
    found = set()
    for salt, key in (("", FIXED_KEY), ("tenant", FIXED_KEY), ("", b"another key 1234")):
        seed = seed_of(salt, key)
        found.update(keys_of(native_hash_chains([tokens], [seed], 4, key)))
    assert len(found) == 3


def test_native_chains_refuse_wrong_arguments() -> None:
    tokens, seed = np.zeros(8, np.int32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="16 bytes"):
        native_hash_chains([tokens], [seed], 4, b"short")
    with pytest.raises(ValueError, match="differ in length"):
        native_hash_chains([tokens], [], 4, FIXED_KEY)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        native_hash_chains([tokens], [seed], 0, FIXED_KEY)
