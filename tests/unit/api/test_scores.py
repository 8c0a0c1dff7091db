"""Log-probabilities of prompts and of listed ids, through both routes, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.sampling_params import SamplingParams
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "h"}]


def _post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> Reply:
    async def exchange() -> Reply:
        return await Site(engine).post(path, body)

    return asyncio.run(exchange())


def _choices(body: dict[str, Any], engine: FakeEngine | None = None) -> list[dict[str, Any]]:
    reply = _post(COMPLETIONS, body, engine)
    assert reply.status == 200, reply.body
    choices: list[dict[str, Any]] = reply.json["choices"]
    return choices


def _asked(path: str = COMPLETIONS, **body: Any) -> SamplingParams:
    engine = FakeEngine()
    given = {"prompt": "abc"} if path == COMPLETIONS else {"messages": MESSAGES}
    reply = _post(path, {**given, **body}, engine)
    assert reply.status == 200, reply.body
    return engine.asked[0].sampling


def test_an_echo_with_log_probabilities_has_the_prompts_first() -> None:
    [choice] = _choices({"prompt": "abc", "echo": True, "logprobs": 1})
    assert choice["text"] == "abcHello"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "Hel", "lo"],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"c": -9999.0, "b": -1.0},
            {"c": -2.0},
            {"Hel": -0.5},
            {"lo": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 6],
    }
    assert choice["prompt_logprobs"] is None


def test_a_special_token_has_characters_only_if_the_echo_spells_it() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=ord("|"))
    for prompt, names, offsets in (
        ("ab", "|ab", [0, 0, 1, 2, 5]),  # put before the text
        ("a|b", "|a|b", [0, 0, 1, 2, 3, 6]),  # and spelled in it
        ([97, 124, 98], "a|b", [0, 1, 1, 2, 5]),  # given as an id: not in the echo's text
    ):
        [choice] = _choices({"prompt": prompt, "echo": True, "logprobs": 0}, engine)
        assert choice["logprobs"]["tokens"][:-2] == list(names)
        assert choice["logprobs"]["text_offset"] == offsets


def test_offsets_of_an_echo_stay_within_it() -> None:
    engine = FakeEngine()
    engine.tokenizer.decode = lambda ids, skip_special_tokens: "a"  # a text that loses characters
    [choice] = _choices({"prompt": [97, 98, 99], "echo": True, "logprobs": 0}, engine)
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 4]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 20, "n": 128}, "logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 9, "prompt_logprobs": 9}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
def test_an_answer_with_too_many_prompt_scores_is_rejected(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("quire.api.generation.answer_json.MAX_PROMPT_NUMBERS", 60)
    given = {"prompt": ["abc", "d"]} if path == COMPLETIONS else {"messages": MESSAGES}
    engine = FakeEngine()
    reply = _post(path, {**given, **fields}, engine)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert "at most 60 a request" in reply.error["message"]
    assert engine.asked == []
    assert _post(COMPLETIONS, {"prompt": ["abc", "d"], "prompt_logprobs": 14}).status == 200


def test_a_prompt_that_is_only_scored_may_fill_the_whole_context() -> None:
    ids = [97] * CARD.max_model_len
    scored = {"prompt_logprobs": 0, "max_tokens": 0}
    for prompt in (ids, "a" * CARD.max_model_len):
        assert _post(COMPLETIONS, {"prompt": prompt, **scored}).status == 200
        longer = _post(COMPLETIONS, {"prompt": prompt + prompt[:1], **scored})
        assert longer.error["code"] == "context_length_exceeded"
        assert "output is needed" not in longer.error["message"]
        full = _post(COMPLETIONS, {"prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1})
        assert full.error["code"] == "context_length_exceeded"


def test_prompt_logprobs_have_vllms_form() -> None:
    written = [
        None,
        {
            "98": {"logprob": -1.0, "rank": 3, "decoded_token": "b"},
            "99": {"logprob": -9999.0, "rank": 1, "decoded_token": "c"},
        },
    ]
    choices = _choices({"prompt": "ab", "prompt_logprobs": 1, "n": 2})
    assert [choice["prompt_logprobs"] for choice in choices] == [written, written]
    assert [choice["logprobs"] for choice in choices] == [None, None]
    engine = FakeEngine()
    engine.template = None
    body = _post(CHAT, {"messages": MESSAGES, "prompt_logprobs": 0, "n": 2}).json
    assert body["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    assert _post(CHAT, {"messages": MESSAGES}).json["prompt_logprobs"] is None


def test_each_prompt_has_its_own_scores() -> None:
    choices = _choices({"prompt": ["ab", "xyz"], "prompt_logprobs": 0, "n": 2})
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 3, 3]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert list(choices[3]["prompt_logprobs"][2]) == [str(ord("z"))]


@pytest.mark.parametrize("extra", [{}, {"echo": True, "logprobs": 1}])
def test_a_stream_has_prompt_scores_in_the_first_chunk_of_each_choice(
    extra: dict[str, Any],
) -> None:
    body = {"prompt": ["ab", "xyz"], "prompt_logprobs": 1, "n": 2, **extra}
    whole = _choices(body)
    events = _post(COMPLETIONS, {**body, "stream": True}).events
    assert events[-1] == "[DONE]"
    parts = [event["choices"][0] for event in events[:-1]]
    for choice in whole:
        of_choice = [part for part in parts if part["index"] == choice["index"]]
        assert of_choice[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert all("prompt_logprobs" not in part for part in of_choice[1:])
        assert "".join(part["text"] for part in of_choice) == choice["text"]
        if extra:
            for name, values in choice["logprobs"].items():
                joined = [value for part in of_choice for value in part["logprobs"][name]]
                assert joined == values


def test_a_streamed_chat_has_prompt_scores_once() -> None:
    body = {"messages": MESSAGES, "prompt_logprobs": 1, "n": 2}
    whole = _post(CHAT, body).json
    events = _post(CHAT, {**body, "stream": True}).events[:-1]
    told = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    assert told == [whole["prompt_logprobs"]]
    assert "prompt_logprobs" in events[0]


def test_an_echo_and_prompt_logprobs_may_request_different_numbers() -> None:
    assert _asked(echo=True, logprobs=2).prompt_logprobs == 2
    assert _asked(echo=True, logprobs=2, prompt_logprobs=5).prompt_logprobs == 5
    assert _asked(echo=True, logprobs=5, prompt_logprobs=2).prompt_logprobs == 5
    assert _asked(echo=True).prompt_logprobs is None
    assert _asked(logprobs=2).prompt_logprobs is None
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 1}
    [choice] = _choices(body)
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    assert len(choice["prompt_logprobs"][1]) == 2


def test_a_scored_prompt_needs_no_output() -> None:
    assert _asked(echo=True, logprobs=1, max_tokens=0).max_tokens == 0
    assert _asked(prompt_logprobs=1, max_tokens=0).max_tokens == 0
    assert _asked(CHAT, prompt_logprobs=1, max_tokens=0).max_tokens == 0
    assert _asked(CHAT, prompt_logprobs=1, max_completion_tokens=0).max_tokens == 0


def test_listed_ids_follow_the_best_and_are_keyed_by_text() -> None:
    body = {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [66, 65]}
    [token, _] = _post(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert [(other["token"], other["logprob"]) for other in token["top_logprobs"][-2:]] == [
        ("B", -66.0),
        ("A", -65.0),
    ]
    [choice] = _choices({"prompt": "ab", "logprobs": 0, "logprob_token_ids": [66, 65]})
    assert choice["logprobs"]["top_logprobs"][0] == {"Hel": -0.5, "B": -66.0, "A": -65.0}
    assert choice["logprobs"]["listed_logprobs"] == [[-66.0, -65.0]] * 2
    body = {"prompt": "ab", "logprobs": 0, "logprob_token_ids": [66], "echo": True}
    assert _choices(body)[0]["logprobs"]["listed_logprobs"] == [None, None, [-66.0], [-66.0]]
    [plain] = _choices({"prompt": "ab", "logprobs": 0, "logprob_token_ids": []})
    assert "listed_logprobs" not in plain["logprobs"]


@each_case(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "or 0 with prompt_logprobs"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, "max_tokens", "prompt_logprobs"),
        (COMPLETIONS, {"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n", "leave n out"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids", "without logprobs"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids", "without logprobs"),
        (
            COMPLETIONS,
            {"logprobs": 0, "logprob_token_ids": [1] * 1025},
            "logprob_token_ids",
            "1024",
        ),
        (
            COMPLETIONS,
            {"echo": True, "logprobs": 0, "max_tokens": 0, "logprob_token_ids": [1]},
            "logprob_token_ids",
            "max_tokens is 0",
        ),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs", "-1 to 20"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "-1 to 20"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
        (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of", "at least 2"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "leave stream out"),
        (CHAT, {"best_of": 2, "stream": True}, "best_of", "leave stream out"),
        (
            COMPLETIONS,
            {"echo": True, "logprobs": 0, "max_tokens": 0, "best_of": 2},
            "best_of",
            "cannot differ",
        ),
        (CHAT, {"use_beam_search": True, "temperature": 0.5}, "temperature", "not drawn"),
        (COMPLETIONS, {"use_beam_search": True, "mirostat": 2}, "mirostat", "temperature"),
        (COMPLETIONS, {"use_beam_search": True, "early_stopping": "x"}, "early_stopping", "never"),
        (COMPLETIONS, {"length_penalty": 2.0}, "length_penalty", "set use_beam_search"),
    ],
)
def test_impossible_requests_are_rejected_by_name(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    given = {"prompt": "abc"} if path == COMPLETIONS else {"messages": MESSAGES}
    engine = FakeEngine()
    reply = _post(path, {**given, **fields}, engine)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert engine.asked == []
