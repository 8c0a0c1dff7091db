"""The official client against the real server, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.running_server import RunningServer

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "What is in the box?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "quire"


def test_a_streamed_chat_equals_the_whole_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.system_fingerprint
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_streamed_completion_equals_the_whole_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="the sea", **GREEDY)
    with client.completions.create(model=MODEL, prompt="the sea", stream=True, **GREEDY) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole.choices[0].text != ""


def test_equal_seeds_give_equal_texts_and_other_seeds_others(client: openai.OpenAI) -> None:
    def story(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="the sea", seed=seed, n=3, max_tokens=24, temperature=1.0
        )
        assert {choice.model_extra["seed"] for choice in answer.choices} == {seed}
        return [choice.text for choice in answer.choices]

    first = story(11)
    assert story(11) == first
    assert len(set(first)) == 3
    assert story(12) != first


def test_a_request_without_a_seed_returns_one_that_repeats_it(client: openai.OpenAI) -> None:
    first = client.completions.create(model=MODEL, prompt="the sea", max_tokens=24)
    extra = first.choices[0].model_extra
    assert extra is not None
    again = client.completions.create(
        model=MODEL, prompt="the sea", max_tokens=24, seed=extra["seed"]
    )
    assert again.choices[0].text == first.choices[0].text


def test_choices_of_a_stream_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["a", "b c"], "n": 2, "seed": 3, "max_tokens": 8}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    with client.completions.create(stream=True, **asked) as stream:
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_log_probabilities_agree_between_both_routes_and_with_the_choice(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=5, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for token in logprobs.content:
        assert len(token.top_logprobs) == 5
        best = [other.logprob for other in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert token.logprob == best[0]  # greedy takes the most likely token
        assert token.bytes == token.top_logprobs[0].bytes
    shown = [token for token in logprobs.content if not token.token.startswith("<|")]
    raw = b"".join(bytes(token.bytes or []) for token in shown)  # special tokens have no text
    assert raw.decode(errors="replace") == answer.choices[0].message.content


def test_a_stop_string_ends_the_text_and_the_token_count(
    client: openai.OpenAI,
) -> None:
    whole = client.completions.create(model=MODEL, prompt="the sea", **GREEDY)
    text = whole.choices[0].text
    letters = [at for at, letter in enumerate(text) if letter.isascii() and letter.isprintable()]
    at = letters[len(letters) // 2]
    stopped = client.completions.create(model=MODEL, prompt="the sea", stop=text[at], **GREEDY)
    assert stopped.choices[0].text == text[: text.index(text[at])]
    assert stopped.choices[0].finish_reason == "stop"
    extra = {"stop_reason": text[at], "seed": _seed(stopped), "prompt_logprobs": None}
    assert stopped.choices[0].model_extra == extra
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens <= 12


def _seed(answer: Any) -> int:
    seed: int = answer.choices[0].model_extra["seed"]
    return seed


def test_an_equal_second_request_finds_its_prompt_cached(client: openai.OpenAI) -> None:
    prompt = "the same long beginning " * 8
    asked: Any = {"model": MODEL, "prompt": prompt, **GREEDY}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert second.choices[0].text == first.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt="a", extra_body={"frobnicate": 1})
    assert unknown.value.param == "frobnicate"


def test_concurrent_async_streams_equal_their_runs_alone(server: RunningServer) -> None:
    prompts = [f"story number {number} " * (number % 5 + 1) for number in range(24)]

    async def story(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, seed=9, max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def exchange() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(story(client, prompt) for prompt in prompts))
            for prompt, text in zip(prompts[::6], together[::6], strict=True):
                assert await story(client, prompt) == text

    asyncio.run(exchange())


def test_closing_an_async_stream_early_lets_the_next_request_run(server: RunningServer) -> None:
    async def exchange() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                stream=True,
                max_tokens=20_000,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
            assert answer.choices[0].message.content

    asyncio.run(exchange())
    server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
