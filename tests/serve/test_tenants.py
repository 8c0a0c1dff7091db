"""Tenants and limits over real sockets: admission, counts, and the errors of others.

One server with a tenants file for most cases: `single` may run one request and queue one; `small`
has a ceiling; `floor` has reserved blocks; `boss` is an admin.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import EventReader, RunningServer
from tests.serve.serve_command import serve_in_process

COMPLETIONS = "/v1/completions"
TENANTS = """
[tenants.single]
keys = ["single-key"]
max_running = 1
max_queued = 1

[tenants.small]
keys = ["small-key"]
kv_ceiling_blocks = 64
priority_max = 5

[tenants.floor]
keys = ["floor-key"]
kv_floor_blocks = 128

[tenants.boss]
keys = ["boss-key"]
admin = true
"""
LONG = {"prompt": "the sea", "max_tokens": 30_000, "ignore_eos": True, "seed": 1}


class Tenant:
    """A client with a key."""

    def __init__(self, server: RunningServer, key: str) -> None:
        self.server = server
        self.headers = {"Authorization": f"Bearer {key}"}

    def post(self, **fields: Any) -> tuple[int, dict[str, str], Any]:
        status, headers, raw = self.server.request(
            "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2, **fields}, **self.headers
        )
        return status, headers, json.loads(raw)

    def metrics(self) -> tuple[int, str]:
        status, _, raw = self.server.request("GET", "/metrics", **self.headers)
        return status, raw.decode()

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[EventReader]:
        body = {**LONG, **fields}
        with self.server.stream(COMPLETIONS, body, headers=self.headers) as reader:
            yield reader


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    flags = ("--tenants", str(file), "--max-num-seqs", "4", "--threads", "1")
    with RunningServer(tiny, *flags) as found:
        yield found


def gauge(server: RunningServer, name: str, tenant: str) -> float:
    text = Tenant(server, "boss-key").metrics()[1]
    (value,) = re.findall(rf'^{name}{{tenant="{tenant}"}} (\S+)$', text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("key", ["", "nobody", "small-key2"])
def test_an_unknown_key_is_rejected(server: RunningServer, key: str) -> None:
    status, headers, answer = Tenant(server, key).post()
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"


def test_every_tenant_is_answered_and_only_an_admin_sees_the_metrics(server: RunningServer) -> None:
    for key in ("small-key", "floor-key", "boss-key"):
        assert Tenant(server, key).post()[0] == 200
    assert Tenant(server, "small-key").metrics()[0] == 403
    status, text = Tenant(server, "boss-key").metrics()
    assert status == 200
    assert 'quire_tenant_generated_tokens_total{tenant="floor"}' in text


def test_a_tenant_at_its_limit_is_rejected_while_others_are_served(server: RunningServer) -> None:
    single, floor = Tenant(server, "single-key"), Tenant(server, "floor-key")
    with single.stream() as running:
        running.next()
        with single.stream() as waiting:
            server.until(
                lambda: gauge(server, "quire_tenant_waiting_requests", "single") == 1, "one waits"
            )
            status, headers, answer = single.post()
            assert (status, answer["error"]["code"]) == (429, "tenant_limit")
            assert int(headers["retry-after"]) >= 1
            assert "at most 1 may" in answer["error"]["message"]
            assert floor.post()[0] == 200
            assert gauge(server, "quire_tenant_running_requests", "single") == 1
            running.close()
            assert waiting.next()["choices"]  # its turn has come
    server.until(lambda: gauge(server, "quire_tenant_running_requests", "single") == 0, "idle")


def test_a_request_above_its_ceiling_is_rejected_with_both_numbers(
    server: RunningServer,
) -> None:
    prompt = [7] * 1100
    status, _, answer = Tenant(server, "small-key").post(prompt=prompt)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "has 1100 tokens" in answer["error"]["message"]
    assert "tenant small have 1024 tokens" in answer["error"]["message"]
    assert Tenant(server, "floor-key").post(prompt=prompt)[0] == 200


def test_an_answer_ends_at_its_tenants_ceiling(server: RunningServer) -> None:
    fields = {"prompt": [7] * 1000, "max_tokens": 200, "ignore_eos": True}
    _, _, small = Tenant(server, "small-key").post(**fields)
    _, _, boss = Tenant(server, "boss-key").post(**fields)
    assert small["choices"][0]["finish_reason"] == boss["choices"][0]["finish_reason"] == "length"
    counts = [answer["usage"]["completion_tokens"] for answer in (small, boss)]
    assert counts == [24, 200]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("priority", -1, "tenant small may ask for 0 to 5"),
        ("priority", 6, "tenant small may ask for 0 to 5"),
        ("priority", 1e300, "a whole number from -1000000"),
        ("deadline_ms", -5, "above 0 to 31536000000"),
        ("deadline_ms", 1e300, "above 0 to 31536000000"),
        ("ttft_slo_ms", "soon", 'ttft_slo_ms is "soon"'),
        ("tpot_slo_ms", True, "tpot_slo_ms is true"),
    ],
)
def test_absurd_objectives_are_rejected_by_name(
    server: RunningServer, field: str, value: Any, said: str
) -> None:
    status, _, answer = Tenant(server, "small-key").post(**{field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert said in answer["error"]["message"]


def test_met_objectives_are_goodput_and_missed_ones_are_named(
    server: RunningServer,
) -> None:
    boss = Tenant(server, "boss-key")
    before = count(boss, "quire_goodput_requests_total")
    assert boss.post(deadline_ms=6e6, ttft_slo_ms=6e5, tpot_slo_ms=6e5)[0] == 200
    assert count(boss, "quire_goodput_requests_total") == before + 1
    assert boss.post(tpot_slo_ms=1e-3, ignore_eos=True)[0] == 200
    assert count(boss, "quire_goodput_requests_total") == before + 1
    assert count(boss, 'quire_missed_objectives_total{objective="tpot_slo_ms"}') == 1


def count(caller: Tenant, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)} (\S+)$", caller.metrics()[1], re.MULTILINE)
    return float(found[0]) if found else 0.0


def test_a_request_past_the_queue_timeout_is_rejected(tiny: Path) -> None:
    flags = ("--max-num-seqs", "1", "--queue-timeout", "0.3", "--threads", "1")
    with RunningServer(tiny, *flags) as server:
        with server.stream(COMPLETIONS, LONG) as running:
            running.next()
            status, answer = server.post(COMPLETIONS, {"prompt": "a", "n": 2})
            assert (status, answer["error"]["code"]) == (503, "queue_timeout")
            assert "at most 300 ms" in answer["error"]["message"]
            assert running.next()["choices"]  # still running
        server.until(lambda: server.metric("quire_running_requests") == 0, "idle")
        assert server.metric("quire_waiting_requests") == 0
        assert server.metric("quire_refused_requests_total") == 1
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tenants.a]\nkeys = ["k"]\nwieght = 2', '"wieght" is not known; did you mean weight?'),
        ("[tenants.a]\nweight = 2", "tenant a has no key"),
        ('[tenants.a]\nkeys = ["k"]\nkv_floor_blocks = 99999999', "floors are 99999999 KV blocks"),
        (
            '[tenants.a]\nkeys = ["k"]\nkv_floor_share = 0.6\n'
            '[tenants.b]\nkeys = ["l"]\nkv_floor_share = 0.6',
            "lower them, or give it more memory",
        ),
    ],
)
def test_an_invalid_tenants_file_fails_startup_with_a_reason(
    tiny: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    done = serve_in_process(str(tiny), "--port", "0", "--tenants", str(file))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_is_replaced_without_a_restart(tiny: Path, tmp_path: Path) -> None:
    """A changed file is read after a signal, and without one."""
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    flags = ("--tenants", str(file), "--threads", "1")
    with RunningServer(tiny, *flags) as server, Tenant(server, "single-key").stream() as running:
        running.next()
        for before, key in (("single-key", "other-key"), ("other-key", "third-key")):
            file.write_text(TENANTS.replace("single-key", key))
            if key == "other-key":
                server.process.send_signal(signal.SIGHUP)
            server.until(lambda key=before: Tenant(server, key).metrics()[0] == 401, "reloaded")  # type: ignore[misc]
            assert Tenant(server, "floor-key").post()[0] == 200
            running.next()  # a running request continues
        assert "reloaded" in server.stderr()
        running.close()
        server.until(lambda: Tenant(server, "third-key").post()[0] == 200, "its place is free")
