"""`quire record URL FILE`: store the requests of a running server, with their arrival times.

The server sends lines (GET /admin/record) and this process writes them, so a full disk ends the
recording and nothing else. Ends with --seconds, at the file's largest size, when the server stops,
or by Ctrl-C. Exit code: 0, or 1 if the server failed or broke the recording off, or if the disk is
full. Always holds: the file ends with a whole line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO

from quire.base.errors import SettingError, WorkerError
from quire.cli.server_arguments import add_key_argument

MAX_FILE_BYTES = 8 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server, the file and what is recorded."""
    parser.add_argument("url", metavar="URL", help="the server, as in http://127.0.0.1:8000")
    parser.add_argument("file", metavar="FILE", help="a new file for the recording")
    parser.add_argument(
        "--content",
        action="store_true",
        help="also record the token ids of prompts and answers, so that a replay can compare "
        "them; the server needs --record-content (default: lengths, times and parameters)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="NUM",
        help="record requests that arrive in this time (default: until Ctrl-C)",
    )
    add_key_argument(parser, "an admin's key")


def run(arguments: argparse.Namespace) -> int:
    """Record until the end; print what is in the file."""
    if arguments.seconds is not None and not 0 < arguments.seconds < float("inf"):
        raise SettingError(f"--seconds is {arguments.seconds}; a number above 0 is allowed")
    if "://" in arguments.file:
        raise SettingError(
            f"FILE is {arguments.file!r}, an address; URL comes first: quire record "
            f"{arguments.file} {'FILE' if '://' in arguments.url else arguments.url}"
        )
    path = Path(arguments.file)
    written = _Written()
    with _new_file(path) as file:
        try:
            asyncio.run(_record(arguments, file, written))
        finally:
            if written.num_lines:
                num = written.num_dropped
                dropped = f"; {num} {'was' if num == 1 else 'were'} dropped" if num else ""
                print(f"{_requests(written.num_lines - 1)} in {path}{dropped}", file=sys.stderr)
            else:
                path.unlink(missing_ok=True)
    return 0


def _requests(number: int) -> str:
    return "1 request is" if number == 1 else f"{number} requests are"


class _Written:
    """Counts of a file. num_lines: its header included, lines about dropped requests not."""

    def __init__(self) -> None:
        self.num_lines = self.num_bytes = self.num_dropped = 0

    def add(self, line: bytes) -> None:
        from quire.obs.recording import num_dropped_of

        num_dropped = num_dropped_of(line)
        self.num_dropped += num_dropped
        self.num_lines += not num_dropped
        self.num_bytes += len(line) + 1


def _new_file(path: Path) -> BinaryIO:
    """Open a file that only its owner may read: it may hold what users sent."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0)
    except FileExistsError as error:
        raise SettingError(f"{path} exists; name a new file") from error
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written: {error.strerror}; name a file in a directory that exists"
        ) from error


def _write(file: BinaryIO, line: bytes, written: _Written) -> None:
    """Write a whole line; on an error cut off what was written of it. Raises WorkerError."""
    left = memoryview(line + b"\n")
    try:
        while left:  # a nearly full disk takes a part
            left = left[file.write(left) :]
    except OSError as error:
        with suppress(OSError):
            file.truncate(written.num_bytes)
        raise WorkerError(
            f"the recording cannot be written: {error.strerror}; make room, or record to another "
            "file"
        ) from error
    written.add(line)


async def _record(arguments: argparse.Namespace, file: BinaryIO, written: _Written) -> None:
    """Write the lines of the server until it ends, the file is full, or Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    with suppress(asyncio.CancelledError):  # by Ctrl-C: the file ends with a whole line
        async with aclosing(_received(arguments)) as lines:
            async for line in lines:
                if not written.num_lines:
                    print(f"recording {arguments.url}; Ctrl-C ends it", file=sys.stderr)
                _write(file, line, written)
                if written.num_bytes >= MAX_FILE_BYTES:
                    print(f"{MAX_FILE_BYTES >> 30} GiB are recorded, the limit", file=sys.stderr)
                    return


async def _received(arguments: argparse.Namespace) -> AsyncGenerator[bytes, None]:
    """Yield the lines of the server. Raises WorkerError if it refuses or breaks off."""
    from quire.bench.http_load import Refused, address_of, exchange, why_unusable
    from quire.obs.recording import HEARTBEAT_S, IDLE_S

    address, has_key = address_of(arguments.url), bool(arguments.api_key)
    path = f"/admin/record?content={str(arguments.content).lower()}"
    if arguments.seconds is not None:
        path += f"&seconds={arguments.seconds:g}"
    lines = exchange(address, "GET", path, None, api_key=arguments.api_key)
    try:
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await anext(lines, None)
            if line is None:
                return
            if line.strip():  # empty ones keep the connection open
                yield line
    except TimeoutError as error:
        raise WorkerError(
            f"{address.shown} has sent nothing for {IDLE_S:g} s, though a server sends an empty "
            f"line every {HEARTBEAT_S:g} s; is it stopped, or out of reach?"
        ) from error
    except asyncio.IncompleteReadError as error:
        raise WorkerError(
            f"{address.shown} broke the recording off, so later requests are missing; its log has "
            "the reason"
        ) from error
    except (OSError, Refused) as error:
        way_out = "; leave out --content" if arguments.content else ""
        raise WorkerError(
            why_unusable(arguments.url, error, has_key=has_key)
            or f"{address.shown} does not record: {error}{way_out}"
        ) from error
    except ValueError as error:
        raise WorkerError(
            f"{address.shown}: the connection failed ({error}); check that a server of Quire "
            "listens there, and its log"
        ) from error
