"""`quire simulate [MODEL] [--trace FILE]`: replay a trace through the scheduler in virtual time.

Arguments and printing only; quire/sim simulates, and is imported when the subcommand runs. The
flags of several engines and of the machine are in files of their own. Standard output holds a
table, or with --json one object. Ctrl-C prints the results so far and exits with code 130.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from quire.cli.exit_codes import INTERRUPTED, SUCCESS
from quire.cli.options import (
    add_engine_arguments,
    comma_separated,
    engine_settings,
    positive_floats,
    positive_int,
)
from quire.cli.simulated_engines import (
    add_engines_arguments,
    check_engines,
    compare_engines,
    has_several_engines,
)
from quire.cli.simulated_machine import add_machine_arguments, machine_of_arguments

_NOT_HERE = frozenset(
    {
        *("chat_template", "record_plans", "trace_file", "timeline_steps", "scheduling_policy"),
        *("speculate", "draft_model", "self_draft_layers", "speculate_history_tokens"),
        *("data_parallel_size", "disk_offload_gb", "cpu_offload_gb"),
        *("distributed_executor_backend", "distributed_key_file", "distributed_timeout_s"),
        *("kv_tier_path", "kv_tier_bytes", "kv_tier_host_bytes", "kv_tier_fetch"),
        *("kv_events_config", "kv_touch_ahead_bytes"),
        "cache_pin_share",  # traces mark no prefixes
        "convert",  # nor embeddings
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the load, of the comparison and of the machine; then the engine's."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--png", default="", metavar="FILE", help="draw the result")
    _add_load(parser.add_argument_group("Load"))
    add_engines_arguments(parser)
    add_machine_arguments(parser)
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
        type=comma_separated,
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
        "--ttft-goal",
        type=float,
        default=2.0,
        metavar="S",
        help="TTFT objective in seconds (default 2)",
    )
    section.add_argument(
        "--tpot-goal",
        type=float,
        default=0.1,
        metavar="S",
        help="TPOT objective in seconds (default 0.1)",
    )
    section.add_argument(
        *("--send-goals", "--tell-goals"),
        dest="send_goals",
        action="store_true",
        help="send the objectives as ttft_slo_ms and tpot_slo_ms, so that the engine plans for "
        "them and rejects requests that would miss them",
    )
    section.add_argument(
        "--draft-acceptance",
        metavar="LIST",
        help="probability that the first, second, ... draft token of a row is accepted, as in "
        "0.8,0.7,0.6, or a file of --record-plans to take it from; with --max-draft-tokens "
        "(default: no drafts)",
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
    check_engines(arguments, config.executor.pipeline_parallel_size)
    goals = Goals(ttft_s=arguments.ttft_goal, tpot_s=arguments.tpot_goal)
    if not (goals.ttft_s > 0 and goals.tpot_s > 0):
        raise SettingError(f"the goals are {goals.ttft_s} s and {goals.tpot_s} s; both must be > 0")
    acceptance = None
    if arguments.draft_acceptance is not None:
        most = config.speculation.max_draft_tokens
        acceptance = draft_acceptance(arguments.draft_acceptance, most)
    path = Path(arguments.trace) if arguments.trace else EXAMPLE_TRACE
    trace = read_trace(path, max_requests=arguments.max_requests)
    machine = machine_of_arguments(arguments, config)
    defaults = RequestDefaults(
        max_tokens=arguments.max_tokens,
        max_model_len=config.model.max_model_len or machine.max_model_len,
        ttft_slo_ms=1e3 * goals.ttft_s if arguments.send_goals else None,
        tpot_slo_ms=1e3 * goals.tpot_s if arguments.send_goals else None,
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
        if has_several_engines(arguments):
            outcome, text_of = compare_engines(arguments, comparison, machine, config, should_stop)
        else:
            outcome = compare(comparison, machine, config, should_stop=should_stop)
            text_of = comparison_text
    if not outcome["runs"]:
        raise KeyboardInterrupt
    if arguments.png:
        plot_policies(outcome, Path(arguments.png))
    show(outcome, text_of(outcome), as_json=arguments.json)
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
