"""BlockServer and BlockClient over real sockets: leases, failures, and links that do not hold."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from quire.base.kv_transfer import Failure
from quire.base.prefill_load import PrefillLoad
from quire.transfer.links import block_client, block_server
from quire.transfer.links.block_client import BlockClient, FetchJob, Source
from quire.transfer.links.block_server import BlockServer
from quire.transfer.links.channel import Channel
from quire.transfer.links.checksum import checksum_of
from quire.transfer.links.handshake import TransferKeys
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import VERSION, Hello, Identity, Landed
from quire.transfer.links.security import LinkSecurity
from quire.transfer.links.shared_memory import MappedSegments, OwnSegment
from tests.flawed_link import cutting, flawed_link, flipping

BLOCK_BYTES = 4096
NUM_BLOCKS = 12
TRANSFER = b"t" * 16
DIGESTS = tuple(bytes([at]) * 16 for at in range(NUM_BLOCKS))
KEYS = TransferKeys.derive(b"a shared key of some length")
IDENTITY = Identity(
    engine_id="left",
    fingerprint=b"f" * 32,
    block_size=16,
    block_bytes=BLOCK_BYTES,
    model="box",
    recipe="avx2",
    kv_dtype="bf16",
    backends=("tcp",),
)
LOAD = PrefillLoad(queue_ms=7.0, token_ms=0.5, step_tokens=512, is_measured=True)
GIVE_UP_S = 30.0


@dataclass
class Desk:
    """Notes what the server asks the engine for."""

    prefills: list[tuple[bytes, str, bytes]] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    on_prefill: Callable[[bytes], None] = lambda transfer_id: None

    def prefill(self, transfer_id: bytes, salt: str, token_ids: bytes) -> None:
        self.prefills.append((transfer_id, salt, token_ids))
        self.on_prefill(transfer_id)

    def cancel(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)

    def settle(self) -> None:
        pass

    def load(self) -> PrefillLoad:
        return LOAD


class Pair:
    """A server with a store of random blocks, and a client with an empty one."""

    def __init__(
        self,
        *,
        backends: tuple[str, ...] = ("tcp",),
        timeout_s: float = 5.0,
        security: LinkSecurity = LinkSecurity(KEYS.links),  # noqa: B008  frozen
        own_security: LinkSecurity = LinkSecurity(KEYS.links),  # noqa: B008
    ) -> None:
        self.reports: list[str] = []
        self.segment = OwnSegment(NUM_BLOCKS * BLOCK_BYTES) if "shm" in backends else None
        memory = np.empty(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.sent = (self.segment.memory if self.segment else memory).reshape(NUM_BLOCKS, -1)
        self.sent[:] = np.random.default_rng(3).integers(0, 256, self.sent.shape, np.uint8)
        self.got = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.leases = LeaseBook(lambda: time.monotonic() * 1000.0, 60_000.0)
        self.desk = Desk()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.server = BlockServer(
            self.listening,
            security=security,
            identity=replace(IDENTITY, backends=backends),
            leases=self.leases,
            room=lambda place: self.sent[place],
            desk=self.desk,
            shared={} if self.segment is None else {"shm": self.segment},
            report=lambda what, **fields: self.reports.append(f"{what} {fields}"),
        )
        self.woken = threading.Event()
        self.client = BlockClient(
            security=own_security,
            identity=replace(IDENTITY, engine_id="right", backends=backends),
            room=lambda place: self.got[place],
            wake=self.woken.set,
            openers={"shm": MappedSegments().opener()},
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self.server.close()
        self.client.close()
        if self.segment is not None:
            self.segment.close()

    def lease(self, num_landed: int = NUM_BLOCKS) -> None:
        """Open the lease, with its first blocks in the store."""
        assert self.leases.open(TRANSFER, DIGESTS) is not None
        self.land(0, num_landed)

    def released(self) -> FetchJob:
        """Return the job of an engine that has all blocks already."""
        source = Source(host="127.0.0.1", port=self.port, transfer_id=TRANSFER)
        job = FetchJob(source, (), ())
        self.client.start(job)
        return job

    def land(self, first: int, last: int) -> None:
        for place in range(first, last):
            self.leases.landed(DIGESTS[place], place)

    def start(
        self,
        accepts: Callable[[PrefillLoad], bool] | None = None,
        port: int = 0,
        **source: object,
    ) -> FetchJob:
        given = {"host": "127.0.0.1", "port": port or self.port, "transfer_id": TRANSFER}
        job = FetchJob(Source(**{**given, **source}), DIGESTS, range(NUM_BLOCKS), accepts)  # type: ignore[arg-type]
        self.client.start(job)
        return job

    def finished(self, job: FetchJob) -> FetchJob:
        """Wait for the job's end, and check that what is there is what was sent."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while job not in self.client.ended():
            assert time.monotonic() < deadline_s, "the job did not end"
            self.woken.wait(0.05)
            self.woken.clear()
        landed = job.num_landed
        assert np.array_equal(self.got[:landed], self.sent[:landed])
        # The block that was checked last may have been copied; those after it were not.
        assert not self.got[landed + 1 :].any(), "a block that did not come was written"
        return job

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("backends", [("tcp",), ("shm", "tcp"), ("shm",)])
def test_all_blocks_of_a_lease_arrive_and_the_lease_ends(backends: tuple[str, ...]) -> None:
    made = Pair(backends=backends)
    try:
        made.lease()
        job = made.finished(made.start())
        assert (job.failure, job.num_landed) == (None, NUM_BLOCKS)
        made.until(lambda: not len(made.leases))
        assert len(made.leases.take_ended()) == 1
        assert made.server.counts.blocks_total == NUM_BLOCKS
    finally:
        made.close()


def test_a_lease_of_which_nothing_is_fetched_ends_at_once(pair: Pair) -> None:
    pair.lease()
    job = pair.finished(pair.released())
    assert (job.failure, job.num_landed) == (None, 0)
    pair.until(lambda: not len(pair.leases))
    assert pair.server.counts.blocks_total == 0
    assert pair.finished(pair.start()).failure is Failure.EXPIRED


def test_blocks_arrive_while_others_are_still_computed(pair: Pair) -> None:
    pair.lease(num_landed=3)
    job = pair.start()
    pair.until(lambda: job.num_landed == 3)
    pair.land(3, NUM_BLOCKS)
    assert pair.finished(job).failure is None


def test_a_prompt_is_computed_on_request_and_given_up_with_its_connection(pair: Pair) -> None:
    pair.desk.on_prefill = lambda transfer_id: pair.lease()
    job = pair.finished(pair.start(salt="s", token_ids=b"\1\0\0\0"))
    assert job.failure is None
    assert pair.desk.prefills == [(TRANSFER, "s", b"\1\0\0\0")]
    pair.until(lambda: pair.desk.cancelled == [TRANSFER])


@pytest.mark.parametrize("accepts", [True, False])
def test_a_prompt_is_asked_for_only_where_the_load_is_accepted(pair: Pair, accepts: bool) -> None:
    pair.desk.on_prefill = lambda transfer_id: pair.lease()
    seen: list[PrefillLoad] = []

    def decide(load: PrefillLoad) -> bool:
        seen.append(load)
        return accepts

    job = pair.finished(pair.start(decide, token_ids=b"\1\0\0\0"))
    assert job.failure is (None if accepts else Failure.BUSY)
    assert seen == [job.load] == [LOAD]
    assert len(pair.desk.prefills) == accepts
    pair.lease()
    assert pair.finished(pair.start()).failure is None  # the server goes on


def test_lost_blocks_end_a_transfer_after_those_before_them(pair: Pair) -> None:
    pair.lease(num_landed=5)
    lease = pair.leases._open[TRANSFER]
    pair.leases.lost(lease, {DIGESTS[5]})
    job = pair.finished(pair.start())
    assert (job.failure, job.num_landed) == (Failure.MISSING, 5)


def test_unknown_and_ended_transfers_are_expired(pair: Pair) -> None:
    assert pair.finished(pair.start()).failure is Failure.EXPIRED
    pair.lease(num_landed=2)
    job = pair.start()
    pair.until(lambda: job.num_landed == 2)
    pair.leases.end_all()  # as when the cache is flushed
    assert pair.finished(job).failure is Failure.EXPIRED


def test_a_lease_ends_at_its_time_unless_a_connection_uses_it() -> None:
    now_ms = [0.0]
    book = LeaseBook(lambda: now_ms[0], 100.0)
    book.open(TRANSFER, DIGESTS)
    lease = book.claim(TRANSFER, 0.0)
    assert lease is not None
    now_ms[0] = 101.0
    assert not book.take_ended()
    book.let_go(TRANSFER, lease, is_over=False)
    assert book.take_ended() == [lease]
    assert not lease.valid
    assert book.claim(TRANSFER, 0.0) is None
    assert not book.take_ended()


def test_a_restarted_engine_at_the_same_address_is_noticed(pair: Pair) -> None:
    pair.lease()
    assert pair.finished(pair.start(engine_id="another")).failure is Failure.EXPIRED
    assert pair.finished(pair.start(engine_id="left")).failure is None


def test_a_port_without_a_listener_is_unreachable(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert pair.finished(pair.start(port=port)).failure is Failure.UNREACHABLE


@pytest.mark.parametrize(
    ("field_name", "value", "words"),
    [
        ("block_size", 32, "tokens per block"),
        ("kv_dtype", "f32", "dtypes"),
        ("block_bytes", 8192, "bytes per block"),
        ("recipe", "amx", "instruction sets"),
        ("fingerprint", b"g" * 32, "the same model"),
    ],
)
def test_engines_with_other_blocks_are_refused_with_the_difference(
    pair: Pair, field_name: str, value: object, words: str
) -> None:
    pair.lease()
    pair.client._identity = replace(pair.client._identity, **{field_name: value})
    job = pair.finished(pair.start())
    assert job.failure is Failure.REFUSED
    assert words in job.detail
    pair.until(lambda: any("refused" in report for report in pair.reports))


def test_another_key_is_refused_before_anything_is_said() -> None:
    another = TransferKeys.derive(b"another key of some length").links
    made = Pair(own_security=LinkSecurity(another))
    try:
        made.lease()
        job = made.finished(made.start())
        assert job.failure is Failure.REFUSED
        assert "keys" in job.detail
        assert made.server.counts.blocks_total == 0
    finally:
        made.close()


def test_another_version_is_refused_by_name(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = socket.create_connection(("127.0.0.1", pair.port))
    channel = Channel(connection)
    channel.send(Hello(VERSION + 1, b"n" * 32), within_s=GIVE_UP_S)
    answer = channel.receive(Hello, within_s=GIVE_UP_S)
    assert isinstance(answer, Hello)
    assert answer.version == VERSION
    assert connection.recv(1) == b""
    pair.until(lambda: any("version" in report for report in pair.reports))
    channel.close()


def test_backends_without_one_in_common_are_refused(pair: Pair) -> None:
    pair.client._identity = replace(pair.client._identity, backends=("shm",))
    job = pair.finished(pair.start())
    assert job.failure is Failure.REFUSED
    assert "kv-transfer-backend" in job.detail


def test_strangers_get_no_more_than_the_version(pair: Pair) -> None:
    pair.lease()
    rng = np.random.default_rng(9)
    for size in (0, 1, 8, 100, 70_000):
        with socket.create_connection(("127.0.0.1", pair.port)) as stranger:
            stranger.settimeout(GIVE_UP_S)
            with suppress(OSError):
                stranger.sendall(rng.integers(0, 256, size, np.uint8).tobytes())
                stranger.shutdown(socket.SHUT_WR)
                received = b"".join(iter(lambda: stranger.recv(65536), b""))
                assert len(received) <= 64
    assert pair.finished(pair.start()).failure is None


def test_a_connection_without_a_thread_is_closed_and_the_next_one_served(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "quire-kv-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    pair.lease()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with socket.create_connection(("127.0.0.1", pair.port)) as refused:
            refused.settimeout(GIVE_UP_S)
            assert refused.recv(1) == b""
        pair.until(lambda: any("new thread" in report for report in pair.reports))
    assert pair.finished(pair.start()).failure is None


def test_flipped_bits_are_found_and_the_blocks_before_them_kept(pair: Pair) -> None:
    pair.lease()

    with flawed_link(pair.port, flipping(6 * BLOCK_BYTES)) as port:
        job = pair.finished(pair.start(port=port))
    assert job.failure is Failure.BAD_BYTES
    assert 0 < job.num_landed < NUM_BLOCKS


def test_stale_bytes_are_not_taken_for_a_block(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is used again between the checksum of its bytes and their sending."""
    pair.lease()
    num_summed = 0

    def summed(raw: np.ndarray) -> int:
        nonlocal num_summed
        found, num_summed = checksum_of(raw), num_summed + 1
        if num_summed == 5:
            pair.sent[4, 100] ^= 1
        return found

    monkeypatch.setattr(block_server, "checksum", SimpleNamespace(checksum_of=summed))
    job = pair.finished(pair.start())
    assert (job.failure, job.num_landed) == (Failure.BAD_BYTES, 4)


@pytest.mark.parametrize("num_bytes", [10, 300, 5 * BLOCK_BYTES])
def test_a_cut_connection_ends_the_job_and_the_lease(pair: Pair, num_bytes: int) -> None:
    pair.lease()

    with flawed_link(pair.port, cutting(num_bytes)) as port:
        job = pair.finished(pair.start(port=port))
    assert job.failure is Failure.CUT
    assert job.num_landed < NUM_BLOCKS


def test_a_silent_server_ends_the_job(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_client, "LOST_S", 5.0)
    monkeypatch.setattr(block_server, "BEAT_S", 60.0)
    pair.lease(num_landed=1)
    job = pair.finished(pair.start())
    assert (job.failure, job.num_landed) == (Failure.TIMEOUT, 1)


def test_an_engine_that_lives_but_computes_nothing_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_server, "BEAT_S", 0.02)
    made = Pair(timeout_s=5.0)
    try:
        made.lease(num_landed=2)
        job = made.finished(made.start())
        assert (job.failure, job.num_landed) == (Failure.TIMEOUT, 2)
        assert "no block" in job.detail
    finally:
        made.close()


def test_a_cancelled_job_writes_nothing_more_and_frees_the_lease(pair: Pair) -> None:
    pair.lease(num_landed=4)
    job = pair.start()
    pair.until(lambda: job.num_landed == 4)
    job.cancel()
    pair.land(4, NUM_BLOCKS)
    assert pair.finished(job).failure is None
    assert job.num_landed == 4
    pair.until(lambda: not len(pair.leases))


def test_closing_ends_everything_in_the_middle_of_transfers() -> None:
    made = Pair()
    before = threading.active_count()
    made.lease(num_landed=2)
    jobs = [made.start() for _ in range(5)]
    made.until(lambda: jobs[0].num_landed == 2)
    made.close()
    made.until(lambda: threading.active_count() <= before)


def test_leases_are_bounded() -> None:
    book = LeaseBook(lambda: 0.0, 1.0)
    opened = [book.open(bytes(14) + at.to_bytes(2, "big"), DIGESTS) for at in range(1100)]
    assert sum(lease is not None for lease in opened) == 1024


def test_a_saved_block_is_sent_before_the_engine_has_noted_it(pair: Pair) -> None:
    pair.lease(num_landed=0)
    job = pair.start()
    for place in range(3):
        pair.leases.saved(DIGESTS[place], place)
    pair.until(lambda: job.num_landed == 3)
    assert not pair.leases._open[TRANSFER].places
    pair.land(0, NUM_BLOCKS)
    assert pair.finished(job).failure is None


def test_a_saved_block_that_lands_in_another_place_ends_the_lease() -> None:
    book = LeaseBook(lambda: 0.0, 1.0)
    lease = book.open(TRANSFER, DIGESTS)
    assert lease is not None
    book.saved(DIGESTS[0], 5)
    assert book.place(lease, DIGESTS[0], 0.0) == 5
    assert book.landed(DIGESTS[0], 6) == [lease]
    assert not book.is_valid(lease)
    with pytest.raises(KeyError):
        book.place(lease, DIGESTS[0], 0.0)


def test_blocks_that_are_there_when_the_prompt_ends_are_counted(pair: Pair) -> None:
    pair.lease(num_landed=3)
    job = pair.start()
    lease = pair.leases._open[TRANSFER]
    pair.until(lambda: lease.num_there == 3)
    for _ in range(2):
        pair.leases.completed(TRANSFER)
    pair.land(3, NUM_BLOCKS)
    assert pair.finished(job).failure is None
    assert pair.leases.overlapped_blocks_total == 3


def test_the_last_blocks_of_a_prompt_that_is_still_computed_are_counted(pair: Pair) -> None:
    """Its last tokens fill no block."""
    pair.lease()
    lease = pair.leases._open[TRANSFER]
    assert pair.finished(pair.start()).failure is None
    pair.until(lambda: lease.num_there == NUM_BLOCKS)


def test_a_side_that_has_more_than_was_sent_is_not_believed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_client, "Landed", lambda count: Landed(count + NUM_BLOCKS))
    pair.lease(num_landed=3)
    job = pair.start()
    lease = pair.leases._open[TRANSFER]
    assert pair.finished(job).failure is Failure.CUT
    assert lease.num_there == 0
