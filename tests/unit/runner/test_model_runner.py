"""ModelRunner: plans become batches, token choices become results, in order and row by row."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.runner.row_errors import NOT_FINITE
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import WHOLE
from tests.cases import each_case
from tests.unit.runner.plans import BLOCK_SIZE, admission_of, ints, plan_of, runner_of
from tests.unit.runner.scripted_executor import ScriptedExecutor, next_ids


def test_a_mixed_step_becomes_one_flat_batch() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    runner.submit(
        plan_of(
            1,
            [(3, 0, 6, True), (1, 0, 3, False)],
            admissions=(
                admission_of(3, [10, 11, 12, 13, 14, 15]),
                admission_of(1, list(range(20, 30))),
            ),
            blocks={3: [7, 2], 1: [5, 6, 8]},
        )
    )
    runner.submit(plan_of(2, [(3, 6, 1, True), (1, 3, 4, False)]))
    first, second = executor.batches
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert first.rope_positions.tolist() == first.positions.tolist()
    assert first.caches[0].kv_slots.tolist() == [28, 29, 30, 31, 8, 9, 20, 21, 22]
    assert first.seq_starts.tolist() == [0, 6, 9]
    assert first.caches[0].block_tables.tolist() == [[7, 2], [5, 6]]
    assert first.sample_rows.tolist() == [5]
    # The sampled token (its position, 6) is read back from the table; the plan never held it.
    assert second.token_ids.tolist() == [6, 23, 24, 25, 26]
    assert second.caches[0].kv_slots.tolist() == [10, 23, 24, 25, 26]
    for batch in executor.batches:
        inner = [getattr(rows, name) for rows in batch.caches for name in rows.__slots__]
        names = set(batch.__slots__) - {"caches", "features", "keeps_taps"}
        arrays = [getattr(batch, name) for name in names]
        for array in (*arrays, *inner):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_rows_keep_their_own_parameters_from_step_to_step() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    both = [(0, 2, 1, True), (1, 2, 1, True)]
    asked = (admission_of(0, [1, 2], temperature=0.5), admission_of(1, [3, 4], temperature=0.25))
    runner.submit(plan_of(1, [(0, 0, 2, True), (1, 0, 2, True)], admissions=asked))
    runner.submit(plan_of(2, both))
    runner.submit(plan_of(3, [(1, 3, 1, True)]))
    later = admission_of(0, [5, 6, 7], temperature=0.75, logit_bias={1: 1.0})
    runner.submit(plan_of(4, [(0, 2, 1, True), (1, 4, 1, True)], admissions=(later,)))
    runner.submit(plan_of(5, [(0, 3, 1, True), (1, 5, 1, True)]))
    temperatures = [batch.temperature.tolist() for batch in executor.samples]
    assert temperatures == [[0.5, 0.25], [0.5, 0.25], [0.25], [0.75, 0.25], [0.75, 0.25]]
    positions = [batch.positions.tolist() for batch in executor.samples]
    assert positions == [[2, 2], [3, 3], [4], [3, 5], [4, 6]]
    biases = [batch.logit_bias for batch in executor.samples]
    assert [bias and bias.tokens.ids.tolist() for bias in biases] == [None, None, None, [1], [1]]
    prepared = [id(batch.prepared) for batch in executor.samples]
    assert prepared[0] == prepared[1]
    assert len(set(prepared)) == 4


def test_nothing_is_stored_before_store_from() -> None:
    executor = ScriptedExecutor()
    plan = plan_of(
        1,
        [(0, 7, 1, True), (1, 2, 4, True)],
        admissions=(admission_of(0, list(range(8))), admission_of(1, list(range(6)))),
        blocks={0: [1, 2], 1: [3, 4]},
        store_from=[8, 4],
    )
    runner_of(executor).submit(plan)
    assert executor.batches[0].caches[0].kv_slots.tolist() == [-1, -1, -1, 16, 17]


def test_a_row_of_one_token_stores_nothing_before_store_from() -> None:
    executor = ScriptedExecutor()
    plan = plan_of(
        1,
        [(0, 7, 1, True), (1, 5, 1, False)],
        admissions=(admission_of(0, list(range(8))), admission_of(1, list(range(6)))),
        blocks={0: [1, 2], 1: [3, 4]},
        store_from=[8, 4],
    )
    runner_of(executor).submit(plan)
    assert executor.batches[0].caches[0].kv_slots.tolist() == [-1, 17]


def test_plans_without_rows_compute_nothing() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    result = runner.collect(
        runner.submit(plan_of(1, [], copy_from=ints(1), copy_to=ints(2), retired=ints(3)))
    )
    assert executor.batches == []
    assert executor.copies == [([1], [2])]
    assert len(result.token_counts) == 0
    assert len(result.token_ids) == 0


def test_a_chunk_that_samples_nothing_yields_no_token() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    plan = plan_of(
        1, [(0, 0, 3, False)], admissions=(admission_of(0, [1, 2, 3, 4]),), blocks={0: [0]}
    )
    result = runner.collect(runner.submit(plan))
    assert result.token_counts.tolist() == [0]
    assert result.token_ids.dtype == np.int32
    assert executor.heads == []


def test_the_head_runs_in_slices_and_alternatives_are_joined() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor, max_samples=2)
    admissions = tuple(
        admission_of(slot, [1] * (slot + 1), logprobs=[None, 0, 3, None, 1][slot])
        for slot in range(5)
    )
    plan = plan_of(
        1,
        [(slot, 0, slot + 1, True) for slot in range(5)],
        admissions=admissions,
        blocks={slot: [slot * 2, slot * 2 + 1] for slot in range(5)},
    )
    result = runner.collect(runner.submit(plan))
    assert executor.heads == [(0, 2), (2, 2), (4, 1)]
    assert result.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(result.logprobs).tolist() == [True, False, False, True, False]
    assert result.top_ids.tolist() == [[-1] * 3, [-1] * 3, [9, 9, 9], [9, 9, 9], [9, -1, -1]]
    assert np.isnan(result.top_logprobs[4]).tolist() == [False, True, True]


def test_a_failed_row_ends_alone() -> None:
    def choose(positions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(positions == 2, -1, next_ids(positions)).astype(np.int32)

    executor = ScriptedExecutor(choose)
    runner = runner_of(executor)
    plan = plan_of(
        1,
        [(0, 0, 3, True), (1, 0, 1, False), (2, 0, 2, True), (3, 0, 4, True)],
        admissions=tuple(admission_of(slot, [5] * 4) for slot in range(4)),
        blocks={slot: [slot] for slot in range(4)},
    )
    result = runner.collect(runner.submit(plan))
    assert result.token_counts.tolist() == [1, 0, 0, 1]
    assert result.token_ids.tolist() == [3, 4]
    assert len(result.logprobs) == len(result.top_ids) == 0  # no request asks for any
    assert [(error.row, error.message) for error in result.errors] == [(2, NOT_FINITE)]
    assert runner.tables.tokens.lengths[:4].tolist() == [4, 4, 4, 5]


def test_plain_rows_carry_no_history_bias_or_banned_ids() -> None:
    executor = ScriptedExecutor()
    runner_of(executor).submit(
        plan_of(
            1,
            [(0, 0, 2, True), (1, 0, 2, True)],
            admissions=(
                admission_of(0, [1, 2], top_k=-1, temperature=0.5, stop_ids=(4,)),
                admission_of(1, [3, 4], stream=2, seed=-5, top_p=0.5, min_p=0.25, logprobs=3),
            ),
            blocks={0: [0], 1: [1]},
        )
    )
    batch = executor.samples[0]
    assert parts_of(batch) == {"truncation", "num_logprobs"}
    assert batch.temperature.tolist() == [0.5, 1.0]
    truncation = batch.truncation
    assert truncation is not None
    assert truncation.top_k.tolist() == [0, 0]
    assert truncation.top_p.tolist() == [1.0, 0.5]
    assert truncation.min_p.tolist() == [0.0, 0.25]
    assert batch.noise.seeds.tolist() == [7, -5]
    assert batch.noise.streams.tolist() == [0, 2]
    assert batch.positions.tolist() == [2, 2]
    assert batch.num_logprobs is not None
    assert batch.num_logprobs.tolist() == [-1, 3]


@each_case(
    ("settings", "parts"),
    [
        ({}, set()),
        ({"temperature": 0.0}, set()),
        ({"top_k": 5}, {"truncation"}),
        ({"top_p": 0.9}, {"truncation"}),
        ({"min_p": 0.1}, {"truncation"}),
        ({"repetition_penalty": 1.5}, {"penalties", "history"}),
        ({"presence_penalty": 0.5}, {"penalties", "history"}),
        ({"frequency_penalty": 0.5}, {"penalties", "history"}),
        ({"frequency_penalty": 0.5, "repeat_last_n": 0}, set()),
        ({"frequency_penalty": 0.5, "repeat_last_n": 9}, {"penalties", "history"}),
        ({"repeat_last_n": 9}, set()),
        ({"logit_bias": {1: 1.0}}, {"logit_bias"}),
        ({"min_tokens": 2, "stop_ids": (3,)}, {"banned"}),
        ({"logprobs": 0}, {"num_logprobs"}),
        ({"typical_p": 0.5}, {"rare"}),
        ({"no_repeat_ngram_size": 2}, {"rare", "history"}),
    ],
)
def test_a_batch_has_the_parts_that_a_row_uses(settings: dict[str, Any], parts: set[str]) -> None:
    executor = ScriptedExecutor()
    admissions = (admission_of(0, [1, 2], **settings), admission_of(1, [3]))
    rows = [(0, 0, 2, True), (1, 0, 1, True)]
    runner_of(executor).submit(plan_of(1, rows, admissions=admissions))
    assert parts_of(executor.samples[0]) == parts


def parts_of(batch: SampleBatch) -> set[str]:
    """Return the parts that a batch has, but for those that all batches have."""
    names = {item.name for item in fields(batch) if getattr(batch, item.name) is not None}
    return names - {"positions", "temperature", "noise", "prepared"}


@pytest.mark.parametrize(
    ("other", "last_n"),
    [({}, None), ({"repeat_last_n": -1}, [WHOLE, -1]), ({"repeat_last_n": 4}, [WHOLE, 4])],
)
def test_windows_are_in_a_batch_if_a_row_has_one(
    other: dict[str, Any], last_n: list[int] | None
) -> None:
    executor = ScriptedExecutor()
    penalized = {"presence_penalty": 0.5}
    admissions = (admission_of(0, [1], **penalized), admission_of(1, [3], **penalized, **other))
    rows = [(0, 0, 1, True), (1, 0, 1, True)]
    runner_of(executor).submit(plan_of(1, rows, admissions=admissions))
    penalties = executor.samples[0].penalties
    assert penalties is not None
    found = None if penalties.last_n is None else penalties.last_n.tolist()
    assert found == last_n


def test_rows_with_penalties_bias_and_banned_ids_carry_theirs_only() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    runner.submit(
        plan_of(
            1,
            [(0, 0, 3, True), (1, 0, 2, True), (2, 0, 4, True)],
            admissions=(
                admission_of(0, [1, 2, 3], num_prompt_tokens=2, presence_penalty=0.5),
                admission_of(1, [4, 5], logit_bias={6: 1.0, 7: -2.0}),
                admission_of(2, [8, 9, 8, 9], num_prompt_tokens=3, min_tokens=2, stop_ids=(1, 2)),
            ),
            blocks={0: [0], 1: [1], 2: [2]},
        )
    )
    runner.submit(plan_of(2, [(0, 3, 1, True), (2, 4, 1, True)], blocks={2: [2, 3]}))
    first, second = executor.samples
    assert first.history is not None
    assert first.history.tokens.starts.tolist() == [0, 3, 3, 3]
    assert first.history.tokens.ids.tolist() == [1, 2, 3]
    assert first.history.num_prompt_tokens.tolist() == [2, 2, 3]
    assert first.logit_bias is not None
    assert first.logit_bias.tokens.starts.tolist() == [0, 0, 2, 2]
    assert first.logit_bias.tokens.ids.tolist() == [6, 7]
    assert first.logit_bias.values.tolist() == [1.0, -2.0]
    assert first.banned is not None
    assert first.banned.starts.tolist() == [0, 0, 0, 2]  # one token of two was generated
    assert first.banned.ids.tolist() == [1, 2]
    assert second.history is not None
    assert second.history.tokens.ids.tolist() == [1, 2, 3, 3]  # with the token sampled in step 1
    assert second.banned is None


def test_a_sample_batch_is_reused_once_min_tokens_are_reached() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    asked = (admission_of(0, [1, 2], min_tokens=2, stop_ids=(3,)),)
    runner.submit(plan_of(1, [(0, 0, 2, 1)], admissions=asked))
    for step in range(2, 6):
        runner.submit(plan_of(step, [(0, step, 1, 1)]))
    assert [batch.banned is not None for batch in executor.samples] == [True, True] + [False] * 3
    prepared = [id(batch.prepared) for batch in executor.samples]
    assert len(set(prepared)) == 3


def test_a_released_slot_keeps_nothing_of_its_request() -> None:
    runner = runner_of(ScriptedExecutor())
    asked = admission_of(
        1, [1, 2], repetition_penalty=1.5, logit_bias={1: 1.0}, min_tokens=9, stop_ids=(3,)
    )
    beside = admission_of(2, [7, 7])
    runner.submit(
        plan_of(
            1,
            [(1, 0, 2, True), (2, 0, 2, True)],
            admissions=(asked, beside),
            blocks={1: [5], 2: [6]},
        )
    )
    runner.submit(plan_of(2, [(2, 2, 1, True)], retired=ints(1)))
    tables = runner.tables
    for name in ("has_truncation", "has_penalty", "has_bias", "stops_from", "blocks"):
        assert not getattr(tables, name)[1].any(), name
    assert not tables.tokens.tokens[1].any()
    assert tables.tokens.lengths[1] == tables.tokens.prompt_lengths[1] == 0
    for name in ("bias_ids", "bias_values", "stop_ids"):
        assert len(getattr(tables, name)[1]) == 0, name
    assert tables.tokens.lengths[2] == 4
    assert tables.blocks[2, 0] == 6


def test_a_slot_drops_the_parameters_of_its_last_request() -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor)
    greedy = admission_of(
        0, [1, 2], repetition_penalty=1.5, logit_bias={1: 1.0}, min_tokens=9, stop_ids=(3,)
    )
    runner.submit(plan_of(1, [(0, 0, 2, True)], admissions=(greedy,), blocks={0: [0]}))
    plain = admission_of(0, [4])
    runner.submit(plan_of(2, [(0, 0, 1, True)], admissions=(plain,), retired=ints(0)))
    batch = executor.samples[1]
    assert parts_of(batch) == set()
    assert batch.positions.tolist() == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_raises_when_collected_and_the_next_one_runs(overlap: bool) -> None:
    executor = ScriptedExecutor()
    runner = runner_of(executor, overlap=overlap)
    executor.fail_next_trunk = RuntimeError("no memory")
    plan = plan_of(1, [(0, 0, 1, True)], admissions=(admission_of(0, [1]),), blocks={0: [0]})
    handle = runner.submit(plan)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.collect(handle)
    plan = plan_of(2, [(1, 0, 2, True)], admissions=(admission_of(1, [5, 6]),), blocks={1: [3]})
    result = runner.collect(runner.submit(plan))
    assert result.token_ids.tolist() == [2]
    runner.close()
    assert executor.is_closed


def test_with_overlap_submit_returns_at_once_and_plans_run_in_order() -> None:
    may_run = threading.Event()

    def choose(positions: NDArray[np.int32]) -> NDArray[np.int32]:
        may_run.wait()
        return next_ids(positions)

    executor = ScriptedExecutor(choose)
    runner = runner_of(executor, overlap=True)
    plan = plan_of(1, [(0, 0, 2, True)], admissions=(admission_of(0, [1, 2]),), blocks={0: [0]})
    handles = [runner.submit(plan), runner.submit(plan_of(2, [(0, 2, 1, True)]))]
    may_run.set()
    assert [runner.collect(handle).step for handle in handles] == [1, 2]
    assert executor.batches[1].token_ids.tolist() == [2]  # the token sampled in step 1
    runner.close()


def test_rows_planned_after_a_failed_one_lack_its_token_and_block_no_other() -> None:
    def choose(positions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(positions == 2, -1, next_ids(positions)).astype(np.int32)

    executor = ScriptedExecutor(choose)
    runner = runner_of(executor, overlap=True)
    admissions = (
        admission_of(0, [1, 2], repetition_penalty=1.3),
        admission_of(1, [3, 4, 5], repetition_penalty=1.3),
    )
    plans = [
        plan_of(
            1, [(0, 0, 2, True), (1, 0, 3, True)], admissions=admissions, blocks={0: [0], 1: [1]}
        ),
        plan_of(2, [(0, 2, 1, True), (1, 3, 1, True)]),
        plan_of(3, [(0, 3, 1, True), (1, 4, 1, True)]),
    ]
    handles = [runner.submit(plan) for plan in plans]
    results = [runner.collect(handle) for handle in handles]
    assert [error.row for error in results[0].errors] == [0]
    assert [result.token_ids.tolist()[-1] for result in results] == [3, 4, 5]
    histories = [batch.history for batch in executor.samples]
    assert all(history is None or history.late_slots is None for history in histories)
    runner.close()


@pytest.mark.parametrize("most", [1, 11])
def test_random_steps_match_a_loop_over_rows(most: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        executor = ScriptedExecutor()
        runner = runner_of(executor)
        num_rows = int(rng.integers(1, 8))
        slots = rng.permutation(8)[:num_rows].tolist()
        counts = rng.integers(1, most + 1, num_rows).tolist()
        starts = rng.integers(0, 40, num_rows).tolist()
        tables = {slot: rng.integers(0, 99, 16).tolist() for slot in slots}
        tokens = {slot: rng.integers(0, 50, 60).tolist() for slot in slots}
        samples = (rng.random(num_rows) < 0.5).tolist()
        plan = plan_of(
            1,
            list(zip(slots, starts, counts, samples, strict=True)),
            admissions=tuple(admission_of(slot, tokens[slot]) for slot in slots),
            blocks=tables,
        )
        runner.submit(plan)
        _check(executor.batches[0], slots, starts, counts, samples, tables, tokens)


def _check(
    batch: Any,
    slots: list[int],
    starts: list[int],
    counts: list[int],
    samples: list[bool],
    tables: dict[int, list[int]],
    tokens: dict[int, list[int]],
) -> None:
    row = 0
    sample_rows = []
    for index, slot in enumerate(slots):
        for position in range(starts[index], starts[index] + counts[index]):
            block = tables[slot][position // BLOCK_SIZE]
            assert batch.token_ids[row] == tokens[slot][position]
            assert batch.positions[row] == position
            assert batch.caches[0].kv_slots[row] == block * BLOCK_SIZE + position % BLOCK_SIZE
            assert batch.caches[0].block_tables[index, position // BLOCK_SIZE] == block
            row += 1
        assert batch.seq_starts[index + 1] == row
        sample_rows += [row - 1] if samples[index] else []
    assert batch.sample_rows.tolist() == sample_rows


def test_a_request_without_a_seed_raises_an_internal_error() -> None:
    runner = runner_of(ScriptedExecutor())
    plan = plan_of(1, [], admissions=(admission_of(0, [1], seed=None),))
    with pytest.raises(ValueError, match="planned without a seed"):
        runner.tables.apply(plan)
