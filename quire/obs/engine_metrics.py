"""Collectors that expose EngineStats as Prometheus metrics, read at scrape time.

Always holds: a counter of the engine is one counter here; of tenants only names from the tenants
file are exposed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, zip_longest

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from quire.base.clock import Clock
from quire.base.engine_stats import EXPERT_TOKENS, PREEMPTION_COSTS_MS, EngineStats
from quire.base.kv_store import BreakerState, KVStoreStats
from quire.base.kv_transfer import TransferStats

# The device's busy share is of so much time before a scrape, from samples so far apart.
BUSY_WINDOW_MS, BUSY_SAMPLE_MS = 60_000.0, 1_000.0
# The label of drafts that are no proposer's of the engine.
PREDICTION = "prediction"


class BusyShare:
    """The share of the last minute in which the device had a step, from samples of a counter."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._samples: deque[tuple[float, float]] = deque([(now_ms(), 0.0)])

    def sample(self, busy_ms_total: float) -> float:
        """Return the share of the time since the oldest sample of the last minute."""
        now_ms = self._now_ms()
        while len(self._samples) > 1 and self._samples[1][0] <= now_ms - BUSY_WINDOW_MS:
            self._samples.popleft()
        since_ms, busy_ms = self._samples[0]
        if now_ms - self._samples[-1][0] >= BUSY_SAMPLE_MS:
            self._samples.append((now_ms, busy_ms_total))
        share = (busy_ms_total - busy_ms) / max(now_ms - since_ms, 1e-3)
        return min(max(share, 0.0), 1.0)


class EngineCollector:
    """Shows an EngineStats as metrics; the numbers are the engine's, not copies."""

    def __init__(
        self, latest: Callable[[], EngineStats], now_ms: Callable[[], float] | None = None
    ) -> None:
        self._latest = latest
        self._busy_share = BusyShare(now_ms or Clock().now_ms)

    def collect(self) -> Iterable[Metric]:
        stats = self._latest()
        busy_share = self._busy_share.sample(stats.device_busy_ms_total)
        for name, text, value in _gauges(stats, busy_share):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in _counters(stats):
            yield CounterMetricFamily(name, text, value=value)
        yield _hits_by_tier(stats)
        yield from _preemptions(stats)
        yield _ended_pins(stats)
        yield from _drafts(stats)
        yield _expert_tokens(stats)
        if stats.transfer is not None:
            yield from _transfers(stats.transfer)
        if stats.kv_store is not None:
            yield from _kv_store(stats.kv_store)


class TenantCollector:
    """Shows what an EngineStats says of tenants, by their names; nothing without tenants."""

    def __init__(self, latest: Callable[[], EngineStats], names: Sequence[str]) -> None:
        self._latest = latest
        self._names = names

    def collect(self) -> Iterable[Metric]:
        stats = self._latest()
        for name, text, values in (
            ("running_requests", "Requests that have a slot", stats.tenant_running),
            ("waiting_requests", "Requests that wait for a slot", stats.tenant_waiting),
            (
                "kv_blocks",
                "KV blocks of running requests, shared ones divided",
                stats.tenant_blocks,
            ),
        ):
            family = GaugeMetricFamily(
                f"quire_tenant_{name}", f"{text}, by tenant", labels=("tenant",)
            )
            for at, tenant in enumerate(self._names):
                family.add_metric((tenant,), values[at] if values else 0)  # none before a step
            yield family


def _gauges(stats: EngineStats, busy_share: float) -> tuple[tuple[str, str, float], ...]:
    """Return (name, help, value) of each gauge."""
    return (
        ("quire_running_requests", "Requests that have a slot", stats.running),
        ("quire_waiting_requests", "Requests that wait for a slot", stats.waiting),
        (
            "quire_waiting_tokens",
            "Known tokens of requests that wait for a slot",
            stats.waiting_tokens,
        ),
        (
            "quire_held_requests",
            "Requests that stand aside: their reader does not keep up, or is stopped",
            stats.held,
        ),
        ("quire_kv_blocks", "KV blocks of the pool", stats.blocks_total),
        ("quire_kv_blocks_used", "KV blocks of live requests", stats.blocks_used),
        (
            "quire_kv_blocks_cached",
            "KV blocks free to take that a prefix may still find",
            stats.blocks_cached,
        ),
        ("quire_kv_blocks_free", "KV blocks free to take", stats.blocks_free),
        (
            "quire_kv_blocks_reserved",
            "Free KV blocks that running requests will take for tokens they know",
            stats.blocks_reserved,
        ),
        (
            "quire_device_busy_share",
            "Share of the last minute in which the device had a step",
            busy_share,
        ),
        (
            "quire_watermark_blocks",
            "KV blocks that admission leaves free for those that run",
            stats.watermark_blocks,
        ),
        ("quire_pinned_blocks", "KV blocks of pinned prefixes", stats.pinned_blocks),
        ("quire_tier_blocks", "Places of the KV tier", stats.tier_blocks_total),
        ("quire_tier_blocks_used", "Places of the KV tier in use", stats.tier_blocks_used),
    )


def _counters(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    """Return (name, help, value) of each counter, without the suffix `_total`."""
    return (
        ("quire_steps", "Steps computed", stats.steps_total),
        (
            "quire_engine_restarts",
            "Engines that died and were replaced (--restart-engine)",
            stats.restarts_total,
        ),
        (
            "quire_device_busy_seconds",
            "Time in which the device had a step",
            stats.device_busy_ms_total / 1000.0,
        ),
        (
            "quire_stage_wait_seconds",
            "Time in which the last stage of a pipeline waited for rows of the stage before",
            stats.stage_wait_ms_total / 1000.0,
        ),
        ("quire_kv_blocks_allocated", "KV blocks allocated", stats.allocated_blocks_total),
        (
            "quire_kv_block_allocation_seconds",
            "Time spent allocating KV blocks",
            stats.block_allocation_ms_total / 1000.0,
        ),
        (
            "quire_prefix_queried_tokens",
            "Prompt tokens looked up in the prefix cache",
            stats.prefix_queried_tokens_total,
        ),
        (
            "quire_prefix_hit_tokens",
            "Prompt tokens found in the prefix cache",
            stats.prefix_hit_tokens_total,
        ),
        (
            "quire_pinned_tokens",
            "Prompt tokens computed for prefixes that requests mark to be kept",
            stats.pinned_tokens_total,
        ),
        (
            "quire_layered_tokens",
            "Prompt tokens computed some layers a step",
            stats.layered_tokens_total,
        ),
        ("quire_preemptions", "Requests preempted", stats.preemptions_total),
        (
            "quire_holds",
            "Times a request was held for its reader, or its stopped API process",
            stats.held_total,
        ),
        ("quire_row_errors", "Rows of steps that failed", stats.row_errors_total),
        *_tier_counters(stats),
    )


def _tier_counters(stats: EngineStats) -> tuple[tuple[str, str, int], ...]:
    return (
        ("quire_tier_saved_blocks", "KV blocks written to the tier", stats.tier_saved_blocks_total),
        (
            "quire_tier_fetched_blocks",
            "KV blocks fetched from the tier: prefix hits that the pool had no more",
            stats.tier_fetched_blocks_total,
        ),
        (
            "quire_tier_unsaved_blocks",
            "KV blocks that went out of the pool unsaved, because too many were being written",
            stats.tier_unsaved_blocks_total,
        ),
        (
            "quire_tier_bad_blocks",
            "KV blocks with corrupt bytes in the tier; they were computed again",
            stats.tier_bad_blocks_total,
        ),
        ("quire_tier_failures", "Times the tier was put out of use", stats.tier_failures_total),
    )


def _drafts(stats: EngineStats) -> Iterable[Metric]:
    """Yield drafts by proposer: the engine's, and the texts that requests predict."""
    seconds = CounterMetricFamily(
        "quire_drafting_seconds",
        "Time in which drafts were computed, between steps: by a draft model, draft heads, or the "
        "model's first layers; by proposer",
        labels=("proposer",),
    )
    saved = CounterMetricFamily(
        "quire_draft_saved_seconds",
        "Time that accepted drafts saved: that of as many tokens without drafts; by proposer",
        labels=("proposer",),
    )
    added = CounterMetricFamily(
        "quire_draft_added_seconds",
        "Time by which steps were longer for planning and verifying drafts, as their cost is "
        "learned; by proposer",
        labels=("proposer",),
    )
    rows = CounterMetricFamily(
        "quire_draft_rows",
        "Rows with draft tokens that were verified, each of which yields one token more than it "
        "has accepted drafts; by proposer",
        labels=("proposer",),
    )
    drafted = CounterMetricFamily(
        "quire_draft_tokens",
        "Draft tokens verified, by position in the draft and proposer",
        labels=("position", "proposer"),
    )
    accepted = CounterMetricFamily(
        "quire_accepted_draft_tokens",
        "Draft tokens accepted; each saves its request a step, other than those after the end of "
        "an answer (a stop string or stop token in the same step), which are counted here and not "
        "in usage; by position in the draft and proposer",
        labels=("position", "proposer"),
    )
    errors = CounterMetricFamily(
        "quire_draft_errors",
        "Errors in speculation, which change no answer, by part: of a proposer, which cost a "
        "request its drafts, or of the prices and the choice of drafts, after which none are made",
        labels=("part",),
    )
    errors.add_metric(("proposer",), stats.draft_proposer_errors_total)
    errors.add_metric(("control",), stats.draft_errors_total)
    predicted = stats.prediction_rows_total
    rows.add_metric((PREDICTION,), predicted)
    for family, ms in (
        (seconds, stats.drafting_ms_total),
        (saved, stats.draft_saved_ms_total),
        (added, stats.draft_added_ms_total),
    ):  # of whole steps, which may have drafts of both
        family.add_metric((stats.proposer or PREDICTION,), ms / 1000.0)
    if stats.proposer:
        rows.add_metric((stats.proposer,), stats.draft_rows_total - predicted)
    for family, of_all, of_predictions in (
        (drafted, stats.draft_tokens_total, stats.prediction_tokens_total),
        (accepted, stats.accepted_draft_tokens_total, stats.accepted_prediction_tokens_total),
    ):
        pairs = zip_longest(of_all, of_predictions, fillvalue=0)
        for position, (num, num_predicted) in enumerate(pairs, start=1):
            if stats.proposer:
                family.add_metric((str(position), stats.proposer), num - num_predicted)
            family.add_metric((str(position), PREDICTION), num_predicted)
    return seconds, saved, added, rows, errors, drafted, accepted


def _expert_tokens(stats: EngineStats) -> Metric:
    family = CounterMetricFamily(
        EXPERT_TOKENS,
        "Tokens that chose an expert, by mixture of experts in the model's order and expert",
        labels=("layer", "expert"),
    )
    for layer, counts in enumerate(stats.expert_tokens_total):
        for expert, count in enumerate(counts):
            family.add_metric((str(layer), str(expert)), count)
    return family


def _transfers(stats: TransferStats) -> Iterable[Metric]:
    """Exchange of KV blocks with other engines; only where there is one."""
    for name, text, gauge in (
        ("leases", "Prompts that are kept for other engines", stats.leases),
        ("fetching", "Transfers from other engines under way", stats.fetching),
    ):
        yield GaugeMetricFamily(f"quire_kv_transfer_{name}", text, value=gauge)
    for name, text, value in (
        ("requests", "Transfers begun from other engines", stats.transfers_total),
        ("sent_blocks", "KV blocks sent to other engines", stats.sent_blocks_total),
        ("sent_bytes", "Bytes of KV blocks sent to other engines", stats.sent_bytes_total),
        (
            "overlapped_bytes",
            "Bytes of those that the other engine had before the prompt was computed",
            stats.overlapped_bytes_total,
        ),
        ("received_blocks", "KV blocks received", stats.received_blocks_total),
        ("received_bytes", "Bytes of KV blocks received", stats.received_bytes_total),
        (
            "early_blocks",
            "KV blocks received that were in the cache before the last one had come",
            stats.early_blocks_total,
        ),
        (
            "receive_seconds",
            "Time spent on the bytes of received KV blocks",
            stats.receive_ms_total / 1000.0,
        ),
    ):
        yield CounterMetricFamily(f"quire_kv_transfer_{name}", text, value=value)
    yield _by_reason(
        "quire_kv_transfer_failures",
        "Transfers that ended early; the blocks that lacked were computed here",
        stats.failures_total,
    )


def _kv_store(stats: KVStoreStats) -> Iterable[Metric]:
    """Yield the metrics of a KV store shared with other engines; only where there is one."""
    for name, text, value in (
        ("lookups", "Requests for which the shared store was asked", stats.lookups_total),
        ("hit_blocks", "KV blocks that were asked for and stored", stats.hit_blocks_total),
        (
            "missed_blocks",
            "KV blocks that were asked for and not stored",
            stats.missed_blocks_total,
        ),
        ("fetched_blocks", "KV blocks fetched from the store", stats.fetched_blocks_total),
        ("fetched_bytes", "Bytes fetched from the store", stats.fetched_bytes_total),
        (
            "disk_fetched_blocks",
            "KV blocks fetched from this engine's disk tier before the store",
            stats.disk_fetched_blocks_total,
        ),
        ("fetch_seconds", "Time in which blocks were fetched", stats.fetch_ms_total / 1000.0),
        ("put_blocks", "KV blocks put into the store, or found there", stats.put_blocks_total),
        ("put_bytes", "Bytes of these", stats.put_bytes_total),
        ("claims", "Prompts that this engine claimed to compute for all", stats.claims_total),
        (
            "waits",
            "Requests that waited for what another engine was computing",
            stats.waited_total,
        ),
        (
            "waits_in_vain",
            "Of these, requests that computed it themselves in the end",
            stats.waited_in_vain_total,
        ),
    ):
        yield CounterMetricFamily(f"quire_kv_store_{name}", text, value=value)
    yield _by_reason(
        "quire_kv_store_failures",
        "Failures of the store by reason; the blocks were computed",
        stats.failures_total,
    )
    breaker = GaugeMetricFamily(
        "quire_kv_store_breaker",
        "1 for the state of the circuit breaker: closed, the store is used; open, it is not after "
        "failures; half_open, one call tries it",
        labels=("state",),
    )
    for state in BreakerState:
        breaker.add_metric((state.value,), float(state.value == stats.breaker))
    yield breaker


def _by_reason(name: str, text: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=("reason",))
    for reason, count in counts:
        family.add_metric((reason,), count)
    return family


def _hits_by_tier(stats: EngineStats) -> Metric:
    host, disk = stats.prefix_hit_host_tokens_total, stats.prefix_hit_disk_tokens_total
    family = CounterMetricFamily(
        "quire_prefix_hit_tokens_by_tier",
        "Prompt tokens found in the prefix cache, by where they lay when the request came",
        labels=("tier",),
    )
    family.add_metric(("pool",), stats.prefix_hit_tokens_total - host - disk)
    family.add_metric(("host",), host)
    family.add_metric(("disk",), disk)
    return family


def _ended_pins(stats: EngineStats) -> Metric:
    family = CounterMetricFamily(
        "quire_ended_pins",
        "KV blocks that were pinned and are no longer, by why: their time was over, their tenant "
        "pinned more than its share, or they were needed",
        labels=("reason",),
    )
    family.add_metric(("expired",), stats.expired_pins_total)
    family.add_metric(("share",), stats.dropped_pins_total)
    family.add_metric(("evicted",), stats.evicted_pins_total)
    return family


def _preemptions(stats: EngineStats) -> Iterable[Metric]:
    """By way, by reason, and what they cost: each has its own sum, all of them the same."""
    total, moved = stats.preemptions_total, stats.preemptions_moved_total
    prompts, ceilings = stats.preemptions_for_prompts_total, stats.preemptions_for_ceilings_total
    by_way = CounterMetricFamily(
        "quire_preemptions_by_way",
        "Requests preempted, by what is done with their KV blocks",
        labels=("way",),
    )
    by_way.add_metric(("move",), moved)
    by_way.add_metric(("recompute",), total - moved)
    yield by_way
    by_reason = CounterMetricFamily(
        "quire_preemptions_by_reason",
        "Requests preempted, by what their KV blocks or slots were wanted for",
        labels=("reason",),
    )
    turns = stats.preemptions_for_turns_total
    by_reason.add_metric(("answer",), total - prompts - turns - ceilings)
    by_reason.add_metric(("prompt",), prompts)
    by_reason.add_metric(("turn",), turns)
    by_reason.add_metric(("ceiling",), ceilings)
    yield by_reason
    counts = stats.preemption_cost_counts or (0,) * (len(PREEMPTION_COSTS_MS) + 1)
    limits = [*(str(cost_ms / 1e3) for cost_ms in PREEMPTION_COSTS_MS), "+Inf"]
    buckets = list(zip(limits, accumulate(map(float, counts)), strict=True))
    yield HistogramMetricFamily(
        "quire_preemption_cost_seconds",
        "What preempted requests waited for and computed again when they came back, each",
        buckets=buckets,
        sum_value=stats.preemption_cost_ms_total / 1e3,
    )
