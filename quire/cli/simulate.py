"""`quire simulate [MODEL] [--trace FILE]`: replay a trace through the scheduler in virtual time.

Arguments and printing only; quire/sim simulates, and is imported when the subcommand runs.
Standard output holds a table, or with --json one object. Ctrl-C prints the results so far and
exits with code 130.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quire.cli.exit_codes import INTERRUPTED, SUCCESS
from quire.cli.options import add_engine_arguments, engine_settings, positive_floats, positive_int

if TYPE_CHECKING:
    from quire.config.groups import EngineConfig
    from quire.sim.machine import Machine

_NOT_HERE = frozenset(
    {
        *("chat_template", "record_plans", "trace_file", "timeline_steps", "scheduling_policy"),
        *("speculate", "draft_model", "self_draft_layers", "speculate_history_tokens"),
        *("pipeline_parallel_size", "data_parallel_size", "disk_offload_gb"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the load, of the comparison and of the machine; then the engine's."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--png", default="", metavar="FILE", help="draw the result")
    _add_load(parser.add_argument_group("Load"))
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
        "--policy",
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


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, and pass on the simulation's errors."""
    from quire.base.errors import SettingError
    from quire.config.flags import engine_config
    from quire.config.groups import POLICIES
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
        if policy not in POLICIES:  # before measuring
            raise SettingError(
                f"--policy has {policy!r}; allowed: {', '.join(POLICIES)}, as in --policy fcfs,sjf"
            )
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
    if sum((bool(arguments.profile), described, bool(arguments.save_profile))) > 1:
        raise SettingError(
            "--profile, --save-profile and --gb-per-s select the machine in different ways; give "
            "one of them, or none to measure the model here"
        )
    if arguments.profile:
        machine = read_machine(Path(arguments.profile))
        asked, measured = config.executor.tensor_parallel_size, machine.about["ranks"]
        if asked not in (1, measured):
            raise SettingError(
                f"tensor_parallel_size is {asked} and {arguments.profile} was measured with "
                f"{measured}: leave it out, or measure such a profile with --save-profile"
            )
        return machine
    links = {
        name: value
        for name, value in vars(arguments).items()
        if name in ("link_gb_per_s", "exchange_us") and value is not None
    }
    if links and (not described or config.executor.tensor_parallel_size == 1):
        raise SettingError(
            "--link-gb-per-s and --exchange-us describe the links of ranks: give them with "
            "--gb-per-s, --gflop-per-s and --tensor-parallel-size"
        )
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))
