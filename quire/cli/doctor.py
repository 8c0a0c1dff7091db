"""`quire doctor` checks this machine; `quire doctor URL` reads a server twice and diagnoses it.

Arguments and printing only; quire/doctor examines, and is imported when the subcommand runs.
Exit code 0 without a problem (warnings included), 1 with one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import InvalidParameter
from quire.base.server_url import KEY_DEFAULT, default_key
from quire.cli.exit_codes import FAILED, SUCCESS

if TYPE_CHECKING:
    from quire.doctor.finding import Finding

_SECONDS = 10.0
_MAX_SECONDS = 3600.0
# Flags of one form that the other would ignore.
_OF_SERVER = {
    "api_key": "--api-key",
    "seconds": "--seconds",
    "goal_ttft_ms": "--goal-ttft-ms",
    "goal_tpot_ms": "--goal-tpot-ms",
}
# Settings that name directories, and what they are for.
_DIRECTORIES = {"kv_tier_path": "KV tier", "pack_cache": "packed weights"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both forms."""
    parser.add_argument(
        "url", nargs="?", default="", metavar="URL", help="a running server (default: this machine)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no text")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="this machine: without the self-test and the measurement of memory speed",
    )
    server = parser.add_argument_group("With URL")
    server.add_argument(
        "--api-key",
        default=argparse.SUPPRESS,
        metavar="KEY",
        help=f"key of the server ({KEY_DEFAULT}); effects are predicted with an admin's "
        "key, or on the server's machine",
    )
    server.add_argument(
        "--seconds",
        type=_seconds,
        default=argparse.SUPPRESS,
        metavar="NUM",
        help=f"time between the two readings (default {_SECONDS:g})",
    )
    server.add_argument(
        "--goal-ttft-ms",
        type=_goal,
        default=argparse.SUPPRESS,
        metavar="NUM",
        help="goal of the 95th percentile of time to first token (default 200)",
    )
    server.add_argument(
        "--goal-tpot-ms",
        type=_goal,
        default=argparse.SUPPRESS,
        metavar="NUM",
        help="goal of the 95th percentile of time per output token (default 50)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine and print. Raises InvalidParameter, or WorkerError where no Quire server answers."""
    given = vars(arguments)
    if not arguments.url:
        for name, flag in _OF_SERVER.items():
            if name in given:
                raise InvalidParameter(f"{flag} is for a server; give its URL, or leave it out")
        return _machine(arguments)
    if _is_model(arguments.url):
        raise InvalidParameter(
            f"{arguments.url!r} is not a server's URL, as http://127.0.0.1:8000 is; whether a "
            f"model fits this machine is answered by quire plan {arguments.url}"
        )
    if arguments.quick:
        raise InvalidParameter("--quick is for this machine; leave it out, or leave out the URL")
    return _server(arguments)


def _is_model(text: str) -> bool:
    """Return whether a text is a path or a model's name in place of a server's URL."""
    from quire.base.user_path import user_path  # slow imports
    from quire.hub.names import parsed_name

    if "//" in text:
        return False
    host = text.partition("/")[0]
    is_name = "." not in host and host != "localhost" and parsed_name(text) is not None
    return is_name or user_path(text).exists()


def _machine(arguments: argparse.Namespace) -> int:
    from quire.doctor.machine_exam import examine_machine

    facts, findings = examine_machine(
        places=_directories(), asked_isa=os.environ.get("QUIRE_ISA", ""), quick=arguments.quick
    )
    title = f"This machine: {facts.cpu_model}, {facts.num_cores} usable cores"
    about = {"machine": facts.cpu_model, "kernels": facts.native.isa}
    return _print(title, findings, about, as_json=arguments.json)


def _server(arguments: argparse.Namespace) -> int:
    from quire.doctor.server_exam import examine_server
    from quire.doctor.server_reader import ServerReader
    from quire.doctor.situation import DEFAULT_GOALS
    from quire.obs.timing import Goals

    given = vars(arguments)
    goals = Goals(
        ttft_s=given.get("goal_ttft_ms", 1e3 * DEFAULT_GOALS.ttft_s) / 1e3,
        tpot_s=given.get("goal_tpot_ms", 1e3 * DEFAULT_GOALS.tpot_s) / 1e3,
    )
    key = given.get("api_key", default_key(os.environ))
    reader = ServerReader(arguments.url, api_key=key)
    exam = examine_server(reader, seconds=given.get("seconds", _SECONDS), goals=goals, wait=_wait)
    about = exam.about
    model = f", model {about['model']}" if about["model"] else ""
    title = (
        f"{about['server']}: Quire {about['version']}{model}; "
        f"{about['seconds']:.3g} s between the readings"
    )
    return _print(title, exam.findings, about, as_json=arguments.json)


def _wait(seconds: float) -> None:
    """Wait, and say so on a terminal."""
    from quire.obs.report import Progress

    progress = Progress()
    progress.say(f"reading the metrics again in {seconds:g} s")
    time.sleep(seconds)
    progress.clear()


def _print(
    title: str, findings: Sequence[Finding], about: Mapping[str, Any], *, as_json: bool
) -> int:
    from quire.doctor.finding import Verdict, worst
    from quire.doctor.report import outcome_of, report_text
    from quire.obs.report import show

    text = report_text(
        title,
        findings,
        width=shutil.get_terminal_size().columns,
        color=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
    )
    show(outcome_of(findings, about), text, as_json=as_json)
    return FAILED if worst(findings) is Verdict.PROBLEM else SUCCESS


def _directories() -> dict[str, Path]:
    """Return the directories that the configuration file and the environment name."""
    from quire.config.config_file import read_config_file
    from quire.config.environment import FILE_VARIABLE, read_environment
    from quire.config.sources import merged

    path = os.environ.get(FILE_VARIABLE, "")
    of_file = read_config_file(path)[0] if path else {}
    found = merged({}, read_environment(os.environ)[0], of_file)
    return {
        text: Path(found[name].value)
        for name, text in _DIRECTORIES.items()
        if name in found and found[name].value
    }


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above 0, at most {_MAX_SECONDS:g}"
        )
    return value


def _goal(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
