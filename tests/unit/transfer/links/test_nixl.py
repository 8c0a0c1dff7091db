"""Blocks read through NIXL: with the library, where it is installed, and with a fake of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.base.kv_transfer import Failure
from quire.transfer.links import nixl
from quire.transfer.links.block_client import FetchJob
from quire.transfer.links.messages import Agent
from quire.transfer.links.nixl import NixlAgent
from tests.unit.transfer.links import fake_nixl
from tests.unit.transfer.links.test_block_exchange import (
    BLOCK_BYTES,
    DIGESTS,
    NUM_BLOCKS,
    TRANSFER,
    Pair,
)

IS_INSTALLED = any(importlib.util.find_spec(name) for name in nixl.PACKAGES)
NAMES = iter(range(1000))


class NixlPair(Pair):
    """A Pair in which blocks are read through NIXL."""

    def __init__(self, **more: Any) -> None:
        super().__init__(backends=("nixl",), **more)
        number = next(NAMES)
        self.handing, self.fetching = NixlAgent(f"left {number}"), NixlAgent(f"right {number}")
        self.server._shared = {"nixl": self.handing.own(self.sent.reshape(-1))}
        self.client._openers = {"nixl": self.fetching.opener(BLOCK_BYTES)}

    def close(self) -> None:
        super().close()
        self.fetching.close()
        self.handing.close()


@pytest.fixture(
    params=[
        "fake",
        pytest.param("library", marks=pytest.mark.skipif(not IS_INSTALLED, reason="no NIXL")),
    ]
)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlPair]:
    if request.param == "fake":
        monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    made = NixlPair()
    yield made
    made.close()


def test_blocks_are_read_from_the_other_sides_memory(pair: NixlPair) -> None:
    pair.lease()
    job = pair.finished(pair.start())
    assert (job.failure, job.detail, job.num_landed) == (None, "", NUM_BLOCKS)
    pair.until(lambda: not len(pair.leases))
    assert not pair.fetching._readers.total()
    assert not pair.fetching._registered
    # The agent stays known: the next transfer needs no new connection.
    assert len(pair.fetching._names) == 1
    pair.lease()
    assert pair.finished(pair.start()).failure is None
    assert len(pair.fetching._names) == 1


def test_blocks_are_read_while_others_are_still_computed(pair: NixlPair) -> None:
    pair.lease(num_landed=3)
    job = pair.start()
    pair.until(lambda: job.num_landed == 3)
    pair.land(3, NUM_BLOCKS)
    assert pair.finished(job).failure is None


def test_several_transfers_read_at_once(pair: NixlPair) -> None:
    pair.lease(num_landed=1)
    jobs = [pair.start() for _ in range(4)]
    pair.until(lambda: all(job.num_landed == 1 for job in jobs))
    pair.land(1, NUM_BLOCKS)
    ended: list[FetchJob] = []

    def have_ended() -> bool:
        ended.extend(pair.client.ended())
        return len(ended) == len(jobs)

    pair.until(have_ended)
    assert [(job.failure, job.num_landed) for job in jobs] == [(None, NUM_BLOCKS)] * 4
    assert np.array_equal(pair.got, pair.sent)


def test_blocks_before_the_first_lost_one_are_used(pair: NixlPair) -> None:
    """The end of the blocks comes while the last one is being read."""
    pair.lease(num_landed=5)
    pair.leases.lost(pair.leases._open[TRANSFER], {DIGESTS[5]})
    job = pair.finished(pair.start())
    assert (job.failure, job.num_landed) == (Failure.MISSING, 5)
    assert np.array_equal(pair.got[:5], pair.sent[:5])


def test_a_block_is_read_while_the_one_before_it_is_viewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    read = threading.Semaphore(0)

    class Counted(NixlAgent):
        def read(self, *arguments: Any) -> None:
            super().read(*arguments)
            read.release()

    memory = np.repeat(np.arange(4, dtype=np.uint8), BLOCK_BYTES)
    number = next(NAMES)
    handing, fetching = NixlAgent(f"left {number}"), Counted(f"right {number}")
    reader = fetching.opener(BLOCK_BYTES).open(handing.own(memory).message())
    assert reader.ahead == 1
    reader.expect(0)
    for block in range(3):
        reader.expect((block + 1) * BLOCK_BYTES)
        viewed = reader.view(block * BLOCK_BYTES, BLOCK_BYTES)
        for _ in range(2 if block == 0 else 1):
            assert read.acquire(timeout=10.0)  # the next block too
        assert (viewed == block).all()
    reader.close()
    assert not fetching._registered


def test_requests_of_the_fake_keep_their_numbers_when_others_end() -> None:
    agent = fake_nixl.nixlAgent("numbers", fake_nixl.nixlAgentConfig())
    nothing = fake_nixl.nixlXferDList("dram", [])
    agent.known["numbers"] = agent
    first, second = (agent.createXferReq("read", nothing, nothing, "numbers") for _ in range(2))
    agent.releaseXferReq(first)
    assert agent.createXferReq("read", nothing, nothing, "numbers") not in (first, second)


def test_metadata_of_no_agent_ends_the_job(pair: NixlPair) -> None:
    pair.lease()
    own = pair.server._shared["nixl"].message()
    assert isinstance(own, Agent)
    for metadata in (b"x", b"\0" * 300, own.metadata[:-5]):
        wrong = Agent(own.address, own.num_bytes, metadata)
        pair.server._shared = {"nixl": _Says(wrong)}
        job = pair.finished(pair.start())
        assert job.failure in (Failure.REFUSED, Failure.CUT)
    assert not pair.fetching._names


def test_places_beyond_the_memory_are_not_read(pair: NixlPair) -> None:
    pair.lease()
    own = pair.server._shared["nixl"].message()
    assert isinstance(own, Agent)
    pair.server._shared = {"nixl": _Says(Agent(own.address, 2 * BLOCK_BYTES, own.metadata))}
    job = pair.finished(pair.start())
    assert (job.failure, job.num_landed) == (Failure.CUT, 2)
    assert "beyond" in job.detail


def test_few_agents_are_kept_and_one_that_failed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    own = NixlAgent("own")
    others = [NixlAgent(f"other {at}") for at in range(nixl.MAX_UNREAD + 5)]
    memories = [np.full(BLOCK_BYTES, at, np.uint8) for at in range(len(others))]
    described = [one.own(memory).message() for one, memory in zip(others, memories, strict=True)]
    opener = own.opener(BLOCK_BYTES)
    for at, message in enumerate(described):
        reader = opener.open(message)
        assert (reader.view(0, BLOCK_BYTES) == at).all()
        reader.close()
    assert len(own._names) <= nixl.MAX_UNREAD + 1
    assert len(own._agent.known) == len(own._names)
    first, second = opener.open(described[-1]), opener.open(described[-1])
    others[-1].close()  # its memory is withdrawn: reads fail
    with pytest.raises(OSError, match="NIXL"):
        first.view(0, BLOCK_BYTES)
    first.close()
    assert described[-1].metadata in own._names  # another reader has it
    second.close()
    assert described[-1].metadata not in own._names
    assert "other" not in "".join(one for one in own._readers if own._readers[one])


def test_stale_bytes_are_not_taken_for_a_block(pair: NixlPair) -> None:
    pair.lease(num_landed=2)
    job = pair.start()
    pair.until(lambda: job.num_landed == 2)
    own = pair.server._shared["nixl"].message()
    assert isinstance(own, Agent)
    shifted = pair.sent.copy()
    pair.server._room = lambda place: shifted[place]  # summed here, and read from the memory
    shifted[4, 7] ^= 1
    pair.land(2, NUM_BLOCKS)
    job = pair.finished(job)
    assert (job.failure, job.num_landed) == (Failure.BAD_BYTES, 4)


def test_a_read_that_does_not_end_keeps_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    monkeypatch.setattr(nixl, "READ_S", 0.05)
    made = NixlPair()
    try:
        made.fetching._agent.num_pending = -1
        made.lease()
        job = made.finished(made.start())
        assert next(made.fetching._agent.numbers) == 2, "one read, and none that waits behind it"
        assert (job.failure, job.num_landed) == (Failure.TIMEOUT, 0)
        assert len(made.fetching._lost) == 1
        assert len(made.fetching._registered) == 1
    finally:
        made.close()


def test_what_lacks_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    with pytest.raises(SettingError, match=r"quire-llm\[nixl\]"):
        NixlAgent("one")
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    monkeypatch.setattr(nixl, "_BACKEND", "UCY")
    with pytest.raises(SettingError, match="UCX_TLS"):
        NixlAgent("two")


def test_the_environment_chooses_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    monkeypatch.setenv("UCX_TLS", "rc,self")
    NixlAgent("three")
    assert nixl.os.environ["UCX_TLS"] == "rc,self"
    monkeypatch.delenv("UCX_TLS")
    NixlAgent("four")
    assert nixl.os.environ["UCX_TLS"] == nixl.CPU_TRANSPORTS


def test_the_thread_of_an_agent_waits_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it takes a core from the engine that waits, and from the one that computes."""
    monkeypatch.setattr(nixl, "bindings", lambda: fake_nixl)
    assert NixlAgent("five")._agent.config.pthrDelay == nixl.PROGRESS_US >= 1000


@pytest.mark.skipif(not IS_INSTALLED, reason="no NIXL")
def test_the_library_takes_the_time_that_its_thread_waits() -> None:
    library = nixl.bindings()
    config = library.nixlAgentConfig(True, False, 0, library.NIXL_THREAD_SYNC_STRICT)
    assert config.pthrDelay == 0
    config.pthrDelay = nixl.PROGRESS_US
    assert config.pthrDelay == nixl.PROGRESS_US


@pytest.mark.skipif(not IS_INSTALLED, reason="no NIXL")
def test_a_process_with_an_agent_ends_with_its_own_exit_code() -> None:
    code = (
        "import sys; from quire.transfer.links.nixl import NixlAgent; "
        "agent = NixlAgent('one'); print('said'); sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr


class _Says:
    def __init__(self, message: Agent) -> None:
        self._message = message

    def message(self) -> Agent:
        return self._message

    def close(self) -> None:
        pass
