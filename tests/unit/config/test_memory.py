"""The memory plan: what fits is used, what does not is rejected with advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.base.errors import CapacityError
from quire.config.machine import MachineMemory
from quire.config.memory import (
    DEFAULT_SHARE,
    RESERVE_BYTES,
    DraftNeeds,
    MemoryNeeds,
    mib,
    plan_memory,
)

MIB = 2**20
NEEDS = MemoryNeeds(
    weights_bytes=100 * MIB,
    step_bytes=10 * MIB,
    token_bytes=64 * 1024,
    block_size=16,
    max_num_seqs=64,
    model_max_len=4096,
    max_model_len=None,
    kv_cache_memory_bytes=None,
)


# 64 slots of 4,096 tokens and 256 block ids, in the scheduler and in the worker's mirror.
TABLES = 64 * (4096 + 256) * 2 * 4


def _memory(num_bytes: int) -> MachineMemory:
    return MachineMemory(available_bytes=num_bytes, limit="free memory")


def _left_for_cache(num_bytes: int) -> MachineMemory:
    return _memory(NEEDS.weights_bytes + NEEDS.step_bytes + RESERVE_BYTES + TABLES + num_bytes)


def test_by_default_the_cache_takes_a_share_of_the_rest() -> None:
    plan = plan_memory(NEEDS, _left_for_cache(1000 * MIB))
    assert plan.kv_bytes == int(1000 * DEFAULT_SHARE) * MIB
    assert plan.max_model_len == 4096
    assert plan.notes == ()


def test_the_lines_are_a_sum() -> None:
    plan = plan_memory(NEEDS, _left_for_cache(1000 * MIB))
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes
    by_name = {line.what: -line.num_bytes for line in plan.lines}
    assert by_name["slot tables"] == TABLES
    assert len(plan.text().splitlines()) == len(plan.lines)
    assert mib(100 * MIB) in plan.text()


def test_slot_tables_scale_with_request_length_and_may_not_fit() -> None:
    asked = replace(NEEDS, max_num_seqs=100_000, max_model_len=4096)
    with pytest.raises(CapacityError, match=r"slot tables.*lower .* --max-num-seqs"):
        plan_memory(asked, _left_for_cache(1000 * MIB))
    small = plan_memory(replace(asked, max_num_seqs=2), _left_for_cache(1000 * MIB))
    assert small.lines[3].num_bytes == -TABLES // 32


def test_the_cache_never_exceeds_what_all_requests_can_use() -> None:
    plan = plan_memory(replace(NEEDS, max_num_seqs=2, max_model_len=40), _memory(2**40))
    assert plan.num_blocks == 2 * 3


def test_the_context_is_reduced_to_what_fits_with_a_notice() -> None:
    plan = plan_memory(NEEDS, _left_for_cache(100 * MIB))
    assert plan.max_model_len == plan.num_blocks * 16 < 4096
    assert plan.notes
    assert "4096" in plan.notes[0]
    assert str(plan.max_model_len) in plan.notes[0]


def test_a_requested_length_is_kept_or_rejected_with_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"--max-model-len 4096 tokens needs 256\.0 MiB"
    ) as raised:
        plan_memory(replace(NEEDS, max_model_len=4096), _left_for_cache(100 * MIB))
    assert "lower --max-model-len to 960" in str(raised.value)
    plan = plan_memory(replace(NEEDS, max_model_len=960), _left_for_cache(100 * MIB))
    assert plan.max_model_len == 960


def test_a_model_that_does_not_fit_is_rejected_with_required_and_available_memory() -> None:
    with pytest.raises(CapacityError) as raised:
        plan_memory(NEEDS, _memory(300 * MIB))
    for part in ("367.0 MiB are needed", "100.0 MiB weights", "300.0 MiB are available", "lower"):
        assert part in str(raised.value)


def test_blocks_in_transfer_are_no_step_buffers() -> None:
    asked = replace(NEEDS, transfer_bytes=512 * MIB)
    plan, plain = (plan_memory(each, _left_for_cache(1000 * MIB)) for each in (asked, NEEDS))
    by_name = {line.what: -line.num_bytes for line in plan.lines}
    assert by_name["step buffers"] == NEEDS.step_bytes
    assert by_name["KV blocks in transfer"] == 512 * MIB
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes
    assert plan.num_blocks < plain.num_blocks
    with pytest.raises(CapacityError, match=r"512\.0 MiB KV blocks in transfer"):
        plan_memory(asked, _memory(300 * MIB))


def test_what_a_proposer_takes_has_lines_by_its_name() -> None:
    draft = DraftNeeds(
        name="prompt lookup",
        host_bytes=7 * MIB,
        host_what="history of answers",
        advice="lower --speculate-history-tokens",
    )
    asked = replace(NEEDS, draft=draft)
    plan, plain = (plan_memory(each, _left_for_cache(1000 * MIB)) for each in (asked, NEEDS))
    by_name = {line.what: -line.num_bytes for line in plan.lines}
    assert by_name["prompt lookup: history of answers"] == 7 * MIB
    assert plan.num_blocks < plain.num_blocks
    with pytest.raises(CapacityError, match=r"7.0 MiB prompt lookup: history.*or lower --specul"):
        plan_memory(asked, _memory(300 * MIB))
    on_device = replace(NEEDS, draft=draft.on_device())
    assert plan_memory(on_device, _left_for_cache(1000 * MIB)).lines == plain.lines
    with pytest.raises(CapacityError) as raised:
        plan_memory(on_device, _memory(300 * MIB))
    assert "lookup" not in str(raised.value)


def test_requested_cache_memory_is_taken_or_rejected() -> None:
    asked = replace(NEEDS, kv_cache_memory_bytes=512 * MIB)
    assert plan_memory(asked, _left_for_cache(600 * MIB)).kv_bytes == 512 * MIB
    with pytest.raises(CapacityError, match=r"asks for 512\.0 MiB.*lower --kv-cache-memory"):
        plan_memory(asked, _left_for_cache(500 * MIB))
    with pytest.raises(CapacityError, match="less than one block"):
        plan_memory(replace(NEEDS, kv_cache_memory_bytes=1000), _left_for_cache(500 * MIB))


def test_a_proposer_is_counted_as_many_blocks_as_its_requests_can_use() -> None:
    draft = DraftNeeds(name="draft model", token_bytes=64 * 1024, max_model_len=64)
    few = replace(NEEDS, max_num_seqs=2, draft=draft, kv_cache_memory_bytes=512 * MIB)
    draft_bytes = 2 * 4 * 16 * draft.token_bytes  # 64 tokens of two requests
    tables = 2 * ((4096 + 256) * 8 + (64 + 4) * 4)
    beside = NEEDS.weights_bytes + NEEDS.step_bytes + RESERVE_BYTES + tables
    plan = plan_memory(few, _memory(beside + 512 * MIB + draft_bytes))
    assert plan.draft_blocks == 8
    assert plan.lines[-1].num_bytes == 0
    with pytest.raises(CapacityError, match=r"and 8\.0 MiB for 8 KV blocks of the draft model"):
        plan_memory(few, _memory(beside + 512 * MIB + draft_bytes - 1))
    shared = replace(few, kv_cache_memory_bytes=None)
    own = MachineMemory(available_bytes=beside + 100 * MIB, limit="a GPU", is_own=True)
    plan = plan_memory(shared, own)
    assert plan.kv_bytes == 100 * MIB - draft_bytes
    assert 0 <= plan.lines[-1].num_bytes < MIB  # less than a block
    long = replace(shared, draft=replace(draft, max_model_len=4096))
    plan = plan_memory(long, replace(own, available_bytes=own.available_bytes + 2**16))
    assert plan.num_blocks == plan.draft_blocks
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes >= 0


def test_what_a_proposer_has_of_the_host_is_a_note_of_a_device_plan() -> None:
    draft = DraftNeeds(name="draft heads", host_bytes=7 * MIB, host_what="hidden states")
    on_host = plan_memory(replace(NEEDS, draft=draft), _left_for_cache(1000 * MIB))
    assert on_host.notes == ()
    assert "draft heads: hidden states" in on_host.text()
    on_device = replace(NEEDS, draft=draft.on_device())
    (note,) = plan_memory(on_device, _left_for_cache(1000 * MIB)).notes
    assert note.startswith("draft heads: hidden states: 7.0 MiB of the host's memory")
