"""`quire plan MODEL`: whether a model fits a device, and the speed to expect; loads no weights.

A model that is not on this machine is described by the hub (quire/hub/outline.py).
Arguments and printing only; quire/sim/plan.py computes, and is imported when the subcommand runs.
Exit code 0 if the model fits, 1 if it does not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.base.errors import CapacityError, SettingError
from quire.cli.exit_codes import FAILED, SUCCESS
from quire.cli.options import add_engine_arguments, engine_settings, positive_int
from quire.config.flags import engine_config, parse_bytes

if TYPE_CHECKING:
    from quire.sim.hardware import Device

_MEASURING_ROUNDS = 3
_MIN_MEMORY_BYTES = 1 << 20
# Fields of the engine that decide sizes; context and concurrency have their own names here.
_SIZING = frozenset(
    {
        *("dtype", "quantization", "head_precision", "keep"),
        *("block_size", "kv_cache_memory_bytes", "kv_cache_dtype"),
        *("max_num_batched_tokens", "num_threads"),
        *("speculate", "draft_model", "self_draft_layers", "speculate_history_tokens"),
        *("tensor_parallel_size", "tp_mode", "enable_expert_parallel"),
        *("context_parallel_size", "pipeline_parallel_size"),
        *("expert_load_file", "num_redundant_experts"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the model must fit, then the engine's flags that decide sizes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    parser.add_argument(
        "--device",
        dest="device_name",
        default="this",
        metavar="NAME",
        help="a device of the table, as in h100, or this: this machine, measured (default this)",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="memory to plan for, as in 80GB; default: the device's, or what is free here",
    )
    parser.add_argument(
        *("--context", "--max-model-len"),
        dest="max_model_len",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="NUM",
        help="tokens of prompt and output of one request (default: the longest that fits)",
    )
    parser.add_argument(
        *("--concurrency", "--max-num-seqs"),
        dest="max_num_seqs",
        type=positive_int,
        default=argparse.SUPPRESS,
        metavar="NUM",
        help="number of requests at once; with --context, this many of that length must fit "
        "(default: 64, or as many as fit)",
    )
    parser.add_argument(
        "--devices",
        type=positive_int,
        default=0,
        metavar="NUM",
        help="recommend a layout of the model over this many devices",
    )
    parser.add_argument(
        "--devices-per-node",
        type=positive_int,
        metavar="NUM",
        help="devices with fast links to each other (default: usual for the device)",
    )
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="NUM",
        help="bandwidth between devices of a node, in GB/s (default: usual for the device)",
    )
    parser.add_argument(
        "--network-gb-per-s",
        type=float,
        metavar="NUM",
        help="bandwidth between nodes for each device, in GB/s (default: usual for the device)",
    )
    add_engine_arguments(parser, only=_SIZING)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Raises ModelError or SettingError as an engine would."""
    from quire.hub.cache import local_model
    from quire.obs.report import show
    from quire.sim.hardware import THIS, find_device
    from quire.sim.links import links_of
    from quire.sim.plan import Planner, check_model
    from quire.sim.plan_report import plan_outcome, plan_text

    if not arguments.devices and (
        arguments.devices_per_node is not None or arguments.network_gb_per_s is not None
    ):
        raise SettingError(
            "--devices-per-node and --network-gb-per-s describe where --devices are: give it too"
        )
    device = None if arguments.device_name.lower() == THIS else find_device(arguments.device_name)
    try:
        with _described(arguments.model) as settings:
            settings |= engine_settings(arguments)
            if settings.get("draft_model"):
                settings["draft_model"] = str(local_model(settings["draft_model"]))
            check_model(settings)  # a wrong model or flag is reported before measuring
            if device is None:
                device = _this_machine(settings.get("num_threads"))
            links = links_of(device).with_rates(
                per_node=arguments.devices_per_node,
                node_gb_per_s=arguments.link_gb_per_s,
                network_gb_per_s=arguments.network_gb_per_s,
            )
            is_alone = engine_config(settings).executor.num_ranks == 1
            if arguments.link_gb_per_s is not None and not arguments.devices and is_alone:
                raise SettingError(
                    "--link-gb-per-s is between devices: give --devices or --tensor-parallel-size"
                )
            planner = Planner(settings, device, memory_bytes=arguments.memory, links=links)
            outcome = plan_outcome(planner, num_devices=arguments.devices)
    except (SettingError, CapacityError) as error:
        raise type(error)(_own_flags(str(error))) from error
    show(outcome, _own_flags(plan_text(outcome)), as_json=arguments.json)
    return SUCCESS if outcome["fits"] else FAILED


def _own_flags(text: str) -> str:
    """Name the flags of this subcommand in place of the engine's, which it takes as well."""
    for name, flag in (("max_model_len", "--context"), ("max_num_seqs", "--concurrency")):
        engines = "--" + name.replace("_", "-")
        text = re.sub(rf"(?<![\w-])(?:{engines}|{name})(?![\w-])", flag, text)
    return text


@contextmanager
def _described(model: str) -> Iterator[dict[str, Any]]:
    """Yield the settings that select a model: a path, a model in the cache, or one on the hub.

    Of the hub's models only the configuration and headers are downloaded.
    """
    from quire.hub.cache import find
    from quire.hub.names import hub_name

    name = hub_name(model)
    if name is None:
        yield {"model": model}
    elif (path := find(name)) is not None:
        yield {"model": str(path), "served_model_name": (model,)}
    else:
        from quire.hub.outline import outline  # imports huggingface_hub

        with outline(name, report=_report) as path:
            yield {"model": str(path), "served_model_name": (model,)}


def _report(line: str) -> None:
    print(line, file=sys.stderr)


def _this_machine(num_threads: int | None) -> Device:
    """Measure bandwidth and arithmetic rates, which takes about a second."""
    from quire import _native
    from quire.bench.limits import LOOPS, READ, machine_limits, peak_gflops
    from quire.bench.machine import machine_card, machine_text
    from quire.config.machine import num_compute_threads
    from quire.sim.hardware import THIS, Device

    limits = machine_limits(num_compute_threads(num_threads), rounds=_MEASURING_ROUNDS)
    peaks = {name: peak_gflops(limits, name) for name in LOOPS}
    return Device(
        name=THIS,
        about=f"this machine: {machine_text(machine_card(), with_load=False)}",
        memory_bytes=None,
        gb_per_s=limits[READ],
        peak_gflops={name: peak for name, peak in peaks.items() if peak is not None},
        is_gpu=False,
        is_measured=True,
        isa=_native.isa(),
    )


def _size(text: str) -> int:
    """Parse an argument as a number of bytes that may hold a model."""
    try:
        size = parse_bytes(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < _MIN_MEMORY_BYTES:
        number = text.strip()
        is_plain = number.isdigit() and size
        raise argparse.ArgumentTypeError(
            f"{text!r} is {size} bytes, which hold no model; "
            + (f"write a unit, as in {number}GiB" if is_plain else "give more, as in 80GiB")
        )
    return size
