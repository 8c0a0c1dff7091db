"""Route messages between the engine and several clients; not used with one client.

The ids of a client's streams begin with its number, and the numbers of its queries contain it.
The routing therefore keeps no state, and messages for a client that is gone are dropped. Every
client receives the counters of each step: it exposes them and judges progress by them. The process
that started the engine (number 0) receives only start, end and failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.base.records import RequestOutput, StepOutputs
from quire.engine.process.messages import (
    Beat,
    CacheReported,
    FromEngine,
    Outputs,
    Refused,
    SnapshotReported,
    TimelinesReported,
)

STARTER = 0
_ASKS_BITS = 32


def id_prefix(client: int) -> str:
    """Return the prefix of the ids of a client's streams; "" for a client without a number."""
    return f"{client}/" if client else ""


def query_number_base(client: int) -> int:
    """Return the number after which a client's queries are numbered."""
    return client << _ASKS_BITS


def parts(message: FromEngine, clients: Iterable[int]) -> list[tuple[int, FromEngine]]:
    """Return the part of a message for each client."""
    if isinstance(message, Outputs):
        by_client = _outputs_by_client(message.outputs)
        return [
            (client, Outputs(outputs=by_client.get(client), stats=message.stats))
            for client in clients
            if client != STARTER
        ]
    if isinstance(message, Refused):
        return [(_owner(message.request_ids[0]), message)]
    if isinstance(message, CacheReported | SnapshotReported | TimelinesReported):
        return [(message.ask_id >> _ASKS_BITS, message)]
    if isinstance(message, Beat):
        return [(client, message) for client in clients if client != STARTER]
    return [(client, message) for client in clients]


def _owner(request_id: str) -> int:
    return int(request_id.partition("/")[0])


def _outputs_by_client(outputs: StepOutputs | None) -> dict[int, StepOutputs]:
    if outputs is None:
        return {}
    rows: dict[int, list[int]] = {}
    for row, request_id in enumerate(outputs.request_ids):
        rows.setdefault(_owner(request_id), []).append(row)
    events: dict[int, list[RequestOutput]] = {}
    for event in outputs.events:
        events.setdefault(_owner(event.request_id), []).append(event)
    if len(rows.keys() | events.keys()) == 1:  # as it is, not a copy
        return dict.fromkeys(rows.keys() | events.keys(), outputs)
    return {
        client: _some(outputs, rows.get(client, []), tuple(events.get(client, ())))
        for client in rows.keys() | events.keys()
    }


def _some(outputs: StepOutputs, rows: list[int], events: tuple[RequestOutput, ...]) -> StepOutputs:
    """Return the rows given, in their order, and these events."""
    at = np.array(rows, np.intp)

    def taken(values: np.ndarray[Any, Any]) -> Any:
        return values[at] if len(values) else values

    return StepOutputs(
        step=outputs.step,
        request_ids=[outputs.request_ids[row] for row in rows],
        token_ids=outputs.token_ids[at],
        logprobs=taken(outputs.logprobs),
        top_ids=taken(outputs.top_ids),
        top_logprobs=taken(outputs.top_logprobs),
        listed_logprobs=taken(outputs.listed_logprobs),
        events=events,
    )
