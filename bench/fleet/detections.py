"""When and why a router gave up the replicas with faults, by the lines of its log.

The log has the time of the decision itself; an answer of its /health is later by as much as the
router is busy with the streams that it sends on. Always holds: each fault is detected once, by the
first line of its replica between its beginning and its end.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bench.fleet.router_log import FENCED, Event, Injected, events
from quire.router.silence_report import GIVEN_UP, KEPT

# A detection that takes longer leaves too little of 3 s for the streams to go on, and is shown.
LATE_S = 1.2
# More of them are counted only.
MAX_SHOWN = 20
_FIELDS = ("sign", "silent_ms", "limit_ms", "no_beat_ms", "no_progress_ms", "others")


def detections(log: Iterable[str], faults: Sequence[Injected]) -> dict[str, Any]:
    """Return by kind of fault how many were detected and how late, by which sign of silence, and
    the late ones with the router's reasons.

    A drain is none: its replica says so itself.
    """
    known = list(events(log))
    seconds: dict[str, list[float]] = defaultdict(list)
    signs: dict[str, Counter[str]] = defaultdict(Counter)
    late = []
    for fault in faults:
        if fault.kind == "drain":
            continue
        own = [one for one in known if one.is_of(fault)]
        fenced = next((one for one in own if one.what == FENCED), None)
        if fenced is None:
            late.append({"kind": fault.kind, "seconds": None, "kept": _of(own, KEPT)})
            continue
        own = [one for one in own if one.at_s <= fenced.at_s]
        took_s = round(fenced.at_s - fault.began_s, 3)
        seconds[fault.kind].append(took_s)
        given_up = _of(own, GIVEN_UP)
        sign = given_up.get("sign", fenced.fields.get("state", ""))
        signs[fault.kind][sign] += 1
        if took_s > LATE_S:
            late.append(
                {
                    "kind": fault.kind,
                    "seconds": took_s,
                    "reason": fenced.fields.get("reason", ""),
                    "open": int(fenced.fields.get("open", 0)),
                    "given_up": given_up,
                    "kept": _of(own, KEPT),
                }
            )
    by_kind = {
        kind: {
            "count": len(times),
            "median_s": round(statistics.median(times), 3),
            "max_s": max(times),
            "signs": dict(signs[kind]),
        }
        for kind, times in seconds.items()
    }
    return {"by_kind": by_kind, "num_late": len(late), "late": late[:MAX_SHOWN]}


def _of(events: Sequence[Event], what: str) -> dict[str, Any]:
    """Return the fields of the newest line of this kind; none where there is no such line."""
    found = next((one for one in reversed(events) if one.what == what), None)
    if found is None:
        return {}
    return {name: found.fields[name] for name in _FIELDS if name in found.fields}
