"""/v1/files: upload the input of a batch, list files, read their content, delete them.

An upload goes to the journal as it arrives. Always holds: an upload that is refused or breaks off
leaves nothing behind once the journal can be written; each key sees its own files only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.api.batches.expiry import drop_file, expiry_s
from quire.api.batches.parted_response import PartedResponse
from quire.api.batches.stored_files import (
    CHUNK_BYTES,
    StoredFile,
    add_chunk,
    begin_file,
    content_part,
    delete_file,
    find_file,
    finish_file,
    list_files,
    new_id,
)
from quire.api.http.request_io import ClientDisconnected, announced_bytes
from quire.api.openai.batches.multipart import MultipartReader, Part, boundary_of
from quire.api.openai.responses.stored_routes import whole_of
from quire.base.errors import BodyTooLarge, InvalidParameter, QuireError, ShuttingDown, TimedOut
from quire.base.request_body import BODY_TIME_S
from quire.base.show import show

if TYPE_CHECKING:
    from quire.api.batches.journal import BatchJournal
    from quire.api.server_state import ServerState

MAX_FILE_BYTES = 512 * 1024 * 1024
MAX_LISTED = 10_000
ORDERS = ("asc", "desc")
PURPOSES = ("batch", "batch_output")
# Those of OpenAI's files that no file has here; a list of them is empty.
_OTHER_PURPOSES = ("assistants", "assistants_output", "fine-tune", "fine-tune-results", "vision")
LISTED_PURPOSES = (*PURPOSES, *_OTHER_PURPOSES, "user_data", "evals")
_MAX_NAME_CHARS, _MAX_FIELD_BYTES = 512, 64
# The fields of a form beside the file. Clients write an object as a field for each of its keys.
_EXPIRES = {"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}
_FIELDS = ("purpose", *_EXPIRES.values())
# Beside the file, a form has heads and a purpose.
_FORM_BYTES = 64 * 1024
# Maximum bytes of a refused form that are read and dropped, within BODY_TIME_S.
_DISCARD_BYTES = 2 * MAX_FILE_BYTES


class FileRoutes:
    """The routes."""

    def __init__(self, server_state: ServerState, journal: BatchJournal) -> None:
        self._server_state = server_state
        self._journal = journal

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list, methods=["GET"]),
            Route("/v1/files/{id}", self.one, methods=["GET"]),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Store a file."""
        pieces = self._pieces(request)
        try:
            return JSONResponse((await self._stored(request, pieces)).as_json())
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        except QuireError:
            if announced_bytes(request) <= _DISCARD_BYTES:
                await _discard(pieces)
            raise

    async def _stored(self, request: Request, pieces: AsyncIterator[bytes]) -> StoredFile:
        """Store the file of a form. Raises InvalidParameter, BodyTooLarge and JournalError."""
        reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        if announced_bytes(request) > MAX_FILE_BYTES + _FORM_BYTES:
            raise _too_large()
        max_bytes, key = self._server_state.config.batch_store_bytes, request.state.key
        id_, open_uploads = new_id("file-"), self._journal.open_uploads
        upload = _Upload(self._journal, key, id_, max_bytes)
        file = None
        open_uploads.add(id_)
        try:
            await self._journal.run(lambda db: begin_file(db, key, id_, open_uploads))
            async for piece in pieces:
                for item in reader.feed(piece):
                    await upload.take(item)
            reader.close()
            file = await upload.finish()
        finally:
            open_uploads.discard(id_)
            if file is None:
                await asyncio.shield(self._drop(id_))
        return file

    async def _drop(self, id_: str) -> None:
        """Remove a partial file. One that stays is removed by drop_stale later."""
        try:
            await self._journal.run(lambda db: drop_file(db, id_))
        except (
            QuireError
        ) as error:  # a full disk, or the server stops; the client gets the upload's error
            self._server_state.log.error("partial file not removed yet", error=str(error))

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body, while it proceeds and the server is not stopping."""
        pieces = aiter(request.stream())
        while True:
            if self._server_state.lifecycle.stopping.done():
                raise ShuttingDown("the server is shutting down; upload the file again later")
            try:
                async with asyncio.timeout(BODY_TIME_S):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TimedOut(
                    f"no part of the file came for {BODY_TIME_S:g} s; upload it again"
                ) from None
            yield piece

    async def list(self, request: Request) -> Response:
        """Return a page of the files of a key."""
        query, key = request.query_params, request.state.key
        limit = whole_of(query, "limit", 1, MAX_LISTED) if "limit" in query else MAX_LISTED
        order = query.get("order", "desc")
        if order not in ORDERS:
            raise InvalidParameter(
                f'order is {show(order)}; "asc" or "desc" is allowed', param="order"
            )
        purpose = _purpose_in(query)
        files = await self._journal.run(
            lambda db: list_files(
                db,
                key,
                purpose=purpose,
                after=query.get("after"),
                limit=limit + 1,
                oldest=order == "asc",
            )
        )
        return page_of([file.as_json() for file in files], limit)

    async def one(self, request: Request) -> Response:
        """Return one file."""
        return JSONResponse((await self._find(request)).as_json())

    async def content(self, request: Request) -> Response:
        """Return the bytes of a file."""
        file = await self._find(request)

        return PartedResponse(
            lambda at: self._journal.run(partial(content_part, file=file, at=at)),
            media_type="application/octet-stream",
            headers={"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"},
        )

    async def delete(self, request: Request) -> Response:
        """Remove a file."""
        id_, key = request.path_params["id"], request.state.key
        await self._journal.run(lambda db: delete_file(db, key, id_))
        return JSONResponse({"id": id_, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> StoredFile:
        id_, key = request.path_params["id"], request.state.key
        return await self._journal.run(lambda db: find_file(db, key, id_))


class _Upload:
    """One form as it arrives. max_bytes: of all files of its key."""

    def __init__(self, journal: BatchJournal, key: bytes, id_: str, max_bytes: int) -> None:
        self._journal, self._key, self._id, self._max_bytes = journal, key, id_, max_bytes
        self._part: Part | None = None
        self._name: str | None = None
        self._fields: dict[str, bytes] = {}
        self._waiting = bytearray()
        self._num_chunks = self._num_bytes = 0

    async def take(self, item: Part | bytes) -> None:
        """Take the head of a part, or a piece of its content."""
        if isinstance(item, Part):
            self._begin(item)
        elif self._part is not None and self._part.name == "file":
            self._waiting += item
            self._num_bytes += len(item)
            if self._num_bytes > MAX_FILE_BYTES:
                raise _too_large()
            while len(self._waiting) >= CHUNK_BYTES:
                await self._store(CHUNK_BYTES)
        elif self._part is not None:
            name = self._part.name
            self._fields[name] += item
            if len(self._fields[name]) > _MAX_FIELD_BYTES:
                found = show(self._fields[name].decode(errors="replace"))
                raise InvalidParameter(f"{name} is {found}, which is too long", param=name)

    async def finish(self) -> StoredFile:
        """Check the fields, and store the rest. Raises InvalidParameter."""
        name = self._name
        if name is None:
            raise InvalidParameter(
                "file is missing; send it as a part with a filename", param="file"
            )
        if self._fields.get("purpose") != b"batch":
            raise _wrong_purpose(self._fields.get("purpose"))
        kept_s = self._kept_s()
        if not self._num_bytes:
            raise InvalidParameter("file is empty; send lines of JSON", param="file")
        if self._waiting:
            await self._store(len(self._waiting))
        return await self._journal.run(lambda db: finish_file(db, self._id, name, "batch", kept_s))

    def _kept_s(self) -> int | None:
        """Return how long the file is kept; None for ever. Raises InvalidParameter."""
        given: dict[str, Any] = {
            key: self._fields[name].decode(errors="replace")
            for key, name in _EXPIRES.items()
            if name in self._fields
        }
        seconds = given.get("seconds", "")
        if seconds.isascii() and seconds.isdigit():
            given["seconds"] = int(seconds)
        return expiry_s(given or None, param="expires_after")

    def _begin(self, part: Part) -> None:
        if part.name not in ("file", *_FIELDS):
            raise InvalidParameter(
                f"field {show(part.name)} is not known here; file, {', '.join(_FIELDS)} are",
                param=part.name,
            )
        if part.name in self._fields or (part.name == "file" and self._name is not None):
            raise InvalidParameter(f"{part.name} is given twice", param=part.name)
        self._part = part
        if part.name != "file":
            self._fields[part.name] = b""
            return
        if part.filename is None:
            raise InvalidParameter("file has no filename; send it as a file", param="file")
        self._name = _label_of(part.filename)

    async def _store(self, num_bytes: int) -> None:
        number, chunk = self._num_chunks, bytes(self._waiting[:num_bytes])
        del self._waiting[:num_bytes]
        self._num_chunks += 1
        key, id_, max_bytes = self._key, self._id, self._max_bytes
        await self._journal.run(lambda db: add_chunk(db, key, id_, number, chunk, max_bytes))


def _label_of(filename: str) -> str:
    """Return a file's name as it is shown: its last part, without control characters."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    shown = "".join(c for c in last if c.isprintable())[:_MAX_NAME_CHARS]
    return "file" if shown in ("", ".", "..") else shown


def _purpose_in(query: QueryParams) -> str | None:
    """Return the purpose that is asked for. Raises InvalidParameter."""
    found = query.getlist("purpose")
    if len(found) > 1 or not set(found) <= set(LISTED_PURPOSES):
        raise InvalidParameter(
            f"purpose is {show(found[0] if len(found) == 1 else found)}; one of "
            f"{', '.join(LISTED_PURPOSES)} is allowed",
            param="purpose",
        )
    return found[0] if found else None


def _wrong_purpose(purpose: bytes | None) -> InvalidParameter:
    found = "missing" if purpose is None else show(purpose[:80].decode(errors="replace"))
    return InvalidParameter(f'purpose is {found}; "batch" is allowed', param="purpose")


async def _discard(pieces: AsyncIterator[bytes]) -> None:
    """Read the rest of a refused form: a client that is still writing would not read the error."""
    num_bytes = 0
    with suppress(QuireError, ClientDisconnect, TimeoutError):
        async with asyncio.timeout(BODY_TIME_S):
            async for piece in pieces:
                num_bytes += len(piece)
                if num_bytes > _DISCARD_BYTES:
                    return


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"the file is too large; at most {MAX_FILE_BYTES} bytes are allowed: split it"
    )


def page_of(found: list[dict[str, object]], limit: int) -> Response:
    """Return a page of a list, of which one entry more than `limit` was read."""
    listed = found[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": listed,
            "first_id": listed[0]["id"] if listed else None,
            "last_id": listed[-1]["id"] if listed else None,
            "has_more": len(found) > limit,
        }
    )
