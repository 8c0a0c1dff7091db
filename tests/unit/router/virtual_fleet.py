"""A fleet in virtual time: servers in memory, with steps as long as a schedule says.

The event loop's clock goes on only while nothing is ready, so a run of minutes takes seconds and is
the same each time. A SteppedServer computes as an engine does: in a step each open stream gets one
token, and a bounded number of prompts is computed. Exchanges are those of the router's own HTTP
client; only sockets are left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.router.virtual_time import run_virtual
from quire.api.admin.beats import EngineWatch
from quire.engine.model_card import Health
from quire.router.faults import ReplicaFault
from quire.router.http_client import Exchange
from tests.unit.router.fake_replica import Router

__all__ = ["SteppedServer", "VirtualFleet", "run_virtual", "whole_answer"]

# Prompts that a step computes, those of streams that continue included.
PROMPTS_A_STEP = 64
# After so long without a step an engine says that it lives.
BEAT_S = 0.25
# How often a server looks whether its engine is silent.
WATCH_S = 0.02


class _Link:
    """A connection of an Exchange. is_cut: the router has given it up."""

    def __init__(self) -> None:
        self.is_cut = False

    def abort(self) -> None:
        self.is_cut = True

    def resume(self) -> None:
        """Nothing is held back here."""


class _Stream:
    """An open stream. next_token: what comes next. is_prefilled: its prompt is computed."""

    def __init__(self, exchange: Exchange, link: _Link, request: dict[str, Any]) -> None:
        self.exchange = exchange
        self.link = link
        self.next_token = 100 + len(request.get("output_ids", ()))
        self.end_token = 100 + request["max_tokens"]
        self.is_prefilled = False


class SteppedServer:
    """One server. step_s: returns how long a step takes by the time and the open streams. health_s:
    how long /health takes by the time. Both, and the steps, stand still while `is_stopped`; the
    steps alone while `hangs`, and the engine's signs of life as well while its process
    `is_frozen`. finds_silence: whether it says with its beats that its engine is silent.
    spoken_s: of the engine's signs of life without a step."""

    has_processes = False

    def __init__(
        self,
        number: int,
        step_s: Callable[[float, int], float],
        health_s: Callable[[float], float] = lambda now_s: 0.001,
    ) -> None:
        self.url = f"http://10.0.0.{number + 1}:8000"
        self.requests: list[dict[str, Any]] = []
        self.steps_total = 0
        self.is_stopped = self.hangs = self.is_frozen = self.is_killed = False
        self.has_beats = True
        self.finds_silence, self.spoken_s = False, BEAT_S
        self._num_kills = 0
        self._beating: list[asyncio.Future[None]] = []
        self.beat_s: Callable[[float], float] = lambda now_s: 0.1
        self._spoke_s = 0.0  # when the engine sent something
        self._step_s, self._health_s = step_s, health_s
        self._streams: list[_Stream] = []
        self._loop = asyncio.get_running_loop()

    async def compute(self) -> None:
        """Run steps until cancelled."""
        while True:
            if not self._streams or self._stands_still:
                await asyncio.sleep(0.01)
                continue
            now_s = self._loop.time()
            await asyncio.sleep(self._step_s(now_s, len(self._streams)))
            while self._stands_still:
                await asyncio.sleep(0.01)
            self._step()

    @property
    def _stands_still(self) -> bool:
        return self.is_stopped or self.hangs or self.is_frozen

    def kill(self) -> None:
        """Close all connections, and take no more."""
        self.is_killed = True
        self._num_kills += 1
        for stream in self._streams:
            stream.exchange.lost("the replica closed the connection")
        self._streams.clear()

    def start(self) -> None:
        """Serve again, after a kill."""
        self.is_killed, self.steps_total = False, 0

    def end_streams(self) -> None:
        """End all streams with an error, as a server does at the end of its grace time."""
        for stream in self._streams:
            stream.exchange.got(
                b'data: {"error":{"code":"shutting_down"}}\n\n: {"ended":"shutting_down"}\n\n'
            )
            stream.exchange.completed()
        self._streams.clear()

    def _step(self) -> None:
        self.steps_total += 1
        self._spoke_s = self._loop.time()
        self._streams = [one for one in self._streams if not one.link.is_cut]
        num_prompts = 0
        for stream in list(self._streams):
            if not stream.is_prefilled:
                num_prompts += 1
                if num_prompts > PROMPTS_A_STEP:
                    continue
                stream.is_prefilled = True
            self._emit(stream)

    def _emit(self, stream: _Stream) -> None:
        token, exchange = stream.next_token, stream.exchange
        stream.next_token += 1
        comment = {"output_ids": [token], "output_cursor": f"gen-{'0' * 24}:1:{token - 99}:0"}
        written = json.dumps(comment, separators=(",", ":")).encode()
        exchange.last_s = self._loop.time()
        exchange.got(b'data: {"token": %d}\n\n: %b\n\n' % (token, written))
        if stream.next_token == stream.end_token:
            exchange.got(b'data: [DONE]\n\n: {"ended":null}\n\n')
            exchange.completed()
            self._streams.remove(stream)

    # ---- the part of ConnectionPool that a fleet uses

    async def send(
        self, method: bytes, path: bytes, headers: Any, body: bytes, **options: Any
    ) -> Exchange:
        """See ConnectionPool: take a stream."""
        if self.is_killed:
            raise ReplicaFault("no connection", is_suspect=False)
        exchange, link = Exchange(self._loop, may_be_stale=False), _Link()
        exchange.began(link)  # type: ignore[arg-type]
        if path == b"/health/beats":
            self._beating.append(asyncio.ensure_future(self._beat(exchange, link)))
            return exchange
        request = json.loads(body)
        self.requests.append(request)
        exchange.got_head(200, [(b"content-type", b"text/event-stream")])
        self._streams.append(_Stream(exchange, link, request))
        return exchange

    async def request(self, method: bytes, path: bytes, headers: Any) -> tuple[int, bytes]:
        """See ConnectionPool: answer a probe."""
        if self.is_killed:
            raise ReplicaFault("no connection", is_suspect=False)
        await asyncio.sleep(self._health_s(self._loop.time()))
        while self.is_stopped:
            await asyncio.sleep(0.01)
        if path == b"/v1/models":
            return 200, b'{"data":[{"id":"box","system_fingerprint":"fp_a"}]}'
        health = {"ok": True, "state": "ready", "pending": len(self._streams)}
        health |= {"silent_ms": self._silent_ms}
        return 200, json.dumps({**health, "steps_total": self.steps_total}).encode()

    @property
    def _silent_ms(self) -> float:
        """How long the engine has sent nothing, while it has work."""
        silent_s = self._loop.time() - self._spoke_s
        if not self.is_frozen:
            silent_s = min(silent_s, self.spoken_s)
        return 1000 * silent_s if self._streams else 0.0

    async def _watch(self, exchange: Exchange) -> None:
        """Say when the engine is silent for longer than usual, and when that is over."""
        watch, was_silent = EngineWatch(), False
        while True:
            await asyncio.sleep(WATCH_S)
            if self.is_stopped or self.is_killed:
                continue
            health = Health(
                ok=True,
                state="ready",
                reason="",
                pending=len(self._streams),
                steps_total=self.steps_total,
                silent_ms=round(self._silent_ms),
            )
            is_silent = watch.is_silent(health, self._loop.time())
            if is_silent != was_silent:
                said: dict[str, Any] = {"ok": True, "state": "ready", "reason": ""}
                said |= {"silent_ms": health.silent_ms} if is_silent else {}
                exchange.got(b"data: %b\n\n" % json.dumps(said).encode())
            was_silent = is_silent

    async def _beat(self, exchange: Exchange, link: _Link) -> None:
        """Send beats while the server's process runs, as late as `beat_s` says."""
        if not self.has_beats:
            exchange.got_head(404, [])
            exchange.completed()
            return
        await asyncio.sleep(self._health_s(self._loop.time()))  # its event loop takes connections
        exchange.got_head(200, [(b"content-type", b"text/event-stream")])
        died = self._num_kills
        if self.finds_silence:
            self._beating.append(asyncio.ensure_future(self._watch(exchange)))
        while not (link.is_cut or self._num_kills > died):
            while self.is_stopped:
                await asyncio.sleep(0.01)
            exchange.last_s = self._loop.time()
            exchange.got(b":\n\n")
            await asyncio.sleep(self.beat_s(self._loop.time()))
        exchange.lost("the replica closed the connection")

    def close(self) -> None:
        """End the beats; nothing else is kept open."""
        for beating in self._beating:
            beating.cancel()


class VirtualFleet:
    """A router before the servers, which all compute."""

    def __init__(self, servers: Sequence[SteppedServer], **settings: Any) -> None:
        self.servers = servers
        self.router = Router(servers, policy="least-tokens", **settings)  # type: ignore[arg-type]
        by_name = {server.url: server for server in servers}
        fleet: Any = self.router.fleet
        fleet.pool = lambda replica: by_name[replica.name]
        self._computing = [asyncio.ensure_future(one.compute()) for one in servers]

    def open_streams(self, count: int, num_tokens: int) -> list[asyncio.Future[Any]]:
        """Send requests; return their answers to come."""
        body = {"tokens": [1, 2], "stream": True, "max_tokens": num_tokens}
        return [
            asyncio.ensure_future(self.router.post("/generate", {**body, "seed": seed}))
            for seed in range(count)
        ]

    async def close(self) -> None:
        """End the servers and the router."""
        for task in self._computing:
            task.cancel()
        await asyncio.gather(*self._computing, return_exceptions=True)
        await self.router.close()
        for server in self.servers:
            server.close()

    def is_up(self, server: SteppedServer) -> bool:
        """Return whether the router sends requests to a server."""
        return self.router.fleet.replicas[server.url].is_up


def whole_answer(num_tokens: int) -> bytes:
    """Return the answer of a stream alone."""
    tokens = range(100, 100 + num_tokens)
    return b"".join(b'data: {"token": %d}\n\n' % one for one in tokens) + b"data: [DONE]\n\n"
