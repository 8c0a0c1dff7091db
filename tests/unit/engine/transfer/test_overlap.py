"""Transfers beside the prefill, by counts: before a chunk is computed, the blocks of all chunks
before it are in the decode engine's cache.

Both engines are stepped by hand in one thread. A gate inside the prefill engine's step, after its
copies have begun and before anything is computed, steps the decode engine until that holds.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.kv_transfer import KVTransfer
from quire.base.records import NO_INTS, FinishReason, Request, RequestOutput, StepOutputs
from quire.base.sampling_params import SamplingParams
from quire.engine.process.messages import Abort, Outputs, QueryCache
from quire.transfer.links import nixl
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.transfer.test_exchange import (
    BLOCK,
    GIVE_UP_S,
    NUM_BLOCKS,
    TRANSFER,
    Stepped,
    request_of,
)

CHUNK_BLOCKS = 2  # of a step (Stepped)
NUM_CHUNKS = NUM_BLOCKS // CHUNK_BLOCKS
NUM_OUTPUT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overlap")
    write_tiny_llama(root / "model", seed=3, max_position_embeddings=512)
    (root / "key").write_text("a key of some length")
    (root / "key").chmod(0o600)
    return root


def prompt_of(name: str, num_tokens: int = NUM_BLOCKS * BLOCK, **changes: Any) -> Request:
    """Return a request with a prompt of full blocks, and an answer of some tokens."""
    ids = np.random.default_rng(4).integers(3, 90, num_tokens).astype(np.int32)
    request = replace(request_of(name), prompt_ids=ids, transfer=None, **changes)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, seed=0).resolve()
    return replace(request, sampling=sampling, max_total_tokens=num_tokens + NUM_OUTPUT)


def handed_over(request: Request) -> Request:
    return replace(
        request,
        request_id="handed over",
        group_id="handed over",
        sampling=replace(request.sampling, max_tokens=1),
        max_total_tokens=len(request.prompt_ids) + 1,
        transfer=KVTransfer(transfer_id=TRANSFER, hand_over=True),
    )


class Sides:
    """A prefill and a decode engine, and a gate in the first one's steps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **of_decode: Any) -> None:
        backend = {"kv_transfer_backend": of_decode.get("kv_transfer_backend", "auto")}
        self.prefill = Stepped(folder, **backend)
        self.decode = Stepped(folder, role="decode", **of_decode)
        self.before_chunk: Callable[[int], None] = lambda chunk: None
        self.num_chunks = 0
        self.problems: list[str] = []
        runner: Any = self.prefill.engine.core.runner
        compute = runner._rows_result

        def gated(plan: Any) -> Any:
            if len(plan.slots):
                try:
                    self.before_chunk(self.num_chunks)
                except AssertionError as error:  # the engine would go on
                    self.problems.append(str(error))
                self.num_chunks += 1
            return compute(plan)

        monkeypatch.setattr(runner, "_rows_result", gated)

    @property
    def num_received(self) -> int:
        return self.decode.exchange.stats().received_blocks_total

    @property
    def num_in_cache(self) -> int:
        """Blocks that were loaded into the decode engine's pool."""
        return self.decode.engine.core.stats().tier_fetched_blocks_total

    @property
    def num_there(self) -> int:
        """Blocks of which the prefill engine knows that they have landed."""
        leases = self.prefill.exchange.handing._leases
        return sum(lease.num_there for lease in leases._open.values())

    def fetch(self, request: Request) -> Request:
        """Order a prompt, and have the decode engine fetch it; return what that one was asked."""
        if not self.prefill.exchange.handing.num_leases:
            self.prefill.submit(handed_over(request))
        offer = self.prefill.engine.card.transfer
        assert offer is not None
        source = KVTransfer(
            transfer_id=TRANSFER,
            hand_over=False,
            host=offer.host,
            port=offer.port,
            engine_id=offer.engine_id,
        )
        fetching = replace(request, transfer=source)
        self.decode.submit(fetching)
        return fetching

    def compute(self) -> None:
        """Compute and hand over the prompt that was ordered, to its end."""
        self.until(lambda: not self.prefill.engine.core.scheduler.stats().running, self.prefill)
        assert not self.problems

    def until(self, condition: Callable[[], bool], *engines: Stepped) -> None:
        """Step engines in turn, at least once."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            for engine in engines:
                engine.step()
            if condition():
                return
            assert time.monotonic() < deadline_s, (
                *(self.num_received, self.num_in_cache, self.num_there),
                self.decode.exchange.stats(),
            )
            time.sleep(0.001)

    def answer(self, request: Request, *engines: Stepped) -> list[int]:
        """Step engines until a request of the first one has ended; return its tokens."""
        said = engines[0].said

        def outputs() -> list[RequestOutput]:
            found = [one.outputs for one in said if isinstance(one, Outputs) and one.outputs]
            return [one for some in found for one in some if one.request_id == request.request_id]

        self.until(lambda: any(one.finish_reason is not None for one in outputs()), *engines)
        return [int(token) for one in outputs() for token in one.token_ids]

    def alone(self, request: Request) -> list[int]:
        """Return the answer of the prefill engine by itself."""
        self.before_chunk = lambda chunk: None
        by_itself = replace(request, request_id="alone", group_id="alone", cache_salt="alone")
        self.prefill.submit(by_itself)
        return self.answer(by_itself, self.prefill)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sides]]:
    made: list[Sides] = []

    def start(**of_decode: Any) -> Sides:
        made.append(Sides(folder, monkeypatch, **of_decode))
        return made[-1]

    yield start
    for one in made:
        one.close()


def no_nixl() -> bool:
    return not any(importlib.util.find_spec(name) is not None for name in nixl.PACKAGES)


@pytest.mark.parametrize(
    "backend",
    [
        "tcp",
        "shm",
        pytest.param("nixl", marks=pytest.mark.skipif(no_nixl(), reason="NIXL is not installed")),
    ],
)
def test_only_the_last_chunks_blocks_are_left_when_a_prompt_is_computed(
    sides: Callable[..., Sides], backend: str
) -> None:
    both = sides(kv_transfer_backend=backend)
    request = prompt_of("a")
    seen: list[int] = []

    def before_chunk(chunk: int) -> None:
        num_blocks = chunk * CHUNK_BLOCKS
        both.until(
            lambda: (both.num_received, both.num_in_cache, both.num_there) == (num_blocks,) * 3,
            both.decode,
        )
        seen.append(num_blocks)

    both.before_chunk = before_chunk
    fetching = both.fetch(request)
    both.compute()
    assert seen == [chunk * CHUNK_BLOCKS for chunk in range(NUM_CHUNKS)]
    tokens = both.answer(fetching, both.decode, both.prefill)
    assert tokens == both.alone(request)
    handed, fetched = both.prefill.exchange.stats(), both.decode.exchange.stats()
    block_bytes = both.prefill.engine.card.block_bytes
    assert handed.sent_bytes_total == NUM_BLOCKS * block_bytes
    assert handed.overlapped_bytes_total == (NUM_BLOCKS - CHUNK_BLOCKS) * block_bytes
    assert fetched.early_blocks_total >= NUM_BLOCKS - CHUNK_BLOCKS
    assert both.num_in_cache == NUM_BLOCKS  # each once
    stats = both.decode.engine.core.stats()
    assert stats.prefix_hit_host_tokens_total == NUM_BLOCKS * BLOCK
    assert not both.decode.engine.core.scheduler.check_integrity()


def test_requests_of_one_prompt_share_what_is_loaded_early(sides: Callable[..., Sides]) -> None:
    both = sides()
    request = prompt_of("a")
    both.before_chunk = lambda chunk: both.until(
        lambda: both.num_in_cache == chunk * CHUNK_BLOCKS, both.decode
    )
    first = both.fetch(request)
    second = both.fetch(replace(request, request_id="b", group_id="b"))
    both.compute()
    wanted = both.alone(request)
    assert both.answer(first, both.decode, both.prefill) == wanted
    assert both.answer(second, both.decode, both.prefill) == wanted
    assert both.num_in_cache == NUM_BLOCKS


def test_a_full_decode_engine_loads_nothing_early_and_waits_for_its_room(
    sides: Callable[..., Sides], folder: Path
) -> None:
    block_bytes = 0
    with probing(folder) as probe:
        block_bytes = probe.engine.card.block_bytes
    both = sides(kv_cache_memory=(NUM_BLOCKS + 3) * block_bytes)
    long = prompt_of("long", 3 * BLOCK)
    answer = replace(long.sampling, max_tokens=6 * BLOCK)
    long = replace(long, sampling=answer, max_total_tokens=9 * BLOCK, cache_salt="long")
    both.decode.submit(long)
    both.until(lambda: both.decode.engine.core.stats().running == 1, both.decode)
    request = prompt_of("a")
    fetching = both.fetch(request)
    both.compute()
    both.until(lambda: both.num_received == NUM_BLOCKS, both.decode, both.prefill)
    assert both.num_in_cache == 0
    assert both.decode.engine.core.stats().running == 1
    wanted = both.alone(request)
    both.answer(long, both.decode)
    assert both.answer(fetching, both.decode) == wanted
    assert both.num_in_cache == NUM_BLOCKS
    assert not both.decode.exchange.handing.num_kept


def test_a_flush_between_two_chunks_costs_time_and_no_token(sides: Callable[..., Sides]) -> None:
    both = sides()
    request = prompt_of("a")

    def before_chunk(chunk: int) -> None:
        if chunk < 3:
            both.until(lambda: both.num_in_cache == chunk * CHUNK_BLOCKS, both.decode)
        if chunk == 2:
            both.decode.engine.core.ask_cache(QueryCache(ask_id=1, num_prefixes=0, flush=True))

    both.before_chunk = before_chunk
    fetching = both.fetch(request)
    both.compute()
    both.before_chunk = lambda chunk: None
    assert both.answer(fetching, both.decode, both.prefill) == both.alone(request)
    assert not both.decode.engine.core.scheduler.check_integrity()


def test_a_request_that_leaves_after_blocks_were_loaded_frees_both_sides(
    sides: Callable[..., Sides],
) -> None:
    both = sides()
    request = prompt_of("a")

    def before_chunk(chunk: int) -> None:
        if chunk <= 2:
            both.until(lambda: both.num_in_cache == chunk * CHUNK_BLOCKS, both.decode)
        if chunk == 2:
            abort(both.decode, request.request_id)

    both.before_chunk = before_chunk
    both.fetch(request)
    both.compute()
    both.until(
        lambda: (
            both.prefill.exchange.stats().leases == 0
            and both.decode.exchange.stats().fetching == 0
            and both.decode.engine.core.stats().blocks_used == 0
        ),
        both.prefill,
        both.decode,
    )
    for side in (both.prefill, both.decode):
        assert side.exchange.handing.num_kept == 0
        assert not side.engine.core.scheduler.check_integrity()


def abort(side: Stepped, request_id: str) -> None:
    side.outside.take([Abort(request_ids=(request_id,))])
    ended = side.engine.core.abort([request_id])
    assert [one.finish_reason for one in ended] == [FinishReason.ABORT]
    none = StepOutputs(step=-1, request_ids=[], token_ids=NO_INTS, events=tuple(ended))
    side.emit(Outputs(outputs=none, stats=side.engine.core.stats()))


@contextmanager
def probing(folder: Path) -> Iterator[Stepped]:
    probe = Stepped(folder)
    try:
        yield probe
    finally:
        probe.close()
