"""Replicas that a router gave up although no fault was theirs, by the lines of its log.

A healthy replica that is given up hands its streams to the others, and they count to the kind of
the fault before. Always holds: a replica with a fault of its own is in no result from its beginning
to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.fleet.router_log import FENCED, Injected, events

# More of them are counted only.
MAX_SHOWN = 20


def false_alarms(log: Iterable[str], faults: Sequence[Injected]) -> dict[str, Any]:
    """Return how many healthy replicas were given up for their silence, and the first of them: when
    after which fault, why, and how many streams and other replicas there were."""
    found = []
    for event in events(log):
        fields = event.fields
        if event.what != FENCED or fields.get("state") != "stalled" or not faults:
            continue
        if any(map(event.is_of, faults)):
            continue
        before = [one for one in faults if one.began_s <= event.at_s]
        last = before[-1] if before else faults[0]
        found.append(
            {
                "after": last.kind if before else "",
                "after_s": round(event.at_s - last.began_s, 2),
                "same_replica": last.url == event.url,
                "reason": fields.get("reason", ""),
                "open": int(fields.get("open", 0)),
                "others": int(fields.get("others", 0)),
            }
        )
    return {"count": len(found), "first": found[:MAX_SHOWN]}
