"""DataParallelEngine over scripted engines: where requests go, and what all report together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.cache_usage import CacheReport, OwnerUsage, PrefixUsage
from quire.base.engine_stats import EngineStats
from quire.base.errors import (
    InvalidParameter,
    OverloadedError,
    PoisonRequest,
    SettingError,
    WorkerError,
)
from quire.base.kv_store import KVStoreStats
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.config.kv_events import read_kv_events
from quire.engine.client.tokenizer_side import TokenizerSide
from quire.engine.data_parallel.data_parallel_engine import DataParallelEngine
from quire.engine.data_parallel.engine_configs import engine_configs
from quire.engine.data_parallel.past_totals import PastTotals
from quire.engine.data_parallel.routing_state import LocalRouting, OpenCounts
from quire.engine.data_parallel.shared_routing import SharedRouting, create_shared_routing
from quire.engine.data_parallel.sums import (
    sum_of_reports,
    sum_of_snapshots,
    sum_of_stats,
)
from quire.engine.output.text_delta import TextDelta
from quire.engine.supervised.supervised_engine import SupervisedEngine
from quire.routing.prefix_history import PrefixHistory
from quire.routing.warm_cache import DEFAULT_BACKLOG_TOKENS
from tests.cases import each_case
from tests.unit.api.fake_engine import SNAPSHOT
from tests.unit.engine.supervised.test_supervised_engine import (
    FakeClient,
    FakeSuccessors,
    FakeWakers,
    run,
)

PARAMS = SamplingParams(seed=1, max_tokens=8)


class Fake(FakeClient):
    """A FakeClient that takes requests while it is not dead."""

    def refusal(self) -> WorkerError | None:
        return WorkerError("it is dead") if self.dead.is_set() else None

    def default_sampling(self) -> SamplingParams:
        return PARAMS

    async def flush_cache(self) -> int:
        return 7

    gate: asyncio.Event | None = None

    async def generate(
        self, prompt_ids: Any, sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        if self.gate is not None:
            await self.gate.wait()
        async for delta in super().generate(prompt_ids, sampling, **options):
            yield delta


def engine_of(*fakes: Any, **options: Any) -> DataParallelEngine:
    return DataParallelEngine(dict(enumerate(fakes)), Log("test"), **options)


async def answer(
    engine: DataParallelEngine, prompt: list[int], request_id: str, **options: Any
) -> str:
    deltas = engine.generate(prompt, PARAMS, request_id=request_id, **options)
    return "".join([delta.text async for delta in deltas])


WHOLE = "".join(f"0.{token} " for token in range(6))


def test_requests_are_spread_and_return_to_their_prefix() -> None:
    async def check() -> None:
        fakes = [Fake(), Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        prompts = [[first, *range(2, 200)] for first in range(6)]
        for number, prompt in enumerate(prompts):
            assert await answer(engine, prompt, f"a{number}") == WHOLE
        assert [len(fake.asked) for fake in fakes] == [2, 2, 2]
        for number, prompt in enumerate(prompts):
            await answer(engine, [*prompt, 5, 6], f"b{number}")
        for fake in fakes:
            firsts = [asked["prompt"][0] for asked in fake.asked]
            assert firsts[:2] == firsts[2:]
        # Another tenant or salt shares no prefix with these.
        salted = [len(fake.asked) for fake in fakes]
        await answer(engine, prompts[0], "c", cache_salt="s")
        await answer(engine, prompts[0], "d", terms=replace(DEFAULT_SCHEDULING, tenant="t"))
        assert sum(len(fake.asked) for fake in fakes) == sum(salted) + 2
        assert await engine.flush_cache() == 21
        await engine.close()
        assert all(fake.is_closed for fake in fakes)

    run(check)


def test_a_warm_engine_with_too_much_to_do_is_left_alone() -> None:
    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        prompt = list(range(200))
        await answer(engine, prompt, "first")
        warm, cold = fakes if fakes[0].asked else reversed(fakes)
        warm.gate = asyncio.Event()
        # Its prompt begins as the first one did, so it goes there, and stays.
        long = asyncio.ensure_future(
            answer(engine, prompt + [7] * (DEFAULT_BACKLOG_TOKENS + 1), "long")
        )
        await asyncio.sleep(0)
        assert await answer(engine, prompt, "next") == WHOLE
        assert len(cold.asked) == 1
        warm.gate.set()
        assert await long == WHOLE
        warm.gate = None
        assert len(warm.asked) == 2
        await answer(engine, [*prompt, 7], "last")
        assert len(warm.asked) + len(cold.asked) == 4
        await engine.close()

    run(check)


def test_a_request_goes_on_at_another_engine() -> None:
    async def check() -> None:
        fakes = [Fake(dies_at={4: 3}), Fake(dies_at={5: 2})]
        engine = engine_of(*fakes)
        await engine.ready()
        assert await answer(engine, [4, 1], "a") == WHOLE
        dead = [fake.dead.is_set() for fake in fakes]
        assert dead == [True, False]
        continued = fakes[1].asked[-1]
        assert continued["output_ids"] == (0, 1, 2)
        health = engine.health()
        assert (health.ok, engine.refusal()) == (True, None)
        with pytest.raises(WorkerError):
            await answer(engine, [5, 1], "b")
        await asyncio.wait_for(engine.dead.wait(), 60)
        assert not engine.health().ok
        assert "engine 0: signal 9; engine 1" in engine.health().reason
        assert isinstance(engine.refusal(), WorkerError)
        await engine.close()

    run(check)


def test_a_request_that_kills_two_engines_is_not_tried_at_a_third() -> None:
    async def check() -> None:
        fakes = [Fake(dies_at={4: 0}) for _ in range(3)]
        engine = engine_of(*fakes)
        await engine.ready()
        with pytest.raises(PoisonRequest):
            await answer(engine, [4, 1], "a")
        assert sum(fake.dead.is_set() for fake in fakes) == 2
        assert await answer(engine, [6, 1], "b") == WHOLE
        await engine.close()

    run(check)


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async def check() -> None:
        engine = engine_of(Fake(), Fake())
        await engine.ready()
        first = engine.generate([3, 1], PARAMS, request_id="a")
        await anext(first)
        with pytest.raises(InvalidParameter, match="'a' is in use"):
            await answer(engine, [3, 1], "a")
        assert len([delta async for delta in first]) == 5
        assert await answer(engine, [3, 1], "a") == WHOLE
        await engine.close()

    run(check)


def test_engines_that_differ_are_refused() -> None:
    async def check() -> None:
        fakes = [Fake(), Fake(fingerprint="other")]
        with pytest.raises(SettingError, match="engines of data_parallel_size differ"):
            await engine_of(*fakes).ready()
        assert all(fake.is_closed for fake in fakes)

    run(check)


def test_counters_are_added() -> None:
    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        seen: list[EngineStats] = []
        engine.on_stats = seen.append
        for number, fake in enumerate(fakes):
            fake.stats = EngineStats(
                steps_total=10 + number,
                tenant_running=(1, number),
                draft_tokens_total=(5,) * number,
                expert_tokens_total=((1, number), (2, 3)),
                last_step_ms=3.0 + number,
            )
            assert fake.on_stats is not None
            fake.on_stats(fake.stats)
        assert (seen[-1].steps_total, seen[-1].last_step_ms) == (21, 4.0)
        assert seen[-1].tenant_running == (2, 1)
        assert seen[-1].draft_tokens_total == (5,)
        assert seen[-1].expert_tokens_total == ((2, 1), (4, 6))
        assert engine.card.num_blocks == 2 * fakes[0].card.num_blocks
        await engine.close()

    run(check)
    one = EngineStats(steps_total=4)
    assert sum_of_stats([one]) is one


@each_case(
    "pending, silent_ms, expected",
    [
        ((1, 1), (900, 20), 20),
        ((1, 0), (900, 0), 900),
        ((0, 0), (0, 0), 0),
    ],
)
def test_engines_are_silent_where_all_with_requests_are(
    pending: tuple[int, int], silent_ms: tuple[int, int], expected: int
) -> None:
    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        for fake, count, ms in zip(fakes, pending, silent_ms, strict=True):
            health = replace(fake.health(), pending=count, silent_ms=ms)
            fake.health = lambda found=health: found  # type: ignore[method-assign,misc]
        assert engine.health().silent_ms == expected
        await engine.close()

    run(check)


def test_reports_and_snapshots_are_joined() -> None:
    prefix = PrefixUsage(digest="d", tokens=10, hits=2, tenant="", salt="", protected=False)
    counts = dict.fromkeys(
        (
            *("block_size", "blocks_total", "blocks_used", "blocks_once", "blocks_again"),
            *("blocks_again_most", "blocks_plain", "blocks_findable", "ghosts", "ghosts_most"),
            *("queried_tokens_total", "hit_tokens_total"),
        ),
        16,
    )
    report = CacheReport(
        prefix_caching=True,
        **counts,
        prefixes=(prefix, replace(prefix, hits=5)),
        owners=(OwnerUsage(tenant="t", salt="", blocks=3),),
    )
    both = sum_of_reports([report, report], 3)
    assert (both.block_size, both.blocks_total, both.hit_tokens_total) == (16, 32, 32)
    assert [one.hits for one in both.prefixes] == [5, 5, 2]
    assert both.owners == (OwnerUsage(tenant="t", salt="", blocks=6),)
    one = SNAPSHOT
    joined = sum_of_snapshots([one, one])
    assert joined.blocks_total == 2 * one.blocks_total
    assert int(joined.run_lengths.sum()) == 2 * int(one.run_lengths.sum())
    owners = [joined.owners[index] for index in joined.run_owners]
    assert owners == [one.owners[index] for index in np.tile(one.run_owners, 2)]


def test_two_processes_know_what_the_other_has_sent(tmp_path: Path) -> None:
    """Two fronts before the same engines route by what both have sent, and count what both have."""
    path = tmp_path / "routing"
    create_shared_routing(path, num_processes=2, num_engines=2)

    async def check() -> None:
        fakes = [[Fake(), Fake()] for _ in range(2)]  # each front has clients of its own
        fronts = [
            engine_of(*own, routing=SharedRouting(path, number)) for number, own in enumerate(fakes)
        ]
        for front in fronts:
            await front.ready()
        prompts = [[first, *range(2, 200)] for first in range(4)]
        for number, prompt in enumerate(prompts):
            await answer(fronts[number % 2], prompt, f"a{number}")
        for number, prompt in enumerate(prompts):
            await answer(fronts[(number + 1) % 2], prompt, f"b{number}")
        for engine in range(2):
            first, second = ([asked["prompt"][0] for asked in own[engine].asked] for own in fakes)
            assert sorted(first) == sorted(second)
        # An engine that is busy for one front is busy for the other.
        fakes[0][0].gate = fakes[0][1].gate = asyncio.Event()
        long = asyncio.ensure_future(answer(fronts[0], [9] * DEFAULT_BACKLOG_TOKENS * 2, "long"))
        await asyncio.sleep(0)
        before = [len(fake.asked) for fake in fakes[1]]
        for number in range(3):
            await answer(fronts[1], [20 + number, 1], f"c{number}")
        after = [len(fake.asked) for fake in fakes[1]]
        assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 3]
        fakes[0][0].gate.set()
        assert await long == WHOLE
        assert await fronts[0].flush_cache() == 14
        for front in fronts:
            await front.close()

    run(check)
    state = SharedRouting(path, 0)
    assert [state.counts(number) for number in range(2)] == [OpenCounts(), OpenCounts()]


def test_an_engine_that_is_started_again_joins() -> None:
    async def check() -> None:
        started: asyncio.Event = asyncio.Event()
        late = Fake()

        async def coming() -> Any:
            await started.wait()
            return late

        async def never() -> Any:
            raise WorkerError("the limit of restarts is reached")

        first = Fake()
        engine = engine_of(first, coming={1: coming, 2: never})
        await engine.ready()
        assert engine.card.num_blocks == first.card.num_blocks
        await answer(engine, [1, 2], "a")
        # The only engine there dies: the one to come keeps the server alive.
        first.dead.set()
        await asyncio.sleep(0)
        assert not engine.dead.is_set()
        started.set()
        for _ in range(3):
            await asyncio.sleep(0)
        assert await answer(engine, [1, 2], "b") == WHOLE
        assert len(late.asked) == 1
        late.dead.set()
        await asyncio.wait_for(engine.dead.wait(), 60)
        await engine.close()

    run(check)


def test_the_prefixes_of_each_life_of_an_engine_are_forgotten_once() -> None:
    forgotten: list[int] = []

    class History(PrefixHistory):
        def forget(self, number: int) -> None:
            forgotten.append(number)
            super().forget(number)

    async def check() -> None:
        routing = LocalRouting()
        routing.history = History(64)
        lives: list[Any] = [Fake(), Fake()]
        supervised = SupervisedEngine(lives[0], FakeSuccessors(lives[1]), Log("test"))
        engine = engine_of(Fake(), supervised, routing=routing)
        await engine.ready()
        for number, life in enumerate(lives):
            assert forgotten == [1] * number
            life.dead.set()
            while len(forgotten) == number:
                await asyncio.sleep(0)
        await supervised.dead.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        assert forgotten == [1, 1]
        await engine.close()

    run(check)


def test_engines_sleep_together_or_not_at_all() -> None:
    async def check() -> None:
        plain = engine_of(Fake(), Fake())
        await plain.ready()
        with pytest.raises(InvalidParameter, match="--restart-engine"):
            await plain.sleep()
        with pytest.raises(InvalidParameter, match="--restart-engine"):
            await plain.wake()
        await plain.close()
        lives: list[Any] = [Fake(), Fake(), Fake()]
        successors = FakeSuccessors(lives[2])
        successors.gate.clear()
        others: Any = [FakeSuccessors(), successors]
        wakers: Any = FakeWakers(FakeClient())
        members = [
            SupervisedEngine(life, other, Log("test"), wakers=wakers)
            for life, other in zip(lives, others, strict=False)
        ]
        engine = engine_of(*members)
        await engine.ready()
        lives[1].die()  # and is being started again
        with pytest.raises(OverloadedError, match="is being restarted"):
            await engine.sleep()
        assert not lives[0].is_closed
        successors.gate.set()
        await members[1].now()
        lives[0].gate = asyncio.Event()
        reading = asyncio.ensure_future(answer(engine, [1, 2], "a"))
        while not engine._open:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests are open"):
            await engine.sleep()
        lives[0].gate.set()
        assert await reading == WHOLE
        await engine.sleep()
        assert [one.is_closed for one in lives] == [True, True, True]
        assert (engine.health().state, engine.refusal()) == ("asleep", None)
        await engine.close()

    run(check)


def test_counters_go_on_over_several_sleeps() -> None:
    class Wakers(FakeWakers):
        async def wake(self, text_side: TokenizerSide | None = None) -> Any:
            return counted()

    class Closing(Fake):
        async def close(self) -> None:
            await super().close()
            await asyncio.sleep(0.001)

    def counted() -> Any:
        life = Closing()
        life.stats = EngineStats(steps_total=5, running=1)
        return life

    async def check() -> None:
        wakers: Any = Wakers(FakeClient())
        others: Any = FakeSuccessors()
        engine = engine_of(
            *(SupervisedEngine(counted(), others, Log("test"), wakers=wakers) for _ in range(2))
        )
        await engine.ready()
        for sleeps in range(1, 4):
            sleeping = asyncio.ensure_future(engine.sleep())
            if sleeps == 2:  # its caller leaves meanwhile, and the engines end
                while engine.health().state != "asleep":
                    await asyncio.sleep(0)
                sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
            while engine.stats.running:
                await asyncio.sleep(0.001)
            assert (engine.stats.steps_total, engine.stats.running) == (10 * sleeps, 0)
            await engine.wake()
            assert (engine.stats.steps_total, engine.stats.running) == (10 * (sleeps + 1), 2)
        await engine.close()

    run(check)


def test_a_process_that_is_late_counts_each_life_by_itself(tmp_path: Path) -> None:
    """It learns of the restart before it has read the last counters of the engine before."""

    async def check() -> None:
        lives: list[Any] = [Fake(), Fake()]
        others = FakeSuccessors(lives[1])
        supervised = SupervisedEngine(lives[0], others, Log("test"))
        engine = engine_of(supervised, past=PastTotals(tmp_path))
        await engine.ready()
        others.num_restarts, others.step = 1, 0
        lives[0].stats = EngineStats(steps_total=5)
        lives[0].on_stats(lives[0].stats)
        lives[0].dead.set()
        while lives[1].on_stats is None:
            await asyncio.sleep(0)
        lives[1].stats = EngineStats(steps_total=3)
        lives[1].on_stats(lives[1].stats)
        assert engine.stats.steps_total == 5 + 3
        await engine.close()

    run(check)


@pytest.mark.parametrize("is_shared", [False, True])
def test_counters_go_on_when_an_engine_ends_and_gauges_do_not(
    tmp_path: Path, is_shared: bool
) -> None:
    past = [PastTotals(tmp_path if is_shared else None) for _ in range(2)]
    one = EngineStats(steps_total=9, running=2, blocks_total=8, preemption_cost_counts=(1, 2))
    # Another process has seen a little less of it, and a third one nothing.
    past[1].add(1, replace(one, steps_total=8))
    past[0].add(1, one)
    past[1].read()
    for each in past if is_shared else past[:1]:
        assert each.total is not None
        assert (each.total.steps_total, each.total.running, each.total.blocks_total) == (9, 0, 0)
        assert each.total.preemption_cost_counts == (1, 2)
    past[0].add(1, EngineStats(steps_total=2, restarts_total=1))
    past[0].add(1, EngineStats(steps_total=2, restarts_total=1))
    store = KVStoreStats(hit_blocks_total=3, breaker="open")
    past[0].add(0, EngineStats(steps_total=5, kv_store=store))
    assert past[0].total is not None
    assert past[0].total.steps_total == 16
    assert past[0].total.kv_store == KVStoreStats(hit_blocks_total=3), "its breaker is no count"
    if is_shared:
        late = PastTotals(tmp_path)
        assert past[0].total == late.total
        past[1].read()
        assert past[1].total == late.total


def test_no_process_counts_less_of_an_ended_engine_than_it_has_reported(tmp_path: Path) -> None:
    store = KVStoreStats(failures_total=(("slow", 1), ("full", 2)))
    seen = [
        EngineStats(steps_total=9, accepted_draft_tokens_total=(4,), kv_store=store),
        EngineStats(steps_total=8, accepted_draft_tokens_total=(4, 1)),
    ]
    past = [PastTotals(tmp_path) for _ in seen]
    for each, stats in zip(past, seen, strict=True):
        each.add(1, stats)
        assert each.total is not None
        assert each.total.steps_total >= stats.steps_total
    for each in (*past, PastTotals(tmp_path)):
        each.read()
        assert each.total is not None
        assert (each.total.steps_total, each.total.accepted_draft_tokens_total) == (9, (4, 1))
        assert each.total.kv_store == store
        assert len(list(tmp_path.iterdir())) == 2, "no file is left half written"


def test_an_end_that_another_process_notes_first_is_counted_once(tmp_path: Path) -> None:
    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes, past=PastTotals(tmp_path))
        await engine.ready()
        counts = []
        engine.on_stats = lambda stats: counts.append(stats.steps_total)
        for fake in fakes:
            fake.stats = EngineStats(steps_total=10)
            assert fake.on_stats is not None
            fake.on_stats(fake.stats)
        other = PastTotals(tmp_path)
        other.add(0, EngineStats(steps_total=12))
        engine._past.read()
        fakes[1].stats = EngineStats(steps_total=11)
        fakes[1].on_stats(fakes[1].stats)
        fakes[0].dead.set()
        while not engine._members[0].has_ended:
            await asyncio.sleep(0)
        assert counts[-2:] == [21, 23], "10 and 11, then 12 and 11"
        assert counts == sorted(counts)
        await engine.close()

    run(check)


def test_the_counters_of_a_dead_engine_stay_in_the_sums() -> None:
    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        for fake in fakes:
            fake.stats = EngineStats(steps_total=10, running=3, step_rows=4, restarts_total=0)
            assert fake.on_stats is not None
            fake.on_stats(fake.stats)
        assert (engine.stats.steps_total, engine.stats.running, engine.stats.step_rows) == (
            20,
            6,
            4,
        )
        fakes[0].dead.set()
        for _ in range(3):
            await asyncio.sleep(0)
        assert (engine.stats.steps_total, engine.stats.running) == (20, 3)
        await engine.close()

    run(check)


def test_counters_of_a_shared_store_are_added() -> None:
    stores = [
        KVStoreStats(breaker="closed", hit_blocks_total=3, failures_total=(("slow", 1),)),
        KVStoreStats(breaker="open", hit_blocks_total=4, failures_total=(("full", 2), ("slow", 2))),
    ]
    both = sum_of_stats([EngineStats(kv_store=one) for one in stores]).kv_store
    assert both == KVStoreStats(
        breaker="open", hit_blocks_total=7, failures_total=(("slow", 3), ("full", 2))
    )


def test_threads_and_gpus_are_divided() -> None:
    configs = engine_configs(engine_config({"data_parallel_size": 3, "num_threads": 8}))
    assert [config.executor.num_threads for config in configs] == [3, 3, 2]
    asked: dict[str, Any] = {"data_parallel_size": 2, "executor": "torch", "device": "cuda"}
    for more, devices in (
        ({}, ["cuda:0", "cuda:1"]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ["cuda:0", "cuda:4"]),
    ):
        found = engine_configs_with(8, {**asked, **more})
        assert [one.executor.device for one in found] == devices
    with pytest.raises(SettingError, match="divided over the engines"):
        engine_configs(engine_config({"data_parallel_size": 3, "num_threads": 2}))


def engine_configs_with(cores: int, settings: dict[str, Any]) -> list[EngineConfig]:
    """Return the engines' configurations on a machine of so many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.data_parallel.engine_configs.num_usable_cores", lambda: cores)
        return engine_configs(engine_config(settings))


def test_ranks_of_several_engines_need_a_core_each() -> None:
    asked = {"data_parallel_size": 2, "tensor_parallel_size": 2, "num_threads": 8}
    assert len(engine_configs_with(4, asked)) == 2
    with pytest.raises(SettingError, match="4 ranks together, and this process may use 3 CPU"):
        engine_configs_with(3, asked)
    # Ray places all but rank 0 of each, and threads are those of a rank.
    asked |= {"distributed_executor_backend": "ray", "num_threads": 3}
    assert [one.executor.num_threads for one in engine_configs_with(2, asked)] == [3, 3]
    with pytest.raises(SettingError, match="2 ranks 0 on this machine, and this process may use 1"):
        engine_configs_with(1, asked)


def test_files_and_ports_get_the_number_of_the_engine() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"}
    asked = {"data_parallel_size": 2, "num_threads": 2, "kv_tier_path": "~/tier"}
    asked |= {"record_plans": "plans.bin", "trace_file": "/tmp/trace.json"}
    first, second = engine_configs(engine_config({**asked, "kv_events_config": json.dumps(events)}))
    assert (first.cache.kv_tier_path, second.cache.kv_tier_path) == (
        "~/tier/engine-0",
        "~/tier/engine-1",
    )
    assert second.executor.record_plans == "plans.engine-1.bin"
    assert second.executor.trace_file == "/tmp/trace.engine-1.json"
    for number, own in enumerate((first, second)):
        assert own.cache.kv_events_config is not None
        read = read_kv_events(own.cache.kv_events_config)
        assert (read.endpoint, read.data_parallel_rank) == (
            f"tcp://127.0.0.1:{5557 + number}",
            number,
        )
    for wrong, words in (
        ({"replay_endpoint": "tcp://127.0.0.1:5558"}, "put replay_endpoint at 5559 or later"),
        ({"endpoint": "tcp://127.0.0.1:65535"}, "would listen at port 65536"),
        ({"data_parallel_rank": 3}, "have the ranks 0 to 1: leave it out"),
    ):
        text = json.dumps({**events, **wrong})
        with pytest.raises(SettingError, match=words):
            engine_configs(engine_config({**asked, "kv_events_config": text}))
    text = json.dumps({**events, "endpoint": "ipc:///run/kv"})
    *_, last = engine_configs(engine_config({**asked, "kv_events_config": text}))
    assert last.cache.kv_events_config is not None
    assert read_kv_events(last.cache.kv_events_config).endpoint == "ipc:///run/kv.1"
