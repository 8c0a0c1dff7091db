"""`quire simulate [MODEL] [--trace FILE]`: replay a trace through the scheduler in virtual time.

Arguments and printing only; quire/sim simulates, and is imported when the subcommand runs.
Standard output holds a table, or with --json one object. Ctrl-C prints the results so far and
exits with code 130.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from quire.cli.exit_codes import INTERRUPTED, SUCCESS
from quire.cli.options import add_engine_arguments, engine_settings, positive_floats, positive_int

if TYPE_CHECKING:
    from quire.config.groups import EngineConfig
    from quire.obs.timing import Goals
    from quire.obs.trace import Arrival
    from quire.sim.fleet import RolesSpec
    from quire.sim.load import RequestDefaults
    from quire.sim.machine import Machine
    from quire.sim.virtual_store import StoreSpec

_NOT_HERE = frozenset(
    {
        *("chat_template", "record_plans", "trace_file", "timeline_steps", "scheduling_policy"),
        *("speculate", "draft_model", "self_draft_layers", "speculate_history_tokens"),
        *("data_parallel_size", "disk_offload_gb", "cpu_offload_gb"),
        *("distributed_executor_backend", "distributed_key_file", "distributed_timeout_s"),
        *("kv_tier_path", "kv_tier_bytes", "kv_tier_host_bytes", "kv_tier_fetch"),
        *("kv_events_config", "kv_touch_ahead_bytes"),
        "cache_pin_share",  # traces mark no prefixes
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the load, of the comparison and of the machine; then the engine's."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--png", default="", metavar="FILE", help="draw the result")
    _add_load(parser.add_argument_group("Load"))
    _add_store(parser.add_argument_group("Engines that share a KV store"))
    _add_roles(parser.add_argument_group("Prefill and decode in engines of their own"))
    _add_machine(parser.add_argument_group("Machine (default: MODEL is measured on this machine)"))
    add_engine_arguments(parser, skip=_NOT_HERE)


def _add_load(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="arrivals and lengths: Azure's CSV or Mooncake's JSON lines (default: a bundled "
        "synthetic minute of chat)",
    )
    section.add_argument(
        "--speed",
        type=positive_floats("speeds"),
        default=(1.0,),
        metavar="LIST",
        help="replay speeds, as in 0.1,0.2,0.4 (default 1)",
    )
    section.add_argument(
        *("--policy", "--scheduling-policy"),
        type=_names,
        default=("fcfs",),
        metavar="LIST",
        help="scheduling policies to compare, as in fcfs,sjf,fair (default fcfs)",
    )
    section.add_argument(
        "--max-requests",
        type=positive_int,
        metavar="NUM",
        help="use only this many requests of the trace",
    )
    section.add_argument(
        "--max-tokens",
        type=positive_int,
        default=2048,
        metavar="NUM",
        help="max_tokens of each request, independent of its output length (default 2048)",
    )
    section.add_argument(
        "--light",
        type=positive_int,
        metavar="NUM",
        help="assign every NUM-th request to a light tenant with constant load, and report its "
        "latencies with and without the other requests",
    )
    section.add_argument(
        "--light-speed",
        type=float,
        metavar="NUM",
        help="the light tenant's speed (default: the slowest of --speed)",
    )
    section.add_argument(
        "--ttft-goal", type=float, default=2.0, help="TTFT objective in seconds (default 2)"
    )
    section.add_argument(
        "--tpot-goal", type=float, default=0.1, help="TPOT objective in seconds (default 0.1)"
    )
    section.add_argument(
        "--tell-goals",
        action="store_true",
        help="send the objectives as ttft_slo_ms and tpot_slo_ms, so that the engine plans for "
        "them and rejects requests that would miss them",
    )
    section.add_argument(
        "--draft-acceptance",
        default="",
        metavar="LIST",
        help="probability that the first, second, ... draft token of a row is accepted, as in "
        "0.8,0.7,0.6, or a file of --record-plans to take it from; with --max-draft-tokens "
        "(default: no drafts)",
    )


def _add_store(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--engines",
        type=positive_int,
        default=1,
        metavar="NUM",
        help="simulate so many engines with and without a KV store that they share (default 1)",
    )
    section.add_argument(
        "--routing",
        type=_names,
        metavar="LIST",
        help="how requests are divided among several engines: round-robin, least-tokens or "
        "warm-cache, as `quire route` does (default: round-robin,warm-cache; with roles one of "
        "them, default round-robin)",
    )
    section.add_argument(
        "--store-gb-per-s",
        type=float,
        metavar="NUM",
        help="what an engine reads from the store, and writes to it, in a second (default 5)",
    )
    section.add_argument(
        "--store-latency-ms",
        type=float,
        metavar="NUM",
        help="the time of a lookup and a fetch beside their bytes (default 2)",
    )
    section.add_argument(
        "--store-size", metavar="BYTES", help="what the store holds (default 1TiB)"
    )
    section.add_argument(
        "--store-buffer-size",
        metavar="BYTES",
        help="host memory of an engine for blocks on their way (default 16GiB)",
    )


def _add_roles(section: argparse._ArgumentGroup) -> None:
    for role in ("prefill", "decode"):
        section.add_argument(
            f"--{role}-engines",
            type=positive_int,
            metavar="NUM",
            help=f"simulate so many {role} engines, beside as many engines in all of both roles; "
            "with a --store flag, all of them also with that store",
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
        help="a role lacks engines for so long before the router moves one (default 30)",
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


def _add_machine(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--profile", default="", metavar="FILE", help="a saved machine profile, instead of MODEL"
    )
    section.add_argument(
        "--save-profile", default="", metavar="FILE", help="save the measured machine profile"
    )
    section.add_argument(
        "--gb-per-s",
        type=float,
        metavar="NUM",
        help="memory bandwidth of a hypothetical machine; with --gflop-per-s",
    )
    section.add_argument("--gflop-per-s", type=float, metavar="NUM", help="its arithmetic rate")
    section.add_argument(
        "--fixed-ms",
        type=float,
        default=0.0,
        metavar="NUM",
        help="its fixed time per step (default 0)",
    )
    section.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="NUM",
        help="what a rank of --tensor-parallel-size receives from the others (default 60, the "
        "memory of another socket); the ranks share the other rates",
    )
    section.add_argument(
        "--exchange-us",
        type=float,
        metavar="NUM",
        help="the time of one exchange beside its bytes (default 3)",
    )
    section.add_argument(
        "--message-gb-per-s",
        type=float,
        metavar="NUM",
        help="what a stage of --pipeline-parallel-size receives from the stage before (default: "
        "--link-gb-per-s)",
    )
    section.add_argument(
        "--message-us",
        type=float,
        metavar="NUM",
        help="the time of one message between stages beside its bytes (default: --exchange-us)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, and pass on the simulation's errors."""
    from quire.base.errors import SettingError
    from quire.config.flags import engine_config
    from quire.config.groups import SCHEDULING_POLICIES
    from quire.hub.cache import with_local_model
    from quire.obs.pictures import check_picture
    from quire.obs.report import show
    from quire.obs.timing import Goals
    from quire.obs.trace import EXAMPLE_TRACE, read_trace
    from quire.sim.compare import Comparison, compare
    from quire.sim.drafts import draft_acceptance
    from quire.sim.load import RequestDefaults
    from quire.sim.plots import plot_policies
    from quire.sim.summary import comparison_text

    if arguments.png:
        check_picture(Path(arguments.png))
    settings = {"model": arguments.model, **engine_settings(arguments)}
    config = with_local_model(engine_config(settings))
    for policy in arguments.policy:
        if policy not in SCHEDULING_POLICIES:  # before measuring
            raise SettingError(
                f"--policy has {policy!r}; allowed: {', '.join(SCHEDULING_POLICIES)}, as in "
                "--policy fcfs,sjf"
            )
    has_roles = _has_roles(arguments)
    _check_engines(arguments, config.executor.pipeline_parallel_size, has_roles=has_roles)
    goals = Goals(ttft_s=arguments.ttft_goal, tpot_s=arguments.tpot_goal)
    if not (goals.ttft_s > 0 and goals.tpot_s > 0):
        raise SettingError(f"the goals are {goals.ttft_s} s and {goals.tpot_s} s; both must be > 0")
    acceptance = None
    if arguments.draft_acceptance:
        most = config.speculation.max_draft_tokens
        acceptance = draft_acceptance(arguments.draft_acceptance, most)
    path = Path(arguments.trace) if arguments.trace else EXAMPLE_TRACE
    trace = read_trace(path, max_requests=arguments.max_requests)
    machine = _machine(arguments, config)
    defaults = RequestDefaults(
        max_tokens=arguments.max_tokens,
        max_model_len=config.model.max_model_len or machine.max_model_len,
        ttft_slo_ms=1e3 * goals.ttft_s if arguments.tell_goals else None,
        tpot_slo_ms=1e3 * goals.tpot_s if arguments.tell_goals else None,
    )
    if arguments.engines > 1 or has_roles:
        return _compare_engines(arguments, machine, config, trace, defaults, goals)
    comparison = Comparison(
        trace_name=path.name,
        trace=trace,
        policies=arguments.policy,
        speeds=arguments.speed,
        defaults=defaults,
        goals=goals,
        light_every=arguments.light or 0,
        light_speed=arguments.light_speed or min(arguments.speed),
        acceptance=acceptance,
    )
    with _stop_on_interrupt() as should_stop:
        outcome = compare(comparison, machine, config, should_stop=should_stop)
    if not outcome["runs"]:
        raise KeyboardInterrupt
    if arguments.png:
        plot_policies(outcome, Path(arguments.png))
    show(outcome, comparison_text(outcome), as_json=arguments.json)
    return SUCCESS if outcome["complete"] else INTERRUPTED


def _compare_engines(
    arguments: argparse.Namespace,
    machine: Machine,
    config: EngineConfig,
    trace: Sequence[Arrival],
    defaults: RequestDefaults,
    goals: Goals,
) -> int:
    """Simulate several engines, with and without a store, and in roles; print the table."""
    from quire.obs.report import show
    from quire.sim.compare import with_policy
    from quire.sim.fleet import COMPARED_ROUTINGS, compare_stores, stores_text
    from quire.sim.load import trace_requests
    from quire.sim.profile import read_machine
    from quire.sim.roles import compare_roles, roles_text

    requests, _ = trace_requests(trace, speed=arguments.speed[0], defaults=defaults)
    scene = (requests, defaults, machine, with_policy(config, arguments.policy[0]))
    with _stop_on_interrupt() as should_stop:
        if arguments.engines > 1:
            outcome = compare_stores(
                *scene,
                num_engines=arguments.engines,
                store=_store_spec(arguments),
                goals=goals,
                routings=arguments.routing or COMPARED_ROUTINGS,
                should_stop=should_stop,
            )
        else:
            path = arguments.prefill_profile
            outcome = compare_roles(
                *scene,
                spec=_roles_spec(arguments),
                goals=goals,
                routing=(arguments.routing or COMPARED_ROUTINGS)[0],
                store=_store_spec(arguments) if _given(arguments, _OF_STORE) else None,
                prefill_machine=read_machine(Path(path)) if path else None,
                should_stop=should_stop,
            )
    if not outcome["runs"]:
        raise KeyboardInterrupt
    text = stores_text(outcome) if arguments.engines > 1 else roles_text(outcome)
    show(outcome, text, as_json=arguments.json)
    return SUCCESS if outcome["complete"] else INTERRUPTED


_OF_STORE = ("store_gb_per_s", "store_latency_ms", "store_size", "store_buffer_size")
_OF_ROUTER = ("movable_engines", "min_prefill_tokens", "role_seconds")
_OF_ROLES = (
    *("prefill_engines", "decode_engines", *_OF_ROUTER, "prefill_by", "prefill_profile"),
    *("transfer_gb_per_s", "transfer_latency_ms"),
)


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


def _check_engines(arguments: argparse.Namespace, num_stages: int, *, has_roles: bool) -> None:
    """Reject what several engines are not compared with, and flags that would have no effect.

    Before anything is measured.
    """
    from quire.base.errors import SettingError
    from quire.sim.fleet_router import check_routing

    roles = (arguments.prefill_engines, arguments.decode_engines)
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
            ("--draft-acceptance", arguments.draft_acceptance),
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


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second one raises as usual."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _machine(arguments: argparse.Namespace, config: EngineConfig) -> Machine:
    """Return the machine: read from a profile, described by flags, or measured now."""
    import json

    from quire.base.errors import SettingError
    from quire.sim.machine import described_machine
    from quire.sim.profile import machine_of, measure_machine, read_machine

    described = arguments.gb_per_s is not None or arguments.gflop_per_s is not None
    if config.executor.pipeline_parallel_size > 1 and not described:
        raise SettingError(
            f"pipeline_parallel_size is {config.executor.pipeline_parallel_size}, and the time of "
            "each stage is computed for a described machine only: give --gb-per-s and "
            "--gflop-per-s, or leave it out"
        )
    if sum((bool(arguments.profile), described, bool(arguments.save_profile))) > 1:
        raise SettingError(
            "--profile, --save-profile and --gb-per-s select the machine in different ways; give "
            "one of them, or none to measure the model here"
        )
    if arguments.profile:
        machine = read_machine(Path(arguments.profile))
        asked, measured = config.executor.ranks_of_stage, machine.about["ranks"]
        if asked not in (1, measured):
            raise SettingError(
                f"{config.executor.ranks_text} and {arguments.profile} was measured with "
                f"{measured}: leave it out, or measure such a profile with --save-profile"
            )
        context, of_profile = config.executor.context_parallel_size, machine.about["context_ranks"]
        if context != of_profile:  # on which the size of blocks depends
            raise SettingError(
                f"context_parallel_size is {context} and {arguments.profile} was measured with "
                f"{of_profile}: give --context-parallel-size {of_profile}"
            )
        return machine
    links = _links(arguments, config, is_described=described)
    if described:
        if arguments.gb_per_s is None or arguments.gflop_per_s is None:
            raise SettingError("--gb-per-s and --gflop-per-s must be given together")
        return described_machine(
            config,
            gb_per_s=arguments.gb_per_s,
            gflop_per_s=arguments.gflop_per_s,
            fixed_ms=arguments.fixed_ms,
            **links,
        )
    profile = measure_machine(config)
    if arguments.save_profile:
        Path(arguments.save_profile).write_text(json.dumps(profile, indent=1) + "\n")
    return machine_of(profile)


def _links(
    arguments: argparse.Namespace, config: EngineConfig, *, is_described: bool
) -> dict[str, float]:
    """Return the rates of links that are given. Raises SettingError where there are no such."""
    from quire.base.errors import SettingError

    executor, found = config.executor, dict[str, float]()
    for names, has_them, degree in (
        (("link_gb_per_s", "exchange_us"), executor.num_ranks > 1, "--tensor-parallel-size"),
        (
            ("message_gb_per_s", "message_us"),
            executor.pipeline_parallel_size > 1,
            "--pipeline-parallel-size",
        ),
    ):
        given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        if given and not (is_described and has_them):
            first, second = ("--" + name.replace("_", "-") for name in names)
            of_what = "ranks" if names[0].startswith("link") else "stages"
            raise SettingError(
                f"{first} and {second} describe the links of {of_what}: give them with "
                f"--gb-per-s, --gflop-per-s and {degree}"
            )
        found |= given
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))
