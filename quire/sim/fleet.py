"""Several simulated engines beside each other, with and without roles, links and a shared KV store.

Each engine has its own clock, and the one that is furthest behind goes on, so that what an engine
does at a time is known to all others when they come to it. A router sends requests to engines as
they arrive (fleet_router.py). Knows no policy and no machine: they are arguments. Always holds: the
same requests and settings give the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import SettingError
from quire.base.records import StepOutputs
from quire.config.groups import EngineConfig
from quire.engine.data_parallel.sums import sum_of_stats
from quire.obs.report import table
from quire.obs.timing import Goals
from quire.routing.role_shortage import Side
from quire.sim.engine_ends import LinkSpec, Surroundings
from quire.sim.engines import OnOutputs, SimEngine
from quire.sim.fleet_router import PairSpec, VirtualRouter, check_routing
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import FinishedRequest, Run
from quire.sim.summary import summary_of
from quire.sim.virtual_links import HandingSide
from quire.sim.virtual_store import StoreSpec, VirtualStore

FETCH_WHEN = ("cost", "always")
PREFILL_BY = ("decode-engine", "router")
COMPARED_ROUTINGS = ("round-robin", "warm-cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesSpec:
    """Engines of each role, and the links into them.

    num_movable: engines of both roles that a router moves to the side that lacks engines. fetch: as
    --kv-transfer-fetch. prefill_by: what has prompts computed by prefill engines: the decode engine
    that a request is sent to, or the router before it sends it there. min_prefill_tokens, hold_s:
    as --min-prefill-tokens and --role-seconds of the router.
    """

    num_prefill: int
    num_decode: int
    gb_per_s: float
    latency_ms: float
    num_movable: int = 0
    fetch: str = "cost"
    prefill_by: str = "decode-engine"
    min_prefill_tokens: int = 512
    hold_s: float = 30.0

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1 or self.num_movable < 0:
            raise SettingError(
                f"there are {self.num_prefill} prefill, {self.num_decode} decode and "
                f"{self.num_movable} movable engines; each role needs one"
            )
        if not (self.gb_per_s > 0 and self.latency_ms >= 0):
            raise SettingError(
                f"the link has {self.gb_per_s} GB/s and {self.latency_ms} ms; the rate must be "
                "above 0 and the latency at least 0"
            )
        if self.fetch not in FETCH_WHEN:
            raise SettingError(f"fetch is {self.fetch!r}; allowed: {', '.join(FETCH_WHEN)}")
        if self.prefill_by not in PREFILL_BY:
            raise SettingError(
                f"prefill_by is {self.prefill_by!r}; allowed: {', '.join(PREFILL_BY)}"
            )
        if self.num_movable and self.prefill_by != "router":
            raise SettingError(
                f"there are {self.num_movable} movable engines, which only a router moves; let the "
                "router have prompts computed (--prefill-by router), or leave them out"
            )
        if not (self.min_prefill_tokens >= 0 and self.hold_s > 0):
            raise SettingError(
                f"the router's shortest prompt is {self.min_prefill_tokens} tokens and it waits "
                f"{self.hold_s} s before it moves an engine; at least 0 and above 0 are allowed"
            )

    @property
    def num_engines(self) -> int:
        """Engines of all roles."""
        return self.num_prefill + self.num_decode + self.num_movable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, how requests are divided among them, and their store; None: none.

    roles: None: all engines are of both roles, and exchange nothing.
    """

    num_engines: int
    routing: str = "round-robin"
    store: StoreSpec | None = None
    roles: RolesSpec | None = None

    def __post_init__(self) -> None:
        check_routing(self.routing)
        if self.roles is not None and self.roles.num_engines != self.num_engines:
            raise SettingError(
                f"there are {self.num_engines} engines, {self.roles.num_engines} of them with roles"
            )


@dataclass(slots=True, kw_only=True)
class FleetRun:
    """What a fleet answered, and what each engine did, prefill engines first.

    run: its counters are the sum of all engines'. store: None where there is none. computed_tokens:
    of prompts, at all engines, which caches had not. num_handed_over: prompts that the router had
    computed.
    """

    run: Run
    engines: list[Run]
    store: VirtualStore | None
    computed_tokens: int
    num_handed_over: int
    num_role_changes: int

    def busy_share(self, first: int, end: int) -> float:
        """Return how much of the time some engines computed."""
        end_ms = max(self.run.end_ms, 1e-9)
        parts = self.engines[first:end]
        return sum(one.busy_ms for one in parts) / max(len(parts), 1) / end_ms

    @property
    def num_fetches(self) -> int:
        """Transfers between engines."""
        stats = [one.stats.transfer for one in self.engines]
        return sum(one.transfers_total for one in stats if one is not None)


def simulate_fleet(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    fleet: Fleet,
    *,
    prefill_machine: Machine | None = None,
    prefill_config: EngineConfig | None = None,
    on_outputs: OnOutputs | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> FleetRun:
    """Run `requests` until all have ended.

    prefill_machine, prefill_config: of the prefill engines; None: the same. on_outputs: called with
    an engine and what it puts out in each step.

    Raises what `simulate` raises, and SettingError where machines were measured with different
    blocks.
    """
    prefill_machine = prefill_machine or machine
    if prefill_machine.token_bytes != machine.token_bytes:
        raise SettingError(
            f"a token takes {prefill_machine.token_bytes} bytes at {prefill_machine.name} "
            f"and {machine.token_bytes} at {machine.name}; measure both profiles with one model, "
            "--dtype and --kv-cache-dtype"
        )
    store = None
    if fleet.store is not None:
        block_bytes = config.kv_block_tokens * machine.token_bytes
        store = VirtualStore(max(fleet.store.num_bytes // block_bytes, 1))
    router = VirtualRouter(requests, defaults, fleet.routing, _pairs(fleet.roles))

    def note(engine: SimEngine, outputs: StepOutputs) -> None:
        router.note_outputs(engine, outputs)
        if on_outputs is not None:
            on_outputs(engine, outputs)

    engines: list[SimEngine] = []
    sides: dict[str, HandingSide] = {}
    roles = fleet.roles
    for number in range(fleet.num_engines):
        is_prefill = roles is not None and number < roles.num_prefill
        of_role = (prefill_machine, prefill_config or config) if is_prefill else (machine, config)
        outside = _outside(fleet, *of_role, store, sides)
        engine = SimEngine(number, requests, defaults, *of_role, outside, note, router.note_refused)
        engines.append(engine)
        if engine.ends is not None and engine.ends.side is not None:
            sides[engine.host] = engine.ends.side
        is_movable = roles is not None and number >= roles.num_prefill + roles.num_decode
        side = Side.PREFILL if is_prefill else Side.DECODE
        router.add(engine, side, is_movable=is_movable)
    is_complete = _advance(router, engines, should_stop)
    return _result(requests, engines, router, store, is_complete=is_complete)


def _pairs(roles: RolesSpec | None) -> PairSpec | None:
    """Return what the router does with prompts; None: the engines do that themselves."""
    if roles is None or roles.prefill_by != "router":
        return None
    return PairSpec(
        min_tokens=roles.min_prefill_tokens, latency_ms=roles.latency_ms, hold_s=roles.hold_s
    )


def _outside(
    fleet: Fleet,
    machine: Machine,
    config: EngineConfig,
    store: VirtualStore | None,
    sides: Mapping[str, HandingSide],
) -> Surroundings:
    """Return what the next engine has outside. sides: of all engines, when they are made."""
    roles = fleet.roles
    is_decode = roles is not None and len(sides) >= roles.num_prefill
    link, peers = None, list[str]()
    if roles is not None:
        link = LinkSpec(
            gb_per_s=roles.gb_per_s,
            latency_ms=roles.latency_ms,
            fetch=roles.fetch,
            num_blocks=machine.num_blocks(config),
        )
        if is_decode and roles.prefill_by == "decode-engine":
            peers = [str(number) for number in range(roles.num_prefill)]
    return Surroundings(
        block_bytes=config.kv_block_tokens * machine.token_bytes,
        store=None if store is None or fleet.store is None else (store, fleet.store),
        link=link,
        others=sides,
        peers=peers,
    )


def _advance(
    router: VirtualRouter,
    engines: Sequence[SimEngine],
    should_stop: Callable[[], bool] | None,
) -> bool:
    """Let go on what is furthest behind, until all have ended; return False where it was stopped.

    Of engines at one time the one goes on that has waited longest.
    """
    order = list(engines)
    while True:
        if should_stop is not None and should_stop():
            for engine in engines:
                engine.replay.stop()
            return router.is_done
        behind = min(order, key=lambda one: one.due_ms)
        due_ms = behind.due_ms
        if router.next_ms <= due_ms:
            if due_ms == router.next_ms == math.inf:
                return True
            router.advance()
            continue
        order.remove(behind)
        order.append(behind)
        behind.advance()


def _result(
    requests: Sequence[TraceRequest],
    engines: Sequence[SimEngine],
    router: VirtualRouter,
    store: VirtualStore | None,
    *,
    is_complete: bool,
) -> FleetRun:
    runs = [engine.replay.result for engine in engines]
    finished: list[FinishedRequest] = []
    refused: list[tuple[TraceRequest, str]] = []
    for engine, run in zip(engines, runs, strict=True):
        for one in run.finished:
            number, is_answer = engine.sent_as(one.request)
            if is_answer:
                finished.append(replace(one, request=requests[number]))
        refused += [(requests[engine.sent_as(one)[0]], kind) for one, kind in run.refused]
    stats = sum_of_stats([run.stats for run in runs])
    return FleetRun(
        run=Run(
            finished=finished,
            refused=refused,
            stats=stats,
            end_ms=max(run.end_ms for run in runs),
            busy_ms=sum(run.busy_ms for run in runs) / len(runs),
            complete=is_complete and all(run.complete for run in runs),
        ),
        engines=runs,
        store=store,
        computed_tokens=stats.prefix_queried_tokens_total - stats.prefix_hit_tokens_total,
        num_handed_over=router.num_handed_over,
        num_role_changes=router.num_role_changes,
    )


def fleet_entry(found: FleetRun, requests: Sequence[TraceRequest], goals: Goals) -> dict[str, Any]:
    """Return a run as one of a comparison."""
    stats, store = found.run.stats, found.store
    num_prompt = sum(one.request.prompt_tokens for one in found.run.finished)
    entry: dict[str, Any] = {
        "complete": found.run.complete,
        "summary": summary_of(found.run, requests, goals),
        # Of prompts in all, so that what two engines compute of one counts twice.
        "found_share": 1.0 - found.computed_tokens / max(num_prompt, 1),
    }
    if stats.transfer is not None:
        entry["transfer"] = {
            "transfers": stats.transfer.transfers_total,
            "received_blocks": stats.transfer.received_blocks_total,
            "received_bytes": stats.transfer.received_bytes_total,
            "handed_over": found.num_handed_over,
            "role_changes": found.num_role_changes,
        }
    if store is not None and stats.kv_store is not None:
        of_store = stats.kv_store
        entry["shared_store"] = {
            "stored_blocks": len(store),
            "evicted_blocks": store.num_evicted,
            "fetched_blocks": of_store.fetched_blocks_total,
            "put_blocks": of_store.put_blocks_total,
            "lookups": of_store.lookups_total,
            "hit_blocks": of_store.hit_blocks_total,
            "missed_blocks": of_store.missed_blocks_total,
            "claims": of_store.claims_total,
            "waited": of_store.waited_total,
        }
    return entry


def compare_stores(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    num_engines: int,
    store: StoreSpec,
    goals: Goals,
    routings: Sequence[str] = COMPARED_ROUTINGS,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return hit shares and times with and without the store, for each way to route requests."""
    runs = []
    for routing in routings:
        for spec in (None, store):
            fleet = Fleet(num_engines=num_engines, routing=routing, store=spec)
            found = simulate_fleet(
                requests, defaults, machine, config, fleet, should_stop=should_stop
            )
            if not found.run.finished:
                break
            entry = fleet_entry(found, requests, goals)
            runs.append({"routing": routing, "store": spec is not None, **entry})
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
        "complete": len(runs) == 2 * len(routings) and all(run["complete"] for run in runs),
        "runs": runs,
    }


def stores_text(outcome: Mapping[str, Any]) -> str:
    """Return the table of `compare_stores`."""
    settings = outcome["settings"]
    rows = []
    for one in outcome["runs"]:
        summary = one["summary"]
        ttft_s = summary["ttft_s"]
        rows.append(
            (
                one["routing"] + "*" * (not one["complete"]),
                "yes" if one["store"] else "no",
                f"{100 * summary['hit_share']:.0f} %",
                f"{summary['ttft_mean_s']:.2f} s",
                *(f"{ttft_s[name]:.2f} s" for name in ("p50", "p99")),
                f"{100 * summary['busy_share']:.0f} %",
            )
        )
    headings = ("routing", "store", "hits", "TTFT mean", "p50", "p99", "busy")
    return "\n".join(
        [
            f"{settings['num_engines']} engines of {settings['machine']}: "
            f"{settings['num_requests']} requests; {store_text(settings['store'])}",
            table(headings, rows),
        ]
    )


def store_text(spec: Mapping[str, Any]) -> str:
    """Return a store in numbers."""
    size = f"{spec['num_bytes'] / 2**30:,.0f} GiB"
    return f"a store of {size} at {spec['gb_per_s']:g} GB/s and {spec['latency_ms']:g} ms"
