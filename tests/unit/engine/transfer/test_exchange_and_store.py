"""A prefill and a decode engine that share a KV store: what comes from where, and what is left.

Both engines are stepped by hand, in turn, so that a test decides what happens meanwhile.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.kv_transfer import Failure, KVTransfer
from quire.base.records import NO_INTS, Request, StepOutputs
from quire.engine.kv_store import costs
from quire.engine.process.messages import Abort, Outputs, Submit
from quire.engine.transfer.exchange import KVExchange
from quire.kv_store.int8 import Int8Encoding
from quire.kv_store.level import Bytes, Fetched
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.kv_store.test_store_client import (
    BLOCK,
    GIVE_UP_S,
    NUM_BLOCKS,
    HungStore,
    Node,
    files,
    prompt,
    request_of,
)

TRANSFER = "ab" * 16
HEAD_DIM = 16  # of the model
NUM_STORED = 4  # blocks that the store has where it has a part of a prompt


class Side(Node):
    """An engine with a role and a store. Requests pass its exchange."""

    @property
    def exchange(self) -> KVExchange:
        assert self.engine.outside is not None
        assert self.engine.outside.exchange is not None
        return self.engine.outside.exchange

    @property
    def received(self) -> int:
        return self.exchange.stats().received_blocks_total

    @property
    def lost(self) -> dict[str, int]:
        return {name: count for name, count in self.exchange.stats().failures_total if count}

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing of a transfer, a fetch or a prompt is left."""
        transfer, client = self.exchange.stats(), self.client
        return not any(
            (
                *(transfer.leases, transfer.fetching, self.exchange.handing.num_kept),
                *(len(client.fetches), len(client.publishing), client.publishing.num_putting),
                *(len(client.claims), len(client.waiting.request_ids)),
                *(len(self.exchange.fetching.request_ids), self.engine.core.stats().blocks_used),
            )
        )

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.outside.take([Submit(requests=(request,))])
            self.engine.core.add((request,))

    def step(self) -> None:
        outputs = self.engine.core.step(self.clock.now_ms)
        self.emit(Outputs(outputs=outputs, stats=self.engine.core.stats()))
        for message in self.outside.take([]):  # what other engines have ordered
            if isinstance(message, Submit):
                self.engine.core.add(message.requests)
            elif isinstance(message, Abort):
                self._abort(message)
        self.num_steps += 1
        if outputs is None:
            time.sleep(0.002)

    def abort(self, request_id: str) -> None:
        message = Abort(request_ids=(request_id,))
        self.outside.take([message])
        self._abort(message)

    def _abort(self, message: Abort) -> None:
        ended = tuple(self.engine.core.abort(message.request_ids))
        none = StepOutputs(step=-1, request_ids=[], token_ids=NO_INTS, events=ended)
        self.emit(Outputs(outputs=none, stats=self.engine.core.stats()))

    def source(self, **changes: Any) -> KVTransfer:
        """Return where another engine finds what this one hands over."""
        offer = self.engine.card.transfer
        assert offer is not None
        transfer = KVTransfer(
            transfer_id=TRANSFER,
            hand_over=False,
            host=offer.host,
            port=offer.port,
            engine_id=offer.engine_id,
        )
        return replace(transfer, **changes)


def until(condition: Callable[[], bool], *sides: Side) -> None:
    """Step engines in turn."""
    deadline_s = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline_s, [(one.stats, one.exchange.stats()) for one in sides]
        for side in sides:
            side.step()


def quiet(*sides: Side) -> None:
    """Wait until nothing is left at either side."""
    until(lambda: all(side.is_quiet for side in sides), *sides)
    for side in sides:
        assert not side.engine.core.scheduler.check_integrity()


def answers(request: Request, side: Side, *others: Side) -> list[int]:
    """Return the tokens of a request that was submitted."""

    def ended() -> bool:
        outputs = side.outputs.get(request.request_id, [])
        return bool(outputs) and outputs[-1].finish_reason is not None

    until(ended, side, *others)
    return [int(one) for output in side.outputs.pop(request.request_id) for one in output.token_ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("both")
    write_tiny_llama(root / "model", seed=3, max_position_embeddings=512)
    (root / "key").write_text("a key of some length")
    (root / "key").chmod(0o600)
    return root


@pytest.fixture
def sides(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Side]]:
    """Return a function that starts an engine of a role."""
    made: list[Side] = []
    cores = os.sched_getaffinity(0)

    def start(role: str, **settings: Any) -> Side:
        os.sched_setaffinity(0, cores)  # of which rank 0 of another engine has taken some
        exchange = {
            "role": role,
            "kv_transfer_key_file": str(folder / "key"),
            "kv_transfer_size": "1MiB",
            "kv_transfer_timeout": 20.0,
        }
        model = settings.pop("model", folder / "model")
        made.append(Side(model, tmp_path / "kv", **{**exchange, **settings}))
        return made[-1]

    yield start
    for side in made:
        side.close()
    os.sched_setaffinity(0, cores)


def handed_over(request: Request) -> Request:
    """Return the request of a prefill engine."""
    return replace(
        request,
        request_id="handed over",
        group_id="handed over",
        sampling=replace(request.sampling, max_tokens=1),
        max_total_tokens=len(request.prompt_ids) + 1,
        transfer=KVTransfer(transfer_id=TRANSFER, hand_over=True),
    )


def partly_stored(
    prefill: Side,
    tmp_path: Path,
    ids: np.ndarray[Any, Any] | None = None,
    num_stored: int = NUM_STORED,
) -> tuple[list[int], list[Path]]:
    """Have a prompt computed and handed over, of which the store has the first blocks only.

    Return the answer to it, and the files of the other blocks, which are beside the store.
    """
    whole, block = request_of("whole", ids), prefill.engine.card.block_size
    prefill.answer(request_of("first", whole.prompt_ids[: num_stored * block + 3]))
    prefill.settle()
    stored = files(tmp_path / "kv")
    assert len(stored) == num_stored
    wanted = prefill.answer(whole)
    prefill.submit(handed_over(whole))
    until(lambda: not prefill.engine.core.has_work, prefill)
    prefill.settle()
    taken = []
    for file in files(tmp_path / "kv"):
        if file not in stored:
            taken.append(tmp_path / "taken" / file.parent.name / file.name)
            taken[-1].parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, taken[-1])
    assert len(taken) == len(whole.prompt_ids) // block - num_stored
    return wanted, taken


def test_a_prefix_comes_from_the_store_and_the_rest_over_the_link(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    wanted, _ = partly_stored(prefill, tmp_path)
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    assert answers(request, decode, prefill) == wanted
    assert decode.stats.fetched_blocks_total == NUM_STORED
    assert decode.received == NUM_BLOCKS - NUM_STORED
    assert decode.engine.core.stats().prefix_hit_tokens_total == NUM_BLOCKS * BLOCK
    quiet(prefill, decode)
    # The engine that computes a block puts it.
    assert decode.stats.put_blocks_total == decode.stats.claims_total == 0
    assert not decode.lost
    assert not decode.failures


@pytest.mark.parametrize(
    "layouts", [("tensor", "pipeline"), ("context", "context")], ids=" to ".join
)
def test_ranks_change_no_block(
    sides: Callable[..., Side], tmp_path: Path, layouts: tuple[str, str]
) -> None:
    """Where positions are divided, both sides divide them alike, and blocks are longer."""
    divided = {"hidden_size": 68, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_tiny_llama(tmp_path / "divided", seed=4, max_position_embeddings=1536, **divided)
    prefill, decode = (
        sides(
            role,
            model=model,
            threads=2,
            max_num_batched_tokens=256,
            kv_cache_memory="2MiB",
            **{f"{layout}_parallel_size": 2},
        )
        for role, layout in zip(("prefill", "decode"), layouts, strict=True)
    )
    block = prefill.engine.card.block_size
    num_blocks = 2 if block > BLOCK else NUM_BLOCKS
    ids = prompt(num_tokens=num_blocks * block + 5)
    wanted, _ = partly_stored(prefill, tmp_path, ids, num_stored=num_blocks // 2)
    decode.submit(request := replace(request_of("a", ids), transfer=prefill.source()))
    assert answers(request, decode, prefill) == wanted
    assert decode.stats.fetched_blocks_total == num_blocks // 2
    assert decode.received == num_blocks // 2
    quiet(prefill, decode)
    whole = sides("both", model=model, max_num_batched_tokens=256)
    assert whole.answer(request_of("a", ids)) == wanted


def test_a_prompt_that_is_stored_ends_the_lease_of_its_transfer(
    sides: Callable[..., Side],
) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    wanted = prefill.answer(request_of("whole"))
    prefill.submit(handed_over(request_of("whole")))
    until(lambda: not prefill.engine.core.has_work, prefill)
    prefill.settle()
    assert prefill.exchange.stats().leases == 1
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    assert answers(request, decode, prefill) == wanted
    assert (decode.stats.fetched_blocks_total, decode.received) == (NUM_BLOCKS, 0)
    quiet(prefill, decode)


def test_a_prefill_engine_hands_over_what_it_has_from_the_store(
    sides: Callable[..., Side],
) -> None:
    first, prefill, decode = (
        sides("both"),
        sides("prefill"),
        sides("decode", kv_store_fetch="never"),
    )
    wanted = first.answer(request_of("whole"))
    first.settle()
    prefill.submit(handed_over(request_of("whole")))
    until(lambda: not prefill.engine.core.has_work, prefill)
    assert prefill.stats.fetched_blocks_total == NUM_BLOCKS
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    assert answers(request, decode, prefill) == wanted
    assert decode.received == NUM_BLOCKS
    quiet(first, prefill, decode)
    assert prefill.stats.put_blocks_total == 0  # the store has them


def test_by_cost_the_faster_of_store_and_link_is_asked(
    sides: Callable[..., Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "MIN_ASK_MS", GIVE_UP_S * 1000)  # a lookup is never too slow
    prefill, decode = sides("prefill"), sides("decode", kv_store_fetch="cost")
    wanted, _ = partly_stored(prefill, tmp_path)
    decode.client.costs.lookup_ms = 0.0
    decode.client.costs.block_ms = [1e6]
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    assert answers(request, decode, prefill) == wanted
    assert (decode.stats.fetched_blocks_total, decode.received) == (0, NUM_BLOCKS)
    assert decode.client.costs.block_ms[0] < 1e6  # it is tried again in the end
    quiet(prefill, decode)


def test_what_a_link_does_not_bring_is_looked_up_again(
    sides: Callable[..., Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill engine that dies may have put its blocks meanwhile."""
    prefill, decode = sides("prefill"), sides("decode")
    wanted, taken = partly_stored(prefill, tmp_path)
    source = prefill.source()
    prefill.close()
    look_again = decode.client.waiting.look_again

    def put_back(request_id: str) -> None:
        for file in taken:
            if file.exists():
                shutil.move(file, tmp_path / "kv" / "blocks" / file.parent.name / file.name)
        look_again(request_id)

    monkeypatch.setattr(decode.client.waiting, "look_again", put_back)
    request = replace(request_of("a"), transfer=source)
    decode.submit(request)
    assert answers(request, decode) == wanted
    assert (decode.stats.fetched_blocks_total, decode.received) == (NUM_BLOCKS, 0)
    assert decode.lost == {Failure.UNREACHABLE: 1}
    quiet(decode)


def test_what_neither_has_is_computed_and_put(sides: Callable[..., Side], tmp_path: Path) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    wanted, taken = partly_stored(prefill, tmp_path)
    source = prefill.source()
    prefill.close()
    request = replace(request_of("a"), transfer=source)
    decode.submit(request)
    assert answers(request, decode) == wanted
    quiet(decode)
    assert decode.stats.fetched_blocks_total == NUM_STORED
    assert decode.stats.put_blocks_total == len(taken)


def test_a_peer_computes_and_claims_what_is_not_stored(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    """An engine that asks a peer claims nothing, or the peer would wait for it."""
    prefill = sides("prefill")
    wanted, _ = partly_stored(prefill, tmp_path)
    offer = prefill.engine.card.transfer
    assert offer is not None
    peer = {"kv_transfer_peer": (f"{offer.host}:{offer.port}",), "kv_transfer_fetch": "always"}
    decode = sides("decode", **peer)
    prefill.engine.core.scheduler.flush_cache()
    prefill.outside.clear()
    decode.submit(request := request_of("a"))
    assert answers(request, decode, prefill) == wanted
    assert decode.stats.fetched_blocks_total == NUM_STORED
    assert decode.received == NUM_BLOCKS - NUM_STORED
    assert decode.stats.claims_total == decode.stats.waited_total == 0
    assert prefill.stats.waited_total == 0
    quiet(prefill, decode)
    assert len(files(tmp_path / "kv")) == NUM_BLOCKS  # put by the engine that computed them


def test_without_a_peer_that_answers_what_is_computed_is_claimed(
    sides: Callable[..., Side],
) -> None:
    decode = sides("decode", kv_transfer_peer=("127.0.0.1:1",), kv_transfer_fetch="always")
    for name in ("a", "b"):  # the first one finds out that there is none
        decode.submit(request := request_of(name, prompt(len(name) + ord(name))))
        answers(request, decode)
    quiet(decode)
    assert decode.lost == {Failure.UNREACHABLE: 1, Failure.NO_PEER: 1}
    assert decode.stats.claims_total == 2
    assert decode.stats.put_blocks_total == 2 * NUM_BLOCKS


def test_an_aborted_request_ends_the_lease_before_its_lookup_has_ended(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    partly_stored(prefill, tmp_path)
    decode.submit(replace(request_of("a"), transfer=prefill.source()))
    decode.abort("a")
    quiet(prefill, decode)
    assert decode.received == 0


def test_a_flush_in_the_middle_gives_no_stale_block(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    wanted, _ = partly_stored(prefill, tmp_path)
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    until(lambda: decode.exchange.stats().fetching > 0 or decode.received > 0, decode)
    decode.engine.core.scheduler.flush_cache()
    decode.outside.clear()
    assert answers(request, decode, prefill) == wanted
    quiet(prefill, decode)
    prefill.engine.core.scheduler.flush_cache()
    prefill.outside.clear()
    quiet(prefill)


def test_a_pair_with_int8_answers_from_the_rounded_blocks(sides: Callable[..., Side]) -> None:
    """What comes from the store is each computed block, rounded as the scheme says, and no more; a
    link brings computed blocks. An engine that has not opted in gets neither."""
    bf16: dict[str, Any] = {"kv_cache_dtype": "bf16"}
    int8 = {**bf16, "kv_store_encoding": "int8"}
    request = request_of("whole")
    plain = sides("both", **bf16)
    exact = plain.answer(request)
    plain.settle()
    keys, computed = stored_blocks(plain, request)
    rounded = [through_int8(plain, raw) for raw in computed]
    assert not np.array_equal(rounded, computed)
    level = plain.client._shared
    for key in keys:
        level.store.remove(key)
    assert level.put(keys, rounded) == [True] * NUM_BLOCKS
    reading = sides("both", **bf16)
    promised = reading.answer(request)
    assert reading.stats.fetched_blocks_total == NUM_BLOCKS

    prefill = sides("prefill", **int8)
    prefill.submit(handed_over(request))
    until(lambda: not prefill.engine.core.has_work, prefill)
    prefill.settle()
    assert prefill.stats.fetched_blocks_total == 0
    source = prefill.source()
    by_store, by_link = sides("decode", **int8), sides("decode", **int8, kv_store_fetch="never")
    by_link.submit(given := replace(request_of("a"), transfer=source))
    assert answers(given, by_link, prefill) == exact
    assert (by_link.stats.fetched_blocks_total, by_link.received) == (0, NUM_BLOCKS)
    by_store.submit(given := replace(request_of("b"), transfer=source))
    assert answers(given, by_store, prefill) == promised
    assert (by_store.stats.fetched_blocks_total, by_store.received) == (NUM_BLOCKS, 0)
    _, arrived = stored_blocks(by_store, request)
    assert np.array_equal(arrived, rounded)
    quiet(prefill, by_store, by_link)


def stored_blocks(side: Side, request: Request) -> tuple[tuple[bytes, ...], list[Bytes]]:
    """Return the digests of a prompt's blocks, and what the store gives an engine for them."""
    hand_overs = side.engine.core.scheduler.hand_overs
    assert hand_overs is not None
    keys = hand_overs.chain(request, request.prompt_ids).keys
    blocks = [np.empty(side.engine.card.block_bytes, np.uint8) for _ in keys]
    assert side.client._shared.fetch(keys, blocks) == [Fetched.WHOLE] * NUM_BLOCKS
    return keys, blocks


def through_int8(side: Side, raw: Bytes) -> Bytes:
    """Return a block as it comes back from 8-bit integers."""
    encoding = Int8Encoding(side.engine.card.block_bytes, HEAD_DIM)
    payload, found = np.empty(encoding.payload_bytes, np.uint8), np.empty_like(raw)
    assert encoding.encode(raw, payload)
    encoding.decode(payload, found)
    return found


def test_blocks_of_an_encoded_store_are_not_handed_to_an_engine_without_it(
    sides: Callable[..., Side],
) -> None:
    bf16: dict[str, Any] = {"kv_cache_dtype": "bf16"}
    prefill = sides("prefill", kv_store_encoding="int8", **bf16)
    decode = sides("decode", **bf16)
    prefill.submit(handed_over(request_of("whole")))
    until(lambda: not prefill.engine.core.has_work, prefill)
    prefill.settle()
    request = replace(request_of("a"), transfer=prefill.source())
    decode.submit(request)
    found = answers(request, decode, prefill)
    assert (decode.stats.fetched_blocks_total, decode.received) == (0, 0)
    assert decode.lost == {Failure.REFUSED: 1}
    assert found == sides("both", **bf16, kv_store_fetch="never").answer(request_of("b"))


def test_a_store_that_hangs_delays_the_link_for_a_limited_time(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = sides("prefill")
    wanted = prefill.answer(request_of("whole"))
    prefill.submit(handed_over(request_of("whole")))
    until(lambda: not prefill.engine.core.has_work, prefill)
    monkeypatch.setattr("quire.engine.assembly.kv_store.DirectoryStore", HungStore)
    HungStore.released.clear()
    decode = sides("decode", kv_store_timeout=0.2)
    decode.submit(request := replace(request_of("a"), transfer=prefill.source()))
    assert answers(request, decode, prefill) == wanted
    assert (decode.stats.fetched_blocks_total, decode.received) == (0, NUM_BLOCKS)
    until(lambda: decode.stats.breaker == "open", decode)
    HungStore.released.set()
    quiet(prefill, decode)


def test_a_disk_tier_is_a_level_of_a_decode_engine(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    disk = {"kv_tier_path": str(tmp_path / "disk"), "kv_tier_size": "4MiB"}
    one = sides("decode", **disk)
    wanted = one.answer(request_of("a"))
    one.settle()
    one.close()
    shutil.rmtree(tmp_path / "kv" / "blocks")
    again = sides("decode", **disk)
    assert again.answer(request_of("b")) == wanted
    assert again.stats.disk_fetched_blocks_total == NUM_BLOCKS
    assert again.stats.fetched_blocks_total == again.received == 0


def test_requests_at_once_share_what_comes_from_both(
    sides: Callable[..., Side], tmp_path: Path
) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    wanted, _ = partly_stored(prefill, tmp_path)
    requests = [replace(request_of(f"b{number}"), transfer=prefill.source()) for number in range(4)]
    decode.submit(*requests)
    assert [answers(one, decode, prefill) for one in requests] == [wanted] * 4
    assert decode.stats.fetched_blocks_total == NUM_STORED
    assert decode.received == NUM_BLOCKS - NUM_STORED
    quiet(prefill, decode)


def test_without_room_what_fits_is_fetched(sides: Callable[..., Side], tmp_path: Path) -> None:
    prefill = sides("prefill")
    wanted, _ = partly_stored(prefill, tmp_path)
    block_bytes = prefill.engine.card.block_bytes
    small = {"kv_transfer_size": 3 * block_bytes, "kv_store_buffer_size": 3 * block_bytes}
    decode = sides("decode", **small)
    decode.submit(request := replace(request_of("a"), transfer=prefill.source()))
    assert answers(request, decode, prefill) == wanted
    assert decode.stats.fetched_blocks_total == NUM_STORED
    assert decode.received == 2
    assert decode.lost == {Failure.NO_ROOM: 1}
    quiet(prefill, decode)
