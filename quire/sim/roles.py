"""Prefill and decode in engines of their own, simulated: what it gains and what moving costs.

As many engines of both roles are run beside those with roles, each also with a KV store that all
share, where one is given. Knows how to compare and to show; engines, links and the router are in
fleet.py. Always holds: the same requests and settings give the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quire.config.groups import EngineConfig
from quire.obs.report import table
from quire.obs.timing import Goals
from quire.sim.fleet import (
    Fleet,
    FleetRun,
    RolesSpec,
    fleet_entry,
    simulate_fleet,
    store_text,
)
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine
from quire.sim.virtual_store import StoreSpec


def compare_roles(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    spec: RolesSpec,
    goals: Goals,
    routing: str = "round-robin",
    store: StoreSpec | None = None,
    prefill_machine: Machine | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return times of as many engines in all, each of both roles, and of those with roles.

    store: None: without one; else all runs once without it and once with it. prefill_machine: of
    the prefill engines; None: the machine of all others.
    """
    runs: list[dict[str, Any]] = []
    fleets = [
        Fleet(num_engines=spec.num_engines, routing=routing, store=kept, roles=roles)
        for kept in ((None,) if store is None else (None, store))
        for roles in (None, spec)
    ]
    for fleet in fleets:
        found = simulate_fleet(
            requests,
            defaults,
            machine,
            config,
            fleet,
            prefill_machine=None if fleet.roles is None else prefill_machine,
            should_stop=should_stop,
        )
        if not found.run.finished:
            break
        runs.append(
            {
                "roles": _roles_text(fleet, has_other=prefill_machine is not None),
                "store": fleet.store is not None,
                "busy": _busy_shares(found, fleet.roles),
                "num_fetches": found.num_fetches,
                **fleet_entry(found, requests, goals),
            }
        )
        if not found.run.complete:
            break
    return {
        "bench": "simulate roles",
        "settings": {
            "machine": machine.name,
            "prefill_machine": (prefill_machine or machine).name,
            "num_requests": len(requests),
            "roles": asdict(spec),
            "routing": routing,
            "store": None if store is None else asdict(store),
            "goals": asdict(goals),
            "token_bytes": machine.token_bytes,
        },
        "complete": len(runs) == len(fleets) and all(run["complete"] for run in runs),
        "runs": runs,
    }


def _roles_text(fleet: Fleet, *, has_other: bool) -> str:
    roles = fleet.roles
    if roles is None:
        return f"{fleet.num_engines} of both roles" + (", as decode" if has_other else "")
    movable = f", {roles.num_movable} movable" if roles.num_movable else ""
    return f"{roles.num_prefill} prefill, {roles.num_decode} decode{movable}"


def _busy_shares(found: FleetRun, roles: RolesSpec | None) -> dict[str, float]:
    if roles is None:
        return {"both": found.busy_share(0, len(found.engines))}
    fixed = roles.num_prefill + roles.num_decode
    shares = {
        "prefill": found.busy_share(0, roles.num_prefill),
        "decode": found.busy_share(roles.num_prefill, fixed),
    }
    if roles.num_movable:
        shares["movable"] = found.busy_share(fixed, roles.num_engines)
    return shares


def roles_text(outcome: Mapping[str, Any]) -> str:
    """Return the table of `compare_roles`."""
    settings = outcome["settings"]
    spec, store, goals = settings["roles"], settings["store"], settings["goals"]
    rows = []
    for one in outcome["runs"]:
        summary = one["summary"]
        ttft_s, tpot_s = summary["ttft_s"], summary["tpot_s"]
        rows.append(
            (
                one["roles"] + "*" * (not one["complete"]),
                *(("yes" if one["store"] else "no",) if store else ()),
                f"{100 * one['found_share']:.0f} %",
                *(f"{ttft_s[name]:.2f} s" for name in ("p50", "p99")),
                *(f"{1e3 * tpot_s[name]:.1f} ms" if tpot_s else "-" for name in ("p50", "p99")),
                f"{summary['goodput_per_s']:.3g}/s",
                ", ".join(f"{100 * share:.0f} %" for share in one["busy"].values()),
                str(one["num_fetches"]),
            )
        )
    headings = ("engines", *(("store",) if store else ()), "hits", "TTFT p50", "p99")
    headings += ("TPOT p50", "p99", "goodput", "busy", "fetches")
    by = "the router" if spec["prefill_by"] == "router" else "the decode engine"
    lines = [
        f"{settings['machine']}: {settings['num_requests']} requests, routed by "
        f"{settings['routing']}; prompts computed elsewhere by choice of {by}; a link of "
        f"{spec['gb_per_s']:g} GB/s and {spec['latency_ms']:g} ms into each engine",
        f"goal: first token within {goals['ttft_s']:g} s, {1e3 * goals['tpot_s']:g} ms per "
        "output token after it",
        table(headings, rows),
    ]
    if store:
        lines.insert(1, store_text(store))
    return "\n".join(lines)
