"""Several engines of `quire simulate`: with and without a shared KV store, and in roles.

Flags, the checks of their combinations, and the call of the comparison; quire/sim simulates. Always
holds: a flag that would have no effect is rejected before anything is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.options import comma_separated, positive_int

if TYPE_CHECKING:
    from quire.config.groups import EngineConfig
    from quire.sim.compare import Comparison
    from quire.sim.fleet import RolesSpec
    from quire.sim.machine import Machine
    from quire.sim.virtual_store import StoreSpec

_OF_STORE = ("store_gb_per_s", "store_latency_ms", "store_size", "store_buffer_size")
_OF_ROUTER = ("movable_engines", "min_prefill_tokens", "role_seconds")
_OF_ROLES = (
    *("prefill_engines", "decode_engines", *_OF_ROUTER, "prefill_by", "prefill_profile"),
    *("transfer_gb_per_s", "transfer_latency_ms"),
)


def add_engines_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of engines that share a store, and of engines with roles."""
    _add_store(parser.add_argument_group("Engines that share a KV store"))
    _add_roles(parser.add_argument_group("Prefill and decode in engines of their own"))


def _add_store(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--engines",
        type=positive_int,
        default=1,
        metavar="NUM",
        help="number of engines to simulate, with and without a shared KV store (default 1)",
    )
    section.add_argument(
        "--routing",
        type=comma_separated,
        metavar="LIST",
        help="how requests are divided among several engines: round-robin, least-tokens or "
        "warm-cache, as `quire route` does (default: round-robin,warm-cache; with roles one of "
        "them, default round-robin)",
    )
    section.add_argument(
        "--store-gb-per-s",
        type=float,
        metavar="NUM",
        help="bandwidth of an engine to and from the store, in GB/s (default 5)",
    )
    section.add_argument(
        "--store-latency-ms",
        type=float,
        metavar="NUM",
        help="fixed time of a lookup and a fetch (default 2)",
    )
    section.add_argument(
        "--store-size", metavar="BYTES", help="capacity of the store (default 1TiB)"
    )
    section.add_argument(
        "--store-buffer-size",
        metavar="BYTES",
        help="an engine's host memory for blocks to and from the store (default 16GiB)",
    )


def _add_roles(section: argparse._ArgumentGroup) -> None:
    for role in ("prefill", "decode"):
        section.add_argument(
            f"--{role}-engines",
            type=positive_int,
            metavar="NUM",
            help=f"number of {role} engines to simulate; compared with as many engines of both "
            "roles; with a --store flag, all of them also with that store",
        )
    section.add_argument(
        "--movable-engines",
        type=positive_int,
        metavar="NUM",
        help="further engines, which the router moves to the role that lacks engines (default: "
        "none)",
    )
    section.add_argument(
        "--prefill-by",
        metavar="WHAT",
        help="what has prompts computed by prefill engines: decode-engine, which a request is sent "
        "to first, where that is predicted to delay all requests less; or router, for all long "
        "prompts (default decode-engine)",
    )
    section.add_argument(
        "--min-prefill-tokens",
        type=int,
        metavar="NUM",
        help="the router has shorter prompts computed where they are answered (default 512)",
    )
    section.add_argument(
        "--role-seconds",
        type=float,
        metavar="NUM",
        help="seconds that a role lacks engines before the router moves one to it (default 30)",
    )
    section.add_argument(
        "--prefill-profile",
        default="",
        metavar="FILE",
        help="a saved machine profile of the prefill engines (default: the machine of the others)",
    )
    section.add_argument(
        "--transfer-gb-per-s",
        type=float,
        metavar="NUM",
        help="what an engine receives from others in a second (default 5)",
    )
    section.add_argument(
        "--transfer-latency-ms",
        type=float,
        metavar="NUM",
        help="the time of a message between engines (default 1)",
    )


def has_several_engines(arguments: argparse.Namespace) -> bool:
    """Return whether several engines are simulated, alike or with roles."""
    return arguments.engines > 1 or _has_roles(arguments)


def compare_engines(
    arguments: argparse.Namespace,
    comparison: Comparison,
    machine: Machine,
    config: EngineConfig,
    should_stop: Callable[[], bool],
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], str]]:
    """Simulate several engines; return the outcome, and the function that makes its text.

    With the comparison's first policy and speed, which are its only ones (see check_engines).
    """
    from quire.sim.compare import with_policy
    from quire.sim.fleet import COMPARED_ROUTINGS, compare_stores, stores_text
    from quire.sim.load import trace_requests
    from quire.sim.profile import read_machine
    from quire.sim.roles import compare_roles, roles_text

    defaults = comparison.defaults
    requests, _ = trace_requests(comparison.trace, speed=comparison.speeds[0], defaults=defaults)
    scene = (requests, defaults, machine, with_policy(config, comparison.policies[0]))
    if arguments.engines > 1:
        outcome = compare_stores(
            *scene,
            num_engines=arguments.engines,
            store=_store_spec(arguments),
            goals=comparison.goals,
            routings=arguments.routing or COMPARED_ROUTINGS,
            should_stop=should_stop,
        )
        return outcome, stores_text
    path = arguments.prefill_profile
    outcome = compare_roles(
        *scene,
        spec=_roles_spec(arguments),
        goals=comparison.goals,
        routing=(arguments.routing or COMPARED_ROUTINGS)[0],
        store=_store_spec(arguments) if _given(arguments, _OF_STORE) else None,
        prefill_machine=read_machine(Path(path)) if path else None,
        should_stop=should_stop,
    )
    return outcome, roles_text


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the flags that were given of these."""
    given = (name for name in names if getattr(arguments, name) not in (None, ""))
    return ["--" + name.replace("_", "-") for name in given]


def _has_roles(arguments: argparse.Namespace) -> bool:
    """Return whether engines have roles."""
    return arguments.prefill_engines is not None or arguments.decode_engines is not None


def _value(value: Any, default: Any) -> Any:
    return default if value is None else value


def _store_spec(arguments: argparse.Namespace) -> StoreSpec:
    from quire.config.flags import parse_bytes
    from quire.sim.virtual_store import StoreSpec

    return StoreSpec(
        gb_per_s=_value(arguments.store_gb_per_s, 5.0),
        latency_ms=_value(arguments.store_latency_ms, 2.0),
        num_bytes=parse_bytes(arguments.store_size or "1TiB"),
        buffer_bytes=parse_bytes(arguments.store_buffer_size or "16GiB"),
    )


def _roles_spec(arguments: argparse.Namespace) -> RolesSpec:
    from quire.sim.fleet import RolesSpec

    return RolesSpec(
        num_prefill=arguments.prefill_engines,
        num_decode=arguments.decode_engines,
        num_movable=arguments.movable_engines or 0,
        gb_per_s=_value(arguments.transfer_gb_per_s, 5.0),
        latency_ms=_value(arguments.transfer_latency_ms, 1.0),
        prefill_by=arguments.prefill_by or "decode-engine",
        min_prefill_tokens=_value(arguments.min_prefill_tokens, 512),
        hold_s=_value(arguments.role_seconds, 30.0),
    )


def check_engines(arguments: argparse.Namespace, num_stages: int) -> None:
    """Reject what several engines are not compared with, and flags that would have no effect.

    Before anything is measured.
    """
    from quire.base.errors import SettingError
    from quire.sim.fleet_router import check_routing

    roles, has_roles = (arguments.prefill_engines, arguments.decode_engines), _has_roles(arguments)
    if arguments.engines > 1 and (given := _given(arguments, _OF_ROLES)):
        raise SettingError(
            f"--engines and {given[0]} are given; --engines compares engines of both roles: leave "
            "one of them out (--prefill-engines and --decode-engines go with the --store flags)"
        )
    if has_roles and None in roles:
        raise SettingError(
            f"--prefill-engines is {roles[0]} and --decode-engines is {roles[1]}; a pair of roles "
            "needs both"
        )
    if arguments.engines == 1 and not has_roles:
        if given := _given(arguments, (*_OF_ROLES, *_OF_STORE, "routing")):
            raise SettingError(
                f"{given[0]} is given and there is one engine; add --engines, or --prefill-engines "
                "and --decode-engines, or leave it out"
            )
        return
    for name in arguments.routing or ():
        check_routing(name)
    if has_roles:
        _check_roles(arguments)
    given = [
        flag
        for flag, is_given in (
            ("--light", arguments.light),
            ("--draft-acceptance", arguments.draft_acceptance is not None),
            ("--png", arguments.png),
            ("several --policy", len(arguments.policy) > 1),
            ("several --speed", len(arguments.speed) > 1),
            ("--pipeline-parallel-size", num_stages > 1),
        )
        if is_given
    ]
    if given:
        asked = "--engines" if arguments.engines > 1 else "--prefill-engines"
        raise SettingError(
            f"{asked} and {given[0]} are given, which are not compared together; leave one of "
            "them out"
        )


def _check_roles(arguments: argparse.Namespace) -> None:
    """Reject numbers and flags of roles that do not go together."""
    from quire.base.errors import SettingError

    _roles_spec(arguments)
    if _given(arguments, _OF_STORE):
        _store_spec(arguments)
    if len(arguments.routing or ()) > 1:
        raise SettingError(
            f"--routing has {', '.join(arguments.routing)}; engines with roles are compared with "
            "one way to divide requests: name one"
        )
    if arguments.prefill_by != "router" and (given := _given(arguments, _OF_ROUTER)):
        raise SettingError(
            f"{given[0]} is of the router, and decode engines have prompts computed: add "
            "--prefill-by router, or leave it out"
        )
