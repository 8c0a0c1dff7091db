"""Lines of a router's log about replicas that are given up, as records.

Knows the form of the log only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from quire.router.silence_report import GIVEN_UP, KEPT

FENCED = "replica fenced"
_LINE = re.compile(rf"(\S+) \w+ router: ({FENCED}|{GIVEN_UP}|{KEPT}) (.*)")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault. url: of its replica. began_s, ended_s: by time.time(), until the replica serves
    again."""

    kind: str
    url: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """One line. what: FENCED, GIVEN_UP or KEPT. at_s: by time.time()."""

    what: str
    at_s: float
    fields: dict[str, str]

    @property
    def url(self) -> str:
        """The address of the replica."""
        return self.fields.get("replica", "")

    def is_of(self, fault: Injected) -> bool:
        """Return whether it is about the replica of a fault, while that lasts."""
        return self.url == fault.url and fault.began_s <= self.at_s <= fault.ended_s


def events(log: Iterable[str]) -> Iterator[Event]:
    """Return what the lines say, in their order."""
    for line in log:
        if found := _LINE.match(line):
            at_s = datetime.fromisoformat(found[1]).timestamp()
            fields = {name: _text(value) for name, value in _FIELD.findall(found[3])}
            yield Event(found[2], at_s, fields)


def _text(value: str) -> str:
    """Return a value without its quotes."""
    if value.startswith('"'):
        with suppress(ValueError):
            return str(json.loads(value))
    return value
