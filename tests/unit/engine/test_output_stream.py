"""OutputStream: its output depends on the tokens alone, and is counted as delivered."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.records import (
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import OutputStream, TextDelta, TextRules
from quire.text.tokenizer import Tokenizer
from tests.data import outside
from tests.drawn import examples
from tests.unit.text.made_tokenizers import byte_level_json, made, metaspace_json

EOS = 1


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return made(byte_level_json() if kind == "byte-level" else metaspace_json())


def _request(prompt: Sequence[int] = (0,), **sampling: Any) -> Request:
    return Request(
        request_id="r/2",
        group_id="r",
        stream=2,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(seed=7, **sampling),
        stop_ids=(EOS,),
        max_total_tokens=1000,
        arrival_ms=0.0,
    )


def _outputs(
    ids: Sequence[int],
    at: Sequence[int],
    *,
    reason: FinishReason = FinishReason.LENGTH,
    stop_id: int | None = None,
    logprobs: bool = False,
) -> list[RequestOutput]:
    """Return the ids divided at the places `at`; the last output carries the reason."""
    edges = [0, *sorted(min(place, len(ids)) for place in at), len(ids)]
    parts = [tuple(ids[low:high]) for low, high in itertools.pairwise(edges)]
    return [
        RequestOutput(
            request_id="r/2",
            token_ids=part,
            logprobs=tuple(
                TokenLogprobs(
                    token_id=id_, logprob=-float(id_), top=((id_, -float(id_)), (5, -9.0))
                )
                for id_ in (part if logprobs else ())
            ),
            finish_reason=reason if place == len(parts) - 1 else None,
            stop_id=stop_id if place == len(parts) - 1 else None,
        )
        for place, part in enumerate(parts)
    ]


def _run(tokenizer: Tokenizer, request: Request, outputs: list[RequestOutput]) -> list[TextDelta]:
    stream = OutputStream(tokenizer, request)
    deltas = [delta for output in outputs if (delta := stream.push(output)) is not None]
    assert stream.finished
    return deltas


def _whole(deltas: list[TextDelta]) -> tuple[Any, ...]:
    """Return everything that a reader of the stream knows at its end."""
    return (
        "".join(delta.text for delta in deltas),
        tuple(id_ for delta in deltas for id_ in delta.token_ids),
        tuple(token for delta in deltas for token in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
        deltas[-1].num_output_tokens,
    )


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_the_output_does_not_depend_on_the_division(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    some = [*tokenizer.encode("a b\n\n猫🐫<tool>\n"), 0, 2, 9, 13, 200]

    @given(
        ids=st.lists(st.sampled_from(some) | st.integers(2, 260), max_size=24),
        at=st.lists(st.integers(0, 24), max_size=10),
        stop=st.lists(st.sampled_from(["\n", "\n\n", "b", "猫", "a b", "\ufffd"]), max_size=3),
        min_tokens=st.integers(0, 6),
        include=st.booleans(),
        logprobs=st.booleans(),
        ended=st.booleans(),
    )
    @settings(max_examples=examples(500), deadline=None)
    def check(
        ids: list[int],
        at: list[int],
        stop: list[str],
        min_tokens: int,
        include: bool,
        logprobs: bool,
        ended: bool,
    ) -> None:
        if ended:
            ids = [*ids, EOS]
        request = _request(
            stop=tuple(stop),
            min_tokens=min_tokens,
            include_stop_str_in_output=include,
            logprobs=2 if logprobs else None,
        )
        cut = functools.partial(
            _outputs,
            ids,
            reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            stop_id=EOS if ended else None,
            logprobs=logprobs,
        )
        deltas = _run(tokenizer, request, cut(at))
        assert _whole(deltas) == _whole(_run(tokenizer, request, cut([])))
        assert _whole(deltas) == _whole(_run(tokenizer, request, cut(list(range(30)))))
        _check_counts(tokenizer, deltas, ids, logprobs)
        _check_text(tokenizer, request, deltas, ids, ended)

    check()


def _check_counts(
    tokenizer: Tokenizer, deltas: list[TextDelta], ids: list[int], logprobs: bool
) -> None:
    """Check that ids come in order, each once, and that counts match the delivered output."""
    delivered: tuple[int, ...] = ()
    for delta in deltas:
        delivered += delta.token_ids
        assert delta.num_output_tokens == len(delivered)
        assert len(delta.logprobs) == (len(delta.token_ids) if logprobs else 0)
        assert [token.token_id for token in delta.logprobs] in ([], list(delta.token_ids))
        assert delta.text or delta.finish_reason is not None
        shown = "".join(each.text for each in deltas[: deltas.index(delta) + 1])
        if delta.finish_reason is None:  # the text of delivered tokens is out
            assert len(tokenizer.decode(delivered).rstrip("\ufffd")) <= len(shown)
    assert delivered == tuple(ids[: len(delivered)])


def _check_text(
    tokenizer: Tokenizer, request: Request, deltas: list[TextDelta], ids: list[int], ended: bool
) -> None:
    """Check that the text is the decode, or the decode up to the first stop string after
    min_tokens.
    """
    sampling = request.sampling
    text, delivered, _, reason, stop_reason, _ = _whole(deltas)
    spoken = ids[:-1] if ended else ids
    if isinstance(stop_reason, str):
        assert reason == FinishReason.STOP
        assert stop_reason in sampling.stop
        assert len(delivered) > sampling.min_tokens
        ending = text if sampling.include_stop_str_in_output else text + stop_reason
        assert ending.endswith(stop_reason)
        assert tokenizer.decode(spoken).startswith(ending)
        assert not _completes(tokenizer, delivered[:-1], ending)
    else:
        assert text == tokenizer.decode(spoken)
        assert delivered == tuple(ids)
        for stop in sampling.stop:
            least = tokenizer.decode(spoken[: sampling.min_tokens])
            assert text.find(stop, len(least)) == -1


def _completes(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Return whether fewer tokens would have completed the same text."""
    return "\ufffd" not in text and tokenizer.decode(ids).startswith(text)


@pytest.mark.parametrize("in_vocabulary", ["special", "plain"])
def test_the_token_that_ended_it_is_counted_and_not_shown(in_vocabulary: str) -> None:
    tokenizer = _tokenizer("byte-level")
    stop_id = EOS if in_vocabulary == "special" else 299
    request = _request(stop_token_ids=(299,))
    ids = [*tokenizer.encode("hi"), stop_id]
    [delta] = _run(tokenizer, request, _outputs(ids, [], reason=FinishReason.STOP, stop_id=stop_id))
    assert delta.text == "hi"
    assert delta.token_ids == tuple(ids)
    assert delta.num_output_tokens == len(ids)
    assert delta.stop_reason == (None if stop_id == EOS else 299)


def test_a_stop_string_ends_the_stream_before_the_engine_does() -> None:
    tokenizer = _tokenizer("byte-level")
    stream = OutputStream(tokenizer, _request(stop=("!!",)))
    ids = tokenizer.encode("so! it!!")
    deltas = [stream.push(output) for output in _outputs(ids, list(range(20)))[:-1]]
    last = [delta for delta in deltas if delta is not None][-1]
    assert "".join(delta.text for delta in deltas if delta) == "so! it"
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "!!")
    assert stream.finished
    assert stream.wants_abort
    late = RequestOutput(request_id="r/2", token_ids=(50,), finish_reason=FinishReason.ABORT)
    assert stream.push(late) is None


def test_tokens_after_a_stop_string_are_neither_shown_nor_counted() -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("one.two.three")
    up_to = len(tokenizer.encode("one."))
    [delta] = _run(tokenizer, _request(stop=(".",)), _outputs(ids, []))
    assert delta.text == "one"
    assert delta.token_ids == tuple(ids[:up_to])
    assert delta.num_output_tokens == up_to


def test_a_stop_string_in_bytes_does_not_count_the_token_that_revealed_it() -> None:
    tokenizer = _tokenizer("metaspace")
    newline, word = 3 + 0x0A, tokenizer.token_id("▁the") or 0
    stream = OutputStream(tokenizer, _request(stop=("\n",)))
    delta = stream.push(RequestOutput(request_id="r/2", token_ids=(word, newline)))
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("the", (word,))
    delta = stream.push(RequestOutput(request_id="r/2", token_ids=(word,)))
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("", (newline,))
    assert delta.num_output_tokens == 2


def test_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("x.y.z.")
    [delta] = _run(tokenizer, _request(stop=(".",), min_tokens=3), _outputs(ids, []))
    assert delta.text == "x.y"
    assert delta.num_output_tokens == 4


def test_tokens_with_held_back_text_come_with_later_text() -> None:
    tokenizer = _tokenizer("byte-level")
    stream = OutputStream(tokenizer, _request(stop=("ab!",)))
    ids = tokenizer.encode("xab?", add_special_tokens=False)
    deltas = [stream.push(RequestOutput(request_id="r/2", token_ids=(id_,))) for id_ in ids]
    first, *between, last = deltas
    assert first is not None
    assert first.text == "x"
    assert between == [None] * len(between)
    assert last is not None
    assert (last.text, last.token_ids) == ("ab?", tuple(ids[1:]))


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH])
def test_held_back_text_is_emitted_at_the_end(reason: FinishReason) -> None:
    tokenizer = _tokenizer("byte-level")
    ids = [*tokenizer.encode("ab"), *tokenizer.encode("🐫")[:1]]
    stream = OutputStream(tokenizer, _request(stop=("b\ufffd\ufffd",)))
    stream.push(RequestOutput(request_id="r/2", token_ids=tuple(ids)))
    delta = stream.push(
        RequestOutput(request_id="r/2", token_ids=(), finish_reason=reason, error="row 3 failed")
    )
    assert delta is not None
    assert delta.text == "b\ufffd"
    assert (delta.finish_reason, delta.error) == (reason, "row 3 failed")
    assert not stream.wants_abort


def test_log_probabilities_come_as_text_and_bytes() -> None:
    tokenizer = _tokenizer("byte-level")
    ids = tokenizer.encode("🐫")
    [delta] = _run(tokenizer, _request(logprobs=2), _outputs(ids, [], logprobs=True))
    assert b"".join(token.raw for token in delta.logprobs).decode() == "🐫"
    assert all(token.logprob == -float(token.token_id) for token in delta.logprobs)
    assert [[top.token_id for top in token.top] for token in delta.logprobs] == [
        [id_, 5] for id_ in ids
    ]
    assert "\ufffd" in delta.logprobs[0].text


def test_a_continued_text_keeps_its_first_space_and_a_new_one_does_not() -> None:
    tokenizer = _tokenizer("metaspace")
    word = tokenizer.token_id("▁the") or 0
    for prompt, expected in (((1,), "the"), ((1, word), " the")):
        [delta] = _run(tokenizer, _request(prompt), _outputs([word], []))
        assert delta.text == expected
        assert delta.num_prompt_tokens == len(prompt)


def test_properties_of_the_request_are_passed_on() -> None:
    times = RequestTimes(
        arrival_ms=1.0, first_scheduled_ms=2.0, first_token_ms=3.0, last_token_ms=4.0
    )
    tokenizer = _tokenizer("byte-level")
    stream = OutputStream(tokenizer, _request())
    first = RequestOutput(request_id="r/2", token_ids=(40,), cached_tokens=16, times=times)
    delta = stream.push(first)
    assert delta is not None
    assert (delta.index, delta.seed, delta.cached_tokens, delta.times) == (2, 7, 16, times)
    delta = stream.push(
        RequestOutput(request_id="r/2", token_ids=(41,), finish_reason=FinishReason.LENGTH)
    )
    assert delta is not None
    assert (delta.cached_tokens, delta.times) == (16, times)


def test_an_output_without_visible_text_gives_no_delta() -> None:
    stream = OutputStream(_tokenizer("byte-level"), _request())
    assert stream.push(RequestOutput(request_id="r/2", token_ids=())) is None
    assert stream.push(RequestOutput(request_id="r/2", token_ids=(0,))) is None  # a special token


def test_the_story_comes_out_as_published() -> None:
    folder = outside("stories260K")
    tokenizer = Tokenizer.load(folder)
    greedy = json.loads((folder / "greedy_200.json").read_text(encoding="utf-8"))
    request = _request(greedy["prompt_ids"], stop=("never in it", "Once upon a midnight"))
    deltas = _run(tokenizer, request, _outputs(greedy["ids"], list(range(200))))
    assert _whole(deltas)[0] == greedy["text"]
    assert _whole(deltas)[1] == tuple(greedy["ids"])


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("cut", [(), (1,), (2,), (1, 2, 3, 4)])
def test_a_token_has_the_offset_of_its_text(kind: str, cut: Sequence[int]) -> None:
    tokenizer = _tokenizer(kind)
    if kind == "byte-level":
        text, starts = "€ x", [0, 0, 0, 1, 2]
        ids = [tokenizer.token_id(letter) for letter in ("â", "Ĥ", "¬", "Ġ", "x")]
    else:
        ids = [tokenizer.token_id(name) for name in ("▁the", "<0xE2>", "<0x82>", "<0xAC>", "▁a")]
        text, starts = "the€ a", [0, 3, 3, 3, 4]
    deltas = _run(tokenizer, _request(logprobs=0), _outputs(ids, cut, logprobs=True))
    assert "".join(delta.text for delta in deltas) == text
    assert [token.start_chars for delta in deltas for token in delta.logprobs] == starts


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("cut", [[], [1], [1, 2, 3]])
def test_special_tokens_are_written_out_on_request(kind: str, cut: list[int]) -> None:
    tokenizer = _tokenizer(kind)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos is not None
    assert eos is not None
    letter = tokenizer.encode("xa", add_special_tokens=False)[-1]
    for skips, text in ((True, "aa"), (False, "a<s>a")):
        request = _request(skip_special_tokens=skips)
        outputs = _outputs([letter, bos, letter], cut)
        deltas = _run(tokenizer, request, outputs)
        assert "".join(delta.text for delta in deltas) == text
        assert deltas[-1].num_output_tokens == 3
        ended = _outputs([letter, eos], cut[:1], reason=FinishReason.STOP, stop_id=eos)
        assert "".join(delta.text for delta in _run(tokenizer, request, ended)) == "a"


def test_a_stop_string_may_be_a_special_token_that_is_written_out() -> None:
    tokenizer = _tokenizer("byte-level")
    ids = [*tokenizer.encode("xa", add_special_tokens=False), tokenizer.bos_id or 0, 40]
    request = _request(skip_special_tokens=False, stop=("<s>",))
    deltas = _run(tokenizer, request, _outputs(ids, []))
    assert "".join(delta.text for delta in deltas) == "xa"
    assert deltas[-1].stop_reason == "<s>"


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_parsed_special_tokens_are_shown_with_each_tokens_characters(
    kind: str, stop: tuple[str, ...]
) -> None:
    tokenizer = _tokenizer(kind)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos is not None
    assert eos is not None
    ids = [*tokenizer.encode("a b猫🐫", add_special_tokens=False), bos, eos, 40, 41]
    shown = frozenset({bos})
    told = set()
    for cut in ([], [1, 2], range(1, len(ids))):
        stream = OutputStream(
            tokenizer, _request(stop=stop), TextRules(shown_ids=shown, counts_chars=True)
        )
        deltas = [
            delta
            for output in _outputs(ids, list(cut))
            if (delta := stream.push(output)) is not None
        ]
        text = "".join(delta.text for delta in deltas)
        chars = [number for delta in deltas for number in delta.token_chars]
        assert all(len(delta.token_chars) == len(delta.token_ids) for delta in deltas)
        assert text.count("<s>") == 1
        assert "</s>" not in text
        assert sum(chars) == len(text)
        assert chars[ids.index(eos)] == 0
        told.add((text, tuple(chars)))
    assert len(told) == 1
    plain = _run(tokenizer, _request(stop=stop), _outputs(ids, [3]))
    assert all(delta.token_chars == () for delta in plain)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_token_pushed_alone_equals_an_output_of_it(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    some = [*tokenizer.encode("a b\n\n猫🐫<tool>\n"), 0, 2, 9, 13, 200]
    begun = RequestTimes(
        arrival_ms=0.0, first_scheduled_ms=1.0, first_token_ms=2.0, last_token_ms=2.0
    )

    @given(ids=st.lists(st.sampled_from(some) | st.integers(2, 260), min_size=1, max_size=24))
    @settings(max_examples=examples(200), deadline=None)
    def check(ids: list[int]) -> None:
        one, other = OutputStream(tokenizer, _request()), OutputStream(tokenizer, _request())
        assert one.is_plain
        first = RequestOutput(request_id="r/2", token_ids=(ids[0],), times=begun)
        assert one.push(first, 2.0) == other.push(first, 2.0)
        for step, id_ in enumerate(ids[1:], 3):
            output = RequestOutput(request_id="r/2", token_ids=(id_,))
            assert one.push_token(id_, float(step)) == other.push(output, float(step))
        last = RequestOutput(request_id="r/2", token_ids=(), finish_reason=FinishReason.LENGTH)
        assert one.push(last, 99.0) == other.push(last, 99.0)
        assert one.push_token(ids[0], 100.0) is None

    check()


@pytest.mark.parametrize("asked", [{"stop": ("a",)}, {"logprobs": 0}, {"logprob_token_ids": (3,)}])
def test_a_stream_with_logprobs_or_stops_is_not_plain(asked: dict[str, Any]) -> None:
    assert not OutputStream(_tokenizer("metaspace"), _request(**asked)).is_plain


def test_a_stream_that_counts_characters_is_not_plain() -> None:
    rules = TextRules(counts_chars=True)
    assert not OutputStream(_tokenizer("metaspace"), _request(), rules).is_plain


def test_accepted_drafts_behind_the_last_token_are_none_of_the_answer() -> None:
    """A step verifies drafts beyond the end of an answer, which is found afterwards."""
    tokenizer = _tokenizer("byte-level")
    ids = tuple(tokenizer.encode("ab!cd"))
    assert len(ids) == 5

    def counts(*outputs: RequestOutput, **sampling: Any) -> tuple[int, int, int]:
        last = _run(tokenizer, _request(**sampling), list(outputs))[-1]
        return last.num_output_tokens, last.accepted_drafts, last.rejected_drafts

    def output(part: tuple[int, ...], accepted: int, rejected: int, **more: Any) -> RequestOutput:
        return RequestOutput(
            "r/2", part, accepted_drafts=accepted, rejected_drafts=rejected, **more
        )

    first = output(ids[:2], 1, 0)
    length = {"finish_reason": FinishReason.LENGTH}
    stopped = {"finish_reason": FinishReason.STOP, "stop_id": EOS}
    assert counts(first, output(ids[2:], 3, 2, **length)) == (5, 3, 2)
    # The end of the text is the third of eight drafts, of which six are accepted.
    assert counts(first, output((*ids[2:4], EOS), 1 + 6, 2, **stopped)) == (5, 1 + 3, 2)
    # A stop string ends within the run: three of its five tokens are left.
    assert counts(first, output((*ids[2:], 5, 6), 1 + 4, 0), stop=("cd",)) == (5, 1 + 3, 0)
    assert counts(output(ids, 4, 0), stop=("ab",)) == (2, 2, 0)
    assert counts(first, RequestOutput("r/2", ids[2:], **length)) == (5, 1, 0)
