"""Routing to several clients: each gets its own outputs, and all get common messages."""

from __future__ import annotations

import asyncio
from dataclasses import MISSING, fields

import numpy as np

from quire.base.cache_usage import CacheReport
from quire.base.engine_stats import EngineStats
from quire.base.records import FinishReason, RequestOutput, StepOutputs
from quire.engine.client.open_streams import OpenStreams
from quire.engine.client.pending_queries import PendingQueries
from quire.engine.process.message_routing import id_prefix, parts, query_number_base
from quire.engine.process.messages import (
    Beat,
    CacheReported,
    Failed,
    Fault,
    FromEngine,
    Outputs,
    Refused,
)

CLIENTS = (0, 1, 2, 7)
REPORT = CacheReport(
    **{one.name: 0 for one in fields(CacheReport) if one.default is MISSING}  # type: ignore[arg-type]
)
FAULT = Fault(kind="WorkerError", message="so it is")


def by_client(message: FromEngine) -> dict[int, FromEngine]:
    found = parts(message, CLIENTS)
    assert len({client for client, _ in found}) == len(found)
    return dict(found)


def outputs(ids: list[str], events: tuple[RequestOutput, ...] = ()) -> StepOutputs:
    num = len(ids)
    return StepOutputs(
        step=4,
        request_ids=ids,
        token_ids=np.arange(num, dtype=np.int32),
        logprobs=np.arange(num, dtype=np.float32) / 8,
        top_ids=np.arange(2 * num, dtype=np.int32).reshape(num, 2),
        top_logprobs=np.arange(2 * num, dtype=np.float32).reshape(num, 2),
        events=events,
    )


def test_each_client_gets_its_rows_and_events_and_all_get_the_counters() -> None:
    stats = EngineStats(steps_total=9)
    event = RequestOutput(request_id="7/c#1", token_ids=(5,), finish_reason=FinishReason.STOP)
    step = outputs(["1/a#1", "2/b#1", "1/a#2"], (event,))
    found = by_client(Outputs(outputs=step, stats=stats))
    assert set(found) == {1, 2, 7}  # the client that started the engine has no requests
    for client, message in found.items():
        assert isinstance(message, Outputs)
        assert message.stats is stats
        assert message.outputs is not None
        expected = [one for one in step if one.request_id.startswith(id_prefix(client))]
        assert list(message.outputs) == expected
        assert message.outputs.step == 4


def test_a_step_for_one_client_is_not_sent_to_the_others() -> None:
    step = outputs(["2/a#1"])
    found = by_client(Outputs(outputs=step, stats=EngineStats()))
    assert {client: message.outputs for client, message in found.items()} == {  # type: ignore[union-attr]
        1: None,
        2: step,
        7: None,
    }


def test_replies_and_rejections_go_to_the_requesting_client() -> None:
    refused = Refused(request_ids=("2/a#1", "2/a#2"), fault=FAULT)
    assert by_client(refused) == {2: refused}


def test_common_messages_are_sent_to_all() -> None:
    failed = Failed(fault=FAULT)
    assert by_client(failed) == dict.fromkeys(CLIENTS, failed)
    assert set(by_client(Beat(ops_done=3))) == {1, 2, 7}


def test_queries_of_different_clients_have_different_numbers() -> None:
    async def story() -> None:
        for client in (1, 2, 7):
            asks: PendingQueries[CacheReported] = PendingQueries(query_number_base(client))
            for _ in range(3):
                number, _ = asks.open()
                message = CacheReported(ask_id=number, report=REPORT, flushed_blocks=0)
                assert by_client(message) == {client: message}

    asyncio.run(story())


def test_equal_ids_of_different_clients_are_distinguished() -> None:
    ids = {OpenStreams[None](id_prefix(client)).fresh_id("same") for client in CLIENTS}
    assert len(ids) == len(CLIENTS)
    assert OpenStreams[None]().fresh_id("same") == "same#1"
