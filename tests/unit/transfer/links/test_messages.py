"""Messages of a transfer connection: what was packed is read back, and nothing else is."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from quire.base.prefill_load import PrefillLoad
from quire.transfer.links.messages import (
    KINDS,
    MAX_TEXT_BYTES,
    Agent,
    AnyMessage,
    Beat,
    Block,
    Done,
    End,
    Fetch,
    Hello,
    Identity,
    Landed,
    Load,
    MessageError,
    Prefill,
    Proof,
    Refusal,
    Release,
    Segment,
)
from tests.cases import each_case

EXAMPLES: tuple[AnyMessage, ...] = (
    Hello(1, bytes(range(32))),
    Proof(b"p" * 32),
    Identity("abc", b"f" * 32, 16, 1 << 20, "box", "avx2", "bf16", ("shm", "tcp")),
    Refusal("because ä"),
    Prefill(b"t" * 16, "salt\0é", b"\1\0\0\0\2\0\0\0"),
    Fetch(b"t" * 16, (b"a" * 16, b"b" * 16), True),
    Block(3, (1 << 64) - 1, Block.INLINE),
    End(""),
    Segment(1 << 22, 7, 1 << 40, b"s" * 32),
    Beat(),
    Done(),
    Release(b"t" * 16),
    Agent(1 << 47, 1 << 40, b"metadata of NIXL"),
    Load(PrefillLoad(queue_ms=1.5, token_ms=0.25, step_tokens=512, is_measured=True)),
    Landed(1 << 20),
)


def test_the_examples_are_of_all_kinds() -> None:
    assert {type(one) for one in EXAMPLES} == set(KINDS.values())


@each_case("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_is_read_as_it_was_packed(message: AnyMessage) -> None:
    raw = message.pack()
    assert len(raw) <= message.max_bytes
    assert KINDS[message.kind].unpack(raw) == message


@each_case("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_cut_lengthened_and_random_payloads_are_message_errors_or_messages(
    message: AnyMessage,
) -> None:
    raw, kind, random = message.pack(), KINDS[message.kind], Random(message.kind)
    payloads = [raw[:cut] for cut in range(len(raw))] + [raw + b"x"]
    payloads += [random.randbytes(random.randrange(100)) for _ in range(300)]
    for payload in payloads:
        try:
            found = kind.unpack(payload)
        except MessageError:
            continue
        assert found.pack() == payload  # read as the one message that has these bytes


def test_long_texts_are_cut_when_packed_and_refused_when_read() -> None:
    assert len(Refusal("x" * 100_000).pack()) == MAX_TEXT_BYTES + 2
    assert Refusal.unpack(Refusal("ä" * 5000 + "x").pack()).reason == "ä" * (MAX_TEXT_BYTES // 2)
    assert Refusal.unpack(Refusal("x" + "ä" * 5000).pack()).reason[-1] == "ä"
    with pytest.raises(MessageError, match="at most"):
        Refusal.unpack(b"\xff\xff" + b"x" * 65535)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_load_has_finite_times(at: int, value: float) -> None:
    times_ms = [1.0] * 4
    times_ms[at] = value
    with pytest.raises(MessageError, match="a load has times"):
        Load.unpack(Load.LAYOUT.pack(*times_ms, 512, 1))
    with pytest.raises(MessageError, match="in steps of 0"):
        Load.unpack(Load.LAYOUT.pack(*[1.0] * 4, 0, 1))


def test_another_service_is_named_as_such() -> None:
    raw = Hello(1, b"n" * 32).pack()
    with pytest.raises(MessageError, match="no KV transfer port"):
        Hello.unpack(b"HTTP/1.1" + raw[8:])
    assert replace(Hello.unpack(raw), version=2).version == 2
