"""ContinuedStream: text, ids, log-probabilities and counts go on where the original was."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.records import FinishReason, Request, RequestOutput, TokenLogprobs
from quire.base.sampling_params import SamplingParams
from quire.engine.output.continued_stream import ContinuedStream
from quire.engine.output.output_stream import OutputStream, TextDelta, TextRules
from quire.text.tokenizer import Tokenizer
from tests.drawn import examples
from tests.unit.text.made_tokenizers import byte_level_json, made, metaspace_json


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return made(byte_level_json() if kind == "byte-level" else metaspace_json())


def _request(**sampling: Any) -> Request:
    return Request(
        request_id="r/0",
        group_id="r",
        stream=0,
        prompt_ids=np.array((0,), np.int32),
        sampling=SamplingParams(seed=7, **sampling),
        stop_ids=(1,),
        max_total_tokens=1000,
        arrival_ms=0.0,
    )


def _outputs(ids: Sequence[int], runs: Sequence[int], *, logprobs: bool) -> list[RequestOutput]:
    """Return the ids in runs of these lengths, repeated; the last has the finish reason."""
    outputs, place, at = [], 0, 0
    while place < len(ids) or not outputs:
        part = tuple(ids[place : place + runs[at % len(runs)]])
        place, at = place + len(part), at + 1
        shown = tuple(TokenLogprobs(token_id=id_, logprob=-float(id_)) for id_ in part)
        outputs.append(RequestOutput("r/0", part, shown if logprobs else ()))
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


def _pushed(stream: OutputStream, outputs: list[RequestOutput]) -> list[TextDelta]:
    """Push as OpenStreams does: single tokens of plain streams without an object."""
    found = []
    for output in outputs:
        if stream.is_plain and len(output.token_ids) == 1 and output.finish_reason is None:
            found.append(stream.push_token(output.token_ids[0], 0.0))
        else:
            found.append(stream.push(output))
    return [delta for delta in found if delta is not None]


def _ids(deltas: list[TextDelta]) -> list[int]:
    return [id_ for delta in deltas for id_ in delta.token_ids]


def _text(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


SETTINGS = {
    "stop": st.lists(st.sampled_from(["\n", "\n\n", "b", "猫", "a b", "\ufffd"]), max_size=3).map(
        tuple
    ),
    "min_tokens": st.integers(0, 6),
    "include": st.booleans(),
    "logprobs": st.booleans(),
    "runs": st.lists(st.integers(1, 4), min_size=1, max_size=4),
}


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_each_reported_place_is_continued_exactly(kind: str) -> None:
    """After any delta: its ids so far, and its held_tokens, say where the stream stands."""
    tokenizer = _tokenizer(kind)
    some = [*tokenizer.encode("a b\n\n猫🐫<tool>\n"), 0, 2, 9, 13, 200]

    @given(ids=st.lists(st.sampled_from(some), min_size=1, max_size=20), **SETTINGS)
    @settings(max_examples=examples(150), deadline=None)
    def check(
        ids: list[int],
        stop: tuple[str, ...],
        min_tokens: int,
        include: bool,
        logprobs: bool,
        runs: list[int],
    ) -> None:
        request = _request(
            stop=stop,
            min_tokens=min_tokens,
            include_stop_str_in_output=include and bool(stop),
            logprobs=0 if logprobs else None,
        )
        outputs = _outputs(ids, runs, logprobs=logprobs)
        whole = _pushed(OutputStream(tokenizer, request), outputs)
        for count, delta in enumerate(whole[:-1], 1):
            known, held = _ids(whole[:count]), delta.held_tokens
            again = replace(request, output_ids=np.array(known, np.int32))
            stream = ContinuedStream(tokenizer, again, TextRules(held_tokens=held))
            rest = _pushed(stream, _outputs(ids[len(known) :], [1, *runs], logprobs=logprobs))
            assert _text(whole[:count]) + _text(rest) == _text(whole)
            assert known + _ids(rest) == _ids(whole)
            before = [token for one in whole[:count] for token in one.logprobs]
            after = [token for one in rest for token in one.logprobs]
            assert before + after == [token for one in whole for token in one.logprobs]
            for name in ("finish_reason", "stop_reason", "num_output_tokens"):
                assert getattr(rest[-1], name) == getattr(whole[-1], name)
            firsts = [one.known is not None for one in rest]
            assert not any(firsts[1:])
            if rest[0].known is not None:
                assert rest[0].known.text == _text(whole[:count])
                assert rest[0].known.finish_reason is None

    check()


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_cut_at_any_token_yields_the_ids_and_text_after_it(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    some = [*tokenizer.encode("a b\n\n猫🐫"), 2, 9, 200]

    @given(
        ids=st.lists(st.sampled_from(some), min_size=2, max_size=16),
        stop=st.sampled_from([(), ("\n\n",), ("a b",), ("猫a",)]),
        data=st.data(),
    )
    @settings(max_examples=examples(150), deadline=None)
    def check(ids: list[int], stop: tuple[str, ...], data: st.DataObject) -> None:
        request = _request(stop=stop, logprobs=0)
        whole = _pushed(OutputStream(tokenizer, request), _outputs(ids, [1], logprobs=True))
        cut = data.draw(st.integers(1, len(ids) - 1))
        again = replace(request, output_ids=np.array(ids[:cut], np.int32))
        stream = ContinuedStream(tokenizer, again)
        rest = _pushed(stream, _outputs(ids[cut:], [1], logprobs=True))
        known = next((one.known for one in rest if one.known is not None), None)
        assert ("" if known is None else known.text) + _text(rest) == _text(whole)
        assert _ids(rest) == _ids(whole)[cut:]
        assert stream.finished
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].num_output_tokens == whole[-1].num_output_tokens

    check()


def test_known_tokens_with_a_whole_stop_string_end_the_answer_at_once() -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("a b\n\n")
    request = replace(_request(stop=("\n\n",)), output_ids=np.array(ids, np.int32))
    stream = ContinuedStream(tokenizer, request)
    last = stream.push(RequestOutput("r/0", (2,)))
    assert last is not None
    assert (last.text, last.token_ids, last.finish_reason) == ("", (), FinishReason.STOP)
    assert last.stop_reason == "\n\n"
    assert last.num_output_tokens == len(ids)
    assert stream.finished
    assert stream.wants_abort
    assert stream.push(RequestOutput("r/0", (2,))) is None


def test_more_held_tokens_than_the_answer_has_leave_nothing_but_its_end() -> None:
    """A client may send anything; it then gets an end, and no text twice."""
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("a b a b")
    stream = ContinuedStream(tokenizer, _request(), TextRules(held_tokens=1000))
    deltas = _pushed(stream, _outputs(ids, [1], logprobs=False))
    assert len(deltas) == 1
    assert deltas[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("held_tokens", [0, 1])
def test_a_stream_is_as_cheap_as_any_other_once_it_goes_on(held_tokens: int) -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("a b a b a b")
    is_plain = []
    samplings: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"stop": ("zebra",)}]
    for sampling in samplings:
        request = replace(_request(**sampling), output_ids=np.array(ids[:3], np.int32))
        stream = ContinuedStream(tokenizer, request, TextRules(held_tokens=held_tokens))
        assert not stream.is_plain, "the first delta has what was known"
        _pushed(stream, _outputs(ids[3:], [1], logprobs="logprobs" in sampling)[:-1])
        is_plain.append(stream.is_plain)
    assert is_plain == [True, False, False]
