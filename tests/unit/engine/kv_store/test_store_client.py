"""Engines that share a store: what one computed the other fetches, and nothing a store does shows.

Each engine is assembled whole and stepped by hand, so that a test decides what happens meanwhile.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.kv_store import KVStoreStats, StoreFailure
from quire.base.records import FinishReason, Request, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.kv_store import costs, job_threads
from quire.engine.kv_store.store_client import StoreClient
from quire.engine.process.messages import FromEngine, Leave, Outputs
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.shared_store import Parts
from tests.tiny_models import write_tiny_llama

NUM_BLOCKS = 10
BLOCK = 16
NUM_OUTPUT = 6
GIVE_UP_S = 60.0


class Node:
    """One engine, and the outputs of its requests."""

    def __init__(self, model: Path, store: Path, **settings: Any) -> None:
        self.reports: list[str] = []
        self._is_closed = False
        self.clock: Clock = settings.pop("clock", None) or Clock()
        self.num_steps = 0
        config = engine_config(
            {
                "model": str(model),
                "threads": 1,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 2 * BLOCK,
                "kv_cache_memory": "1MiB",
                "kv_touch_ahead": 0,
                "kv_store": str(store),
                "kv_store_buffer_size": "1MiB",
                "kv_store_fetch": "always",
                "kv_store_timeout": 20.0,
                **settings,
            }
        )
        self.engine: Engine = assemble(
            config, clock=self.clock, report=lambda what, **_: self.reports.append(what)
        )
        assert self.engine.outside is not None
        assert self.engine.outside.store_client is not None
        self.outside = self.engine.outside.blocks
        self.client: StoreClient = self.engine.outside.store_client
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.emit = self.outside.watch(self._take)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs or ():
                self.outputs.setdefault(output.request_id, []).append(output)

    @property
    def stats(self) -> KVStoreStats:
        return self.client.stats()

    @property
    def failures(self) -> dict[str, int]:
        return {name: count for name, count in self.stats.failures_total if count}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.core.add((request,))

    def step(self) -> None:
        outputs = self.engine.core.step(self.clock.now_ms)
        self.emit(Outputs(outputs=outputs, stats=self.engine.core.stats()))
        self.outside.take([])
        self.num_steps += 1
        if outputs is None:
            time.sleep(0.002)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.stats, self.reports)
            self.step()

    def answer(self, request: Request) -> list[int]:
        """Run a request to its end; return its tokens."""
        self.submit(request)
        return self.finish(request)

    def finish(self, request: Request) -> list[int]:
        def ended() -> bool:
            outputs = self.outputs.get(request.request_id, [])
            return bool(outputs) and outputs[-1].finish_reason is not None

        self.until(ended)
        outputs = self.outputs.pop(request.request_id)
        assert outputs[-1].error is None
        assert not self.engine.core.scheduler.check_integrity()
        return [int(token) for one in outputs for token in one.token_ids]

    def settle(self) -> None:
        """Wait until all that was computed is stored, and nothing is left open."""
        self.until(
            lambda: not len(self.client.publishing) and not self.client.publishing.num_putting
        )
        self.until(lambda: not len(self.client.claims) and not len(self.client.fetches))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.outside.close()
            self.engine.core.runner.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "model"
    return write_tiny_llama(folder, seed=3, max_position_embeddings=512)


@pytest.fixture
def nodes(model: Path, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Return a function that starts an engine on the test's store."""
    made: list[Node] = []
    cores = os.sched_getaffinity(0)  # rank 0 takes one of them

    def start(**settings: Any) -> Node:
        folder = settings.pop("model", model)
        made.append(Node(folder, settings.pop("store", tmp_path / "kv"), **settings))
        return made[-1]

    yield start
    for node in made:
        node.close()
    os.sched_setaffinity(0, cores)


def prompt(seed: int = 0, num_tokens: int = NUM_BLOCKS * BLOCK + 5) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, 90, num_tokens, np.int32)


def request_of(name: str, ids: np.ndarray[Any, Any] | None = None, *, salt: str = "") -> Request:
    ids = prompt() if ids is None else ids
    return Request(
        request_id=name,
        group_id=name,
        stream=0,
        prompt_ids=ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, seed=0).resolve(),
        stop_ids=(),
        max_total_tokens=len(ids) + NUM_OUTPUT,
        arrival_ms=0.0,
        cache_salt=salt,
    )


def files(store: Path) -> list[Path]:
    return sorted((store / "blocks").glob("*/*"))


def test_what_one_engine_computed_another_fetches(
    nodes: Callable[..., Node], tmp_path: Path
) -> None:
    one, other = nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    assert one.stats.put_blocks_total == NUM_BLOCKS
    assert len(files(tmp_path / "kv")) == NUM_BLOCKS
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS
    assert other.engine.core.stats().prefix_hit_tokens_total == NUM_BLOCKS * BLOCK
    other.settle()
    assert other.stats.put_blocks_total == 0  # it is there
    assert other.stats.claims_total == 0
    assert not list((tmp_path / "kv" / "claims").iterdir())


def test_blocks_of_two_ranks_are_those_of_one_process(
    nodes: Callable[..., Node], tmp_path: Path
) -> None:
    divided = {"hidden_size": 68, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_tiny_llama(tmp_path / "divided", seed=4, max_position_embeddings=512, **divided)
    one, ranks = nodes(model=model), nodes(model=model, tensor_parallel_size=2, threads=2)
    longer = np.concatenate((prompt(), prompt(1)))
    wanted = one.answer(request_of("a"))
    one.settle()
    assert ranks.answer(request_of("b")) == wanted
    assert ranks.stats.fetched_blocks_total == NUM_BLOCKS
    longer_wanted = ranks.answer(request_of("c", longer))
    ranks.settle()
    assert ranks.stats.put_blocks_total == NUM_BLOCKS
    other = nodes(model=model)
    assert other.answer(request_of("d", longer)) == longer_wanted
    assert other.stats.fetched_blocks_total == 2 * NUM_BLOCKS
    assert not other.failures
    assert not ranks.failures


def test_the_part_that_is_stored_is_fetched_and_the_rest_put(nodes: Callable[..., Node]) -> None:
    one, other, third = nodes(), nodes(), nodes()
    one.answer(request_of("a", prompt()[: 4 * BLOCK + 3]))
    one.settle()
    wanted = other.answer(request_of("b"))
    other.settle()
    assert other.stats.fetched_blocks_total == 4
    assert other.stats.put_blocks_total == NUM_BLOCKS - 4
    assert third.answer(request_of("c")) == wanted
    assert third.stats.fetched_blocks_total == NUM_BLOCKS


def test_other_salts_and_tenants_find_nothing(nodes: Callable[..., Node], tmp_path: Path) -> None:
    one, other = nodes(), nodes()
    salts = ["", "secret", "\0tenant\0", "\0tenant\0secret"]
    wanted = one.answer(request_of("0", salt=salts[0]))
    for number, salt in enumerate(salts[1:], start=1):
        assert one.answer(request_of(str(number), salt=salt)) == wanted
    one.settle()
    assert one.stats.fetched_blocks_total == 0
    assert len(files(tmp_path / "kv")) == len(salts) * NUM_BLOCKS
    assert other.answer(request_of("x", salt="third")) == wanted
    assert other.stats.fetched_blocks_total == 0
    assert other.answer(request_of("y", salt="secret")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS


def test_two_directories_are_two_stores(nodes: Callable[..., Node], tmp_path: Path) -> None:
    one, other = nodes(), nodes(store=tmp_path / "another")
    wanted = one.answer(request_of("a"))
    one.settle()
    assert other.answer(request_of("b")) == wanted
    other.settle()
    assert (other.stats.fetched_blocks_total, other.failures) == (0, {})
    assert len(files(tmp_path / "kv")) == len(files(tmp_path / "another")) == NUM_BLOCKS


def test_corrupt_blocks_are_computed_counted_and_stored_again(
    nodes: Callable[..., Node], tmp_path: Path
) -> None:
    one, other, third = nodes(), nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    for file in files(tmp_path / "kv"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == 0
    assert other.failures[StoreFailure.CORRUPT] >= 1
    other.settle()
    assert other.stats.put_blocks_total >= 1
    # What was not looked at is still corrupt, and is found so by the next.
    assert third.answer(request_of("c")) == wanted


def test_blocks_that_vanish_between_lookup_and_fetch_are_computed(
    nodes: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    get, calls = DirectoryStore.get, []

    def evicted(
        self: DirectoryStore, keys: Sequence[bytes], rooms: Sequence[Parts]
    ) -> list[int | None]:
        calls.append(keys)
        if len(calls) == 1:
            for file in files(tmp_path / "kv")[2:]:
                file.unlink(missing_ok=True)
        return get(self, keys, rooms)

    monkeypatch.setattr(DirectoryStore, "get", evicted)
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total < NUM_BLOCKS
    other.settle()
    assert len(files(tmp_path / "kv")) == NUM_BLOCKS


def test_one_engine_computes_and_the_other_waits(nodes: Callable[..., Node]) -> None:
    one, other = nodes(), nodes()
    one.submit(request_of("a"))
    one.until(lambda: one.stats.claims_total == 1)
    other.submit(request_of("b"))
    other.until(lambda: other.stats.waited_total == 1)
    for _ in range(20):
        other.step()
    assert other.engine.core.stats().running == 0
    wanted = one.finish(request_of("a"))
    one.settle()
    assert other.finish(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS
    assert other.stats.waited_in_vain_total == 0


class HaltedStore(DirectoryStore):
    """Takes four blocks, and the others when it goes on."""

    goes_on: threading.Event
    num_put: int

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        HaltedStore.num_put += 1
        if self.num_put > 4:
            self.goes_on.wait(GIVE_UP_S)
        return super().put(keys, values)


def test_what_another_engine_computes_is_fetched_while_it_does(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", HaltedStore)
    HaltedStore.goes_on, HaltedStore.num_put = threading.Event(), 0
    one, other = nodes(), nodes()
    one.submit(request_of("a"))
    one.until(lambda: one.stats.claims_total == 1)
    other.submit(request_of("b"))
    other.until(lambda: other.stats.waited_total == 1)
    wanted = one.finish(request_of("a"))
    one.until(lambda: one.stats.put_blocks_total == 4)
    other.until(lambda: other.stats.fetched_blocks_total == 4)
    other.until(lambda: other.engine.core.stats().tier_fetched_blocks_total == 4)  # in its cache
    assert other.engine.core.stats().running == 0
    HaltedStore.goes_on.set()
    one.settle()
    assert other.finish(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS
    assert other.stats.waited_in_vain_total == 0
    assert other.engine.core.stats().prefix_hit_tokens_total == NUM_BLOCKS * BLOCK
    assert other.engine.core.stats().prefix_hit_host_tokens_total == NUM_BLOCKS * BLOCK


class SlowStore(DirectoryStore):
    """Reads slowly, by the clock of `reader`, which looks at its limits meanwhile."""

    reader: Node
    read_ms: list[float]

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        assert isinstance(self.reader.clock, ShiftedClock)
        self.reader.clock.shift_ms += self.read_ms.pop(0)
        num_steps, deadline_s = self.reader.num_steps, time.monotonic() + GIVE_UP_S
        while self.reader.num_steps < num_steps + 2 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return super().get(keys, rooms)


class ShiftedClock(Clock):
    """A clock that is set forward."""

    shift_ms = 0.0

    def now_ms(self) -> float:
        return super().now_ms() + self.shift_ms


@pytest.fixture
def slow(nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    """Return a function that starts an engine that reads the store slowly."""

    def start(read_ms: list[float], **settings: Any) -> Node:
        monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", SlowStore)
        monkeypatch.setattr(job_threads, "FETCH_THREADS", 1)
        SlowStore.reader = node = nodes(clock=ShiftedClock(), **settings)
        SlowStore.read_ms = read_ms
        return node

    return start


def test_a_fetch_that_makes_progress_is_waited_for_longer_than_one_call_may_take(
    nodes: Callable[..., Node], slow: Callable[..., Node]
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    other = slow([15_000.0, 15_000.0, 15_000.0])  # a call may take 20 s
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS
    assert other.engine.core.stats().prefix_hit_tokens_total == NUM_BLOCKS * BLOCK
    assert not other.failures
    other.settle()
    assert other.stats.put_blocks_total == 0


def test_a_fetch_slower_than_computing_ends_and_what_came_is_used(
    nodes: Callable[..., Node], slow: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    other = slow([2_000.0, 19_000.0, 0.0], kv_store_fetch="cost")
    monkeypatch.setattr(
        costs.FetchCosts, "compute_ms", lambda self, first, end: 1_000.0 * (end - first)
    )
    assert other.answer(request_of("b")) == wanted
    assert other.failures == {StoreFailure.SLOW: 1}
    # The slice being read was waited for, the last one never read.
    assert other.stats.fetched_blocks_total == 8
    assert other.engine.core.stats().prefix_hit_tokens_total == 8 * BLOCK


def test_a_prompt_that_shares_a_part_waits_for_that_part(nodes: Callable[..., Node]) -> None:
    one, other = nodes(), nodes()
    longer = np.concatenate((prompt()[: 6 * BLOCK], prompt(1)))
    one.submit(request_of("a"))
    one.until(lambda: one.stats.claims_total == 1)
    other.submit(request_of("b", longer))
    other.until(lambda: other.stats.waited_total == 1)
    one.finish(request_of("a"))
    one.settle()
    other.finish(request_of("b", longer))
    assert other.stats.fetched_blocks_total == 6


def test_a_claim_of_a_killed_engine_holds_up_no_one_for_long(
    nodes: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = nodes(), nodes(kv_store_timeout=0.3), nodes()
    one.submit(request_of("a"))
    one.until(lambda: one.stats.claims_total == 1)
    # It is not stepped any more, as if it had been killed: its claim stays.
    wanted = other.answer(request_of("b"))
    assert other.stats.waited_in_vain_total == 1
    assert other.stats.breaker == "closed"
    other.settle()
    assert third.answer(request_of("c")) == wanted
    assert third.stats.fetched_blocks_total == NUM_BLOCKS
    assert one.finish(request_of("a")) == wanted


def test_an_aborted_claim_is_given_up(nodes: Callable[..., Node], tmp_path: Path) -> None:
    one = nodes()
    one.submit(request_of("7/a"))
    one.until(lambda: one.stats.claims_total == 1)
    one.outside.take([Leave(client=7)])
    one.engine.core.abort(["7/a"])
    one.settle()
    one.until(lambda: not list((tmp_path / "kv" / "claims").iterdir()))
    assert not one.client.waiting.request_ids


class HungStore(DirectoryStore):
    """Does not return from reads until it is released."""

    released = threading.Event()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.released.wait(GIVE_UP_S)
        return super().exists(keys)


def test_a_store_that_hangs_costs_a_limited_wait(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", HungStore)
    HungStore.released.clear()
    one = nodes(kv_store_timeout=0.2)
    began_s = time.monotonic()
    wanted = one.answer(request_of("a"))
    assert one.stats.breaker == "open"
    assert one.failures[StoreFailure.SLOW] >= 1
    assert one.answer(request_of("b", prompt(1)))  # the breaker is open: it does not wait
    assert one.answer(request_of("c", prompt(2)))
    assert time.monotonic() - began_s < GIVE_UP_S / 2
    HungStore.released.set()
    assert one.answer(request_of("d")) == wanted


def test_a_store_that_is_gone_is_a_miss(nodes: Callable[..., Node], tmp_path: Path) -> None:
    one, other = nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    shutil.rmtree(tmp_path / "kv" / "blocks")
    (tmp_path / "kv" / "blocks").write_text("not a directory any more")
    assert other.answer(request_of("b")) == wanted
    assert other.answer(request_of("c", prompt(1)))
    assert other.stats.fetched_blocks_total == 0


class FullStore(DirectoryStore):
    """Takes nothing."""

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        return [False] * len(keys)


def test_a_full_store_is_counted_and_used_for_reading(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", FullStore)
    other = nodes()
    assert other.answer(request_of("b", prompt(1)))
    other.until(lambda: not len(other.client.publishing))
    assert other.failures[StoreFailure.FULL] == NUM_BLOCKS
    assert other.answer(request_of("c")) == wanted
    assert other.stats.fetched_blocks_total == NUM_BLOCKS


def test_nothing_that_a_full_store_refuses_stays_claimed(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", FullStore)
    one, other = nodes(), nodes()
    one.submit(long_request("a"))
    one.until(lambda: one.failures.get(StoreFailure.FULL, 0) == NUM_BLOCKS)
    one.settle()
    one.until(lambda: not list((tmp_path / "kv" / "claims").iterdir()))
    assert one.stats.claims_total == 1
    assert one.engine.core.stats().running == 1
    assert other.answer(request_of("b"))
    assert other.stats.waited_total == 0


def test_a_prompt_that_cannot_be_put_now_is_not_claimed(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = nodes(), nodes()
    monkeypatch.setattr(one.client.publishing, "_can_put", lambda: False)
    one.submit(long_request("a"))
    one.until(lambda: one.stats.claims_total == 1)
    one.settle()
    one.until(lambda: not list((tmp_path / "kv" / "claims").iterdir()))
    assert not any(output.finish_reason for output in one.outputs.get("a", ()))
    assert other.answer(request_of("b"))
    assert other.stats.waited_total == 0


def long_request(name: str) -> Request:
    """Return a request that is still answered while another one begins and ends."""
    sampling = SamplingParams(temperature=0.0, max_tokens=200, seed=0).resolve()
    ids = prompt()
    total = len(ids) + 200
    return replace(request_of(name, ids), sampling=sampling, max_total_tokens=total)


def test_a_prefix_beyond_the_buffer_is_fetched_as_far_as_it_goes(
    nodes: Callable[..., Node],
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    block_bytes = one.engine.card.block_bytes
    other = nodes(kv_store_buffer_size=4 * block_bytes)
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == 4
    with pytest.raises(SettingError, match="raise --kv-store-buffer-size"):
        nodes(kv_store_buffer_size=block_bytes - 1)


def test_a_disk_tier_is_asked_before_the_store(nodes: Callable[..., Node], tmp_path: Path) -> None:
    disk = {"kv_tier_path": str(tmp_path / "disk"), "kv_tier_size": "4MiB"}
    one = nodes(**disk)
    wanted = one.answer(request_of("a"))
    one.settle()
    one.close()
    for file in files(tmp_path / "kv")[::2]:
        file.unlink()
    again = nodes(**disk)
    assert again.answer(request_of("b")) == wanted
    assert again.stats.disk_fetched_blocks_total == NUM_BLOCKS
    assert again.stats.fetched_blocks_total == 0


def test_never_only_fills_and_cost_spares_short_prompts(nodes: Callable[..., Node]) -> None:
    one = nodes(kv_store_fetch="never")
    wanted = one.answer(request_of("a"))
    one.settle()
    assert one.stats.put_blocks_total == NUM_BLOCKS
    assert one.stats.lookups_total == 0
    other = nodes(kv_store_fetch="never")
    assert other.answer(request_of("b")) == wanted
    assert other.stats.fetched_blocks_total == 0


def test_by_cost_what_is_slower_than_computing_is_computed(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    other = nodes(kv_store_fetch="cost")
    other.client.costs.block_ms = [1e9]
    other.client.costs.lookup_ms = 0.0
    monkeypatch.setattr(costs, "MIN_ASK_MS", GIVE_UP_S * 1000)  # never too slow
    assert other.answer(request_of("b")) == wanted
    assert other.stats.hit_blocks_total == NUM_BLOCKS
    assert other.stats.fetched_blocks_total == 0
    assert other.client.costs.block_ms[0] < 1e9  # it is tried again in the end
    third = nodes(kv_store_fetch="cost")
    third.client.costs.block_ms = [0.0]
    third.client.costs.lookup_ms = 0.0
    assert third.answer(request_of("c")) == wanted
    assert third.stats.fetched_blocks_total == NUM_BLOCKS


def test_a_flush_forgets_what_is_here_and_leaves_the_store_to_others(
    nodes: Callable[..., Node],
) -> None:
    one = nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    one.engine.core.scheduler.flush_cache()
    one.outside.clear()
    one.outside.take([])
    assert not one.engine.core.scheduler.check_integrity()
    assert one.answer(request_of("b")) == wanted
    assert one.stats.fetched_blocks_total == NUM_BLOCKS


def test_a_flush_while_blocks_arrive_gives_no_stale_block(nodes: Callable[..., Node]) -> None:
    one, other = nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    other.submit(request_of("b"))
    other.until(lambda: len(other.client.fetches) > 0 or other.stats.fetched_blocks_total > 0)
    other.engine.core.scheduler.flush_cache()
    other.outside.clear()
    assert other.finish(request_of("b")) == wanted
    assert not other.engine.core.scheduler.check_integrity()


def test_many_requests_at_once_share_one_fetch(nodes: Callable[..., Node]) -> None:
    one, other = nodes(), nodes()
    wanted = one.answer(request_of("a"))
    one.settle()
    requests = [request_of(f"b{number}") for number in range(6)]
    other.submit(*requests)
    assert [other.finish(request) for request in requests] == [wanted] * 6
    assert other.stats.fetched_blocks_total == NUM_BLOCKS


def test_requests_that_score_their_prompt_compute_it(nodes: Callable[..., Node]) -> None:
    one, other = nodes(), nodes()
    one.answer(request_of("a"))
    one.settle()
    request = request_of("b")
    scored = replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
    other.answer(scored)
    assert other.stats.lookups_total == 0


@pytest.mark.parametrize("dtype", ["bf16"])
def test_int8_transfer_is_another_name_for_blocks(
    nodes: Callable[..., Node], tmp_path: Path, dtype: str
) -> None:
    plain = nodes(kv_cache_dtype=dtype)
    plain.answer(request_of("a"))
    plain.settle()
    size = files(tmp_path / "kv")[0].stat().st_size
    one, other = (nodes(kv_cache_dtype=dtype, kv_store_encoding="int8") for _ in range(2))
    assert one.engine.card.fingerprint != plain.engine.card.fingerprint
    assert one.engine.card.fingerprint == other.engine.card.fingerprint
    one.answer(request_of("b"))
    one.settle()
    assert one.stats.fetched_blocks_total == 0  # never what is not rounded
    sizes = {file.stat().st_size for file in files(tmp_path / "kv")} - {size}
    assert len(sizes) == 1
    assert sizes.pop() < 0.8 * size
    assert len(other.answer(request_of("c"))) == NUM_OUTPUT
    assert other.stats.fetched_blocks_total == NUM_BLOCKS
    with pytest.raises(SettingError, match="bf16"):
        nodes(kv_store_encoding="int8")


def test_a_finish_reason_is_the_one_of_one_engine(nodes: Callable[..., Node]) -> None:
    one = nodes()
    one.submit(request_of("a"))
    one.until(lambda: bool(one.outputs.get("a")) and one.outputs["a"][-1].finish_reason is not None)
    assert one.outputs["a"][-1].finish_reason is FinishReason.LENGTH
