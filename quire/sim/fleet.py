"""Several simulated engines beside each other, with and without a KV store that they share.

Each engine has its own clock, and the one that is furthest behind goes on, so that what an engine
does at a time is known to all others when they come to it. Requests are divided before the run: in
turn, or by the beginning of their prompts, as a router with prefix affinity would. Knows no policy
and no machine: they are arguments. Always holds: the same requests and settings give the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from quire.cache.chain import FIXED_KEY
from quire.cache.store_map import StoreMap
from quire.config.groups import EngineConfig
from quire.engine.assembly.scheduler_factory import make_scheduler
from quire.engine.core import EngineCore
from quire.engine.data_parallel.sums import sum_of_stats
from quire.obs.report import table
from quire.obs.timing import Goals
from quire.sim.clock import VirtualClock
from quire.sim.load import RequestDefaults, RequestFactory, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import Run, TraceReplay, report_nothing
from quire.sim.runner import PlannedOutputs, VirtualRunner
from quire.sim.shared_store import StoreLink, StoreSpec, VirtualStore
from quire.sim.summary import summary_of
from quire.sim.virtual_link import VirtualLink

MAX_SAVING = 128
ROUTINGS = ("turn", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, how requests are divided among them, and their store; None: none."""

    num_engines: int
    routing: str
    store: StoreSpec | None


class FleetFactory(RequestFactory):
    """Makes the requests of engine `number`, with contents that no other engine makes."""

    def __init__(
        self, requests: Sequence[TraceRequest], defaults: RequestDefaults, number: int
    ) -> None:
        super().__init__(requests, defaults)
        self._first_own += number * len(requests)


def divided(
    requests: Sequence[TraceRequest], num_engines: int, routing: str
) -> list[list[TraceRequest]]:
    """Return the requests of each engine, in order of arrival."""
    parts: list[list[TraceRequest]] = [[] for _ in range(num_engines)]
    for number, request in enumerate(requests):
        key = number
        if routing == "prefix" and request.block_ids:
            key = hash(request.block_ids[:1])  # of numbers, so the same in every run
        parts[key % num_engines].append(request)
    return parts


def simulate_fleet(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    fleet: Fleet,
    *,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[list[Run], VirtualStore | None]:
    """Run `requests` until all have ended; return the run of each engine, and the store.

    Raises what `simulate` raises.
    """
    block_bytes = config.kv_block_tokens * machine.token_bytes
    store = None
    if fleet.store is not None:
        store = VirtualStore(max(fleet.store.num_bytes // block_bytes, 1))
    replays = []
    for number, part in enumerate(divided(requests, fleet.num_engines, fleet.routing)):
        factory = FleetFactory(requests, defaults, number)
        if store is None or fleet.store is None:
            replays.append(replay_of(part, factory, defaults, machine, config)[0])
            continue
        make_link = partial(
            StoreLink,
            store=store,
            spec=fleet.store,
            block_size=config.kv_block_tokens,
            block_bytes=block_bytes,
        )
        tier_blocks = max(fleet.store.buffer_bytes // block_bytes, 1)
        replay, _ = replay_of(
            part, factory, defaults, machine, config, tier_blocks=tier_blocks, make_link=make_link
        )
        replays.append(replay)
    live = list(replays)
    while live:
        behind = min(live, key=lambda one: one.now_ms)
        if should_stop is not None and should_stop():
            for replay in live:
                replay.stop()
            break
        if not behind.advance():
            live.remove(behind)
    return [replay.result for replay in replays], store


def replay_of(
    requests: Sequence[TraceRequest],
    factory: RequestFactory,
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    tier_blocks: int = 0,
    make_link: Callable[..., VirtualLink] | None = None,
) -> tuple[TraceReplay, VirtualLink | None]:
    """Return an engine's run of `requests`, and its link.

    make_link(scheduler, tier, now_ms=...): of an engine that gets blocks from elsewhere, through
    so many places.
    """
    num_blocks = machine.num_blocks(config)
    limits = machine.limits(config, num_blocks=num_blocks, max_model_len=defaults.max_model_len)
    clock, tier, link = VirtualClock(), None, None
    if make_link is not None:
        tier = StoreMap(tier_blocks, max_saving=MAX_SAVING)
    scheduler = make_scheduler(
        config,
        limits,
        num_blocks=num_blocks,
        fingerprint=machine.name,
        hash_key=FIXED_KEY,
        cost=machine.linear if limits.step_budget_ms else None,
        prices=machine.linear,
        tier=tier,
    )
    if make_link is not None and tier is not None:
        link = make_link(scheduler, tier, now_ms=clock.now_ms)
    runner = VirtualRunner(
        clock,
        machine.stages or (machine.cost,),
        PlannedOutputs(factory.planned, num_slots=limits.max_num_seqs),
        on_plan=None if link is None else link.note_plan,
    )
    core = EngineCore(
        scheduler,
        runner,
        plans_in_flight=limits.plans_in_flight,
        report=report_nothing,
        tier=link,
    )
    replay = TraceReplay(core, clock, requests, factory)
    replay.busy_ms = lambda: runner.busy_ms
    if link is not None:
        replay.on_outputs, replay.wakes_at_ms = link.note_outputs, link.next_ms
    return replay, link


def joined(runs: Sequence[Run]) -> Run:
    """Return the runs of several engines as one."""
    end_ms = max(run.end_ms for run in runs)
    return Run(
        finished=[one for run in runs for one in run.finished],
        refused=[one for run in runs for one in run.refused],
        stats=sum_of_stats([run.stats for run in runs]),
        end_ms=end_ms,
        busy_ms=sum(run.busy_ms for run in runs) / len(runs),
        complete=all(run.complete for run in runs),
    )


def compare_stores(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    num_engines: int,
    store: StoreSpec,
    goals: Goals,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return hit shares and times with and without the store, for each way to divide requests."""
    runs = []
    for routing in ROUTINGS:
        for spec in (None, store):
            fleet = Fleet(
                num_engines=num_engines,
                routing=routing,
                store=spec,
            )
            found, kept = simulate_fleet(
                requests, defaults, machine, config, fleet, should_stop=should_stop
            )
            run = joined(found)
            if not run.finished:
                break
            runs.append(
                {
                    "routing": routing,
                    "store": spec is not None,
                    "complete": run.complete,
                    "summary": summary_of(run, requests, goals),
                    "stored_blocks": 0 if kept is None else len(kept),
                    "evicted_blocks": 0 if kept is None else kept.num_evicted,
                }
            )
    return {
        "bench": "simulate stores",
        "settings": {
            "machine": machine.name,
            "num_engines": num_engines,
            "num_requests": len(requests),
            "store": asdict(store),
            "block_bytes": config.kv_block_tokens * machine.token_bytes,
            "num_blocks": machine.num_blocks(config),
            "max_num_seqs": config.scheduler.max_num_seqs,
        },
        "complete": len(runs) == 2 * len(ROUTINGS) and all(run["complete"] for run in runs),
        "runs": runs,
    }


def stores_text(outcome: Mapping[str, Any]) -> str:
    """Return the table of `compare_stores`."""
    settings = outcome["settings"]
    spec = settings["store"]
    rows = []
    for one in outcome["runs"]:
        summary = one["summary"]
        ttft_s = summary["ttft_s"]
        rows.append(
            (
                {"turn": "in turn", "prefix": "by prefix"}[one["routing"]]
                + "*" * (not one["complete"]),
                "yes" if one["store"] else "no",
                f"{100 * summary['hit_share']:.0f} %",
                f"{summary['ttft_mean_s']:.2f} s",
                *(f"{ttft_s[name]:.2f} s" for name in ("p50", "p99")),
                f"{100 * summary['busy_share']:.0f} %",
            )
        )
    headings = ("requests", "store", "hits", "TTFT mean", "p50", "p99", "busy")
    return "\n".join(
        [
            f"{settings['num_engines']} engines of {settings['machine']}: "
            f"{settings['num_requests']} requests; a store of {spec['num_bytes'] / 2**30:,.0f} GiB "
            f"at {spec['gb_per_s']:g} GB/s and {spec['latency_ms']:g} ms",
            table(headings, rows),
        ]
    )
