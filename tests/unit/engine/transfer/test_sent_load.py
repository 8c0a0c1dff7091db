"""SentLoad: what a prefill engine says of its queue between two steps, alone and in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import OverloadedError
from quire.base.prefill_load import PrefillLoad
from quire.engine.process.messages import Refused, Submit, fault_of
from quire.engine.transfer.sent_load import SentLoad
from tests.unit.engine.transfer.test_exchange import BLOCK, NUM_BLOCKS, Stepped, folder, request_of
from tests.unit.engine.transfer.test_placement import FakeOwn

__all__ = ["folder"]

# A millisecond a token, in steps that cost nothing else.
SPEED = PrefillLoad(token_ms=1.0, step_tokens=1000, is_measured=True)
TRANSFER = bytes(16)


def sent_load(own: FakeOwn) -> SentLoad:
    return SentLoad(own)  # type: ignore[arg-type]


def test_a_prompt_counts_once_from_its_order_until_the_load_is_noted() -> None:
    own = FakeOwn(SPEED)
    sent = sent_load(own)
    sent.order("a", 100)
    assert sent.now().queue_ms == 100.0
    sent.take("a", 60, 100)  # the rest is cached
    assert sent.now().queue_ms == 40.0
    sent.order("b", 10)
    assert sent.now().queue_ms == 50.0
    own.load = replace(SPEED, queue_ms=30.0)  # of `a` 10 tokens are computed
    sent.note()
    assert sent.now().queue_ms == 40.0
    sent.take("b", 0, 10)
    assert sent.now().queue_ms == 40.0
    sent.drop("b")
    assert sent.now().queue_ms == 30.0


def test_prompts_count_nothing_while_their_times_are_guesses() -> None:
    sent = sent_load(FakeOwn(replace(SPEED, token_ms=1e6, is_measured=False)))
    sent.order("a", 100)
    assert sent.now().queue_ms == 0.0


@pytest.fixture
def prefill(folder: Path) -> Iterator[Stepped]:
    """An engine with a fake load of its own, which is that of no prompt."""
    made = Stepped(folder)
    made.exchange.handing._sent = sent_load(FakeOwn(SPEED))
    yield made
    made.close()


def test_an_engine_counts_what_is_ordered_and_taken_until_a_step_ends(prefill: Stepped) -> None:
    handing, tokens = prefill.exchange.handing, np.arange(3, 3 + 3 * BLOCK, dtype="<i4")
    handing.prefill(TRANSFER, "", tokens.tobytes())
    assert handing.load().queue_ms == len(tokens)
    (message,) = prefill.outside.take([])
    assert isinstance(message, Submit)
    assert handing.load().queue_ms == len(tokens)
    prefill.engine.core.add(message.requests)
    prefill.step()
    assert handing.load().queue_ms == 0.0
    prefill.until(lambda: not prefill.engine.core.has_work, steps=True)
    # Its blocks are found, so that a second one computes nothing of them.
    handing.prefill(bytes(range(16)), "", tokens.tobytes())
    prefill.outside.take([])
    assert handing.load().queue_ms == 0.0


def test_a_refused_prompt_counts_no_more(prefill: Stepped) -> None:
    handing = prefill.exchange.handing
    prefill.outside.take([Submit(requests=(request_of("one"),))])
    assert handing.load().queue_ms == NUM_BLOCKS * BLOCK + 5
    prefill.emit(Refused(request_ids=("one",), fault=fault_of(OverloadedError("full"))))
    assert handing.load().queue_ms == 0.0
