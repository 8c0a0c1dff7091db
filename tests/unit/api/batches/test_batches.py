"""Files and batches with a scripted engine: forms, bounds, order, errors, cancels, restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api.batches import expiry, input_lines, stored_batches
from quire.api.openai.batches import file_routes
from quire.api.openai.batches.multipart import MultipartReader, Part, boundary_of
from quire.api.server_state import OpenRequest, Requester
from quire.base.errors import OverloadedError, RequestError, SettingError
from quire.config.server_config import ServerConfig
from quire.config.tenants import MAX_PRIORITY, Tenant, key_digest
from tests.unit.api.fake_engine import FakeEngine, Reply, Site
from tests.unit.api.responses.asking import engine

FILES, BATCHES, ENDPOINT = "/v1/files", "/v1/batches", "/v1/completions"
FORM = {"content-type": "multipart/form-data; boundary=X"}


def line(number: int, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    given = {"prompt": f"line {number}", "max_tokens": 4, "seed": 1, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": given}


def form_of(content: bytes, *, name: str = "lines.jsonl", purpose: str = "batch") -> bytes:
    head = b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode()
    head += b'\r\n--X\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n' % (
        name.encode()
    )
    return head + b"Content-Type: application/jsonl\r\n\r\n" + content + b"\r\n--X--\r\n"


async def upload(site: Site, lines: list[Any], headers: Any = None, **form: str) -> Reply:
    content = b"\n".join(
        entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in lines
    )
    return await site.call("POST", FILES, form_of(content, **form), headers=FORM | (headers or {}))


async def create(site: Site, file: str, endpoint: str = ENDPOINT, **more: Any) -> Reply:
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    return await site.post(BATCHES, body | more)


async def started(site: Site, lines: list[Any], endpoint: str = ENDPOINT) -> str:
    file = await upload(site, lines)
    assert file.status == 200, file.body
    batch = await create(site, file.json["id"], endpoint)
    assert batch.status == 200, batch.body
    return str(batch.json["id"])


async def ended(site: Site, id_: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := (await site.get(f"{BATCHES}/{id_}")).json)["status"] not in (
            "completed",
            "failed",
            "expired",
            "cancelled",
        ):
            await asyncio.sleep(0.01)
    return batch


async def lines_of(site: Site, file: str | None) -> list[Any]:
    if file is None:
        return []
    reply = await site.get(f"{FILES}/{file}/content")
    assert reply.status == 200
    assert len(reply.body) == int(reply.headers["content-length"])
    return [json.loads(entry) for entry in reply.body.splitlines()]


async def stopped(site: Site) -> None:
    site.server_state.lifecycle.drain()
    await asyncio.sleep(0)
    await site.server_state.idle.wait()


def on_site(
    store: Path, use: Callable[[Site], Awaitable[Any]], engine: Any = None, **settings: Any
) -> Any:
    """Return what `use` returns for a new server, which is stopped then."""

    async def run() -> Any:
        site = Site(engine or FakeEngine("a", "b"), batch_store=str(store), **settings)
        try:
            return await use(site)
        finally:
            await stopped(site)

    return asyncio.run(run())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def test_results_are_in_the_order_of_the_lines(store: Path) -> None:
    async def use(site: Site) -> None:
        wrong = line(5, max_tokens="many")
        streams = line(6, stream=True)
        id_ = await started(site, [*map(line, range(5)), wrong, b"", streams, line(7)])
        batch = await ended(site, id_)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 8, "completed": 6, "failed": 2}
        output = await lines_of(site, batch["output_file_id"])
        assert [entry["custom_id"] for entry in output] == [f"id-{n}" for n in (0, 1, 2, 3, 4, 7)]
        usages = [entry["response"]["body"]["usage"] for entry in output]
        assert batch["model"] == "fake"
        assert batch["usage"] == {
            "input_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "input_tokens_details": {"cached_tokens": 2 * 6},
            "output_tokens": 2 * 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
        }
        alone = (await site.post(ENDPOINT, line(3)["body"])).json
        body = output[3]["response"]["body"]
        assert body["choices"] == alone["choices"]
        assert output[3]["error"] is None
        errors = await lines_of(site, batch["error_file_id"])
        assert [entry["custom_id"] for entry in errors] == ["id-5", "id-6"]
        params = [entry["response"]["body"]["error"]["param"] for entry in errors]
        assert params == ["max_tokens", "stream"]
        listed = (await site.get(BATCHES)).json
        assert [entry["id"] for entry in listed["data"]] == [id_]
        files = (await site.get(FILES)).json["data"]
        assert {file["purpose"] for file in files} == {"batch", "batch_output"}
        for file in files:
            assert (await site.call("DELETE", f"{FILES}/{file['id']}", b"")).json["deleted"]
        assert (await site.get(FILES)).json["data"] == []
        assert site.server_state.requests.num_open == 0

    on_site(store, use)


def test_a_line_runs_in_the_background_and_may_ask_for_the_whole_vocabulary(store: Path) -> None:
    """Such an answer is encoded in parts; in a batch they are joined."""

    async def use(site: Site) -> None:
        asked = line(0, logprobs=-1, prompt_logprobs=-1)
        batch = await ended(site, await started(site, [asked]))
        [output] = await lines_of(site, batch["output_file_id"])
        alone = (await site.post(ENDPOINT, asked["body"])).json
        assert output["response"]["body"]["choices"] == alone["choices"]
        assert len(alone["choices"][0]["logprobs"]["top_logprobs"]) == 2
        assert [one.terms.background for one in site.engine.asked] == [True, False]
        assert site.server_state.requests.num_open == 0

    on_site(store, use)


@pytest.mark.parametrize(
    ("lines", "code", "at"),
    [
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([line(0), b"{"], "invalid_json_line", 2),
        ([b"[]"], "invalid_json_line", 1),
        ([b"\xff\xfe"], "invalid_json_line", 1),
        ([b'{"custom_id": ' + b"[" * 100_000], "invalid_json_line", 1),
        ([line(0) | {"extra": 1}], "invalid_json_line", 1),
        ([line(0) | {"custom_id": ""}], "invalid_custom_id", 1),
        ([line(0) | {"method": "GET"}], "invalid_method", 1),
        ([line(0, url="/v1/../admin")], "mismatched_url", 1),
        ([line(0) | {"body": []}], "invalid_body", 1),
        ([line(0), line(1, prompt="x" * 2000)], "line_too_long", 2),
        ([b" ", b" "], "empty_file", None),
    ],
)
def test_a_file_with_a_wrong_line_fails_as_a_whole(
    store: Path, lines: list[Any], code: str, at: int | None
) -> None:
    async def use(site: Site) -> None:
        batch = await ended(site, await started(site, lines))
        assert batch["status"] == "failed"
        assert batch["output_file_id"] is None
        found = batch["errors"]["data"][0]
        assert (found["code"], found["line"]) == (code, at)
        assert site.engine.asked == []

    on_site(store, use, max_body_bytes=200_000 if len(lines[0]) > 5000 else 1024)


def test_a_file_of_too_many_lines_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINES", 3)

    async def use(site: Site) -> None:
        batch = await ended(site, await started(site, [*map(line, range(4))]))
        assert batch["errors"]["data"][0]["code"] == "too_many_lines"

    on_site(store, use)


def test_lines_over_several_chunks_of_a_file_arrive_whole(store: Path) -> None:
    async def use(site: Site) -> None:
        lines = [line(n, prompt="p" * 20, user=f"{n}-" + "é" * 3000) for n in range(60)]
        content = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in lines).encode()
        raw = form_of(content)
        file = (await site.call("POST", FILES, raw, headers=FORM, part_bytes=999)).json
        assert file["bytes"] == len(content) > 256 * 1024
        got = await site.get(f"{FILES}/{file['id']}/content")
        assert got.body == content
        batch = await ended(site, (await create(site, file["id"])).json["id"])
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        output = await lines_of(site, batch["output_file_id"])
        assert [entry["custom_id"] for entry in output] == [f"id-{n}" for n in range(60)]

    on_site(store, use)


def test_a_restart_continues_with_the_lines_without_a_result(store: Path) -> None:
    held = FakeEngine("a", "b")

    async def begin(site: Site) -> str:
        id_ = await started(site, [*map(line, range(12))])
        async with asyncio.timeout(60):
            while (await site.get(f"{BATCHES}/{id_}")).json["request_counts"]["completed"] < 3:
                await asyncio.sleep(0)
        return id_

    id_ = on_site(store, begin, held, batch_lines=1)
    assert 3 <= len(held.asked) < 12
    rest = FakeEngine("a", "b")

    async def end(site: Site) -> None:
        batch = await ended(site, id_)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        output = await lines_of(site, batch["output_file_id"])
        assert [entry["custom_id"] for entry in output] == [f"id-{n}" for n in range(12)]

    on_site(store, end, rest)
    assert len(rest.asked) <= 12 - 3


def test_a_line_that_ends_the_server_again_and_again_is_an_error(store: Path) -> None:
    async def begin(site: Site) -> str:
        site.server_state.lifecycle.pause()
        id_ = await started(site, [line(0), line(1)])
        async with asyncio.timeout(60):
            while (await site.get(f"{BATCHES}/{id_}")).json["status"] != "in_progress":
                await asyncio.sleep(0.01)
        return id_

    id_ = on_site(store, begin)
    database = sqlite3.connect(store)
    with database:
        attempts = stored_batches.MAX_ATTEMPTS
        database.execute("UPDATE lines SET attempts = ? WHERE number = 0", (attempts,))
    database.close()

    async def end(site: Site) -> None:
        batch = await ended(site, id_)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        (error,) = await lines_of(site, batch["error_file_id"])
        assert (error["custom_id"], error["error"]["code"]) == ("id-0", "server_ended")

    on_site(store, end)


def test_a_line_that_the_engine_has_no_room_for_is_tried_again(store: Path) -> None:
    class Full(FakeEngine):
        num_refused = 0

        async def generate(self, *asked: Any, **more: Any) -> AsyncGenerator[Any, None]:
            if not self.num_refused:
                self.num_refused += 1
                raise OverloadedError("the queue is full", retry_after_s=1.0)
            async for delta in super().generate(*asked, **more):
                yield delta

    full = Full("a", "b")

    async def use(site: Site) -> None:
        batch = await ended(site, await started(site, [line(0)]))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert full.num_refused == 1

    on_site(store, use, full)


def test_a_cancelled_batch_keeps_what_it_has(store: Path) -> None:
    async def use(site: Site) -> None:
        id_ = await started(site, [*map(line, range(40))])
        async with asyncio.timeout(60):
            while (await site.get(f"{BATCHES}/{id_}")).json["request_counts"]["completed"] < 2:
                await asyncio.sleep(0)
        reply = await site.post(f"{BATCHES}/{id_}/cancel", b"")
        assert reply.json["status"] == "cancelling"
        batch = await ended(site, id_)
        assert batch["status"] == "cancelled"
        assert batch["cancelled_at"]
        num_done = batch["request_counts"]["completed"]
        output = await lines_of(site, batch["output_file_id"])
        assert len(output) == num_done
        assert 2 <= num_done < 40
        again = await site.post(f"{BATCHES}/{id_}/cancel", b"")
        assert again.status == 400
        assert "cancelled" in again.error["message"]
        assert site.server_state.requests.num_open == 0

    on_site(store, use, batch_lines=1)


def test_lines_that_do_not_run_in_time_are_errors(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expired(site: Site) -> Any:
        """Return a batch that has run out of time after its lines were read."""
        for window_s in (1, 4, 16, 64):  # a busy disk takes a second to read them
            monkeypatch.setattr(stored_batches, "WINDOW_S", window_s)
            batch = await ended(site, await started(site, [line(0), line(1)]))
            assert batch["status"] == "expired"
            if batch["in_progress_at"] is not None:
                return batch
        raise AssertionError("two lines were not read in a minute")

    async def use(site: Site) -> None:
        site.server_state.lifecycle.pause()
        batch = await expired(site)
        assert batch["output_file_id"] is None
        errors = await lines_of(site, batch["error_file_id"])
        assert [entry["error"]["code"] for entry in errors] == ["batch_expired"] * 2
        assert site.engine.asked == []

    on_site(store, use)


def test_lines_wait_while_others_have_the_server(store: Path) -> None:
    async def use(site: Site) -> None:
        other = OpenRequest("other", Requester(), ENDPOINT)
        site.server_state.requests.begin(other)
        id_ = await started(site, [line(0)])
        await asyncio.sleep(0.3)
        assert site.engine.asked == []
        site.server_state.requests.end(other)
        assert (await ended(site, id_))["status"] == "completed"
        assert site.engine.asked[0].terms.priority == MAX_PRIORITY

    on_site(store, use, batch_lines=1)


def test_other_endpoints(store: Path) -> None:
    async def use(site: Site) -> None:
        body = {"input": "hi", "max_output_tokens": 4}
        entry = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
        bad = entry | {"custom_id": "b", "body": body | {"background": True}}
        batch = await ended(site, await started(site, [entry, bad], "/v1/responses"))
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}, batch

    on_site(store, use, engine("a", "b"))


def test_usage_is_counted_in_every_form(store: Path) -> None:
    responses = {"input": "hi", "max_output_tokens": 4}
    lines = [{**line(0, "/v1/responses"), "body": responses}]
    embedded = [{**line(0, "/v1/embeddings"), "body": {"input": ["a", "bc"]}}]

    async def use(site: Site) -> None:
        for endpoint, sent in (("/v1/responses", lines), ("/v1/embeddings", embedded)):
            batch = await ended(site, await started(site, sent, endpoint))
            (output,) = await lines_of(site, batch["output_file_id"])
            usage = output["response"]["body"]["usage"]
            assert batch["usage"]["total_tokens"] == usage["total_tokens"] > 0
            assert batch["model"] == "fake"
        failed = await ended(site, await started(site, [line(1, max_tokens="many")]))
        assert (failed["model"], failed["usage"]["total_tokens"]) == (None, 0)

    on_site(store, use)


OLDER: dict[str, tuple[str, ...]] = {
    "batches": (
        *("model", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
        "output_expiry",
    ),
    "files": ("expires",),
}


def test_a_journal_of_an_older_server_is_read_and_counts_new_batches(store: Path) -> None:
    async def fill(site: Site) -> tuple[str, str]:
        id_ = await started(site, [line(0)])
        await ended(site, id_)
        site.server_state.lifecycle.pause()
        return id_, await started(site, [line(1)])

    old, unfinished = on_site(store, fill)
    with sqlite3.connect(store) as database:
        for table, added in OLDER.items():
            for name in added:
                database.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
    database.close()

    async def use(site: Site) -> None:
        batch = (await site.get(f"{BATCHES}/{old}")).json
        assert (batch["status"], batch["model"], batch["usage"]) == ("completed", None, None)
        assert len(await lines_of(site, batch["output_file_id"])) == 1
        file = (await site.get(f"{FILES}/{batch['input_file_id']}")).json
        assert file["expires_at"] is None
        resumed = await ended(site, unfinished)
        assert resumed["request_counts"]["completed"] == 1
        output = (await site.get(f"{FILES}/{resumed['output_file_id']}")).json
        assert output["expires_at"] is None
        kept = {"output_expires_after": {"anchor": "created_at", "seconds": 7200}}
        new = await ended(site, (await create(site, file["id"], **kept)).json["id"])
        assert new["usage"]["output_tokens"] == 2
        output = (await site.get(f"{FILES}/{new['output_file_id']}")).json
        assert output["expires_at"] == output["created_at"] + 7200

    on_site(store, use)


def test_a_list_of_files_of_another_purpose_is_empty(store: Path) -> None:
    async def use(site: Site) -> None:
        await upload(site, [line(0)])
        for purpose, count in ((b"batch", 1), (b"user_data", 0), (b"fine-tune", 0)):
            listed = (await site.get(FILES, query=b"purpose=" + purpose)).json
            assert len(listed["data"]) == count
        refused = await site.get(FILES, query=b"purpose=frobnicate")
        assert (refused.status, refused.error["param"]) == (400, "purpose")

    on_site(store, use)


def test_each_key_has_its_own(store: Path) -> None:
    tenant = Tenant(name="one", key_digests=(key_digest(b"k1"),), priority_max=7)
    other = Tenant(name="two", key_digests=(key_digest(b"k2"),))

    async def run() -> None:
        site = Site(
            FakeEngine("a", "b"),
            tenants=[Tenant(name="default"), tenant, other],
            batch_store=str(store),
        )
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        file = (await upload(site, [line(0)], mine)).json["id"]
        body = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        refused = await site.post(BATCHES, body, headers=theirs)
        assert (refused.status, refused.error["code"]) == (404, "file_not_found")
        id_ = (await site.post(BATCHES, body, headers=mine)).json["id"]
        for method, path in (
            ("GET", f"{FILES}/{file}"),
            ("GET", f"{FILES}/{file}/content"),
            ("DELETE", f"{FILES}/{file}"),
            ("GET", f"{BATCHES}/{id_}"),
            ("POST", f"{BATCHES}/{id_}/cancel"),
        ):
            assert (await site.call(method, path, b"", headers=theirs)).status == 404
        for path in (FILES, BATCHES):
            assert (await site.get(path, headers=theirs)).json["data"] == []
        async with asyncio.timeout(60):
            while not site.engine.asked:
                await asyncio.sleep(0.01)
        assert site.engine.asked[0].terms.tenant == "one"
        assert site.engine.asked[0].terms.priority == 7
        await stopped(site)

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/../b", "..", "C:\\x\\con", "a\x00b", "\u202ex", "", "é" * 2000]
)
def test_a_file_name_is_a_label(store: Path, name: str) -> None:
    async def use(site: Site) -> None:
        file = (await upload(site, [line(0)], name=name.replace("\\", "\\\\"))).json
        shown = file["filename"]
        assert shown
        assert not set(shown) & set("/\\\0\u202e")
        assert shown not in ("..", ".")
        assert len(shown) <= 512

    on_site(store, use)
    assert sorted(path.name for path in store.parent.iterdir()) == ["batches"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"--X--\r\n",
        form_of(b"x")[:-10],
        form_of(b"x").replace(b"--X", b"--Y"),
        form_of(b""),
        form_of(b"x", purpose="fine-tune"),
        form_of(b"x", purpose="b" * 5000),
        form_of(b"x").replace(b'; filename="lines.jsonl"', b""),
        form_of(b"x").replace(b'name="purpose"', b'name="expires_after[anchor]"'),
        form_of(b"x").replace(b'name="purpose"', b'name="keep"'),
        form_of(b"x").replace(b'name="purpose"', b'name="file"; filename="y"'),
        b'--X\r\nContent-Disposition: form-data; name="' + b"n" * 20_000,
        b"--X\r\n" * 50,
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(store: Path, body: bytes) -> None:
    async def use(site: Site) -> None:
        for part_bytes in (1, 7, 1 << 20):
            reply = await site.call("POST", FILES, body, headers=FORM, part_bytes=part_bytes)
            assert reply.status == 400, reply.body
        cut = await site.call(
            "POST", FILES, form_of(b"x")[:-9], headers=FORM, cut_short=True, gone=_set()
        )
        assert cut.status == 0
        assert (await site.get(FILES)).json["data"] == []

    on_site(store, use)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def test_the_rest_of_a_refused_form_is_read_for_a_bounded_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        while True:  # as by a client that sends a byte at a time
            await asyncio.sleep(0.001)
            yield b"a"

    monkeypatch.setattr(file_routes, "BODY_TIME_S", 0.01)
    asyncio.run(asyncio.wait_for(file_routes._discard(endless()), 60))


def test_the_files_of_a_key_are_bounded(store: Path) -> None:
    async def use(site: Site) -> None:
        assert (await upload(site, [b"x" * 600])).status == 200
        reply = await upload(site, [b"x" * 600])
        assert reply.status == 413
        assert "--batch-store-size" in reply.error["message"]
        assert len((await site.get(FILES)).json["data"]) == 1

    on_site(store, use, batch_store_bytes=1000)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/admin/drain"}, "endpoint"),
        ({"endpoint": ["x"]}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": True}},
            "output_expires_after",
        ),
    ],
)
def test_a_wrong_batch_is_refused(store: Path, more: dict[str, Any], param: str) -> None:
    async def use(site: Site) -> None:
        file = (await upload(site, [line(0)])).json["id"]
        body = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"} | more
        reply = await site.post(BATCHES, body)
        assert reply.status in (400, 404)
        assert reply.error["param"] == param

    on_site(store, use)


def test_an_input_file_stays_while_its_batch_runs(store: Path) -> None:
    async def use(site: Site) -> None:
        site.server_state.lifecycle.pause()
        file = (await upload(site, [line(0)])).json["id"]
        id_ = (await create(site, file)).json["id"]
        reply = await site.call("DELETE", f"{FILES}/{file}", b"")
        assert reply.status == 400
        assert id_ in reply.error["message"]

    on_site(store, use)


def test_files_expire(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = 0.0
    monkeypatch.setattr(expiry, "time", SimpleNamespace(time=lambda: time.time() + passed_s))
    head = b'--X\r\nContent-Disposition: form-data; name="expires_after[%b]"\r\n\r\n%b\r\n'
    content = json.dumps(line(0)).encode()

    async def sent(site: Site, anchor: bytes, seconds: bytes) -> Reply:
        body = head % (b"anchor", anchor) + head % (b"seconds", seconds) + form_of(content)
        return await site.call("POST", FILES, body, headers=FORM)

    async def use(site: Site) -> None:
        nonlocal passed_s
        for anchor, seconds in ((b"created_at", b"3599"), (b"x", b"3600"), (b"created_at", b"-1")):
            reply = await sent(site, anchor, seconds)
            assert (reply.status, reply.error["param"]) == (400, "expires_after"), reply.body
        kept = (await upload(site, [line(0)])).json
        file = (await sent(site, b"created_at", b"3600")).json
        assert kept["expires_at"] is None
        assert file["expires_at"] == file["created_at"] + 3600
        more = {"output_expires_after": {"anchor": "created_at", "seconds": 7200}}
        site.server_state.lifecycle.pause()
        id_ = (await create(site, file["id"], **more)).json["id"]
        passed_s = 3700
        assert (await site.get(f"{FILES}/{file['id']}")).status == 404
        assert (await create(site, file["id"])).status == 404
        listed = (await site.get(FILES)).json["data"]
        assert [one["id"] for one in listed] == [kept["id"]]
        await upload(site, [line(1)])  # which removes what has expired, but no input of a batch
        site.server_state.lifecycle.resume()
        batch = await ended(site, id_)
        assert batch["request_counts"]["completed"] == 1
        output = (await site.get(f"{FILES}/{batch['output_file_id']}")).json
        assert output["expires_at"] == output["created_at"] + 7200
        assert len(await lines_of(site, output["id"])) == 1
        passed_s = 7300
        assert (await site.get(f"{FILES}/{output['id']}/content")).status == 404
        await upload(site, [line(1)])
        assert len((await site.get(FILES)).json["data"]) == 3

    on_site(store, use)
    with sqlite3.connect(store) as database:
        for table, count in (("files", 3), ("chunks", 3), ("lines", 0)):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)


def test_without_a_store_the_flag_is_named() -> None:
    async def run() -> None:
        site = Site()
        for reply in (
            await site.get(FILES),
            await site.get(f"{BATCHES}/x"),
            await site.post(BATCHES, {}),
        ):
            assert reply.status == 400
            assert "--batch-store FILE" in reply.error["message"]

    asyncio.run(run())


def test_one_server_has_the_store(store: Path, tmp_path: Path) -> None:
    async def use(site: Site) -> None:
        with pytest.raises(SettingError, match="batch_store"):
            Site(batch_store=str(store))

    on_site(store, use)
    assert store.stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").write_text("text")
    with pytest.raises(SettingError, match="batch_store"):
        on_site(tmp_path / "other", use)
    with pytest.raises(SettingError, match="api_processes"):
        ServerConfig(batch_store="x", api_processes=2)


def test_a_form_is_read_alike_however_it_is_cut() -> None:
    content = b"a\r\n--\r\n-\r\n--XY?\r\n\r--X".replace(b"--X", b"--Z")
    raw = form_of(content)
    for size in (1, 2, 3, 5, 64, 1000):
        reader = MultipartReader(boundary_of(FORM["content-type"]))
        items = [
            item for at in range(0, len(raw), size) for item in reader.feed(raw[at : at + size])
        ]
        reader.close()
        heads = [item for item in items if isinstance(item, Part)]
        assert heads == [Part("purpose", None), Part("file", "lines.jsonl")]
        after = items[items.index(heads[1]) + 1 :]
        assert b"".join(piece for piece in after if isinstance(piece, bytes)) == content


@pytest.mark.parametrize(
    "value", ["", "text/plain", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71]
)
def test_a_form_needs_a_boundary(value: str) -> None:
    with pytest.raises(RequestError, match="multipart"):
        boundary_of(value)
