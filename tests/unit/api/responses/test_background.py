"""Background responses: polled, cancelled, deleted, and their events read again from any number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from quire.api.http.errors import ResumeGone
from quire.api.openai.responses.open_store import store_of
from quire.api.openai.responses.stored_routes import StoredRoutes
from quire.api.streaming.event_journal import EventJournal
from quire.base.errors import WorkerError
from quire.config.server_config import ServerConfig
from tests.unit.api.fake_engine import Reply, Site
from tests.unit.api.responses.asking import ASKED, PATH, engine, events_of, kinds_of

BACKGROUND = {**ASKED, "background": True}


class Gate:
    """Holds an engine before its second delta until it is opened."""

    def __init__(self, site: Site) -> None:
        self.open, self.reached = asyncio.Event(), asyncio.Event()
        site.engine.pause = self._wait

    async def _wait(self) -> None:
        self.reached.set()
        await self.open.wait()


def on_site(use: Callable[[Site, Gate], Awaitable[Any]], **settings: Any) -> Any:
    """Return what `use` returns for a new server with a held engine."""

    async def run() -> Any:
        site = Site(engine("Hel", "lo", "!"), **settings)
        return await use(site, Gate(site))

    return asyncio.run(run())


async def begun(site: Site, **fields: Any) -> str:
    reply = await site.post(PATH, {**BACKGROUND, **fields})
    assert (reply.status, reply.json["status"]) == (200, "queued"), reply.body
    id_: str = reply.json["id"]
    return id_


async def ended(site: Site, gate: Gate) -> None:
    gate.open.set()
    await site.server_state.idle.wait()


async def read(site: Site, id_: str, query: bytes = b"") -> Reply:
    return await site.get(f"{PATH}/{id_}", query=query)


def test_a_background_response_is_polled_until_it_has_ended() -> None:
    async def use(site: Site, gate: Gate) -> None:
        id_ = await begun(site)
        await gate.reached.wait()
        running = (await read(site, id_)).json
        assert (running["status"], running["output"][0]["status"]) == ("in_progress",) * 2
        continued = await site.post(PATH, {**ASKED, "previous_response_id": id_})
        assert (continued.status, continued.error["param"]) == (400, "previous_response_id")
        await ended(site, gate)
        response = (await read(site, id_)).json
        assert (response["status"], response["background"]) == ("completed", True)
        assert response["output"][0]["content"][0]["text"] == "Hello!"
        assert response["usage"]["output_tokens"] == 3
        assert site.server_state.requests.num_open == 0

    on_site(use)


def test_its_events_are_read_from_any_number_while_it_runs_and_afterwards() -> None:
    async def use(site: Site, gate: Gate) -> None:
        gone = asyncio.Event()

        async def leave(part: bytes) -> None:
            if b"output_text.delta" in part:
                gone.set()

        body = msgspec.json.encode({**BACKGROUND, "stream": True})
        first = await site.call("POST", PATH, body, gone=gone, on_part=leave)
        events = events_of(first)
        assert kinds_of(events)[:3] == ["created", "queued", "in_progress"]
        assert not first.complete
        id_ = events[0]["response"]["id"]
        last = events[-1]["sequence_number"]
        again = asyncio.ensure_future(read(site, id_, b"stream=true&starting_after=%d" % last))
        await asyncio.sleep(0)
        await ended(site, gate)
        rest = events_of(await again)
        assert rest[0]["sequence_number"] == last + 1
        assert rest[-1]["type"] == "response.completed"
        whole = events_of(await read(site, id_, b"stream=true"))
        assert whole == [*events, *rest]
        number = rest[-1]["sequence_number"]
        assert (await read(site, id_, b"stream=true&starting_after=%d" % number)).events == []
        beyond = await read(site, id_, b"stream=true&starting_after=%d" % (number + 1))
        assert (beyond.status, beyond.error["code"]) == (410, "resume_gone")

    on_site(use)


def test_a_cancelled_response_ends_and_stays_cancelled() -> None:
    async def use(site: Site, gate: Gate) -> None:
        id_ = await begun(site)
        reading = asyncio.ensure_future(read(site, id_, b"stream=true"))
        await gate.reached.wait()
        cancelled = await site.post(f"{PATH}/{id_}/cancel", b"")
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        assert cancelled.json["output"][0]["status"] == "incomplete"
        assert site.engine.closed_early == [id_]
        assert (await read(site, id_)).json == cancelled.json
        assert (await site.post(f"{PATH}/{id_}/cancel", b"")).json == cancelled.json
        last = events_of(await reading)[-1]
        assert (last["type"], last["code"]) == ("error", "aborted")

    on_site(use)


def test_only_background_responses_are_cancelled_and_streamed() -> None:
    async def use(site: Site, gate: Gate) -> None:
        gate.open.set()
        id_ = (await site.post(PATH, ASKED)).json["id"]
        for reply in (
            await site.post(f"{PATH}/{id_}/cancel", b""),
            await read(site, id_, b"stream=true"),
            await read(site, id_, b"starting_after=3"),
            await read(site, id_, b"stream=true&starting_after=x"),
            await read(site, id_, b"stream=yes"),
        ):
            assert (reply.status, reply.error["code"]) == (400, "invalid_value")
        assert (await site.post(f"{PATH}/resp_0/cancel", b"")).status == 404

    on_site(use)


def test_a_deleted_response_is_ended_and_does_not_come_back() -> None:
    async def use(site: Site, gate: Gate) -> None:
        id_ = await begun(site)
        await gate.reached.wait()
        deleted = await site.call("DELETE", f"{PATH}/{id_}", b"")
        assert deleted.json["deleted"] is True
        assert site.engine.closed_early == [id_]
        await ended(site, gate)
        for query in (b"", b"stream=true"):
            assert (await read(site, id_, query)).status == 404

    on_site(use)


def test_a_failure_is_stored_and_the_last_event() -> None:
    async def use(site: Site, gate: Gate) -> None:
        site.engine.fails_with, site.engine.fails_after = WorkerError("it died"), 1
        id_ = await begun(site)
        await ended(site, gate)
        failed = (await read(site, id_)).json
        assert (failed["status"], failed["error"]["message"]) == ("failed", "it died")
        events = events_of(await read(site, id_, b"stream=true"))
        assert kinds_of(events)[-2:] == ["error", "failed"]
        after_error = b"stream=true&starting_after=%d" % events[-2]["sequence_number"]
        assert events_of(await read(site, id_, after_error)) == events[-1:]
        after_all = b"stream=true&starting_after=%d" % events[-1]["sequence_number"]
        assert (await read(site, id_, after_all)).events == []

    on_site(use)


def test_a_server_that_stops_fails_what_runs() -> None:
    async def use(site: Site, gate: Gate) -> None:
        id_ = await begun(site)
        await gate.reached.wait()
        site.server_state.lifecycle.grace_over.set_result(None)
        await site.server_state.idle.wait()
        assert (await read(site, id_)).json["status"] == "failed"

    on_site(use)


def test_another_key_sees_no_background_response() -> None:
    async def use(site: Site, gate: Gate) -> None:
        own, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        reply = await site.post(PATH, BACKGROUND, headers=own)
        path = f"{PATH}/{reply.json['id']}"
        for query in (b"", b"stream=true"):
            assert (await site.get(path, headers=other, query=query)).status == 404
        for method, under in (("POST", "/cancel"), ("DELETE", "")):
            assert (await site.call(method, path + under, b"", headers=other)).status == 404
        assert (await site.get(path, headers=own)).json["status"] in ("queued", "in_progress")

    on_site(use, api_key=("a", "b"))


def test_background_needs_the_store_and_room() -> None:
    async def use(site: Site, gate: Gate) -> None:
        refused = await site.post(PATH, {**BACKGROUND, "store": False})
        assert (refused.status, refused.error["param"]) == (400, "background")
        await begun(site)
        full = await site.post(PATH, BACKGROUND)
        assert (full.status, full.error["code"]) == (503, "overloaded")
        await ended(site, gate)
        await begun(site)

    on_site(use, resume_memory_bytes=1 << 20)


def test_refusals_are_those_of_other_responses() -> None:
    async def use(site: Site, gate: Gate) -> None:
        assert (await site.post(PATH, {**BACKGROUND, "input": []})).status == 400
        long = {**BACKGROUND, "input": "x" * 3000}
        assert (await site.post(PATH, long)).error["code"] == "context_length_exceeded"
        assert site.engine.asked == []

    on_site(use)


def test_an_open_response_that_no_process_runs_has_failed(tmp_path: Path) -> None:
    settings = {"responses_store": str(tmp_path / "store")}

    async def use(site: Site, gate: Gate) -> None:
        id_ = await begun(site)
        store = store_of(ServerConfig(**settings))
        found = await store.find(b"", id_)
        assert found is not None
        await site.call("DELETE", f"{PATH}/{id_}", b"")
        await store.save(b"", found)  # as a killed server leaves it
        assert msgspec.json.decode(found.response)["status"] == "queued"
        for _ in range(2):
            response = (await read(site, id_)).json
            assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
            assert (response["error"]["type"], response["error"]["param"]) == ("server_error", None)

    on_site(use, **settings)


def test_another_process_answers_for_what_it_runs(tmp_path: Path) -> None:
    """Two processes share a file; the first forwards to the private routes of the second."""
    settings = {"responses_store": str(tmp_path / "store")}

    async def use(site: Site, gate: Gate) -> None:
        first = Site(engine(), **settings)
        private = StoredRoutes(site.server_state, store_of(site.server_state.config))
        endpoints = {
            (next(iter(route.methods - {"HEAD"})), route.path): route.endpoint
            for route in private.private_routes()
        }

        async def forward(request: Any) -> Response | None:
            path = request.scope["route"].path
            response: Response = await endpoints[request.method, path](request)
            return response

        public = StoredRoutes(first.server_state, store_of(first.server_state.config), forward)
        for route in first.app._router.routes:
            own = [each for each in public.routes() if each.path == getattr(route, "path", "")]
            for each in own:
                if each.methods == route.methods:
                    route.app, route.endpoint = each.app, each.endpoint
        id_ = await begun(site)
        await gate.reached.wait()
        assert (await read(first, id_)).json["status"] == "in_progress"
        reading = asyncio.ensure_future(read(first, id_, b"stream=true"))
        await asyncio.sleep(0)
        cancelled = await first.post(f"{PATH}/{id_}/cancel", b"")
        assert cancelled.json["status"] == "cancelled"
        assert events_of(await reading)[-1]["type"] == "error"
        assert (await read(first, id_)).json == cancelled.json
        assert (await first.call("DELETE", f"{PATH}/{id_}", b"")).json["deleted"] is True
        assert (await read(site, id_)).status == 404

    on_site(use, **settings)


def test_a_reader_that_falls_behind_a_dropping_journal_is_cut() -> None:
    async def use() -> None:
        journal = EventJournal(4, drops_unread=True)
        for at in range(3):
            await journal.put(b"%d%d" % (at, at))
        assert (journal.first, journal.last) == (2, 3)
        assert await journal.after(1) == b"1122"
        with pytest.raises(ResumeGone, match="events up to 1 are not kept"):
            await journal.after(0)

    asyncio.run(use())


def test_while_the_server_is_paused_it_is_queued_and_can_be_cancelled() -> None:
    async def use(site: Site, gate: Gate) -> None:
        gate.open.set()
        site.server_state.lifecycle.pause()
        id_, other = await begun(site), await begun(site)
        assert (await read(site, id_)).json["status"] == "queued"
        assert not site.engine.asked
        cancelled = await site.post(f"{PATH}/{other}/cancel", {})
        assert cancelled.json["status"] == "cancelled"
        site.server_state.lifecycle.resume()
        await site.server_state.idle.wait()
        assert (await read(site, id_)).json["status"] == "completed"
        assert len(site.engine.asked) == 1

    on_site(use)
