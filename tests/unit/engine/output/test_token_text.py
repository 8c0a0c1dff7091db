"""PromptLogprobs: prompt scores with text, detokenized on access; the delta that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.base.records import FinishReason, PromptScores, Request, RequestOutput, TokenLogprobs
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import OutputStream, TextDelta
from quire.engine.output.token_text import PromptLogprobs, TokenText
from quire.text.tokenizer import Tokenizer
from tests.unit.text.made_tokenizers import byte_level_json, made, metaspace_json


def _scores(num_scored: int, width: int) -> PromptScores:
    """Return rank i + 1 and logprob -i / 2 at entry i; alternatives 5, 6, ..., the last one
    unused.
    """
    top_ids = np.tile(np.arange(5, 5 + width, dtype=np.int32), (num_scored, 1))
    top_logprobs = np.tile(np.arange(width, dtype=np.float32), (num_scored, 1)) * np.float32(-1)
    if num_scored and width:
        top_ids[-1, -1], top_logprobs[-1, -1] = -1, np.nan
    return PromptScores(
        logprobs=np.arange(num_scored, dtype=np.float32) / np.float32(-2),
        ranks=np.arange(1, num_scored + 1, dtype=np.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _of(tokenizer: Tokenizer, ids: Sequence[int], width: int = 2) -> PromptLogprobs:
    return PromptLogprobs(tokenizer, ids, _scores(len(ids) - 1, width))


def _texts(tokens: Sequence[TokenText | None]) -> list[TokenText]:
    assert tokens[0] is None
    return [token for token in tokens[1:] if token is not None]


def test_each_token_except_the_first_has_text_rank_and_alternatives() -> None:
    tokenizer = made(byte_level_json())
    ids = tokenizer.encode("the sea 🐫")
    tokens = _texts(_of(tokenizer, ids))
    assert [token.token_id for token in tokens] == ids[1:]
    assert [token.logprob for token in tokens] == [-at / 2 for at in range(len(tokens))]
    assert [token.rank for token in tokens] == list(range(1, len(ids)))
    assert b"".join(token.raw for token in tokens).decode().endswith("🐫")
    tops = [[(top.token_id, top.rank, top.logprob) for top in token.top] for token in tokens]
    assert tops[:-1] == [[(5, 1, 0.0), (6, 2, -1.0)]] * (len(tokens) - 1)
    assert tops[-1] == [(5, 1, 0.0)]
    assert tokens[0].top[0].text == tokenizer.token_text(5)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("text", ["the sea and the camel", "🐫 the", "日本 sea", ""])
def test_a_token_has_the_offset_of_its_text_in_the_prompt(kind: str, text: str) -> None:
    tokenizer = made(byte_level_json() if kind == "byte-level" else metaspace_json())
    ids = [0, *tokenizer.encode(text, add_special_tokens=False)]
    starts = [0, *(token.start_chars for token in _texts(_of(tokenizer, ids)))]
    expected = [len(tokenizer.decode(ids[:at])) for at in range(len(ids))]
    whole = tokenizer.decode(ids)
    for at, start in enumerate(starts):
        shown = tokenizer.decode(ids[:at])
        if whole.startswith(shown):  # without half a character at its end
            assert start == expected[at]
    assert starts == sorted(starts)


def test_it_behaves_like_a_sequence() -> None:
    tokenizer = made(byte_level_json())
    ids = tokenizer.encode("the sea and")
    tokens = _of(tokenizer, ids)
    assert len(tokens) == len(ids)
    assert list(tokens) == [tokens[at] for at in range(len(ids))]
    assert tokens[1:3] == [tokens[1], tokens[2]]
    assert tokens[-1] == tokens[len(ids) - 1]
    assert tokens[-len(ids)] is None
    for beyond in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError, match=f"a prompt of {len(ids)} tokens"):
            tokens[beyond]
    assert list(_of(tokenizer, [5])) == [None]


def _stream(tokenizer: Tokenizer, prompt: list[int], **sampling: Any) -> OutputStream:
    return OutputStream(
        tokenizer,
        Request(
            request_id="r/0",
            group_id="r",
            stream=0,
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(seed=7, **sampling),
            stop_ids=(1,),
            max_total_tokens=100,
            arrival_ms=0.0,
        ),
    )


def _said(delta: TextDelta | None) -> TextDelta:
    assert delta is not None
    return delta


def test_scores_come_in_the_first_delta_even_without_text() -> None:
    tokenizer = made(byte_level_json())
    prompt = tokenizer.encode("the sea")
    camel = tokenizer.encode("🐫")
    assert len(camel) > 1
    stream = _stream(tokenizer, prompt, prompt_logprobs=2)
    scores = _scores(len(prompt) - 1, 2)
    first = _said(
        stream.push(RequestOutput(request_id="r/0", token_ids=(camel[0],), scores=scores))
    )
    assert (first.text, first.token_ids, first.num_output_tokens) == ("", (), 0)
    assert list(first.prompt_logprobs) == list(PromptLogprobs(tokenizer, prompt, scores))
    rest = _said(stream.push(RequestOutput(request_id="r/0", token_ids=tuple(camel[1:]))))
    assert (rest.text, rest.token_ids) == ("🐫", tuple(camel))
    assert rest.prompt_logprobs == ()


def test_scores_alone_end_a_stream_without_text() -> None:
    tokenizer = made(byte_level_json())
    stream = _stream(tokenizer, [5], prompt_logprobs=0, max_tokens=0)
    delta = _said(
        stream.push(
            RequestOutput(
                request_id="r/0",
                token_ids=(),
                scores=_scores(0, 0),
                finish_reason=FinishReason.LENGTH,
            )
        )
    )
    assert (delta.text, delta.num_output_tokens) == ("", 0)
    assert delta.finish_reason is FinishReason.LENGTH
    assert list(delta.prompt_logprobs) == [None]
    assert stream.finished


def test_listed_ids_have_texts_too() -> None:
    tokenizer = made(byte_level_json())
    stream = _stream(tokenizer, [5], logprob_token_ids=(7, 9))
    said = TokenLogprobs(token_id=8, logprob=-0.5, listed=(-1.0, float("-inf")))
    delta = _said(
        stream.push(
            RequestOutput(
                request_id="r/0",
                token_ids=(8,),
                logprobs=(said,),
                finish_reason=FinishReason.LENGTH,
            )
        )
    )
    (token,) = delta.logprobs
    assert [(one.token_id, one.logprob, one.text) for one in token.listed] == [
        (7, -1.0, tokenizer.token_text(7)),
        (9, float("-inf"), tokenizer.token_text(9)),
    ]
    assert token.top == ()
