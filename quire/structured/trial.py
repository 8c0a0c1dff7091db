"""Trial: a grammar that may do harm is compiled in a process of its own first.

llguidance's own limits do not bound everything: a divisor can keep it busy for minutes, thousands
of rules that name each other overflow its stack, which ends the process. So what is long, or of a
kind that can be dear while it is short, is tried out where it may hang, swell or crash: the process
(trial_process.py) is ended and its grammar refused. What ends there ends here. Knows no tokens but
the names of special ones. Always holds: `source` returns or raises within its limit, whatever the
grammar.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.grammar import Grammar, GrammarKind

# Shorter grammars cannot overflow a stack of 8 MiB: a level takes six characters at least, and
# two thousand levels fit.
MAX_UNTRIED_CHARS = 8192
_START = """
import sys
sys.path[:] = sys.argv[1:]
from quire.structured.trial_process import main
main()
"""
_PACKAGES = str(Path(__file__).parents[2])
_SIZE_BYTES = 4


def needs_trial(grammar: Grammar) -> bool:
    """Whether a grammar may take long, much memory or much stack: by its length and its words."""
    text = grammar.text
    if len(text) > MAX_UNTRIED_CHARS or "multipleOf" in text:
        return True
    return grammar.kind is GrammarKind.GRAMMAR and ("&" in text or "~" in text)


class Trial:
    """The process, started when it is first needed. For one thread; `end` may come from any."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or (
            *(sys.executable, "-I", "-c", _START),
            *(*sys.path, _PACKAGES),
        )
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, grammar: Grammar, special_names: frozenset[str], *, limit_ms: float) -> str:
        """The grammar in llguidance's words; "" where it has none, which compiling it will explain.

        Raises InvalidParameter where compiling it does not end well within the limit.
        """
        job = {
            "kind": grammar.kind.value,
            "text": grammar.text,
            "whitespace": grammar.whitespace,
            "special_names": sorted(special_names),
            "most_seconds": int(limit_ms / 1000) + 1,  # of processor time; then it ends
        }
        try:
            process = self._running()
            assert process.stdin is not None, "it was started with a pipe"
            assert process.stdout is not None, "likewise"
            write_frame(process.stdin.fileno(), json.dumps(job).encode())
            told = _frame_in_time(process.stdout.fileno(), limit_ms)
        except TimeoutError:
            self.close()
            raise too_slow(grammar, limit_ms) from None
        except OSError as error:
            self.close()
            raise WorkerError(f"no grammar can be tried out here: {error}") from error
        if told is None:
            self.close()
            raise InvalidParameter(
                f"{grammar.param}: the grammar takes more memory than it may have to be compiled, "
                "or its parts name each other in too many levels; make it smaller",
                param=grammar.param,
            )
        return told.decode()

    def end(self) -> None:
        """Whatever is being tried out fails, and all that comes."""
        self._is_over = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            if self._is_over:
                raise OSError("the engine is ending")
            kept = {name: value for name, value in os.environ.items() if name != "QUIRE_API_KEY"}
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=kept,
                start_new_session=True,  # an interrupt at a terminal is not for it
                bufsize=0,
            )
        return self._process


def too_slow(grammar: Grammar, limit_ms: float) -> InvalidParameter:
    """The refusal of a grammar that was not compiled in time."""
    return InvalidParameter(
        f"{grammar.param}: the grammar was not compiled within {limit_ms / 1000:g} s; make it "
        "smaller (fewer alternatives, smaller bounds of repetition)",
        param=grammar.param,
    )


def write_frame(number: int, raw: bytes) -> None:
    """A message into a descriptor, behind its length."""
    left = memoryview(len(raw).to_bytes(_SIZE_BYTES, "big") + raw)
    while left:
        left = left[os.write(number, left) :]


def read_frame(number: int) -> bytes | None:
    """A message that was written by write_frame; None at the end."""
    size = _read_exactly(number, _SIZE_BYTES)
    return None if size is None else _read_exactly(number, int.from_bytes(size, "big"))


def _read_exactly(number: int, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        part = os.read(number, size - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _frame_in_time(number: int, limit_ms: float) -> bytes | None:
    """A message, no part of which is written before all of it is known. Raises TimeoutError."""
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    if not waiting.poll(limit_ms):
        raise TimeoutError
    return read_frame(number)
