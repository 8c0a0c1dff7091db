"""Who of several clients is told what. An engine that has one client needs none of this.

What a client names carries its number: the ids of its streams begin with it, the numbers of its
questions hold it. So nothing is remembered here, and what is said of a client that is gone reaches
nobody. All are told the counters of each step: each shows them and judges progress by them. Whoever
started the engine (number 0) hears of its life only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.base.records import RequestOutput, StepOutputs
from quire.engine.process.messages import Beat, CacheReported, FromEngine, Outputs, Refused

STARTER = 0
_ASKS_BITS = 32


def id_prefix(client: int) -> str:
    """What the ids of a client's streams begin with; nothing for one that has no number."""
    return f"{client}/" if client else ""


def query_number_base(client: int) -> int:
    """The number behind which those of a client's questions begin."""
    return client << _ASKS_BITS


def parts(message: FromEngine, clients: Iterable[int]) -> list[tuple[int, FromEngine]]:
    """Which client is told what of a message."""
    if isinstance(message, Outputs):
        told = _outputs_by_client(message.outputs)
        return [
            (client, Outputs(outputs=told.get(client), stats=message.stats))
            for client in clients
            if client != STARTER
        ]
    if isinstance(message, Refused):
        return [(_owner(message.request_ids[0]), message)]
    if isinstance(message, CacheReported):
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
    """The rows given, in their order, and these events."""
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
