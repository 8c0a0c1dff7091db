"""/v1/messages/batches: create a batch of messages, look at it, list, read results, cancel, delete.

The journal and the worker are those of all batches. Always holds: each key sees its own batches
only; the journal has a batch, with all of its lines, before its client knows its id.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.api.anthropic.paging import page_query
from quire.api.batches import message_batches as rows
from quire.api.batches.parted_response import PartedResponse
from quire.api.batches.stored_batches import ENDED, StoredBatch, move_to
from quire.api.http.request_io import Deadline, body_in_time, read_object
from quire.base.errors import InvalidParameter
from quire.base.show import show

if TYPE_CHECKING:
    from sqlite3 import Connection

    from quire.api.batches.journal import BatchJournal
    from quire.api.batches.worker import BatchWorker
    from quire.api.server_state import ServerState

PATH = "/v1/messages/batches"
MAX_REQUESTS, MAX_LISTED, NUM_LISTED = 100_000, 1000, 20
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class MessageBatchRoutes:
    """The routes."""

    def __init__(
        self, server_state: ServerState, journal: BatchJournal, worker: BatchWorker
    ) -> None:
        self._server_state, self._journal, self._worker = server_state, journal, worker

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(PATH, self.list, methods=["GET"]),
            Route(f"{PATH}/{{id}}", self.one, methods=["GET"]),
            Route(f"{PATH}/{{id}}", self.delete, methods=["DELETE"]),
            Route(f"{PATH}/{{id}}/cancel", self.cancel, methods=["POST"]),
            Route(f"{PATH}/{{id}}/results", self.results, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Add a batch."""
        lifecycle, config = self._server_state.lifecycle, self._server_state.config
        if lifecycle.draining:
            raise lifecycle.refusal()
        body, is_large = await body_in_time(
            read_object(request, limit_bytes=config.max_body_bytes),
            stopping=lifecycle.stopping,
            deadline=Deadline(None),
        )
        lines = await self._server_state.thread_pools.run(is_large, _lines_of, body)
        key, max_bytes = request.state.key, config.batch_store_bytes
        batch = await self._journal.run(lambda db: rows.create(db, key, lines, max_bytes))
        self._worker.begin(batch)
        return JSONResponse(_as_json(batch))

    async def one(self, request: Request) -> Response:
        """Return one batch."""
        return JSONResponse(_as_json(await self._find(request)))

    async def list(self, request: Request) -> Response:
        """Return a page of the batches of a key, the newest first."""
        key = request.state.key
        query = page_query(request, num_listed=NUM_LISTED, max_listed=MAX_LISTED)
        limit, before, after = query.limit, query.before, query.after
        found = await self._journal.run(
            lambda db: rows.page(db, key, before=before, after=after, limit=limit + 1)
        )
        listed = [_as_json(batch) for batch in found[:limit]]
        if before is not None:  # read from the oldest on
            listed.reverse()
        return JSONResponse(
            {
                "data": listed,
                "has_more": len(found) > limit,
                "first_id": listed[0]["id"] if listed else None,
                "last_id": listed[-1]["id"] if listed else None,
            }
        )

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; its finished lines keep their results."""
        id_, key = request.path_params["id"], request.state.key

        def begin_cancel(database: Connection) -> StoredBatch:
            batch = rows.find(database, key, id_)
            if batch.status in ENDED or batch.status == "cancelling":
                return batch
            return move_to(database, id_, "cancelling") or batch

        batch = await self._journal.run(begin_cancel)
        if batch.status == "cancelling":
            self._worker.cancel(id_)
        return JSONResponse(_as_json(batch))

    async def delete(self, request: Request) -> Response:
        """Remove a batch that has ended."""
        id_, key = request.path_params["id"], request.state.key
        await self._journal.run(lambda db: rows.delete(db, key, id_))
        return JSONResponse({"id": id_, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """Return the results of a batch that has ended, a line each, in the order of requests."""
        batch = await self._find(request)
        if batch.status not in ENDED:
            raise InvalidParameter(
                f"message batch {batch.id} has not ended, and has no results before; poll it until "
                'its processing_status is "ended"',
                param="id",
            )
        return PartedResponse(
            lambda at: self._journal.run(partial(rows.results_part, id_=batch.id, at=at)),
            media_type="application/x-jsonl",
        )

    async def _find(self, request: Request) -> StoredBatch:
        id_, key = request.path_params["id"], request.state.key
        return await self._journal.run(lambda db: rows.find(db, key, id_))


def _lines_of(body: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Return the custom_id of each request, and its line of input. Raises InvalidParameter."""
    for name in body:
        if name != "requests" and body[name] is not None:
            raise _fault(f"{show(name)} is not known here; requests is", name)
    requests = body.get("requests")
    if not isinstance(requests, list) or not requests:
        found = "missing" if requests is None else show(requests)
        raise _fault(
            f"requests is {found}; a list is needed, of objects such as "
            '{"custom_id": "a-1", "params": {"model": "...", "max_tokens": 64, "messages": [...]}}'
        )
    if len(requests) > MAX_REQUESTS:
        raise _fault(f"requests has {len(requests)} entries; at most {MAX_REQUESTS} are allowed")
    lines, seen = [], set[str]()
    for at, entry in enumerate(requests):
        custom_id = _checked(f"requests[{at}]", entry, seen)
        seen.add(custom_id)
        line = {"custom_id": custom_id, "method": "POST", "url": rows.ENDPOINT}
        lines.append((custom_id, msgspec.json.encode({**line, "body": entry["params"]}) + b"\n"))
    return lines


def _checked(path: str, entry: Any, seen: set[str]) -> str:
    """Check one request of a batch; return its custom_id."""
    if not isinstance(entry, dict) or entry.keys() != {"custom_id", "params"}:
        raise _fault(f"{path} is {show(entry)}; an object with custom_id and params is allowed")
    custom_id, params = entry["custom_id"], entry["params"]
    if not isinstance(custom_id, str) or not CUSTOM_ID.fullmatch(custom_id):
        raise _fault(
            f"{path}.custom_id is {show(custom_id)}; 1 to 64 letters, digits, - and _ are allowed"
        )
    if custom_id in seen:
        raise _fault(f"{path}.custom_id is {show(custom_id)}, that of an earlier request too")
    if not isinstance(params, dict):
        raise _fault(f"{path}.params is {show(params)}; the object of a message request is allowed")
    return custom_id


def _fault(message: str, param: str = "requests") -> InvalidParameter:
    return InvalidParameter(message, param=param[:64])


def _as_json(batch: StoredBatch) -> dict[str, Any]:
    """Return Anthropic's object; counts of results are those of a batch that has ended."""
    times, has_ended = json.loads(batch.times), batch.status in ENDED
    counts = json.loads(batch.metadata) or {}
    by_kind = [int(counts.get(str(kind), 0)) for kind in range(4)]
    ended_s = times.get(batch.status) if has_ended else None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": (
            "ended" if has_ended else "canceling" if batch.status == "cancelling" else "in_progress"
        ),
        "request_counts": {
            "processing": 0 if has_ended else batch.total,
            "succeeded": by_kind[rows.SUCCEEDED],
            "errored": by_kind[rows.ERRORED],
            "canceled": by_kind[rows.CANCELED],
            "expired": by_kind[rows.EXPIRED],
        },
        "created_at": _moment(batch.created_s),
        "expires_at": _moment(batch.expires_s),
        "ended_at": _moment(ended_s),
        "cancel_initiated_at": _moment(times.get("cancelling")),
        "archived_at": None,
        # Relative, so that it holds behind every proxy; clients add it to their base URL.
        "results_url": f"{PATH}/{batch.id}/results" if has_ended else None,
    }


def _moment(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
