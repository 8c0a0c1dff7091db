"""Clients that disconnect or do not read: their blocks are freed, and others are unaffected."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import EventReader, RunningServer, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Long enough to be interrupted.
LONG: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True, "seed": 1}
# The engine frees the blocks in the step after the abort. Measured from outside, steps also pass
# until the closed connection is noticed and while tokens wait to be sent, more on a busy machine:
# few of 30,000.
FEW_STEPS = 4_000


def long_request(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {**LONG, "messages": [{"role": "user", "content": "tell me all"}]}
    return {**LONG, "prompt": "tell me all"}


def counts(server: RunningServer) -> dict[str, float]:
    names = (
        "quire_steps_total",
        "quire_generated_tokens_total",
        "quire_disconnects_total",
        "quire_requests_total",
    )
    return {name: server.metric(name) for name in names}


def wait_until_free(server: RunningServer) -> None:
    server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
    server.until(lambda: server.metric("quire_open_requests") <= 1, "the request closed")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_blocks_of_an_abandoned_stream_are_freed_within_a_few_steps(
    server: RunningServer, path: str
) -> None:
    before = counts(server)
    with server.stream(path, long_request(path)) as reader:
        for _ in range(3):
            reader.next()
        server.until(lambda: server.metric("quire_kv_blocks_used") > 0, "blocks taken")
    wait_until_free(server)
    after = counts(server)
    steps = after["quire_steps_total"] - before["quire_steps_total"]
    sent = after["quire_generated_tokens_total"] - before["quire_generated_tokens_total"]
    assert after["quire_disconnects_total"] - before["quire_disconnects_total"] == 1
    assert steps <= sent + FEW_STEPS


@pytest.mark.parametrize("spare_bytes", [0, 90_000])
def test_a_disconnect_while_waiting_for_a_whole_answer_frees_its_blocks(
    server: RunningServer, spare_bytes: int
) -> None:
    before = counts(server)
    # A long body stops the reading of its connection while it arrives.
    raw = json.dumps(long_request(COMPLETIONS)).encode() + b" " * spare_bytes
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        connection.sendall(head.encode() + raw)
        server.until(lambda: server.metric("quire_kv_blocks_used") > 0, "blocks taken")
    wait_until_free(server)
    after = counts(server)
    assert after["quire_disconnects_total"] - before["quire_disconnects_total"] == 1
    assert after["quire_requests_total"] - before["quire_requests_total"] == 1


def test_all_choices_of_all_prompts_are_aborted_together(server: RunningServer) -> None:
    body = {**LONG, "prompt": ["one", "two", "three"], "n": 2}
    with server.stream(COMPLETIONS, body) as reader:
        reader.next()
        server.until(lambda: server.metric("quire_running_requests") == 6, "all six run")
    wait_until_free(server)
    assert server.metric("quire_running_requests") == server.metric("quire_waiting_requests") == 0


# Without line breaks, which would end an answer of any length.
@pytest.mark.parametrize("more", [{}, {"n_indent": 1, "logit_bias": [["\n", False]]}])
def test_all_answers_of_llama_cpps_route_are_aborted_together(
    server: RunningServer, more: dict[str, Any]
) -> None:
    before = counts(server)
    sent = {"prompt": ["one", [4, "two"]], "n_cmpl": 3, "n_predict": 30_000, "ignore_eos": True}
    with server.stream("/completion", {**sent, **more, "seed": 1}) as reader:
        reader.next()
        server.until(lambda: server.metric("quire_running_requests") == 6, "all six run")
    wait_until_free(server)
    assert server.metric("quire_running_requests") == server.metric("quire_waiting_requests") == 0
    assert counts(server)["quire_disconnects_total"] - before["quire_disconnects_total"] == 1


def _read_on(reader: EventReader) -> None:
    with suppress(OSError, http.client.HTTPException):
        reader.read()


def test_queued_requests_of_disconnected_clients_are_removed(server: RunningServer) -> None:
    body = {**LONG, "prompt": "fill", "n": 8}
    with server.stream(COMPLETIONS, body) as filling:
        filling.next()
        # Unread it would stand aside after some seconds, which free its slots.
        reading = threading.Thread(target=_read_on, args=(filling,))
        reading.start()
        server.until(lambda: server.metric("quire_running_requests") == 8, "all slots taken")
        with server.stream(COMPLETIONS, {**LONG, "prompt": "wait"}) as waiting:
            server.until(lambda: server.metric("quire_waiting_requests") == 1, "one waits")
            assert waiting.connection.fileno() > 0
        server.until(lambda: server.metric("quire_waiting_requests") == 0, "it is forgotten")
        # Those that are read too slowly, on a busy machine, stand aside.
        kept = ("quire_running_requests", "quire_held_requests")
        server.until(lambda: sum(map(server.metric, kept)) == 8, "the eight go on")
        filling.connection.shutdown(socket.SHUT_RDWR)
        reading.join()
    wait_until_free(server)


def test_a_stalled_reader_does_not_affect_others(server: RunningServer) -> None:
    asked = {"prompt": "the stone", "seed": 2, "max_tokens": 40, "ignore_eos": True}
    alone = server.post(COMPLETIONS, asked)[1]["choices"][0]["text"]
    slow = {**LONG, "prompt": "slow", "logprobs": 20}
    with server.stream(COMPLETIONS, slow, receive_buffer_bytes=4096) as reader:
        reader.next()
        together = [server.post(COMPLETIONS, asked)[1]["choices"][0]["text"] for _ in range(5)]
        assert together == [alone] * 5
        assert server.get("/health")[0] == 200
    wait_until_free(server)


def test_a_slow_reader_gets_every_token_in_the_end(server: RunningServer) -> None:
    asked = {"prompt": "patience", "seed": 3, "max_tokens": 1000, "ignore_eos": True}
    whole = server.post(COMPLETIONS, asked)[1]["choices"][0]["text"]
    # A chunk has many kilobytes: together more than sockets buffer.
    asked |= {"logprobs": 20, "logprob_token_ids": list(range(100))}
    num_before = server.metric("quire_generated_tokens_total")
    with server.stream(COMPLETIONS, asked, receive_buffer_bytes=4096) as reader:
        first = reader.next()
        server.until(lambda: server.metric("quire_held_requests") == 1, "it stands aside")
        server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "its blocks are free")
        assert server.metric("quire_generated_tokens_total") < num_before + 1000
        other = {"prompt": "the stone", "max_tokens": 5, "ignore_eos": True}
        assert server.post(COMPLETIONS, other)[0] == 200
        reader.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # read quickly
        rest = list(reader)
    assert rest[-1] == "[DONE]"
    assert text_of([first, *rest]) == whole
    assert server.metric("quire_held_requests") == 0


def test_many_connecting_and_disconnecting_clients_leave_nothing_behind(
    server: RunningServer,
) -> None:
    asked = {"prompt": "steady", "seed": 6, "max_tokens": 60, "ignore_eos": True}
    alone = server.post(COMPLETIONS, asked)[1]["choices"][0]["text"]
    texts = []

    def steady() -> None:
        texts.extend(server.post(COMPLETIONS, asked)[1]["choices"][0]["text"] for _ in range(5))

    def fickle(number: int) -> None:
        for _ in range(5):
            with server.stream(COMPLETIONS, {**LONG, "prompt": f"fickle {number}"}) as reader:
                if number % 2:
                    reader.next()

    callers = [threading.Thread(target=steady)]
    callers += [threading.Thread(target=fickle, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert texts == [alone] * 5
    wait_until_free(server)
    assert server.metric("quire_running_requests") == server.metric("quire_waiting_requests") == 0


def test_blocks_are_freed_with_two_plans_in_flight(tiny: Path) -> None:
    with RunningServer(tiny, "--plans-in-flight", "2", "--threads", "1") as server:
        with server.stream(COMPLETIONS, {**LONG, "prompt": "overlap", "n": 3}) as reader:
            reader.next()
        wait_until_free(server)
        asked = {"prompt": "and on", "max_tokens": 5, "ignore_eos": True}
        assert server.post(COMPLETIONS, asked)[1]["usage"]["completion_tokens"] == 5
