"""Templates and text routes over real sockets: they show exactly what the model receives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import RunningServer, text_of
from tests.serve.serve_command import serve_in_process
from tests.tiny_models import write_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "and the "}]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
# Each comparison counts as 64 rounds: the limit is reached in a tenth of the time of empty rounds.
ENDLESS = (
    "{% set a, b = 'x' * 65536, 'x' * 65536 %}"
    "{% for i in range(999999) %}{% for j in range(999999) %}{% if a == b and j.x %}{% endif %}"
    "{% endfor %}{% endfor %}"
)
LARGE = "{{ 'x' * 10 ** 12 }}"


def test_apply_template_and_tokenize_show_what_a_chat_sends_to_the_model(
    server: RunningServer,
) -> None:
    fields = {"messages": SAID, "continue_final_message": True}
    _, applied = server.post("/apply_template", fields)
    assert applied["prompt"] == "<|begin|><|user|>the sea<|end|><|assistant|>and the "
    _, tokens = server.post("/tokenize", {**fields, "return_token_strs": True})
    assert "".join(tokens["token_strs"]) == applied["prompt"]
    status, chat = server.post(CHAT, {**fields, **GREEDY})
    assert status == 200
    assert chat["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    _, completion = server.post(COMPLETIONS, {"prompt": tokens["tokens"], **GREEDY})
    assert completion["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    _, text = server.post("/detokenize", {"tokens": tokens["tokens"]})
    assert text["prompt"] == applied["prompt"]
    _, bare = server.post("/detokenize", {"tokens": tokens["tokens"], "skip_special_tokens": True})
    assert bare["prompt"] == "the seaand the "


def test_a_prompt_is_shown_with_the_special_tokens_of_a_completion(server: RunningServer) -> None:
    _, tokens = server.post("/tokenize", {"prompt": "the sea"})
    _, completion = server.post(COMPLETIONS, {"prompt": "the sea", **GREEDY})
    assert completion["usage"]["prompt_tokens"] == tokens["count"]
    _, bare = server.post("/tokenize", {"prompt": "the sea", "add_special_tokens": False})
    assert bare["tokens"] == tokens["tokens"][1:]


def test_a_long_text_is_tokenized_during_a_stream(server: RunningServer) -> None:
    asked = {"prompt": "the sea", "seed": 3, "max_tokens": 200, "ignore_eos": True}
    _, alone = server.post(COMPLETIONS, asked)
    text = "吾輩は猫である。 the sea and the stone\n" * 20_000
    with server.stream(COMPLETIONS, asked) as reader:
        events = [reader.next()]
        status, tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert status == 200
        assert tokens["count"] > tokens["max_model_len"]
        status, back = server.post("/detokenize", {"tokens": tokens["tokens"]})
        assert (status, back["prompt"]) == (200, text)
        events += list(reader)
    assert text_of(events) == alone["choices"][0]["text"]


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a broken template, other templates beside it, and trusted templates."""
    folder = tmp_path_factory.mktemp("odd") / "tiny"
    write_tiny_llama(folder, seed=5)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": "fine\n{% for %}"},
        {"name": "short", "template": "{% for m in messages %}{{ m.content }};{% endfor %}"},
        {"name": "endless", "template": ENDLESS},
        {"name": "large", "template": LARGE},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with RunningServer(folder, "--threads", "1", "--trust-request-chat-template") as server:
        yield server


def test_a_model_with_a_broken_template_starts_reports_it_and_completes(
    odd_server: RunningServer,
) -> None:
    assert "chats    not served: chat template 'default', line 2" in odd_server.stdout()
    assert "chat template cannot be used" in odd_server.stderr()
    status, answer = odd_server.post(CHAT, {"messages": SAID})
    assert (status, answer["error"]["code"]) == (500, "model_error")
    assert "'default', line 2" in answer["error"]["message"]
    assert odd_server.post(COMPLETIONS, {"prompt": "the sea", **GREEDY})[0] == 200
    status, answer = odd_server.post(CHAT, {"messages": SAID, "chat_template": "short", **GREEDY})
    assert status == 200
    assert odd_server.post("/apply_template", {"messages": SAID, "chat_template": "short"})[1] == {
        "prompt": "the sea;and the ;"
    }


@pytest.mark.parametrize(
    ("template", "status", "code"),
    [
        ("endless", 500, "model_error"),
        ("large", 500, "model_error"),
        ("a\n" + LARGE, 400, "invalid_value"),
    ],
)
def test_an_endless_template_disturbs_no_other_request(
    odd_server: RunningServer, template: str, status: int, code: str
) -> None:
    asked = {"prompt": "the sea", "seed": 3, "max_tokens": 400, "ignore_eos": True}
    _, alone = odd_server.post(COMPLETIONS, asked)
    with odd_server.stream(COMPLETIONS, asked) as reader:
        events = [reader.next()]
        found, answer = odd_server.post(CHAT, {"messages": SAID, "chat_template": template})
        assert (found, answer["error"]["code"]) == (status, code)
        assert "exceeds a limit" in answer["error"]["message"]
        assert "line" in answer["error"]["message"]
        events += list(reader)
    assert text_of(events) == alone["choices"][0]["text"]
    assert odd_server.get("/health")[1]["state"] == "ready"


def test_another_template_is_selected_by_file_or_name(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with RunningServer(tiny, "--threads", "1", "--chat-template", str(file)) as server:
        assert server.post("/apply_template", {"messages": SAID})[1] == {
            "prompt": "[the sea][and the ]"
        }
        own: dict[str, Any] = {"messages": SAID, "chat_template": "{{ messages }}"}
        status, answer = server.post(CHAT, own)
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in answer["error"]["message"]


@pytest.mark.parametrize("given", ["nowhere.jinja", "broken.jinja"])
def test_an_unusable_requested_template_fails_startup(
    tiny: Path, tmp_path: Path, given: str
) -> None:
    (tmp_path / "broken.jinja").write_text("a\n{% if")
    file = str(tmp_path / given)
    ended = serve_in_process(str(tiny), "--port", "0", "--threads", "1", "--chat-template", file)
    assert ended.returncode == 2
    assert "--chat-template" in ended.stderr
    assert ("line 2" if given == "broken.jinja" else "neither a file") in ended.stderr
