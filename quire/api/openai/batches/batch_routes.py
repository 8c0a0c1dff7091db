"""/v1/batches: create a batch of an uploaded file, look at it, list them, cancel one.

Always holds: each key sees its own batches only; the journal has a batch before its client knows
its id.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.api.batches.expiry import expiry_s
from quire.api.batches.message_batches import ENDPOINT as MESSAGES
from quire.api.batches.stored_batches import (
    ENDED,
    StoredBatch,
    create_batch,
    find_batch,
    list_batches,
    move_to,
)
from quire.api.http.errors import UnknownBatch
from quire.api.http.request_io import Deadline, body_in_time, read_object
from quire.api.openai.batches.file_routes import page_of
from quire.api.openai.metadata import checked_metadata
from quire.api.openai.responses.stored_routes import whole_of
from quire.base.errors import InvalidParameter
from quire.base.show import show

if TYPE_CHECKING:
    from sqlite3 import Connection

    from quire.api.batches.journal import BatchJournal
    from quire.api.batches.worker import BatchWorker
    from quire.api.server_state import ServerState

MAX_LISTED, NUM_LISTED = 100, 20
_FIELDS = (
    *("input_file_id", "endpoint", "completion_window", "metadata"),
    "output_expires_after",
)
_BODY_BYTES = 64 * 1024


class BatchRoutes:
    """The routes. endpoints: that a batch may be for."""

    def __init__(
        self,
        server_state: ServerState,
        journal: BatchJournal,
        worker: BatchWorker,
        endpoints: Collection[str],
    ) -> None:
        self._server_state = server_state
        self._journal = journal
        self._worker = worker
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches/{id}", self.one, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Add a batch."""
        lifecycle = self._server_state.lifecycle
        if lifecycle.draining:
            raise lifecycle.refusal()
        body, _ = await body_in_time(
            read_object(request, limit_bytes=_BODY_BYTES),
            stopping=lifecycle.stopping,
            deadline=Deadline(None),
        )
        endpoint, input_id, metadata = self._checked(body)
        kept_s = expiry_s(body.get("output_expires_after"), param="output_expires_after")
        key = request.state.key
        batch = await self._journal.run(
            lambda db: create_batch(db, key, endpoint, input_id, metadata, kept_s)
        )
        self._worker.begin(batch)
        return JSONResponse(batch.as_json())

    async def one(self, request: Request) -> Response:
        """Return one batch."""
        id_, key = request.path_params["id"], request.state.key
        batch = await self._journal.run(lambda db: _find(db, key, id_))
        return JSONResponse(batch.as_json())

    async def list(self, request: Request) -> Response:
        """Return a page of the batches of a key, the newest first."""
        query, key = request.query_params, request.state.key
        limit = whole_of(query, "limit", 1, MAX_LISTED) if "limit" in query else NUM_LISTED
        batches = await self._journal.run(
            lambda db: list_batches(db, key, after=query.get("after"), limit=limit + 1)
        )
        return page_of([batch.as_json() for batch in batches], limit)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; its finished lines keep their results."""
        id_, key = request.path_params["id"], request.state.key

        def begin_cancel(database: Connection) -> StoredBatch:
            batch = _find(database, key, id_)
            if batch.status in ENDED:
                raise InvalidParameter(
                    f"batch {id_} is {batch.status}; one that has not ended can be cancelled",
                    param="id",
                )
            return (
                batch
                if batch.status == "cancelling"
                else move_to(database, id_, "cancelling") or batch
            )

        batch = await self._journal.run(begin_cancel)
        self._worker.cancel(id_)
        return JSONResponse(batch.as_json())

    def _checked(self, body: dict[str, Any]) -> tuple[str, str, dict[str, str] | None]:
        """Return endpoint, input file and metadata. Raises InvalidParameter."""
        for name in body:
            if name not in _FIELDS and body[name] is not None:
                raise InvalidParameter(
                    f"{show(name)} is not known here; {', '.join(_FIELDS)} are", param=name
                )
        endpoint, input_id = body.get("endpoint"), body.get("input_file_id")
        if endpoint not in self._endpoints:
            allowed = ", ".join(map(show, self._endpoints))
            raise InvalidParameter(
                f"endpoint is {show(endpoint)}; one of {allowed} is allowed", param="endpoint"
            )
        if not isinstance(input_id, str) or not input_id:
            raise InvalidParameter(
                f"input_file_id is {show(input_id)}; the id of a file is allowed (POST /v1/files)",
                param="input_file_id",
            )
        window = body.get("completion_window")
        if window != "24h":
            raise InvalidParameter(
                f'completion_window is {show(window)}; "24h" is allowed', param="completion_window"
            )
        metadata = body.get("metadata")
        labels = None if metadata is None else checked_metadata(metadata)
        return str(endpoint), input_id, labels


def _find(database: Connection, key: bytes, id_: str) -> StoredBatch:
    """Return a batch of this API. Raises UnknownBatch."""
    batch = find_batch(database, key, id_)
    if batch.endpoint == MESSAGES:
        raise UnknownBatch(
            f"batch {show(id_)} is a message batch; GET /v1/messages/batches/{id_} has it"
        )
    return batch
