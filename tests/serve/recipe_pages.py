"""Read the commands of a documentation page, and run them in order in a directory of their own.

A code block is preceded by an HTML comment that says what becomes of it:

    <!-- server -->          a `quire serve` command: started, and stopped at the end of the page
    <!-- run -->             shell or Python: must succeed
    <!-- output -->          what the block before it printed; `...` stands for any text
    <!-- output: numbers differ -->  the same, with any numbers and widths of columns
    <!-- file: NAME -->      written to a file
    <!-- not run: REASON --> shown only

127.0.0.1:8000 and localhost:8000 stand for the page's server, and /path/to/model for the built-in
model.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.serve.running_server import ROOT, RunningServer

MODEL = ROOT / "quire" / "models" / "box"
GIVE_UP_S = 120.0
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_MARKER = re.compile(r"<!-- (server|run|output|file|not run)(?:: ([^>]+))? -->\n\Z")
_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8000")
_SHELL = ("sh", "")


class PageError(AssertionError):
    """A page's command failed, printed something else, or is not marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block. kind: its marker's word, empty without a marker; argument: the rest of it."""

    kind: str
    argument: str
    language: str
    code: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    found = []
    for fence in _FENCE.finditer(text):
        marker = _MARKER.search(text[: fence.start()])
        kind, argument = marker.groups() if marker else ("", "")
        line = text.count("\n", 0, fence.start()) + 1
        language, code = fence.groups()
        found.append(
            Block(kind=kind, argument=argument or "", language=language, code=code, line=line)
        )
    return found


class PageRun:
    """The run of one page.

    serve: returns a server for the flags of a `quire serve` command, as a context manager.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        serve: Callable[[tuple[str, ...]], AbstractContextManager[RunningServer]],
    ) -> None:
        self._name = name
        self._folder = folder
        self._environment = {**environment, "HOME": str(folder)}
        self._serve = serve
        self._exits = contextlib.ExitStack()
        self._address = "127.0.0.1:9"  # refuses connections until the page has a server
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def __enter__(self) -> PageRun:
        self._exits.enter_context(contextlib.chdir(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._close_what_is_open()
        self._exits.close()

    def _close_what_is_open(self) -> None:
        """Close streams and clients of the page's Python, which a script leaves to its end."""
        for value in reversed(self._names.values()):
            close = getattr(value, "close", None)
            if callable(close) and not isinstance(value, type | ModuleType):
                close()

    def run(self, text: str, *, all_marked: bool) -> int:
        """Run the marked blocks of a page, and return their number.

        all_marked: a block without a marker is an error.
        """
        num_run = 0
        for block in blocks_of(text):
            if not block.kind and all_marked:
                raise self._error(block, "has no marker: say <!-- run --> or <!-- not run: WHY -->")
            if block.kind and block.kind != "not run":
                self._run(block)
                num_run += 1
        return num_run

    def _run(self, block: Block) -> None:
        code = _ADDRESS.sub(self._address, block.code).replace("/path/to/model", str(MODEL))
        if block.kind == "file":
            (self._folder / block.argument).write_text(code, encoding="utf-8")
        elif block.kind == "server":
            self._start(code)
        elif block.kind == "output":
            if not _matches(block.code, self._printed, any_numbers=bool(block.argument)):
                raise self._error(block, f"shows another output than:\n{self._printed}")
        elif block.language == "python":
            self._printed = self._python(block, code)
        elif block.language in _SHELL:
            self._printed = self._shell(block, code)
        else:
            raise self._error(block, f"is marked to run, but is {block.language}")

    def _start(self, code: str) -> None:
        words = shlex.split(code.replace("\\\n", " "), comments=True)
        flags = words[words.index("serve") + 1 :]
        if "--port" in flags:
            at = flags.index("--port")
            del flags[at : at + 2]
        here = [str(self._folder / word) if self._is_file(word) else word for word in flags]
        server = self._exits.enter_context(self._serve(tuple(here)))
        self._address = f"127.0.0.1:{server.port}"

    def _is_file(self, word: str) -> bool:
        return not word.startswith("-") and (self._folder / word).is_file()

    def _shell(self, block: Block, code: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=dict(self._environment),
            capture_output=True,
            text=True,
            timeout=GIVE_UP_S,
            check=False,
        )
        if done.returncode:
            raise self._error(block, f"exits with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def _python(self, block: Block, code: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(code, f"{self._name}:{block.line}", "exec"), self._names)
            except Exception as error:
                raise self._error(block, f"raises {type(error).__name__}: {error}") from error
        return printed.getvalue()

    def _error(self, block: Block, words: str) -> PageError:
        return PageError(f"{self._name}:{block.line}: the block {words}")


def _matches(shown: str, printed: str, *, any_numbers: bool = False) -> bool:
    """Return whether a text was printed as shown, with any text in place of `...`."""
    if any_numbers:
        shown, printed = _without_numbers(shown), _without_numbers(printed)
    pattern = re.escape(shown.strip()).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


def _without_numbers(text: str) -> str:
    return re.sub(" +", " ", re.sub(r"[+-]?\b\d[\d.,]*", "0", text))


def command_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `quire` is the command of this checkout."""
    command = folder / "quire"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match("QUIRE_|HF_|[a-z]+_proxy|OPENAI_", name)
    }
    return {
        **kept,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


@contextlib.contextmanager
def own_server(flags: tuple[str, ...]) -> Iterator[RunningServer]:
    """Yield a server with these flags; the built-in model is served if they name none."""
    has_model = bool(flags) and not flags[0].startswith("-")
    model, others = (flags[0], flags[1:]) if has_model else (MODEL, flags)
    with RunningServer(model, *others) as server:
        yield server
