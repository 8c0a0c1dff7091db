"""Trial: compile a risky grammar in a separate process first.

llguidance's limits do not bound everything: multipleOf can keep it busy for minutes, and thousands
of nested rules overflow its stack, which ends the process. So a grammar that is long, or of a kind
that can be expensive even if short, is first compiled in a process that may hang, run out of memory
or crash; the process (trial_process.py) is then killed and its grammar rejected. Invariant:
`source` returns or raises within its limit, for any grammar.
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

# Shorter grammars cannot overflow a stack of 8 MiB: each level takes at least six characters, and
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
    """Return whether a grammar may take long, much memory or much stack, judged by its text."""
    text = grammar.text
    if len(text) > MAX_UNTRIED_CHARS or "multipleOf" in text:
        return True
    return grammar.kind is GrammarKind.GRAMMAR and ("&" in text or "~" in text)


class Trial:
    """A trial process, started on first use. For one thread; any thread may call `end`."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or (
            *(sys.executable, "-I", "-c", _START),
            *(*sys.path, _PACKAGES),
        )
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, grammar: Grammar, special_names: frozenset[str], *, limit_ms: float) -> str:
        """Return the grammar in llguidance's form; "" if it has none, as compiling it will explain.

        Raises InvalidParameter if compiling it crashes or exceeds the limit.
        """
        job = {
            "kind": grammar.kind.value,
            "text": grammar.text,
            "whitespace": grammar.whitespace,
            "special_names": sorted(special_names),
            "max_cpu_s": int(limit_ms / 1000) + 1,  # then the process ends
        }
        try:
            process = self._running()
            assert process.stdin is not None, "it was started with a pipe"
            assert process.stdout is not None, "likewise"
            write_frame(process.stdin.fileno(), json.dumps(job).encode())
            answer = _frame_in_time(process.stdout.fileno(), limit_ms)
        except TimeoutError:
            self.close()
            raise too_slow(grammar, limit_ms) from None
        except OSError as error:
            self.close()
            raise WorkerError(f"the process for trial compilations failed: {error}") from error
        if answer is None:
            self.close()
            raise InvalidParameter(
                f"{grammar.param}: compiling the grammar exceeds its memory limit or nests too "
                "deeply; make it smaller",
                param=grammar.param,
            )
        return answer.decode()

    def end(self) -> None:
        """Fail the running trial and all later ones."""
        self._is_over = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process; the next grammar starts another."""
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
                start_new_session=True,  # Ctrl-C at a terminal must not reach it
                bufsize=0,
            )
        return self._process


def too_slow(grammar: Grammar, limit_ms: float) -> InvalidParameter:
    """Return the error for a grammar that was not compiled in time."""
    return InvalidParameter(
        f"{grammar.param}: the grammar was not compiled within {limit_ms / 1000:g} s; make it "
        "smaller (fewer alternatives, smaller bounds of repetition)",
        param=grammar.param,
    )


def write_frame(number: int, raw: bytes) -> None:
    """Write a message with its length to a file descriptor."""
    left = memoryview(len(raw).to_bytes(_SIZE_BYTES, "big") + raw)
    while left:
        left = left[os.write(number, left) :]


def read_frame(number: int) -> bytes | None:
    """Read a message of write_frame; None at the end."""
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
    """Read a message within the limit. The sender writes it at once. Raises TimeoutError."""
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    if not waiting.poll(limit_ms):
        raise TimeoutError
    return read_frame(number)
