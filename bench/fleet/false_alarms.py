"""Replicas that a router gave up although no fault was theirs, by the lines of its log.

A healthy replica that is given up hands its streams to the others, and they count to the kind of
the fault before. Knows the form of the log only. Always holds: a replica with a fault of its own is
in no result from its beginning to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_FENCED = " router: replica fenced "
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
# More of them are counted only.
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault. url: of its replica. began_s, ended_s: by time.time(), until the replica serves
    again."""

    kind: str
    url: str
    began_s: float
    ended_s: float


def false_alarms(log: Iterable[str], faults: Sequence[Injected]) -> dict[str, Any]:
    """Return how many healthy replicas were given up for their silence, and the first of them: when
    after which fault, why, and how many streams and other replicas there were."""
    found = []
    for line in log:
        head, is_fence, rest = line.partition(_FENCED)
        fields = {name: value.strip('"') for name, value in _FIELD.findall(rest)}
        if not is_fence or fields.get("state") != "stalled" or not faults:
            continue
        at_s = datetime.fromisoformat(head.split()[0]).timestamp()
        url = fields.get("replica", "")
        if any(one.url == url and one.began_s <= at_s <= one.ended_s for one in faults):
            continue
        before = [one for one in faults if one.began_s <= at_s]
        last = before[-1] if before else faults[0]
        found.append(
            {
                "after": last.kind if before else "",
                "after_s": round(at_s - last.began_s, 2),
                "same_replica": last.url == url,
                "reason": fields.get("reason", ""),
                "open": int(fields.get("open", 0)),
                "others": int(fields.get("others", 0)),
            }
        )
    return {"count": len(found), "first": found[:MAX_SHOWN]}
