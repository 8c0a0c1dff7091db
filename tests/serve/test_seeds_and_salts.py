"""A request's seed reproduces all its choices; its salt isolates its prefixes."""

from __future__ import annotations

from tests.serve.running_server import RunningServer

COMPLETIONS = "/v1/completions"


def test_the_returned_seed_reproduces_all_choices_of_all_prompts(
    server: RunningServer,
) -> None:
    asked = {"prompt": ["one two", "one two", "three"], "n": 2, "max_tokens": 12}
    _, first = server.post(COMPLETIONS, asked)
    seeds = {choice["seed"] for choice in first["choices"]}
    assert len(seeds) == 1
    _, again = server.post(COMPLETIONS, {**asked, "seed": seeds.pop()})
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["text"] for choice in again["choices"]] == texts
    assert len(set(texts[:4])) == 4  # equal prompts with different answers


def test_cached_prefixes_do_not_cross_salts_and_answers_do_not_change(
    server: RunningServer,
) -> None:
    asked = {"prompt": "a prefix that nobody else asks for " * 8, "max_tokens": 8, "seed": 3}
    cached, texts = [], set()
    for salt in ("ours", "ours", "theirs", None, "theirs", None, ""):
        _, answer = server.post(COMPLETIONS, {**asked, "cache_salt": salt})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        texts.add(answer["choices"][0]["text"])
    assert cached == [False, True, False, False, True, True, True]
    assert len(texts) == 1
    for wrong in (3, "x" * 257, ["a"]):
        status, answer = server.post(COMPLETIONS, {**asked, "cache_salt": wrong})
        assert (status, answer["error"]["param"]) == (400, "cache_salt")
