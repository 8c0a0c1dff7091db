"""The machine of `quire simulate`: read from a profile, described by flags, or measured now.

Flags, and the checks of their combinations; quire/sim computes the times. Knows neither the trace
nor how many engines there are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config.groups import EngineConfig
    from quire.sim.machine import Machine


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose or describe the machine."""
    section = parser.add_argument_group("Machine (default: MODEL is measured on this machine)")
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
        help="bandwidth into a rank of --tensor-parallel-size, in GB/s (default 60, the memory of "
        "another socket); the ranks share the other rates",
    )
    section.add_argument(
        "--exchange-us",
        type=float,
        metavar="NUM",
        help="fixed time of one exchange (default 3)",
    )
    section.add_argument(
        "--message-gb-per-s",
        type=float,
        metavar="NUM",
        help="bandwidth between two stages of --pipeline-parallel-size, in GB/s (default: "
        "--link-gb-per-s)",
    )
    section.add_argument(
        "--message-us",
        type=float,
        metavar="NUM",
        help="fixed time of one message between stages (default: --exchange-us)",
    )


def machine_of_arguments(arguments: argparse.Namespace, config: EngineConfig) -> Machine:
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
