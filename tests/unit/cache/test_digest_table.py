"""The native digest table against its Python reference, and with many collisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire._native import DigestTable
from quire.cache.chain import digests_of, keys_of
from quire.cache.digest_table import PlainDigestTable

VERBS = ("find", "longest_run", "put", "take", "take_pairs", "clear")
Drawn = list[tuple[str, list[tuple[int, int]]]]


def digests(*names: int) -> np.ndarray:
    """Return one digest per name.

    Names with equal last 4 bits have equal last 62 bits of the low half, so that they share a home
    slot in any table.
    """
    rows = [((name & 15) | (name >> 4 & 3) << 62, name) for name in names]
    return np.array(rows, np.uint64).reshape(-1, 2)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(VERBS[:5] * 8 + VERBS[5:]),
            st.lists(st.tuples(st.integers(0, 150), st.integers(0, 9)), max_size=60),
        ),
        max_size=40,
    )
)
def test_the_native_table_matches_its_reference(drawn: Drawn) -> None:
    native, plain = DigestTable(), PlainDigestTable()
    for verb, pairs in drawn:
        arguments: tuple[np.ndarray, ...] = (digests(*(name for name, _ in pairs)),)
        if verb in ("put", "take_pairs"):
            arguments += (ints(*(number for _, number in pairs)),)
        if verb == "clear":
            arguments = ()
        found, expected = (getattr(table, verb)(*arguments) for table in (native, plain))
        assert np.array_equal(found, expected), verb
        assert len(native) == len(plain)
    everything = digests(*range(151))
    assert native.find(everything).tolist() == plain.find(everything).tolist()
    chains = [everything[first : first + 5] for first in range(0, 151, 3)] + [digests()]
    found = [run.tolist() for run in native.longest_runs(chains)]
    assert found == [run.tolist() for run in plain.longest_runs(chains)]


def test_entries_after_a_removed_digest_are_found_across_the_tables_end() -> None:
    # The last slot of the smallest table is the home of low halves that end in 63: these occupy it
    # and the first slots.
    crowd = np.array([(63 | high << 32, high) for high in range(5)], np.uint64)
    for dropped in range(5):
        table = DigestTable()
        table.put(crowd, np.arange(5, dtype=np.int32))
        table.take(crowd[dropped : dropped + 1])
        expected = [-1 if at == dropped else at for at in range(5)]
        assert table.find(crowd).tolist() == expected


def test_thousands_are_found_while_the_table_grows_and_shrinks() -> None:
    random = np.random.default_rng(0)
    many = random.integers(0, 2**63, (5_000, 2)).astype(np.uint64)
    table = DigestTable()
    for first in range(0, 5_000, 100):
        part = np.arange(first, first + 100, dtype=np.int32)
        assert table.put(many[part], part).tolist() == list(range(100))
    assert table.find(many).tolist() == list(range(5_000))
    assert table.take(many[::2]).tolist() == list(range(0, 5_000, 2))
    assert len(table) == 2_500
    assert table.find(many[1::2]).tolist() == list(range(1, 5_000, 2))


def test_numbers_match_digests_in_count_and_are_not_negative() -> None:
    table = DigestTable()
    with pytest.raises(ValueError, match="differ in length"):
        table.put(digests(1, 2), ints(1))
    with pytest.raises(ValueError, match="differ in length"):
        table.take_pairs(digests(1), ints(1, 2))
    with pytest.raises(ValueError, match="negative"):
        table.put(digests(1, 2), ints(1, -1))
    assert len(table) == 0


def test_digests_convert_to_keys_and_back() -> None:
    for some in (digests(), digests(3), digests(5, 17, 5)):
        assert digests_of(keys_of(some)).tolist() == some.tolist()
