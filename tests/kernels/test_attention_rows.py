"""The Row Rule for attention: a row's bits depend on its query and its visible positions only.

They do not depend on other rows, shared blocks, tiles, threads, block size, chunks, or the content
of invisible slots.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import each_case
from tests.drawn import each_third, examples
from tests.kernels.attention_cases import Geometry, Kept, PagedCache, Rows, Tokens
from tests.kernels.isas import ISAS

BORDERS = (0, 1, 15, 16, 17, 127, 128, 254, 255, 256, 257, 258, 510, 511, 512, 513, 599)
on_every_isa = each_case("isa", ISAS)
however_kept = each_case("kept", list(Kept))
under_windows = each_case("window", [0, 37, 256, 301])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare bit patterns, so that zeros of either sign and NaN count too."""
    assert not np.isnan(expected).any()
    differing = np.flatnonzero((actual.view(np.uint32) != expected.view(np.uint32)).any((1, 2)))
    assert not len(differing), f"rows {differing} of {len(expected)} differ"


@on_every_isa
@however_kept
@under_windows
def test_a_row_is_equal_among_1_to_65_rows(isa: str, kept: Kept, window: int) -> None:
    geometry = Geometry(kept=kept, heads=3, kv_heads=1, head_dim=24, window=window)
    cache = PagedCache(Tokens(geometry, sequences=1, positions=600), isa=isa)
    cache.store([Rows(0, 0, 600)])
    compared = np.array(each_third(range(600), isa, kept, window))
    alone = cache.attend_alone([Rows(0, position, 1) for position in compared.tolist()])
    for count in range(1, 66):
        first = (count * 37) % (600 - count)
        rows = cache.attend([Rows(0, first, count)])
        found = (compared >= first) & (compared < first + count)
        assert_same_bits(rows[compared[found] - first], alone[found])
    assert_same_bits(cache.attend([Rows(0, 0, 600)])[compared], alone)


@on_every_isa
@however_kept
@each_case("window", [0, 37, 301])
@each_case(("group", "head_dim"), [(1, 32), (2, 128), (3, 64), (4, 96), (2, 256)])
def test_few_rows_of_whole_steps_are_as_among_many(
    isa: str, kept: Kept, window: int, group: int, head_dim: int
) -> None:
    geometry = Geometry(kept=kept, heads=group, kv_heads=1, head_dim=head_dim, window=window)
    tokens = Tokens(geometry, sequences=1, positions=600)
    tokens.q[:, 300:330] *= np.float32(1e-38)  # denormals: all code paths must flush alike
    tokens.v[:, 530:540] *= np.float32(1e-38)
    sizes = (4, 8, 16, 32, 48)
    # Two of them for each geometry, and all over all geometries.
    for block_size in (sizes[head_dim // 32 % 5], sizes[(head_dim // 32 + window + 2) % 5]):
        cache = PagedCache(tokens, isa=isa, block_size=block_size)
        many = [Rows(0, 0, 600)]
        cache.store(many)
        together = cache.attend(many)
        places = (*BORDERS, 31, 32, 33, 63, 305, 320, 384, 544, 560, 575)
        for position in each_third(places, isa, kept, window, group, head_dim, block_size):
            row = cache.attend([Rows(0, position, 1)])
            assert_same_bits(row, together[position : position + 1])
        some = cache.attend([Rows(0, 280, 2)])  # different visible positions of their last piece
        assert_same_bits(some, together[280:282])


@on_every_isa
@however_kept
@under_windows
def test_positions_around_every_border_ignore_unfilled_slots(
    isa: str, kept: Kept, window: int
) -> None:
    geometry = Geometry(kept=kept, heads=4, kv_heads=2, head_dim=20, window=window)
    tokens = Tokens(geometry, sequences=1, positions=600)
    full = PagedCache(tokens, isa=isa)
    full.store([Rows(0, 0, 600)])
    for position in BORDERS:
        bare = PagedCache(tokens, isa=isa, seed=position)
        seen = position + 1 if window == 0 else min(window, position + 1)
        bare.store([Rows(0, position + 1 - seen, seen)])  # all other slots are NaN
        row = [Rows(0, position, 1)]
        assert_same_bits(bare.attend(row), full.attend(row))


@on_every_isa
@however_kept
@each_case("fill", [0x00, 0x7F, 0xFF])
@each_case("head_dim", [9, 64])
def test_stale_slots_are_never_read(isa: str, kept: Kept, fill: int, head_dim: int) -> None:
    geometry = Geometry(kept=kept, head_dim=head_dim)
    tokens = Tokens(geometry, sequences=2, positions=300)
    calls = [Rows(0, 250, 27), Rows(1, 30, 1)]
    results = []
    for value in (0xFF, fill):
        cache = PagedCache(tokens, isa=isa)
        cache.bytes[:] = value
        cache.store([Rows(0, 0, 277), Rows(1, 0, 31)])
        results.append(cache.attend(calls))
    assert_same_bits(results[1], results[0])


@on_every_isa
@however_kept
@each_case("head_dim", [1, 16, 20, 33, 64, 128])
def test_stored_bytes_do_not_depend_on_other_rows(isa: str, kept: Kept, head_dim: int) -> None:
    geometry = Geometry(kept=kept, heads=2, kv_heads=2, head_dim=head_dim)
    tokens = Tokens(geometry, sequences=2, positions=90)
    one = PagedCache(tokens, isa=isa, block_size=32)
    for position in range(90):
        for sequence in (0, 1):
            one.store([Rows(sequence, position, 1)])
    for chunks in ([(0, 90)], [(0, 3), (3, 20), (23, 9), (32, 17), (49, 41)], [(0, 31), (31, 59)]):
        many = PagedCache(tokens, isa=isa, block_size=32, num_threads=2)
        for first, count in chunks:
            many.store([Rows(1, first, count), Rows(0, first, count)])
        np.testing.assert_array_equal(many.bytes, one.bytes)


@on_every_isa
@however_kept
@each_case("poison", [np.nan, np.inf])
@each_case("head_dim", [16, 32])
def test_a_nan_token_does_not_reach_earlier_rows(
    isa: str, kept: Kept, poison: float, head_dim: int
) -> None:
    geometry = Geometry(kept=kept, heads=2, kv_heads=1, head_dim=head_dim)
    tokens = Tokens(geometry, sequences=2, positions=300)
    cache = PagedCache(tokens, isa=isa)
    calls = [Rows(0, 240, 40), Rows(1, 0, 20)]
    cache.store([Rows(0, 0, 300), Rows(1, 0, 300)])
    sound = cache.attend(calls)
    for broken in (259, 262):  # an odd and an even place in a pair
        for values in (tokens.q, tokens.k, tokens.v):
            values[0, broken] = poison
        cache.store([Rows(0, broken, 1)])
        rows = cache.attend(calls)
        assert not np.isfinite(rows[broken - 240 : 40]).all()
    assert_same_bits(rows[: 259 - 240], sound[: 259 - 240])
    assert_same_bits(rows[40:], sound[40:])


@on_every_isa
@however_kept
@each_case("broken", [205, 217, 262, 263, 290, 330])
def test_a_nan_token_amid_many_rows_reaches_only_rows_that_see_it(
    isa: str, kept: Kept, broken: int
) -> None:
    """Tiles of earlier rows are in progress when a tile of rows that see it is found."""
    geometry = Geometry(kept=kept, heads=2, kv_heads=1, head_dim=32)
    tokens = Tokens(geometry, sequences=1, positions=600)
    cache = PagedCache(tokens, isa=isa)
    cache.store([Rows(0, 0, 600)])
    call = [Rows(0, 200, 150)]
    sound = cache.attend(call)
    tokens.v[0, broken] = np.inf
    cache.store([Rows(0, broken, 1)])
    rows = cache.attend(call)
    assert not np.isfinite(rows[broken - 200 :]).all((1, 2)).any()
    assert_same_bits(rows[: broken - 200], sound[: broken - 200])


@on_every_isa
@however_kept
@under_windows
def test_threads_and_block_sizes_change_nothing(isa: str, kept: Kept, window: int) -> None:
    geometry = Geometry(kept=kept, heads=6, kv_heads=3, head_dim=40, window=window)
    tokens = Tokens(geometry, sequences=3, positions=530)
    calls = [Rows(0, 200, 90), Rows(2, 529, 1), Rows(1, 0, 33), Rows(2, 5, 1)]
    results = []
    others = ((4, 2), (8, 1), (32, 2), (64, 3), (128, 2), (48, 3))
    for block_size, num_threads in ((16, 1), *each_third(others, isa, kept, window)):
        cache = PagedCache(tokens, isa=isa, block_size=block_size, num_threads=num_threads)
        cache.store([Rows(sequence, 0, 530) for sequence in range(3)])
        results.append(cache.attend(calls))
    for rows in results[1:]:
        assert_same_bits(rows, results[0])


@however_kept
def test_sequences_distributed_over_threads_are_as_alone(kept: Kept) -> None:
    tokens = Tokens(Geometry(kept=kept, head_dim=8), sequences=70, positions=40)
    cache = PagedCache(tokens, num_threads=3)
    cache.store([Rows(sequence, 0, 40) for sequence in range(70)])
    calls = [Rows(sequence, sequence % 40, 1) for sequence in range(70)]
    assert_same_bits(cache.attend(calls), cache.attend_alone(calls))


@however_kept
def test_rows_of_a_2048_row_prefill_are_as_alone(kept: Kept) -> None:
    geometry = Geometry(kept=kept, heads=2, kv_heads=1, head_dim=16)
    cache = PagedCache(Tokens(geometry, sequences=1, positions=2048), num_threads=2)
    cache.store([Rows(0, 0, 2048)])
    rows = cache.attend([Rows(0, 0, 2048)])
    some = [*range(0, 2048, 97), 255, 256, 1023, 1024, 2047]
    alone = cache.attend_alone([Rows(0, position, 1) for position in some])
    assert_same_bits(rows[some], alone)


@on_every_isa
@however_kept
@each_case("window", [0, 301, 400, 700])
def test_sequences_sharing_a_prefix_are_as_alone(isa: str, kept: Kept, window: int) -> None:
    geometry = Geometry(kept=kept, heads=4, kv_heads=2, head_dim=20, window=window)
    tokens = Tokens(geometry, sequences=9, positions=800)
    calls = [
        Rows(0, 600, 1),
        Rows(1, 100, 1),  # sees no whole piece
        Rows(2, 790, 3),
        Rows(3, 512, 1),
        Rows(4, 511, 1),  # ends where the prefix does
        Rows(5, 700, 1),  # shares one piece only
        Rows(6, 640, 1),  # shares with 7 what no other row has
        Rows(7, 650, 2),
        Rows(8, 200, 99),  # starts inside the shared prefix
    ]
    alone = None  # the same for all sizes of blocks and numbers of threads
    for block_size, num_threads in ((16, 1), (4, 2), (8, 3), (48, 3), (128, 2)):
        cache = PagedCache(tokens, isa=isa, block_size=block_size, num_threads=num_threads)
        cache.share(512 // block_size * block_size, (0, 1, 2, 3, 4, 8))
        cache.share(384, (0, 5))
        cache.share(576, (6, 7))
        cache.store([Rows(call.sequence, 0, call.first + call.count) for call in calls])
        alone = cache.attend_alone(calls) if alone is None else alone
        assert_same_bits(cache.attend(calls), alone)


@on_every_isa
@however_kept
def test_shared_pieces_are_read_once(isa: str, kept: Kept) -> None:
    geometry = Geometry(kept=kept, heads=4, kv_heads=2, head_dim=16)
    cache = PagedCache(Tokens(geometry, sequences=16, positions=800), isa=isa)
    cache.share(512, range(15))
    calls = [Rows(sequence, 600 + 10 * sequence, 1) for sequence in range(16)]
    cache.store([Rows(sequence, 0, 800) for sequence in range(16)])
    alone = [cache.pieces_read([call]) for call in calls]
    assert alone == [call.first // 256 + 1 for call in calls]
    assert cache.pieces_read(calls[:2]) == 2 + (alone[0] - 2) + (alone[1] - 2)
    # Two pieces for all 15, and the own pieces of each; the 16th shares nothing.
    assert cache.pieces_read(calls) == 2 + sum(count - 2 for count in alone[:15]) + alone[15]


@on_every_isa
def test_under_a_window_only_pieces_all_rows_see_whole_are_read_once(isa: str) -> None:
    geometry = Geometry(kept=Kept.BF16, heads=4, kv_heads=2, head_dim=16, window=600)
    cache = PagedCache(Tokens(geometry, sequences=3, positions=1200), isa=isa)
    cache.share(1024, range(3))
    cache.store([Rows(sequence, 0, 1200) for sequence in range(3)])
    near = [Rows(0, 1030, 1), Rows(1, 1040, 1), Rows(2, 1050, 1)]
    assert [cache.pieces_read([call]) for call in near] == [4, 4, 4]
    assert cache.pieces_read(near) == 2 + 3 * 2  # from 512 on; each its own end and beginning
    assert cache.pieces_read([near[0], Rows(1, 1150, 1)]) == 1 + 3 + 2  # the latter from 551 on
    narrow = Geometry(kept=Kept.BF16, heads=4, kv_heads=2, head_dim=16, window=200)
    cache = PagedCache(Tokens(narrow, sequences=3, positions=1200), isa=isa)
    cache.share(1024, range(3))
    cache.store([Rows(sequence, 0, 1200) for sequence in range(3)])
    assert cache.pieces_read(near) == sum(cache.pieces_read([call]) for call in near) == 3 * 2


@on_every_isa
def test_more_sharing_rows_than_a_group_holds_are_as_alone(isa: str) -> None:
    geometry = Geometry(kept=Kept.BF16, heads=6, kv_heads=1, head_dim=16)
    cache = PagedCache(Tokens(geometry, sequences=70, positions=300), isa=isa, num_threads=3)
    cache.share(256, range(70))
    cache.store([Rows(sequence, 0, 300) for sequence in range(70)])
    calls = [Rows(sequence, 256 + sequence % 40, 1 + sequence % 3) for sequence in range(70)]
    assert_same_bits(cache.attend(calls), cache.attend_alone(calls))


@on_every_isa
@however_kept
def test_nan_in_one_sharing_row_stays_with_it(isa: str, kept: Kept) -> None:
    geometry = Geometry(kept=kept, heads=8, kv_heads=2, head_dim=40, soft_cap=7.0)
    tokens = Tokens(geometry, sequences=3, positions=600)
    cache = PagedCache(tokens, isa=isa)
    cache.share(512, (0, 1, 2))
    calls = [Rows(0, 540, 3), Rows(1, 590, 1), Rows(2, 512, 1)]
    cache.store([Rows(sequence, 0, 600) for sequence in range(3)])
    sound = cache.attend(calls)
    assert_same_bits(sound, cache.attend_alone(calls))
    for values in (tokens.q, tokens.k, tokens.v):
        values[1, 590] = np.nan
    cache.store([Rows(1, 590, 1)])
    rows = cache.attend(calls)
    assert not np.isfinite(rows[3]).all()
    assert_same_bits(rows[[0, 1, 2, 4]], sound[[0, 1, 2, 4]])


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_sharing_gives_the_bits_of_rows_alone(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 2), label="kv_heads")
    geometry = Geometry(
        kept=data.draw(st.sampled_from(list(Kept)), label="kept"),
        heads=kv_heads * data.draw(st.integers(1, 5), label="group"),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([1, 16, 31, 64, 70, 128]), label="head_dim"),
        window=data.draw(st.sampled_from([0, 0, 200, 257, 400, 513, 700]), label="window"),
        soft_cap=data.draw(st.sampled_from([0.0, 0.0, 7.0]), label="soft_cap"),
    )
    count = data.draw(st.integers(2, 12), label="sequences")
    cache = PagedCache(
        Tokens(geometry, sequences=count, positions=800),
        block_size=data.draw(st.sampled_from([4, 8, 16, 32, 64, 128]), label="block_size"),
        num_threads=data.draw(st.integers(1, 3), label="num_threads"),
        isa=data.draw(st.sampled_from(ISAS), label="isa"),
    )
    for sequence in range(1, count):  # with one that shares itself, or with none
        other = data.draw(st.integers(0, sequence - 1))
        cache.share(data.draw(st.sampled_from([0, 240, 256, 400, 512, 768])), (other, sequence))
    calls = [
        Rows(sequence, data.draw(st.integers(200, 790)), data.draw(st.integers(1, 10)))
        for sequence in range(count)
    ]
    cache.store([Rows(call.sequence, 0, call.first + call.count) for call in calls])
    assert_same_bits(cache.attend(calls), cache.attend_alone(calls))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_geometry_gives_the_bits_of_rows_alone(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3), label="kv_heads")
    geometry = Geometry(
        kept=data.draw(st.sampled_from(list(Kept)), label="kept"),
        heads=kv_heads * data.draw(st.integers(1, 5), label="group"),
        kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 70), label="head_dim"),
        window=data.draw(st.sampled_from([0, 0, 1, 5, 64, 255, 256, 259]), label="window"),
        soft_cap=data.draw(st.sampled_from([0.0, 0.0, 7.0]), label="soft_cap"),
    )
    length = data.draw(st.integers(1, 560), label="length")
    tokens = Tokens(geometry, sequences=2, positions=length)
    cuts = data.draw(st.sets(st.integers(1, length), max_size=5), label="cuts")
    edges = sorted({0, length, *cuts})
    cache = PagedCache(
        tokens,
        block_size=data.draw(st.sampled_from([4, 8, 16, 32, 64, 128]), label="block_size"),
        num_threads=data.draw(st.integers(1, 3), label="num_threads"),
        isa=data.draw(st.sampled_from(ISAS), label="isa"),
    )
    cache.store([Rows(1, 0, length)])
    chunks = []
    for first, end in pairwise(edges):  # store, then attend, as a step does
        cache.store([Rows(0, first, end - first)])
        calls = [Rows(1, length - 1, 1), Rows(0, first, end - first)]
        chunks.append(cache.attend(calls)[1:])
    some = sorted({0, length - 1, *(edge - 1 for edge in edges[1:]), length // 2})
    alone = cache.attend_alone([Rows(0, position, 1) for position in some])
    assert_same_bits(np.concatenate(chunks)[some], alone)
