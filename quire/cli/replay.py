"""`quire replay FILE [MODEL]`: send the requests of a recording again, and compare.

To an engine with MODEL in this process, or with --url to a server of Quire. Exit code: 0 where
every request succeeded and every recorded token is equal, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from quire.cli.exit_codes import FAILED, SUCCESS
from quire.cli.options import add_engine_arguments, engine_settings, positive_int
from quire.cli.server_arguments import add_key_argument

_NOT_HERE = frozenset({"chat_template", "record_plans"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recording, the server, and the flags of the engine in this process."""
    parser.add_argument(
        "file", metavar="FILE", help="a recording that `quire record URL FILE` wrote"
    )
    parser.add_argument(
        "--url", default="", metavar="URL", help="a server of Quire, instead of MODEL"
    )
    add_key_argument(parser, "key for the server")
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="NUM",
        help="speed of the arrivals: 2 halves the time between them (default 1)",
    )
    parser.add_argument(
        "--max-requests", type=positive_int, metavar="NUM", help="send only this many requests"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    add_engine_arguments(parser, skip=_NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the times and what differs."""
    from quire.base.errors import InvalidParameter
    from quire.bench.replay import HttpSender, is_equal, replay, replay_text
    from quire.obs.recording import read_recording
    from quire.obs.report import show

    recording = read_recording(Path(arguments.file), max_requests=arguments.max_requests)
    if arguments.url:
        if arguments.model or engine_settings(arguments):
            raise InvalidParameter(
                "--url names a server, and MODEL or flags an engine in this process; give one"
            )
        sender = HttpSender(arguments.url, arguments.api_key)
        outcome = asyncio.run(replay(recording, sender, speed=arguments.speed))
    else:
        outcome = asyncio.run(_local(arguments, recording))
    show(outcome, replay_text(outcome), as_json=arguments.json)
    return SUCCESS if is_equal(outcome) else FAILED


async def _local(arguments: argparse.Namespace, recording: Any) -> dict[str, Any]:
    from quire.bench.replay import LocalSender, replay
    from quire.engine.library.async_llm import AsyncLLM

    async with AsyncLLM(arguments.model, **engine_settings(arguments)) as llm:
        return await replay(recording, LocalSender(llm), speed=arguments.speed)
