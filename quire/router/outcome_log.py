"""OutcomeLog: what became of the small model's answers, a line of JSON for each.

A line has the features of the request and no text. `quire cascade` learns from these files. Always
holds: a file has at most MAX_LOG_BYTES; then it is renamed to FILE.1, in place of the one before
it. A line that cannot be written is lost, the next one begins after what there is of it, and an
answer never waits for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.router.prompt_features import VERSION, Features

MAX_LOG_BYTES = 256 << 20
KEPT = "kept"


class LoggedOutcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. features: their version. outcome: "kept", or why the answer was replaced."""

    features: int
    cascade: str
    words: list[int]
    facts: list[int]
    outcome: str


_encode = msgspec.json.Encoder().encode


class OutcomeLog:
    """complain: called once with what is wrong where lines cannot be written."""

    def __init__(
        self,
        path: str,
        complain: Callable[[str], None] = lambda what: None,
        *,
        max_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._path = Path(path).expanduser()
        self._max_bytes = max_bytes
        self.complain = complain
        self._has_complained = False
        self._may_be_torn = True  # a router may have ended in the middle of a line

    def note(self, cascade: str, features: Features, outcome: str) -> None:
        """Write a line. outcome: why the answer was replaced, "" where it was kept."""
        line = LoggedOutcome(
            features=VERSION,
            cascade=cascade,
            words=features.words,
            facts=features.facts,
            outcome=outcome or KEPT,
        )
        raw = _encode(line) + b"\n"
        try:
            descriptor = self._opened(len(raw) + 1)
            try:
                if self._may_be_torn and _is_torn(self._path):
                    raw = b"\n" + raw  # what is left of a line ends here
                self._may_be_torn = True
                # At once, so that lines of several writers do not mix.
                if os.write(descriptor, raw) < len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._may_be_torn = False
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                self.complain(f"{self._path}: {error.strerror or error}")

    def _opened(self, num_bytes: int) -> int:
        """Return the file, which has room for so many bytes."""
        # Not blocking: a pipe without a reader is an error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o600)
        if os.fstat(descriptor).st_size + num_bytes <= self._max_bytes:
            return descriptor
        os.close(descriptor)
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        return os.open(self._path, flags, 0o600)


def _is_torn(path: Path) -> bool:
    """Return whether the last line of a file was not written to its end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        num_bytes = os.fstat(descriptor).st_size  # of a pipe 0
        return num_bytes > 0 and os.pread(descriptor, 1, num_bytes - 1) != b"\n"
    finally:
        os.close(descriptor)
