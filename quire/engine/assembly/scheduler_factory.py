"""From a config to a Scheduler: which policy, gates and limits; no tensors and no clock.

Apart from `assemble`, so that a simulation has the very deciders that serve: what differs there is
the executor and the clock. Reads the config, and the file of tenants it names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire._native import BlockOperations
from quire.cache.manager import CacheManager
from quire.cache.tier_map import TierMap
from quire.config.groups import EngineConfig, SchedulerConfig
from quire.engine.assembly.tenant_limits import read_limits
from quire.execute.executor import PART_TOKENS
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.cost.transfer_cost import RestoreMode
from quire.scheduler.interfaces import DraftSource
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_budget import CostModel

if TYPE_CHECKING:
    from quire.cache.reporting import BlockEvents


def scheduler_limits(
    config: SchedulerConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    step_tokens: int,
    plans_in_flight: int = 1,
    num_layers: int = 0,
    is_pipelined: bool = False,
    pin_share: float = 0.0,
) -> SchedulerLimits:
    """Return the limits of the scheduler.

    step_tokens: maximum token rows of one step. plans_in_flight: used where the configuration
    sets no number. num_layers: layers that the executor can compute separately, 0 for none.
    is_pipelined: plans in flight are computed by different stages at the same time. pin_share:
    see SchedulerLimits.
    """
    num_plans = config.plans_in_flight or plans_in_flight
    return SchedulerLimits(
        max_num_seqs=min(config.max_num_seqs, num_blocks),
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        plans_in_flight=num_plans,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        step_budget_ms=config.step_budget_ms,
        queue_timeout_ms=1000.0 * (config.queue_timeout_s or 0.0),
        tpot_target_ms=config.tpot_target_ms,
        long_prompt_tokens=config.long_prompt_tokens,
        max_long_prompts=config.max_long_prompts,
        max_short_prompts=config.max_short_prompts,
        part_layers=num_layers if config.layered_prefill else 0,
        layered_part_tokens=PART_TOKENS,
        timeline_steps=config.timeline_steps,
        micro_batches=num_plans if is_pipelined and num_plans > 1 else 0,
        pin_share=pin_share,
    )


def make_scheduler(
    config: EngineConfig,
    limits: SchedulerLimits,
    *,
    num_blocks: int,
    fingerprint: str,
    hash_key: bytes,
    cost: CostModel | None = None,
    tier: TierMap | None = None,
    prices: LinearCost | None = None,
    window: int = 0,
    operations: Callable[..., BlockOperations] = BlockOperations,
    draft_source: DraftSource | None = None,
    events: BlockEvents | None = None,
) -> Scheduler:
    """Return a scheduler over a fresh cache of `num_blocks`.

    Only blocks that the model of `fingerprint` has computed are found. cost: where limits have a
    step_budget_ms. tier: the places of a tier, where there is one. prices: what steps cost, until
    some were timed. window, operations: see CacheManager. draft_source: see Scheduler.
    events: receives which blocks become findable.
    """
    make_cache: Callable[..., CacheManager] = CacheManager
    if events is not None:
        from quire.cache.reporting import ReportingCacheManager  # only if asked for

        make_cache = partial(ReportingCacheManager, events=events)
    cache = make_cache(
        num_blocks,
        config.kv_block_tokens,
        prefix_caching=config.cache.enable_prefix_caching,
        fingerprint=fingerprint,
        hash_key=hash_key,
        tier=tier,
        window=window,
        operations=operations,
    )
    settings = config.scheduler
    tenants, weights = read_limits(settings.tenants, num_blocks=num_blocks)
    policy = make_policy(settings.scheduling_policy, aging=settings.policy_aging, weights=weights)
    return Scheduler(
        limits,
        cache,
        policy,
        cost=cost,
        speed=None if prices is None else SpeedEstimate(prices),
        tenants=tenants,
        restore_mode=RestoreMode(config.cache.kv_tier_fetch),
        draft_source=draft_source,
    )
