"""Placement of prompts by a decode engine: how many it has computed elsewhere, by load.

The engine, its map and its store are real; its clock, its load and the connections are fakes, so
that each count follows from the prices. A prompt of ten blocks takes 100 ms at a peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.kv_transfer import Failure
from quire.base.prefill_load import PrefillLoad
from quire.base.records import Request
from quire.engine.process.messages import Submit
from quire.engine.transfer.link_times import LinkTimes
from quire.engine.transfer.peers import KNOWN_MS
from quire.transfer.links.block_client import FetchJob
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.transfer.test_exchange import BLOCK, NUM_BLOCKS, Stepped, request_of

PROMPT_MS = 100.0
EQUAL = PrefillLoad(token_ms=PROMPT_MS / (NUM_BLOCKS * BLOCK), step_tokens=10_000, is_measured=True)


@dataclass
class FakeClient:
    """A BlockClient of which a test says what the other side answers."""

    started: list[FetchJob] = field(default_factory=list)
    done: list[FetchJob] = field(default_factory=list)

    def start(self, job: FetchJob) -> None:
        self.started.append(job)

    def ended(self) -> list[FetchJob]:
        ended, self.done = self.done, []
        return ended

    def meet(self, job: FetchJob, load: PrefillLoad) -> bool:
        """Open the connection of a job; return whether it goes on."""
        job.load = load
        goes_on = job.accepts is None or job.accepts(load)
        if not goes_on:
            job.failure = Failure.BUSY
            self.done.append(job)
        return goes_on

    def close(self) -> None:
        pass


@dataclass
class FakeOwn:
    """An OwnLoad."""

    load: PrefillLoad = EQUAL
    num_decoding: int = 0

    def now(self) -> PrefillLoad:
        return self.load


class Placing:
    """A decode engine with peers, and how it places prompts."""

    def __init__(self, folder: Path, *ports: int, **settings: Any) -> None:
        peers = tuple(f"127.0.0.1:{port}" for port in ports)
        given = {"role": "decode", "kv_transfer_peer": peers, "kv_transfer_size": "16MiB"}
        self.engine = Stepped(folder, **{**given, **settings})
        self.fetching = self.engine.exchange.fetching
        assert self.fetching.client is not None
        self.fetching.client.close()
        self.client, self.own = FakeClient(), FakeOwn()
        self.now_ms = 0.0
        self.reports: list[str] = []
        replaced: dict[str, Any] = {
            "client": self.client,
            "_own": self.own,
            "_now_ms": lambda: self.now_ms,
            "_report": lambda what, **_: self.reports.append(what),
            "links": LinkTimes(0.1),
        }
        for name, value in replaced.items():
            setattr(self.fetching, name, value)
        self._numbers = iter(range(1, 1000))

    def arrive(self) -> FetchJob | None:
        """Let another prompt arrive; return the job, where a peer is asked for it."""
        before = len(self.client.started)
        self.engine.outside.take([Submit(requests=(self._request(next(self._numbers)),))])
        started = self.client.started[before:]
        assert len(started) <= 1
        return started[0] if started else None

    def meet(self, job: FetchJob | None, load: PrefillLoad) -> bool:
        """Open a job's connection, and let the engine notice."""
        assert job is not None
        goes_on = self.client.meet(job, load)
        self.engine.outside.take([])
        return goes_on

    def num_asked(self, count: int) -> int:
        """Let so many prompts arrive at once; return for how many a peer is asked."""
        jobs = [self.arrive() for _ in range(count)]
        return sum(job is not None for job in jobs)

    @property
    def num_busy(self) -> int:
        return self.fetching.failures[Failure.BUSY]

    def _request(self, number: int) -> Request:
        request = request_of(f"r{number}")
        ids = (request.prompt_ids + np.int32(number)) % 90 + 3
        return replace(request, prompt_ids=ids.astype(np.int32), transfer=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("placement")
    write_tiny_llama(root / "model", seed=3, max_position_embeddings=512)
    (root / "key").write_text("a key of some length")
    (root / "key").chmod(0o600)
    return root


@pytest.fixture
def placing(folder: Path) -> Iterator[Placing]:
    made = Placing(folder, 1)
    yield made
    made.engine.close()


def test_an_idle_engine_computes_what_an_equal_peer_would_not_have_sooner(
    placing: Placing,
) -> None:
    """It learns so from the first connection, which asks for nothing."""
    assert not placing.meet(placing.arrive(), EQUAL)
    assert placing.num_busy == 1
    assert placing.num_asked(5) == 0
    assert not placing.fetching.num_jobs
    assert not placing.reports  # nothing has failed
    placing.now_ms += KNOWN_MS + 1.0
    assert placing.num_asked(1) == 1  # what it knew is old


def test_an_idle_engine_asks_a_faster_peer_while_its_queue_is_short(placing: Placing) -> None:
    fast = replace(EQUAL, token_ms=EQUAL.token_ms / 5)  # 20 ms a prompt
    assert placing.meet(placing.arrive(), fast)
    # 20, 40, 60 ms of prompts before it, its own 20, 1 on the way and 3 for the connection: < 100.
    assert placing.num_asked(6) == 3
    placing.now_ms += 2 * PROMPT_MS / 5
    assert placing.num_asked(6) == 2


def test_requests_that_generate_weigh_as_much_as_the_one_that_waits(placing: Placing) -> None:
    """With four of them a prompt computed here delays five requests by 100 ms each."""
    placing.own.num_decoding = 4
    assert placing.meet(placing.arrive(), EQUAL)
    assert placing.num_asked(9) == 3  # up to 300 ms of prompts before it
    placing.now_ms += 2 * PROMPT_MS
    assert placing.num_asked(9) == 2


def test_the_own_queue_counts_without_the_prompts_that_come_from_peers(placing: Placing) -> None:
    placing.own.load = replace(EQUAL, queue_ms=150.0)
    assert placing.meet(placing.arrive(), EQUAL)  # 104 ms there, 250 ms here
    placing.own.load = replace(EQUAL, queue_ms=150.0 + PROMPT_MS)  # it waits, and is not computed
    assert placing.num_asked(3) == 1  # 204 ms there, 250 ms here; the next one 304 ms there


def test_a_peer_that_is_busier_than_it_was_thought_is_not_asked(placing: Placing) -> None:
    """Its prompts may be of other engines. It is asked again when they are computed."""
    placing.own.num_decoding = 2
    busy = replace(EQUAL, queue_ms=5 * PROMPT_MS)
    assert not placing.meet(placing.arrive(), busy)
    assert (placing.num_busy, placing.num_asked(4)) == (1, 0)
    placing.now_ms += 4 * PROMPT_MS
    assert placing.num_asked(4) == 1
    assert not placing.fetching.failures[Failure.NO_PEER]


def test_peers_get_prompts_by_their_speed(folder: Path) -> None:
    placing = Placing(folder, 1, 2)
    try:
        placing.own.num_decoding = 20
        fast = replace(EQUAL, token_ms=EQUAL.token_ms / 2)
        assert placing.meet(placing.arrive(), EQUAL)
        assert placing.meet(placing.arrive(), fast)
        first, second = (job.source.port for job in placing.client.started)
        assert first != second
        placing.num_asked(10)
        asked = Counter(job.source.port for job in placing.client.started)
        assert asked == {first: 4, second: 8}
    finally:
        placing.engine.close()


def test_a_slow_link_is_not_worth_it_whatever_runs(placing: Placing) -> None:
    placing.own.num_decoding = 50
    placing.fetching.links.guess_ms = 1.1 * PROMPT_MS / NUM_BLOCKS
    assert placing.num_asked(3) == 0


def test_a_link_that_was_slow_is_tried_again_in_the_end(placing: Placing) -> None:
    """Each prompt that is computed here because of it makes it 2 % faster: 1.5 times in 20."""
    placing.own.num_decoding = 50
    placing.fetching.links.note("127.0.0.1", 1, 1.5 * PROMPT_MS / NUM_BLOCKS)
    assert placing.num_asked(20) == 0
    job = next(job for job in (placing.arrive() for _ in range(5)) if job is not None)
    placing.meet(job, EQUAL)
    job.num_landed, job.receive_ms = len(job.digests), 15.0
    placing.client.done.append(job)
    placing.engine.outside.take([])
    measured_ms = placing.fetching.links.block_ms("127.0.0.1")
    assert measured_ms == pytest.approx(15.0 / NUM_BLOCKS, rel=2.0)
    assert measured_ms < PROMPT_MS / NUM_BLOCKS
    assert placing.fetching.links.block_ms("another machine") == 0.1


def test_a_peer_that_has_timed_few_steps_counts_as_fast_as_this_engine(placing: Placing) -> None:
    guess = PrefillLoad(token_ms=1e6, step_tokens=1)
    assert not placing.meet(placing.arrive(), guess)
    placing.own.num_decoding = 1
    placing.now_ms += KNOWN_MS + 1.0
    assert placing.meet(placing.arrive(), guess)


def test_where_it_is_forced_a_busy_peer_is_asked(folder: Path) -> None:
    placing = Placing(folder, 1, kv_transfer_fetch="always")
    try:
        busy = replace(EQUAL, queue_ms=1e6)
        assert placing.meet(placing.arrive(), busy)
        assert placing.num_asked(3) == 3
        assert placing.num_busy == 0
    finally:
        placing.engine.close()
