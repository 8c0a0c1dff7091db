"""Partial files: they go once the journal can be written, and open uploads keep theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import pytest

from quire.api.batches import worker
from quire.api.batches.expiry import drop_stale
from quire.api.batches.journal import BatchJournal
from quire.api.batches.stored_files import CHUNK_BYTES
from quire.api.openai.batches import file_routes
from tests.unit.api.batches.test_batches import FILES, on_site, upload
from tests.unit.api.fake_engine import Site

MAX_BYTES = 4 * CHUNK_BYTES
NUM_STORED = 3  # chunks, before the disk is full


class Disk:
    """The disk of a journal: full once it has NUM_STORED chunks, until it has room."""

    def __init__(self, add_chunk: Callable[..., None]) -> None:
        self._add_chunk = add_chunk
        self._database: Connection | None = None

    def add_chunk(
        self, database: Connection, key: bytes, id_: str, number: int, *more: Any
    ) -> None:
        if number == NUM_STORED and self._database is None:
            self._database = database
            database.execute("PRAGMA query_only = ON")  # stands for a full disk: no write succeeds
        self._add_chunk(database, key, id_, number, *more)

    def make_room(self) -> None:
        assert self._database is not None, "it was full"
        self._database.execute("PRAGMA query_only = OFF")

    def files(self) -> list[tuple[int, int]]:
        """Return (ready, bytes) of each file."""
        assert self._database is not None, "it was full"
        return self._database.execute("SELECT ready, bytes FROM files").fetchall()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(file_routes.add_chunk)
    monkeypatch.setattr(file_routes, "add_chunk", disk.add_chunk)
    return disk


async def failed_upload(site: Site, disk: Disk) -> None:
    """Upload a file until the disk is full, and make room then."""
    reply = await upload(site, [b"x" * MAX_BYTES])
    assert (reply.status, reply.error["code"]) == (500, "internal_error"), reply.body
    assert disk.files() == [(0, NUM_STORED * CHUNK_BYTES)]
    disk.make_room()


def test_the_next_upload_has_the_place_of_a_partial_file(tmp_path: Path, disk: Disk) -> None:
    async def use(site: Site) -> None:
        await failed_upload(site, disk)
        reply = await upload(site, [b"y" * MAX_BYTES])
        assert reply.status == 200, reply.body
        listed = (await site.get(FILES)).json["data"]
        assert [file["id"] for file in listed] == [reply.json["id"]]
        assert disk.files() == [(1, MAX_BYTES)]
        assert site.log.getvalue().count("partial file not removed yet") == 1

    on_site(tmp_path / "store", use, batch_store_bytes=MAX_BYTES)


def test_the_sweep_removes_a_partial_file(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SWEEP_S", 0.0)

    async def use(site: Site) -> None:
        await failed_upload(site, disk)
        loop, swept = asyncio.get_running_loop(), asyncio.Event()

        def see(database: Connection, open_uploads: set[str]) -> None:
            drop_stale(database, open_uploads)
            if not database.execute("SELECT 1 FROM files").fetchall():
                loop.call_soon_threadsafe(swept.set)

        monkeypatch.setattr(worker, "drop_stale", see)
        async with asyncio.timeout(60):
            await swept.wait()

    on_site(tmp_path / "store", use)


def test_an_upload_that_the_end_of_the_server_cuts_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as an internal error, though the journal is closed before the upload ends."""
    add_chunk, close, closing = file_routes.add_chunk, BatchJournal.close, threading.Event()

    def closed(journal: BatchJournal) -> None:
        closing.set()
        close(journal)

    async def use(site: Site) -> None:
        loop = asyncio.get_running_loop()

        def add(*arguments: Any) -> None:
            loop.call_soon_threadsafe(site.server_state.lifecycle.drain)
            assert closing.wait(60)
            add_chunk(*arguments)

        monkeypatch.setattr(BatchJournal, "close", closed)
        monkeypatch.setattr(file_routes, "add_chunk", add)
        reply = await upload(site, [b"x" * MAX_BYTES])
        assert (reply.status, reply.error["code"]) == (503, "shutting_down"), reply.body

    on_site(tmp_path / "store", use)
    BatchJournal(str(tmp_path / "store")).close()  # the next server can open it


def test_open_uploads_keep_their_files(tmp_path: Path) -> None:
    async def use(site: Site) -> None:
        content = [b"x" * CHUNK_BYTES]
        first, second = await asyncio.gather(upload(site, content), upload(site, content))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        listed = (await site.get(FILES)).json["data"]
        assert {file["id"] for file in listed} == {first.json["id"], second.json["id"]}

    on_site(tmp_path / "store", use)
