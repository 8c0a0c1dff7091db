"""Events of a stream: equal bytes on every code path, and joined writes of waiting events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.api.generation.generate import Envelope, StreamOptions
from quire.api.openai import chat, completions
from quire.api.openai.chat_fields import ReturnedFields
from quire.api.openai.dialect import OPENAI
from quire.api.streaming.event_stream import Events, Writer
from quire.base.errors import QuireError, WorkerError
from quire.base.sampling_params import SamplingParams
from quire.obs.metrics import Metrics
from tests.unit.api.fake_engine import FakeEngine

ENVELOPE = Envelope(id="cmpl-1", created_s=1_700_000_000, model='a "model"', fingerprint="fp_1")
TEXTS = st.text(min_size=0, max_size=6) | st.sampled_from(['"', "\\", "\0text\0", "\n\n", "猫"])


def _prompt(n: int, echo: str = "") -> Prompt:
    return Prompt(token_ids=[1, 2], sampling=SamplingParams(n=n, max_tokens=40), echo=echo)


def _completions(n: int, *, usage: bool, echo: str = "", ids: bool = False) -> Writer:
    return completions.CompletionWriter(
        ENVELOPE,
        [_prompt(n, echo=echo)],
        num_top=None,
        num_prompt_top=None,
        special_ids=(),
        returns_ids=ids,
        options=StreamOptions(include_usage=usage),
    )


def _chat(n: int, *, usage: bool, echo: str, ids: bool = False) -> Writer:
    returned = ReturnedFields(prompt_ids=[1, 2] if ids else None, num_choices=n)
    return chat.ChatWriter(ENVELOPE, None, returned, StreamOptions(include_usage=usage))


def _writes(engine: FakeEngine, writer: Writer, prompt: Prompt) -> list[tuple[list[bytes], bool]]:
    """Return what `write` passes on, call by call; an error ends it."""
    writes: list[tuple[list[bytes], bool]] = []

    async def put(events: list[bytes], is_last: bool) -> None:
        writes.append((events, is_last))

    async def run() -> None:
        answers = ChoiceStreams(engine, Metrics(), [prompt], "cmpl-1")
        try:
            await Events(answers, writer, OPENAI, "cmpl-1").write(put)
        except QuireError as error:
            writes.append(([str(error).encode()], True))

    asyncio.run(run())
    return writes


@pytest.mark.parametrize("writer", [_completions, _chat])
@given(
    script=st.lists(TEXTS, min_size=1, max_size=8),
    n=st.integers(1, 3),
    usage=st.booleans(),
    ids=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_events_are_the_writers_chunks_of_each_delta(
    writer: Any, script: list[str], n: int, usage: bool, ids: bool
) -> None:
    twin, chunks = writer(n, usage=usage, echo="so ", ids=ids), []

    class Overheard(FakeEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            async for delta in super().generate(*args, **options):
                chunks.extend(twin.of_delta(0, delta))
                yield delta

    writes = _writes(
        Overheard(*script), writer(n, usage=usage, echo="so ", ids=ids), _prompt(n, echo="so ")
    )
    events = [event for handed, _ in writes for event in handed]
    lines = [event.split(b"\n")[1].removeprefix(b"data: ") for event in events]
    assert lines[: len(chunks)] == [msgspec.json.encode(chunk) for chunk in chunks]
    assert len(lines) == len(chunks) + usage + 1
    assert [event.split(b"\n")[0] for event in events] == [
        b"id: cmpl-1:%d" % number for number in range(1, len(events) + 1)
    ]


class Backlogged(FakeEngine):
    """Report waiting deltas until `waits` have been read."""

    waits = 0

    def num_waiting(self, request_id: str) -> int:
        return max(self.waits - self.num_deltas, 0)


def _texts(handed: list[bytes]) -> str:
    chunks = [json.loads(event.split(b"data: ")[1]) for event in handed if b"{" in event]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_waiting_deltas_are_sent_together_and_the_end_with_the_last() -> None:
    engine = Backlogged(*"abcdef")
    engine.waits = 4
    writes = _writes(engine, _completions(1, usage=False), _prompt(1))
    assert [(_texts(handed), is_last) for handed, is_last in writes] == [
        ("abcd", False),
        ("e", False),
        ("f", True),
    ]
    assert writes[-1][0][-1].endswith(b"data: [DONE]\n\n")


def test_each_delta_is_sent_at_once_if_none_waits() -> None:
    writes = _writes(FakeEngine(*"abc"), _completions(1, usage=False), _prompt(1))
    assert [_texts(handed) for handed, _ in writes] == ["a", "b", "c"]


def test_a_long_backlog_is_sent_in_parts() -> None:
    engine = Backlogged(*"a" * 200)
    engine.waits = 200
    writes = _writes(engine, _completions(1, usage=False), _prompt(1))
    assert [len(_texts(handed)) for handed, _ in writes] == [64, 64, 64, 8]


def test_deltas_before_an_error_are_sent_before_it() -> None:
    engine = Backlogged(*"abcd")
    engine.waits, engine.fails_after, engine.fails_with = 9, 2, WorkerError("the engine is gone")
    writes = _writes(engine, _completions(1, usage=False), _prompt(1))
    assert _texts(writes[0][0]) == "ab"
    assert writes[1:] == [([b"the engine is gone"], True)]


def test_deltas_with_calls_or_logprobs_are_written_separately() -> None:
    def writer(*, num_top: int | None, ids: bool = False) -> completions.CompletionWriter:
        return completions.CompletionWriter(
            ENVELOPE,
            [_prompt(1)],
            num_top=num_top,
            num_prompt_top=None,
            special_ids=(),
            returns_ids=ids,
            options=StreamOptions(),
        )

    assert writer(num_top=0).of_text(0, 0, "a") is None
    assert writer(num_top=None, ids=True).of_text(0, 0, "a") is None
    assert writer(num_top=None).of_text(0, 0, "a") is not None
