"""Wiring: builds the parts of a scheduler and connects its core with the extensions.

The only file of the core that imports extension packages. Decides which extensions exist: one that
the configuration turns off is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import InvalidParameter
from quire.cache.manager import CacheManager
from quire.scheduler.admission.admitter import AdmissionRules, Admitter, Watermark
from quire.scheduler.admission.gates import LengthGate
from quire.scheduler.admission.kv_loads import KVLoads
from quire.scheduler.admission.slot_allocation import SlotAllocator
from quire.scheduler.advance import Advance
from quire.scheduler.beam.beam_groups import BeamGroups
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.cost.transfer_cost import RestoreMode, TransferCost
from quire.scheduler.in_flight import InFlightPlans
from quire.scheduler.interfaces import DraftSource, Gate, StepExtension
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.micro_batches import MicroBatches
from quire.scheduler.outcomes import Outcomes
from quire.scheduler.policy.policy import Policy
from quire.scheduler.preemption.background_rows import BackgroundRows
from quire.scheduler.preemption.backpressure import Backpressure
from quire.scheduler.preemption.preemption_stats import PreemptionStats
from quire.scheduler.preemption.preemptor import Preemptor
from quire.scheduler.preemption.priority_preemption import PriorityPreemption
from quire.scheduler.preemption.victims import Victims
from quire.scheduler.prefill.continued_first import ContinuedFirst
from quire.scheduler.prefill.layered import LayeredChunks
from quire.scheduler.prefill.prompt_shares import PromptShares
from quire.scheduler.prefix_pins import PrefixPins
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.slo.admission_control import (
    check_objectives,
    check_queue_room,
    check_request,
)
from quire.scheduler.slo.expiry import Expired, Expiry
from quire.scheduler.slo.length_history import LengthHistory
from quire.scheduler.slo.ttft_prediction import TTFTPredictor
from quire.scheduler.speculation.draft_rows import DraftRows
from quire.scheduler.step_budget import BlockShares, CostModel
from quire.scheduler.tenants.tenant_ceilings import TenantCeilings
from quire.scheduler.tenants.tenant_usage import TenantLimits, TenantUsage

if TYPE_CHECKING:
    from quire.scheduler.prefill.hand_over import HandOvers

__all__ = [
    "Expired",
    "Policy",
    "RestoreMode",
    "SpeedEstimate",
    "TenantLimits",
    "check_objectives",
    "check_queue_room",
    "check_request",
    "wire",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one scheduler. extensions: in the order in which steps call them."""

    batch: RunningBatch
    shares: BlockShares
    requests: RequestTable
    advance: Advance
    prompts: PromptShares
    layered: LayeredChunks
    admitter: Admitter
    slot_allocator: SlotAllocator
    outcomes: Outcomes
    expiry: Expiry
    beams: BeamGroups
    backpressure: Backpressure
    preemptor: Preemptor
    kv_loads: KVLoads
    lengths: LengthHistory
    predictor: TTFTPredictor
    drafts: DraftRows | None
    hand_overs: HandOvers | None
    background: BackgroundRows
    continued: ContinuedFirst | None
    extensions: tuple[StepExtension, ...]


def wire(
    limits: SchedulerLimits,
    cache: CacheManager,
    policy: Policy,
    cost: CostModel | None,
    speed: SpeedEstimate,
    tenants: Sequence[TenantLimits],
    restore_mode: RestoreMode,
    draft_source: DraftSource | None = None,
) -> Parts:
    """Build and connect the parts of a scheduler. Arguments as of Scheduler."""
    _check_budget(limits, cost)
    cache.lay_out(num_slots=limits.max_num_seqs, max_tokens=limits.max_model_len)
    batch, lengths = RunningBatch(limits.max_num_seqs, limits.max_model_len), LengthHistory()
    policy.begin(batch, speed, lengths)
    shares = BlockShares(cache, limits.max_num_seqs)
    if tenants:
        shares = TenantUsage(tenants, batch, cache)
    loads = KVLoads(cache, transfer := _transfer_cost(cache, speed, restore_mode))
    beams = BeamGroups(batch, cache, policy, shares)
    requests = RequestTable(
        limits, batch, cache, policy, shares, groups=beams, loads=loads, lengths=lengths
    )
    watermark, stats = Watermark(cache.num_blocks), PreemptionStats(speed)
    victims = Victims(policy, batch, cache, speed, transfer if _keeps_evicted(cache) else None)
    preemptor = Preemptor(
        requests, batch, cache, shares, beams, victims=victims, watermark=watermark, stats=stats
    )
    prompts = PromptShares(limits, batch, policy, speed, layered := LayeredChunks(limits, batch))
    advance = Advance(requests, batch, cache, shares, preemptor, prompts, layered, loads)
    beams.connect(advance)
    backpressure, pins = Backpressure(requests, preemptor), PrefixPins(cache, limits.pin_share)
    extensions: list[StepExtension] = [pins, backpressure]
    if limits.micro_batches:
        extensions.append(MicroBatches(batch, preemptor, limits.micro_batches))
    extensions += [TenantCeilings(preemptor)] if shares.has_ceilings else []
    continued = _continued_first(limits, batch, policy, requests.in_flight, speed)
    extensions += [] if continued is None else [continued]
    by_priority = None
    if policy.has_priority_preemption:
        by_priority = PriorityPreemption(requests, batch, cache, policy, shares, preemptor, advance)
        extensions.append(by_priority)
    background = BackgroundRows(requests, batch, speed, advance, backpressure)
    extensions += [layered, beams, background]
    drafts = None
    if draft_source is not None:
        drafts = DraftRows(limits, requests, batch, cache, shares, speed, draft_source)
        extensions.append(drafts)  # last: drafts take what all rows leave
    hand_overs = _hand_overs(limits, batch, cache, loads)
    extensions += [hand_overs] if hand_overs is not None else []
    gates = [*([loads] if cache.tiers is not None else []), *_length_gates(limits)]
    slots = SlotAllocator(batch, cache, policy, shares, loads, stats, pins)
    obstacles = requests.history.obstacles
    rules = AdmissionRules(
        gates=gates, extensions=extensions, watermark=watermark, obstacles=obstacles
    )
    predictor = TTFTPredictor(limits, batch, cache, speed, lengths, requests, policy, by_priority)
    return Parts(
        batch=batch,
        shares=shares,
        requests=requests,
        advance=advance,
        prompts=prompts,
        layered=layered,
        admitter=Admitter(batch, cache, policy, shares, slots, loads, rules, beams),
        slot_allocator=slots,
        outcomes=Outcomes(requests, batch, beams, lengths, predictor.margin, drafts),
        expiry=Expiry(requests, predictor, limits.queue_timeout_ms),
        beams=beams,
        backpressure=backpressure,
        preemptor=preemptor,
        kv_loads=loads,
        lengths=lengths,
        predictor=predictor,
        drafts=drafts,
        hand_overs=hand_overs,
        background=background,
        continued=continued,
        extensions=tuple(extensions),
    )


def _continued_first(
    limits: SchedulerLimits,
    batch: RunningBatch,
    policy: Policy,
    in_flight: InFlightPlans,
    speed: SpeedEstimate,
) -> ContinuedFirst | None:
    """Return steps for streams that continue, where nothing else says which rows stand back."""
    if limits.micro_batches or limits.tpot_target_ms or policy.has_priority_preemption:
        return None
    return ContinuedFirst(batch, in_flight, speed)


def _hand_overs(
    limits: SchedulerLimits, batch: RunningBatch, cache: CacheManager, loads: KVLoads
) -> HandOvers | None:
    if cache.tiers is None or not cache.tiers.tier.exchanges:
        return None
    from quire.scheduler.prefill.hand_over import HandOvers  # only where engines exchange blocks

    return HandOvers(batch, cache, loads, step_tokens=limits.max_num_batched_tokens)


def _keeps_evicted(cache: CacheManager) -> bool:
    """Return whether blocks that leave the pool go to a tier."""
    return cache.tiers is not None and cache.tiers.tier.keeps_evicted


def _check_budget(limits: SchedulerLimits, cost: CostModel | None) -> None:
    """Raise InvalidParameter if steps are limited by time without a cost model."""
    if limits.step_budget_ms and cost is None:
        raise InvalidParameter(
            f"step_budget_ms is {limits.step_budget_ms} but there is no cost model; "
            "set it to 0 or give one",
            param="step_budget_ms",
        )


def _transfer_cost(
    cache: CacheManager, speed: SpeedEstimate, restore_mode: RestoreMode
) -> TransferCost | None:
    """Return the cost of moving blocks; None without a tier."""
    if cache.tiers is None:
        return None
    block_ms = cache.tiers.tier.block_ms
    return TransferCost(speed, cache.block_size, block_ms=block_ms, choice=restore_mode)


def _length_gates(limits: SchedulerLimits) -> list[Gate]:
    """Return the gate of long and short prompts, where their number is limited."""
    if not (limits.max_long_prompts or limits.max_short_prompts):
        return []
    return [LengthGate(limits.max_long_prompts, limits.max_short_prompts)]
