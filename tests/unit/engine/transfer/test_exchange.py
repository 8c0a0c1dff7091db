"""KVExchange in an engine that is stepped by hand: overlap, leases, and an engine without it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import Clock
from quire.base.kv_transfer import KVTransfer
from quire.base.records import NO_INTS, Request, StepOutputs
from quire.base.sampling_params import SamplingParams
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.process.messages import Abort, FromEngine, Leave, Outputs, Submit
from quire.engine.transfer.exchange import KVExchange
from tests.tiny_models import write_tiny_llama

NUM_BLOCKS = 10
BLOCK = 16
TRANSFER = "ab" * 16
GIVE_UP_S = 30.0


class Stepped:
    """A prefill engine, and what the loop around it does."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = engine_config(
            {
                "model": str(folder / "model"),
                "threads": 1,
                "max_num_seqs": 2,
                "max_num_batched_tokens": 2 * BLOCK,
                "kv_cache_memory": "1MiB",
                "kv_touch_ahead": 0,
                "role": "prefill",
                "kv_transfer_key_file": str(folder / "key"),
                "kv_transfer_size": "1MiB",
                **settings,
            }
        )
        self.clock = Clock()
        self.engine: Engine = assemble(config, clock=self.clock, report=lambda what, **_: None)
        assert self.engine.outside is not None
        assert self.engine.outside.exchange is not None
        self.outside = self.engine.outside.blocks
        self.exchange: KVExchange = self.engine.outside.exchange
        self.said: list[FromEngine] = []
        self.emit = self.outside.watch(self.said.append)

    def submit(self, request: Request) -> None:
        self.outside.take([Submit(requests=(request,))])
        self.engine.core.add((request,))

    def step(self) -> None:
        outputs = self.engine.core.step(self.clock.now_ms)
        self.emit(Outputs(outputs=outputs, stats=self.engine.core.stats()))
        self.outside.take([])

    def until(self, condition: Callable[[], bool], *, steps: bool = False) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline_s
            if steps:
                self.step()
            else:
                time.sleep(0.005)

    def num_kept(self) -> int:
        """Return the blocks that leases have."""
        return sum(len(lease.places) for lease in self.exchange.handing._leases._open.values())

    def close(self) -> None:
        self.outside.close()
        self.engine.core.runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exchange")
    write_tiny_llama(root / "model", seed=3, max_position_embeddings=512)
    (root / "key").write_text("a key of some length")
    (root / "key").chmod(0o600)
    return root


@pytest.fixture
def prefill(folder: Path) -> Iterator[Stepped]:
    made = Stepped(folder)
    yield made
    made.close()


def test_blocks_of_a_step_leave_with_the_next_plan_however_large_it_is_by_default(
    folder: Path,
) -> None:
    """Half of what may be on its way at once is saved with a plan."""
    large = Stepped(folder, block_size=4, max_num_seqs=300, max_num_batched_tokens=None)
    assert large.engine.step_tokens == 600
    assert large.exchange.handing._tier.max_saving == 2 * 600 // 4
    large.close()


def request_of(name: str = "one", *, transfer_id: str = TRANSFER) -> Request:
    ids = np.arange(3, 3 + NUM_BLOCKS * BLOCK + 5, dtype=np.int32) % 90
    return Request(
        request_id=name,
        group_id=name,
        stream=0,
        prompt_ids=ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0).resolve(),
        stop_ids=(),
        max_total_tokens=len(ids) + 1,
        arrival_ms=0.0,
        transfer=KVTransfer(transfer_id=transfer_id, hand_over=True),
    )


def test_blocks_are_kept_while_the_rest_of_the_prompt_is_computed(prefill: Stepped) -> None:
    prefill.submit(request_of())
    for _ in range(3):
        prefill.step()
    assert prefill.engine.core.scheduler.stats().running == 1  # its prompt takes six steps
    # What two steps have computed is saved by the third plan, beside its own chunk.
    seen = 0
    while prefill.engine.core.scheduler.stats().running:
        prefill.step()
        seen = max(seen, prefill.num_kept())
        time.sleep(0.01)
    assert seen > 0
    prefill.until(lambda: prefill.num_kept() == NUM_BLOCKS, steps=True)


def test_cached_blocks_are_handed_over_without_computing_them(prefill: Stepped) -> None:
    prefill.submit(replace(request_of("first"), transfer=None))
    prefill.until(lambda: not prefill.engine.core.has_work, steps=True)
    steps = prefill.engine.core.steps.num_submitted
    prefill.submit(request_of("second"))
    prefill.until(lambda: prefill.num_kept() == NUM_BLOCKS, steps=True)
    assert prefill.engine.core.steps.num_submitted > steps
    assert prefill.engine.core.stats().prefix_hit_tokens_total >= NUM_BLOCKS * BLOCK


def test_two_leases_of_one_prompt_share_its_blocks(prefill: Stepped) -> None:
    prefill.submit(request_of("first"))
    prefill.submit(request_of("second", transfer_id="cd" * 16))
    prefill.until(lambda: prefill.num_kept() == 2 * NUM_BLOCKS, steps=True)
    assert prefill.engine.core.stats().tier_blocks_used == NUM_BLOCKS


def test_an_aborted_prompt_keeps_what_it_had_and_loses_the_rest(prefill: Stepped) -> None:
    prefill.submit(request_of())
    for _ in range(3):
        prefill.step()
    prefill.outside.take([Abort(request_ids=("one",))])
    ended = prefill.engine.core.abort(["one"])
    assert ended[0].finish_reason is not None
    none = StepOutputs(step=-1, request_ids=[], token_ids=NO_INTS, events=tuple(ended))
    prefill.emit(Outputs(outputs=none, stats=prefill.engine.core.stats()))
    lease = next(iter(prefill.exchange.handing._leases._open.values()))
    prefill.until(lambda: not lease.pending, steps=True)
    assert lease.is_complete
    assert lease.lost
    assert len(lease.places) + len(lease.lost) == NUM_BLOCKS


def test_a_client_that_is_gone_fails_its_leases(prefill: Stepped) -> None:
    prefill.submit(request_of("7/one"))
    prefill.step()
    prefill.outside.take([Leave(client=7)])
    lease = next(iter(prefill.exchange.handing._leases._open.values()))
    assert lease.is_complete
    assert not lease.pending
    assert lease.failure


def test_a_memory_that_fails_ends_all_leases(prefill: Stepped) -> None:
    """The map forgets all places, so what comes next may be written where another engine reads."""
    prefill.submit(request_of())
    prefill.until(lambda: prefill.num_kept() == NUM_BLOCKS, steps=True)
    (lease,) = prefill.exchange.handing._leases._open.values()
    mover: Any = prefill.outside._mover
    mover._ask(lambda: 1 // 0)
    prefill.step()
    assert prefill.engine.core.stats().tier_blocks_used == 0
    assert not lease.valid
    assert not prefill.exchange.handing.num_kept


def test_a_flush_ends_all_leases(prefill: Stepped) -> None:
    prefill.submit(request_of())
    prefill.until(lambda: prefill.num_kept() == NUM_BLOCKS, steps=True)
    prefill.engine.core.scheduler.flush_cache()
    prefill.outside.clear()
    prefill.outside.take([])
    assert prefill.exchange.stats().leases == 0
    assert not prefill.engine.core.scheduler.check_integrity()


def test_requests_of_other_engines_are_not_shown_to_clients(prefill: Stepped) -> None:
    tokens = np.arange(3, 3 + 2 * BLOCK, dtype="<i4").tobytes()
    prefill.exchange.handing.prefill(bytes.fromhex(TRANSFER), "", tokens)
    messages = prefill.outside.take([])
    assert len(messages) == 1
    assert isinstance(messages[0], Submit)
    prefill.engine.core.add(messages[0].requests)
    prefill.until(lambda: prefill.num_kept() == 2, steps=True)
    shown = [one for one in prefill.said if isinstance(one, Outputs) and one.outputs]
    assert not [event for one in shown for event in one.outputs or ()]
    prefill.exchange.handing.cancel(bytes.fromhex(TRANSFER))
    prefill.outside.take([])
    assert prefill.exchange.stats().leases == 0


def test_an_engine_that_exchanges_nothing_imports_nothing_of_it() -> None:
    code = (
        "import sys; from quire import LLM; LLM(threads=1).generate('a'); "
        "names = ('quire.transfer', 'quire.engine.transfer', 'quire.engine.assembly.exchange', "
        "'quire.cache.exchange_map', 'quire.scheduler.prefill.hand_over'); "
        "print(*(one for one in sys.modules if one.startswith(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # quire.transfer.store is the type that the runner's mover names.
    assert set(done.stdout.split()) <= {"quire.transfer", "quire.transfer.store"}
