"""Trace one streamed chat through the code: the files it enters, in order, with counts.

    python scripts/trace_request.py            # the ordered list and the totals
    python scripts/trace_request.py --write    # renew docs/reading.md

Runs the server's application and the engine's thread in one process with the built-in model and
default settings, lets them get ready, and then records each file of `quire/` of which a function is
entered while one streamed chat is answered. Module-level code, which start-up runs, does not count.
`tests/repository/test_reading_path.py` holds the totals to their limits.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import io
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
_PACKAGE = str(ROOT / "quire") + "/"
# What a model passes before a request can: a list by hand, as start-up is not traced.
_OF_A_MODEL = (
    *("quire/models/registry.py", "quire/models/decoder_config.py", "quire/models/spec.py"),
    *("quire/models/llama.py", "quire/models/layers.py", "quire/program/builder.py"),
    *("quire/program/quantize.py", "quire/program/shard.py", "quire/weights/checkpoint.py"),
    *("quire/weights/binding.py", "quire/execute/packing.py", "quire/execute/native.py"),
)
# So long the server may still log and count a request after its response.
_END_OF_REQUEST_S = 0.2


@dataclass(frozen=True)
class EnteredFile:
    """A file that the request entered: its path below the root, lines, first function entered."""

    path: str
    num_lines: int
    first_function: str


class FileTrace:
    """Record the files with functions that are called while tracing is on, in all threads."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._is_on = False

    def install(self) -> None:
        """Profile this thread and those that start later; records nothing until `start`."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def start(self) -> None:
        """Record from now on."""
        self._is_on = True

    def stop(self) -> list[EnteredFile]:
        """Stop recording and return the files in the order of their first call."""
        self._is_on = False
        return [
            EnteredFile(name, _num_lines(ROOT / name), function)
            for name, function in self._first.items()
        ]

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_on:
            return
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.startswith(_PACKAGE):
            return
        name = code.co_filename[len(_PACKAGE) - len("quire/") :]
        self._first.setdefault(name, code.co_qualname)


def _num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def trace_streamed_chat(prompt: str = "Tell me a story.") -> list[EnteredFile]:
    """Return the files that one streamed chat enters, in order.

    Must run in the main thread: the server takes signals. Raises RuntimeError where the chat was
    not answered.
    """
    from quire.api.server import run
    from quire.base.log import Log
    from quire.config.flags import engine_config
    from quire.config.server_config import ServerConfig
    from quire.engine.client.engine_client import EngineClient

    trace, outcome = FileTrace(), _Outcome()
    trace.install()
    try:
        listening = socket.create_server(("127.0.0.1", 0))
        run(
            EngineClient.in_process(engine_config({})),
            ServerConfig(),
            listening,
            Log("trace", stream=io.StringIO()),
            announce=lambda: _ask_beside(trace, prompt, listening.getsockname(), outcome),
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if not outcome.answer.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"the chat was not answered: {outcome.answer[-300:]!r}")
    return outcome.files


@dataclass
class _Outcome:
    answer: bytes = b""
    files: list[EnteredFile] = field(default_factory=list)


def _ask_beside(trace: FileTrace, prompt: str, address: tuple[str, int], outcome: _Outcome) -> None:
    """Ask in a thread, since the caller is the server's event loop; then stop the server."""

    def ask() -> None:
        _get_health(address)  # the listener accepts connections only after `announce`
        time.sleep(_END_OF_REQUEST_S)
        trace.start()
        outcome.answer = _posted(address, prompt)
        outcome.files = trace.stop()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()


def _get_health(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    finally:
        connection.close()


def _posted(address: tuple[str, int], prompt: str) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": 24,
            "seed": 1,
        }
    )
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def reading_page(files: Sequence[EnteredFile]) -> str:
    """Return docs/reading.md: the files in the order of the request."""
    num_lines = sum(file.num_lines for file in files)
    lines = [
        "# The path of one request",
        "",
        "Written by `python scripts/trace_request.py --write`: the files of `quire/` that one",
        "streamed chat with default settings enters, in the order of the first call;",
        f"{len(files)} files, {num_lines:,} lines. A file that is not listed belongs to start-up",
        "or to a feature that this request does not use. [ARCHITECTURE](../ARCHITECTURE.md#layers)",
        "links to a page for each package.",
        "",
        "| File | Lines | What it is |",
        "|---|---|---|",
        *(f"| `{file.path}` | {file.num_lines} | {_summary(file.path)} |" for file in files),
        "",
        "What these files call in C++ is [native](packages/native.md). `tests/exact` then compares",
        "the answers of all of it with those of each request computed alone.",
        "",
        "## The path of one model",
        "",
        "What happens before, when a model is loaded, in the order of the calls:",
        "",
        *(_item(path) for path in _OF_A_MODEL),
        "",
        "`quire program MODEL` prints what the builder wrote.",
        "",
    ]
    return "\n".join(lines)


def _item(path: str) -> str:
    """Return a line of a list, which is not wrapped: the file and its first sentence."""
    words = textwrap.wrap(f"`{path}`: {_summary(path)}", 96)
    return "* " + "\n  ".join(words)


def _summary(path: str) -> str:
    """Return the first sentence of a file's docstring, for a table cell."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or path
    first = " ".join(text.split("\n\n")[0].split())
    return first.replace("|", "\\|")


def main() -> None:
    """Print the list, as text or JSON, or write docs/reading.md."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="renew docs/reading.md")
    parser.add_argument("--json", action="store_true", help="print a list of path and lines")
    arguments = parser.parse_args()
    files = trace_streamed_chat()
    if arguments.json:
        print(json.dumps([[file.path, file.num_lines] for file in files]))
        return
    if arguments.write:
        (ROOT / "docs" / "reading.md").write_text(reading_page(files), encoding="utf-8")
    for file in files:
        print(f"{file.num_lines:5}  {file.path}  {file.first_function}")
    print(f"{len(files)} files, {sum(file.num_lines for file in files)} lines")


if __name__ == "__main__":
    main()
