"""EngineStats: counters and gauges of one engine, for metrics and reports.

Numbers, and the name of the proposer. Always holds: counters (`_total`) only grow while the engine
lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.kv_store import KVStoreStats
from quire.base.kv_transfer import TransferStats

# Upper ends of the histogram of what preemptions cost.
PREEMPTION_COSTS_MS = (
    *(1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0, 10_000.0, 30_000.0, 100_000.0),
)
# The metric of expert_tokens_total, which --expert-load-file reads.
EXPERT_TOKENS = "quire_expert_tokens"


@dataclass(slots=True, kw_only=True)  # made in every step: frozen, it takes three times as long
class EngineStats:
    """Counters and gauges of one engine. Counters (`_total`) only grow."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # that they know: prompts, and what preempted ones have generated
    held: int = 0  # that stand aside: their reader does not keep up, or is stopped
    held_total: int = 0  # how often one was held
    # By tenant, the default one first, then as their file has them.
    tenant_running: tuple[int, ...] = ()
    tenant_waiting: tuple[int, ...] = ()
    tenant_blocks: tuple[int, ...] = ()  # of running requests, shared ones divided
    blocks_total: int = 0
    blocks_used: int = 0  # named by a live request
    blocks_cached: int = 0  # free to take, but still findable by prefix
    blocks_free: int = 0  # free to take, those that a prefix may find included
    blocks_reserved: int = 0  # of those: that running requests will take for tokens they know
    allocated_blocks_total: int = 0
    block_allocation_ms_total: float = 0.0  # 0 where no clock is read (simulation)
    steps_total: int = 0
    restarts_total: int = 0  # of a supervised engine; the other totals are those of one life
    device_busy_ms_total: float = 0.0  # during which at least one step was in flight
    stage_wait_ms_total: float = 0.0  # the last stage of a pipeline waited for rows
    step_rows: int = 0  # requests in the last step
    step_tokens: int = 0  # token rows in the last step; of a part by layers as large a share
    layered_tokens_total: int = 0  # prompt tokens that were computed by layers
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    prefix_hit_host_tokens_total: int = 0  # of those: fetched from a tier in the host's memory
    prefix_hit_disk_tokens_total: int = 0  # of those: fetched from a tier on disk
    pinned_blocks: int = 0
    pinned_tokens_total: int = 0  # of marked prefixes, not found in the cache before
    expired_pins_total: int = 0  # blocks
    dropped_pins_total: int = 0  # blocks beyond a tenant's share
    evicted_pins_total: int = 0  # blocks that were needed
    preemptions_total: int = 0
    preemptions_moved_total: int = 0  # of those: their blocks went to the tier
    preemptions_for_prompts_total: int = 0  # of those: a prompt lacked blocks, not an answer
    preemptions_for_turns_total: int = 0  # of those: for a request long overdue
    preemptions_for_ceilings_total: int = 0  # of those: the tenant had more than it may
    preemption_cost_counts: tuple[int, ...] = ()  # by PREEMPTION_COSTS_MS, and one for beyond
    preemption_cost_ms_total: float = 0.0
    watermark_blocks: int = 0  # what admission leaves free now
    tier_blocks_total: int = 0  # places of the tier, 0 without one or where it failed
    tier_blocks_used: int = 0
    tier_saved_blocks_total: int = 0
    tier_fetched_blocks_total: int = 0
    tier_unsaved_blocks_total: int = 0  # taken out of the pool while too many were being saved
    tier_bad_blocks_total: int = 0  # read back with other bytes than saved: recomputed
    tier_failures_total: int = 0  # 1 where the tier is out of use
    row_errors_total: int = 0
    proposer: str = ""  # of the engine: the name of its kind
    drafting_ms_total: float = 0.0  # computing drafts, beside the steps
    # Decode steps that accepted drafts saved, and what steps took longer for drafts.
    draft_saved_ms_total: float = 0.0
    draft_added_ms_total: float = 0.0
    # Errors of proposers, and of other parts of speculation, which is off after one.
    draft_proposer_errors_total: int = 0
    draft_errors_total: int = 0
    draft_rows_total: int = 0  # rows with draft tokens that were verified
    # Of these drafts, by position in the row: how many there were, and how many were accepted.
    draft_tokens_total: tuple[int, ...] = ()
    accepted_draft_tokens_total: tuple[int, ...] = ()
    # Of those: from texts that requests predict, not from the engine's proposer.
    prediction_rows_total: int = 0
    prediction_tokens_total: tuple[int, ...] = ()
    accepted_prediction_tokens_total: tuple[int, ...] = ()
    # By mixture and expert, the rows that chose it; empty where there is none, and mostly (they are
    # added from time to time).
    expert_tokens_total: tuple[tuple[int, ...], ...] = ()
    transfer: TransferStats | None = None  # None where no blocks are exchanged
    kv_store: KVStoreStats | None = None  # None where there is no shared store
    last_step_ms: float = 0.0  # engine clock when the last step ended
