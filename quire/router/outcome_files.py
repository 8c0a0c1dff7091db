"""Read outcomes: lines that a router has logged, or requests with outcomes of one's own.

    {"features": 1, "cascade": "auto", "words": [...], "facts": [...], "outcome": "kept"}
    {"request": {"messages": [...]}, "hard": true}

The second form is for outcomes that were found otherwise, as by an evaluation: `hard` says that the
large model should answer. Always holds: what is kept in memory is bounded; a line that is neither
form is an error that names its place. A line of a router that was not written to its end, because
the router was ended or the disk was full, is left out and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from quire.base.errors import SettingError
from quire.router.outcome_log import KEPT, LoggedOutcome
from quire.router.prompt_features import MAX_WORDS, NUM_BUCKETS, VERSION, Features, features_of
from quire.router.routed_request import RoutedRequest
from quire.router.routes import ROUTES

MAX_EXAMPLES = 100_000
MAX_LINE_BYTES = 16 << 20
_CHAT = "/v1/chat/completions"
_MAX_FACTS = 64
# How a router begins a line.
_LOGGED = b'{"features":'


class Example(NamedTuple):
    """is_hard: the small model's answer was replaced, or should have been."""

    features: Features
    is_hard: bool


class _OwnOutcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: dict[str, Any]
    hard: bool
    path: Annotated[str, Meta(max_length=256)] = _CHAT


_read_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_logged = msgspec.json.Decoder(LoggedOutcome).decode
_read_own = msgspec.json.Decoder(_OwnOutcome).decode


def read_outcomes(
    paths: Iterable[str],
    cascade: str = "",
    *,
    max_examples: int = MAX_EXAMPLES,
    on_torn: Callable[[str, int], None] = lambda path, num_lines: None,
) -> tuple[list[Example], set[str]]:
    """Return the newest outcomes of files in order, and the cascades that logged them.

    cascade: its outcomes alone are read; "": those of all. on_torn: called once for a file with
    lines that were not written to their ends, with their number. Raises SettingError, also where
    other cascades have logged outcomes and `cascade` has not.
    """
    found: deque[Example] = deque(maxlen=max_examples)
    logged: set[str] = set()
    for path in paths:
        try:
            with Path(path).expanduser().open("rb") as file:
                number = num_torn = 0
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise _wrong(path, number, f"it has more than {MAX_LINE_BYTES} bytes")
                    if not line.strip():
                        continue
                    try:
                        name, example = _example(line)
                    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                        if not _is_torn(line, error):
                            raise _wrong(path, number, str(error)) from error
                        num_torn += 1
                        continue
                    logged |= {name} if name else set()
                    if not cascade or name in ("", cascade):
                        found.append(example)
                if num_torn:
                    on_torn(path, num_torn)
        except OSError as error:
            raise SettingError(
                f"the outcomes {path} cannot be read ({error.strerror}); give files that a router "
                "has written (outcomes of a cascade)"
            ) from error
    if cascade and logged:
        if cascade not in logged:
            raise SettingError(
                f"the outcomes are of {', '.join(sorted(logged))}, and none is of the cascade "
                f"{cascade!r}; choose one of these with --cascade"
            )
        logged = {cascade}
    return list(found), logged


def _is_torn(line: bytes, error: Exception) -> bool:
    """Return whether a line that cannot be read was not written to its end: a last one, or one of a
    router, after which another one was begun."""
    is_no_json = isinstance(error, msgspec.DecodeError | UnicodeError) and not isinstance(
        error, msgspec.ValidationError
    )
    is_of_router = line.startswith(_LOGGED) or _LOGGED.startswith(line.rstrip())
    return not line.endswith(b"\n") or (is_no_json and is_of_router)


def _example(line: bytes) -> tuple[str, Example]:
    """Return the cascade and the outcome of a line. Raises MsgspecError, ValueError."""
    if "features" not in _read_keys(line):
        own = _read_own(line)
        if own.path not in ROUTES:
            raise ValueError(f"path is {own.path!r}, which is not routed; {_CHAT} is, for one")
        request = RoutedRequest(own.path, [], msgspec.json.encode(own.request))
        features = features_of(request.user_text, request.prompt_tokens, request.fields)
        return "", Example(features, own.hard)
    logged = _read_logged(line)
    if logged.features != VERSION:
        raise ValueError(
            f"its features are of version {logged.features}, and these are {VERSION}; log anew"
        )
    for buckets, most in ((logged.words, MAX_WORDS), (logged.facts, _MAX_FACTS)):
        if len(buckets) > most or not all(0 <= one < NUM_BUCKETS for one in buckets):
            raise ValueError(f"buckets are at most {most} numbers from 0 to {NUM_BUCKETS - 1}")
    return logged.cascade, Example(Features(logged.words, logged.facts), logged.outcome != KEPT)


def _wrong(path: str, number: int, why: str) -> SettingError:
    return SettingError(
        f"{path}, line {number}: {why}; a line is an outcome that a router has logged, or "
        '{"request": {...}, "hard": true}'
    )
